"""Overhead against the memory budget, for every method: Checkmate's Fig. 5.

    python -m experiments.budget_sweep                       three networks, all methods
    python -m experiments.budget_sweep step:ResNet50:64 --solvers auto chen_greedy
    python -m experiments.budget_sweep GRAPH.json
    python -m experiments.budget_sweep --measure UNet        and what really runs

A graph is a file or a name that ``experiments.graphs`` knows.  Steps are priced
from the datasheet of a V100, and their curves are not measured.  The budgets run
evenly from the proven floor to just below the peak of the graph's own order.

``--measure`` takes networks of ``experiments.models``.  Their steps are priced
on the device at hand, and crosses on top of the curves say what is measured:
the peak and the overhead of the step that ``remat.compile`` gives for shares of
the plain peak, as ``experiments.measured_step`` measures them.

The shaded area is proven to hold no schedule; the first budget is the least
that is not proven infeasible.  A method has no point where it found nothing within
the budget.  Every result is kept in a file of its own, so a run that was killed
goes on where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from remat.profiles.devices import DEVICES
from remat.solvers import Graph, save_graph
from remat.solvers.solving import METHODS

from .graphs import graph_files
from .models import CASES
from .pictures import styles
from .process import Runner, Task, by_turns
from .solver_quality import Row, cells, summarise
from .tables import begin, command, ended, given, machine, positive, proper_share, show, write_csv

_GRAPHS = ("step:VGG16:256", "step:MobileNet:512", "step:U-Net:32")
_TIME_LIMIT = 5.0  # seconds
_TOP = 60.0  # percent of overhead that the picture shows
_GB = 1e9
_MEASURED_SHARES = (0.8, 0.65, 0.5, 0.4)  # of the plain peak
_STEPS = 3
_TIMEOUT = 1800.0  # seconds


@dataclass(frozen=True)
class Measured:
    """One budget for which a network was compiled and trained.

    Attributes:
      graph: its step's name in the table of methods.
      budget, peak: bytes; the peak is None where the budget is not feasible.
      overhead_percent, predicted_percent: of the step's time, as measured by
        turns with the plain step, and as the plan says.
    """

    graph: str
    budget: int
    status: str
    peak: int | None = None
    overhead_percent: float | None = None
    predicted_percent: float | None = None


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the sweep."""
    parser = command("budget_sweep", __doc__)
    parser.add_argument("graphs", nargs="*", metavar="GRAPH", help=f"default: {' '.join(_GRAPHS)}")
    parser.add_argument(
        "--measure", nargs="+", default=[], choices=CASES, metavar="NETWORK", help="measure, too"
    )
    parser.add_argument(
        "--shares",
        nargs="+",
        type=proper_share,
        default=_MEASURED_SHARES,
        help="of the plain peak, to measure at (default: %(default)s)",
    )
    parser.add_argument(
        "--budgets", nargs="+", metavar="BUDGET", help="bytes, or %% of the given order's peak"
    )
    parser.add_argument("--solvers", nargs="+", default=list(METHODS), metavar="NAME")
    parser.add_argument(
        "--time-limit", type=positive, default=_TIME_LIMIT, help="seconds (default: %(default)s)"
    )
    asked = parser.parse_args(arguments)
    begin(asked.out)
    names = asked.graphs or (() if asked.measure else _GRAPHS)
    paths = graph_files(parser, names, asked.out)
    measured: list[Measured] = []
    for network in asked.measure:
        path = asked.out / f"{network}.json"
        measured += _measure(asked.out / "measured", network, asked.shares, path)
        paths.append(path)
    rows = summarise(
        cells(asked.out / "cells", paths, asked.budgets, asked.solvers, 1, asked.time_limit)
    )
    write_csv([{**asdict(row), **machine()} for row in rows], asked.out / "table.csv")
    for graph in dict.fromkeys(row.graph for row in rows):
        print(f"\n{graph}: overhead %\n\n{show(_lines([r for r in rows if r.graph == graph]))}")
    if measured:
        print(f"\nmeasured\n\n{show([_measured_line(point) for point in measured])}")
        write_csv([{**asdict(m), **machine()} for m in measured], asked.out / "measured.csv")
    _plot(rows, measured, asked.out / "budget_sweep.png")
    print(f"\nsaved: {asked.out / 'table.csv'}, {asked.out / 'budget_sweep.png'}")


def _measure(folder: Path, network: str, shares: Sequence[float], path: Path) -> list[Measured]:
    """Writes the graph of a network's step; measures the step within some budgets.

    Raises:
      RuntimeError: if a process broke down.
    """
    runner = Runner(folder, "experiments.child", _TIMEOUT)

    def result(task: Task) -> Mapping[str, Any]:
        found = runner.result(task)
        if found["status"] == "failed":
            raise RuntimeError(f"{network}, {task.kind}: {found['message']}")
        return found

    whole = Task("plain", network, steps=_STEPS)
    plain = result(whole)
    graph = Graph.from_json(result(Task("graph", network))["graph"])
    save_graph(graph, path)
    points = []
    for share in shares:
        task = runner.budgeted(whole, share * plain["peak"])
        assert task.budget is not None
        found = result(task)
        point = Measured(graph.name, task.budget, found["status"])
        if found["status"] == "done":
            times = by_turns(result, task)
            point = replace(
                point,
                peak=found["peak"],
                overhead_percent=100 * (times["ratio"] - 1),
                predicted_percent=100 * found["overhead"],
            )
        points.append(point)
    return points


def _measured_line(point: Measured) -> dict[str, str]:
    return {
        "graph": point.graph,
        "budget (GB)": f"{point.budget / _GB:.3f}",
        "peak (GB)": given(point.peak, ".3f", _GB),
        "overhead predicted (%)": given(point.predicted_percent, ".1f"),
        "overhead measured (%)": given(point.overhead_percent, ".1f"),
        "status": point.status,
    }


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


def _plot(rows: Sequence[Row], measured: Sequence[Measured], path: Path) -> None:
    graphs = list(dict.fromkeys(row.graph for row in rows))
    looks = styles(dict.fromkeys(row.solver for row in rows))
    figure = Figure(figsize=(4.2 * len(graphs) + 1, 4.6), layout="constrained")
    panels = figure.subplots(1, len(graphs), squeeze=False)[0]
    for axes, graph in zip(panels, graphs, strict=True):
        own = [row for row in rows if row.graph == graph]
        _shade(axes, own)
        for solver, look in looks.items():
            found = sorted(
                (row for row in own if row.solver == solver), key=lambda row: row.budget_bytes
            )
            if all(row.overhead_percent is None for row in found):
                continue
            width, above = (2.2, 3) if solver == "auto" else (1, 2)
            axes.plot(
                [row.budget_bytes / _GB for row in found],
                [  # a gap where there is none
                    math.nan if row.overhead_percent is None else row.overhead_percent
                    for row in found
                ],
                linewidth=width,
                zorder=above,
                **look,
            )
        points = {
            point.peak / _GB: point.overhead_percent
            for point in measured
            if point.graph == graph and point.peak is not None
        }
        if points:
            axes.set_xlim(right=max(axes.get_xlim()[1], 1.02 * max(points)))
            axes.plot(
                list(points),
                list(points.values()),
                "X",
                color="black",
                markersize=8,
                zorder=4,
                label="measured",
            )
        axes.set(title=graph, xlabel="budget (GB)", ylim=(-1, _TOP))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("overhead (%)")
    shown = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        list(shown.values()),
        list(shown),
        loc="outside lower center",
        ncols=min(7, 3 * len(graphs)),
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
                memory / _GB, 0.98 * _TOP, f"{memory / _GB:.0f} GB card", rotation=90, va="top",
                ha="right", fontsize=7,
            )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(ended(main))
