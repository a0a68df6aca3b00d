"""Overhead against the memory budget, for every method: Checkmate's Fig. 5.

    python -m experiments.budget_sweep                       three networks, all methods
    python -m experiments.budget_sweep step:ResNet50:64 --solvers auto chen_greedy
    python -m experiments.budget_sweep GRAPH.json

A graph is a file or a name that ``experiments.graphs`` knows.  Steps are priced
from the datasheet of a V100; nothing here is measured.  The budgets run evenly
from the proven floor to just below the peak of the graph's own order.

The shaded area is proven to hold no schedule; the first budget is the least
that is not proven infeasible.  A method has no point where it found nothing within
the budget.  Every result is kept in a file of its own, so a run that was killed
goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from remat.profiles.devices import DEVICES
from remat.solvers.solving import METHODS

from .graphs import graph_files
from .pictures import styles
from .solver_quality import Row, cells, summarise
from .tables import begin, command, ended, machine, show, write_csv

_GRAPHS = ("step:VGG16:256", "step:MobileNet:512", "step:U-Net:32")
_TIME_LIMIT = 2.0  # seconds
_TOP = 60.0  # percent of overhead that the picture shows
_GB = 1e9


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the sweep."""
    parser = command("budget_sweep", __doc__)
    parser.add_argument("graphs", nargs="*", metavar="GRAPH", default=_GRAPHS)
    parser.add_argument(
        "--budgets", nargs="+", metavar="BUDGET", help="bytes, or %% of the given order's peak"
    )
    parser.add_argument("--solvers", nargs="+", default=list(METHODS), metavar="NAME")
    parser.add_argument(
        "--time-limit", type=float, default=_TIME_LIMIT, help="seconds (default: %(default)s)"
    )
    asked = parser.parse_args(arguments)
    begin(asked.out)
    paths = graph_files(parser, asked.graphs, asked.out)
    rows = summarise(
        cells(asked.out / "cells", paths, asked.budgets, asked.solvers, 1, asked.time_limit)
    )
    write_csv([{**asdict(row), **machine()} for row in rows], asked.out / "table.csv")
    for graph in dict.fromkeys(row.graph for row in rows):
        print(f"\n{graph}: overhead %\n\n{show(_lines([r for r in rows if r.graph == graph]))}")
    _plot(rows, asked.out / "budget_sweep.png")
    print(f"\nsaved: {asked.out / 'table.csv'}, {asked.out / 'budget_sweep.png'}")


def _lines(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A line for each method, a column for each budget; the bound is the last line."""
    lines: dict[str, dict[str, Any]] = {}
    bound: dict[str, Any] = {"method": "(proven bound)"}
    for row in rows:
        column = f"{row.budget_bytes / _GB:.2f} GB"
        found = row.overhead_percent
        lines.setdefault(row.solver, {"method": row.solver})[column] = (
            None if found is None else f"{found:.2f}"
        )
        bound[column] = f"{row.bound_percent:.2f}"
    return [*lines.values(), bound]


def _plot(rows: Sequence[Row], path: Path) -> None:
    graphs = list(dict.fromkeys(row.graph for row in rows))
    looks = styles(dict.fromkeys(row.solver for row in rows))
    figure = Figure(figsize=(4.2 * len(graphs) + 1, 4.6), layout="constrained")
    panels = figure.subplots(1, len(graphs), squeeze=False)[0]
    for axes, graph in zip(panels, graphs, strict=True):
        own = [row for row in rows if row.graph == graph]
        _shade(axes, own)
        for solver, look in looks.items():
            found = [r for r in own if r.solver == solver and r.overhead_percent is not None]
            found.sort(key=lambda row: row.budget_bytes)
            width, above = (2.2, 3) if solver == "auto" else (1, 2)
            axes.plot(
                [row.budget_bytes / _GB for row in found],
                [row.overhead_percent for row in found],
                linewidth=width,
                zorder=above,
                **look,
            )
        axes.set(title=graph, xlabel="budget (GB)", ylim=(-1, _TOP))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("overhead (%)")
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=7,
        frameon=False,
        fontsize="small",
    )
    figure.savefig(path, dpi=110)


def _shade(axes: Axes, rows: Sequence[Row]) -> None:
    """What is proven impossible, and what devices hold."""
    bounds = {row.budget_bytes / _GB: row.bound_percent for row in rows}
    budgets = sorted(bounds)
    grey: dict[str, Any] = {"color": "0.85", "linewidth": 0}
    axes.fill_between(budgets, -1, [bounds[b] for b in budgets], label="proven impossible", **grey)
    axes.set_xlim(0.9 * budgets[0], 1.02 * budgets[-1])
    for memory in sorted({device.memory for device in DEVICES if device.memory}):
        if axes.get_xlim()[0] < memory / _GB < axes.get_xlim()[1]:
            axes.axvline(memory / _GB, color="black", linestyle=(0, (1, 2)), linewidth=1)
            axes.text(
                memory / _GB, _TOP, f" {memory / _GB:.0f} GB card", rotation=90, va="top",
                ha="right", fontsize=7,
            )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(ended(main))
