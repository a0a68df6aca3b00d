"""How good the schedules are: every method, side by side, on any graph files.

    python -m experiments.solver_quality GRAPH...            methods x budgets
    python -m experiments.solver_quality --ratios GRAPH...   Checkmate's Table 2
    python -m experiments.solver_quality --scale             100 to 10,000 nodes

A graph is a file, or a name that ``experiments.graphs`` knows: ``segnet-8``,
``layers:U-Net:32``.

Each cell (graph, budget, solver, seed) is written to its own file once it is
done, so a run that was killed goes on where it stopped; delete the folder to
measure again.  The tables are saved as CSV beside them.

``auto`` is measured as its users run it, the whole command ``remat solve`` in a
process of its own; the other methods through ``remat.solvers.solve``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from remat.solvers import Graph, Status, load_graph, simulate, solve
from remat.solvers.budget import format_bytes, parse_budget
from remat.solvers.compiling import load
from remat.solvers.floor import memory_floor
from remat.solvers.method import Monitor
from remat.solvers.solving import METHODS

from .graphs import graph_file, graph_files
from .pictures import styles
from .tables import begin, command, ended, machine, positive, positive_int, remembered, write_csv

_BUDGETS = ("90%", "80%", "70%")
_SOLVERS = tuple(METHODS)
# The others do not depend on a seed.
_SEEDED = ("auto", "anneal", "gap_cover", "lp_rounding", "moccasin")

_FIELDS = ("status", "overhead", "lower_bound", "peak", "seconds")  # of a ``Result``

_RATIO_BUDGETS = 8  # evenly from the proven floor to just below the peak
# Our solver for each column of Checkmate's Table 2, and what was published.
_RATIO_SOLVERS = {
    "AP sqrt(n)": "chen_sqrt:generalisation=articulation",
    "AP greedy": "chen_greedy:generalisation=articulation",
    "Griewank": "griewank",
    "LP rounding": "lp_rounding",
    "auto": "auto",
}
_PUBLISHED_RATIOS = {
    "mobilenet": (1.14, 1.07, 7.07, 1.06),
    "vgg16": (1.28, 1.06, 1.44, 1.01),
    "unet": (1.27, 1.23, None, 1.03),
    "resnet50": (1.20, 1.25, None, 1.05),
}

_SCALE_SIZES = (100, 300, 1000, 3000, 10_000)
_SCALE_SOLVERS = ("auto", "feng_huang", "chen_greedy", "griewank")
_SCALE_BUDGET = "50%"


@dataclass(frozen=True)
class Cell:
    """One method on one graph within one budget, with one seed.

    Attributes:
      overhead: fraction, or None if no schedule was found.
      bound: overhead of the proven lower bound, a fraction.
      peak, budget: bytes; peak is None if no schedule was found.
      seconds: that the solve took.
      command_seconds: that the whole command took, or None where there was none.
    """

    graph: str
    nodes: int
    budget_text: str
    budget: int
    solver: str
    seed: int
    status: str
    overhead: float | None
    bound: float
    peak: int | None
    seconds: float
    command_seconds: float | None


@dataclass(frozen=True)
class Row:
    """The cells that differ in their seed only, as medians."""

    graph: str
    nodes: int
    budget: str
    budget_bytes: int
    solver: str
    found: int
    runs: int
    status: str
    overhead_percent: float | None
    bound_percent: float
    gap_points: float | None
    solve_seconds: float
    command_seconds: float | None


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the experiment that the command line asks for."""
    parser = command("solver_quality", __doc__)
    parser.add_argument("graphs", nargs="*", metavar="GRAPH", help="GRAPH.json, or KIND-SIZE")
    parser.add_argument("--ratios", action="store_true", help="Checkmate's Table 2")
    parser.add_argument("--scale", action="store_true", help="growth with the size of the graph")
    parser.add_argument(
        "--budgets", nargs="+", metavar="BUDGET", help="bytes, or %% of the given order's peak"
    )
    parser.add_argument(
        "--solvers",
        nargs="+",
        metavar="NAME[:OPTION=VALUE,...]",
        help=f"default: {', '.join(_SOLVERS)}",
    )
    parser.add_argument(
        "--seeds", type=positive_int, default=5, help="of the methods that have any"
    )
    parser.add_argument(
        "--time-limit", type=positive, metavar="SECONDS", help="default: the solver's"
    )
    parser.add_argument(
        "--sizes", nargs="+", type=positive_int, default=_SCALE_SIZES, help="nodes, for --scale"
    )
    asked = parser.parse_args(arguments)
    if asked.scale and (asked.graphs or asked.ratios):
        parser.error("--scale makes its own graphs: give it without graphs and --ratios")
    begin(asked.out)
    if asked.scale:
        _scale(asked)
        return
    if not asked.graphs:
        parser.error("name at least one graph, or use --scale")
    asked.graphs = graph_files(parser, asked.graphs, asked.out)
    if asked.ratios:
        _ratios(asked)
    else:
        _table(asked)


def _table(asked: argparse.Namespace) -> None:
    """Methods x budgets."""
    budgets, solvers = asked.budgets or _BUDGETS, asked.solvers or _SOLVERS
    rows = summarise(
        cells(asked.out / "cells", asked.graphs, budgets, solvers, asked.seeds, asked.time_limit)
    )
    _save(rows, asked.out / "table.csv")
    width = max(len(solver) for solver in solvers) + 2
    for graph in dict.fromkeys(row.graph for row in rows):
        own = {(row.solver, row.budget): row for row in rows if row.graph == graph}
        print(f"\n{graph:{width}}" + "".join(f"{budget:^28}" for budget in budgets))
        print(f"{'':{width}}" + f"{'overhead %':>12}{'gap':>8}{'s':>8}" * len(budgets))
        for solver in solvers:
            figures = (_figures(own[solver, budget]) for budget in budgets)
            print(f"{solver:{width}}" + "".join(figures))
        bounds = (f"{own[solvers[0], budget].bound_percent:12.3f}{'':16}" for budget in budgets)
        print(f"{'(proven bound)':{width}}" + "".join(bounds))
    print("\ngap: to the best proven bound, in points of overhead")
    print("s: seconds of the whole command for auto, of the solve for the others")


def _figures(row: Row) -> str:
    seconds = row.solve_seconds if row.command_seconds is None else row.command_seconds
    if row.overhead_percent is None or row.gap_points is None:
        what = "proven infeasible" if row.status == Status.INFEASIBLE else "none found"
        return f"{what:>20}{seconds:8.1f}"
    return f"{row.overhead_percent:12.3f}{row.gap_points:8.3f}{seconds:8.1f}"


def _ratios(asked: argparse.Namespace) -> None:
    """Geometric mean, over the budgets, of the cost against the best schedule."""
    known = cells(
        asked.out / "cells",
        asked.graphs,
        asked.budgets,
        _RATIO_SOLVERS.values(),
        1,
        asked.time_limit or 20.0,
    )
    print(f"\n{'':16}" + "".join(f"{name:>16}" for name in _RATIO_SOLVERS))
    lines = []
    for graph in dict.fromkeys(cell.graph for cell in known):
        own = [cell for cell in known if cell.graph == graph]
        line: dict[str, Any] = {"graph": graph}
        for name, solver in _RATIO_SOLVERS.items():
            ratios = [
                (1 + cell.overhead) / (1 + _best_overhead(own, cell.budget))
                for cell in own
                if cell.solver == solver and cell.overhead is not None
            ]
            line[name] = statistics.geometric_mean(ratios) if ratios else None
            line[f"{name}: budgets"] = len(ratios)
        lines.append(line)
        print(
            f"{graph:16}"
            + "".join(f"{_ratio(line[n])} ({line[f'{n}: budgets']})" for n in _RATIO_SOLVERS)
        )
        for network, published in _PUBLISHED_RATIOS.items():
            if graph.startswith(network):
                print(f"{'  published':16}" + "".join(f"{_ratio(r)}    " for r in published))
    write_csv(lines, asked.out / "ratios.csv")
    wanted = f"the {_RATIO_BUDGETS} budgets evenly from the floor to the peak"
    if asked.budgets:
        wanted = f"the budgets {', '.join(asked.budgets)}"
    print(f"\n(k): of {wanted}, k had a schedule by this method")


def _ratio(ratio: float | None) -> str:
    return f"{'-':>12}" if ratio is None else f"{ratio:12.3f}"


def _best_overhead(cells: Iterable[Cell], budget: int) -> float:
    """The least overhead known for a budget; what fits a smaller one fits it too."""
    return min(c.overhead for c in cells if c.overhead is not None and c.budget <= budget)


def _scale(asked: argparse.Namespace) -> None:
    """How cost and time grow with the size of the graph."""
    solvers = asked.solvers or _SCALE_SOLVERS
    paths = [graph_file(f"training-{size}", asked.out) for size in asked.sizes]
    budgets = asked.budgets or (_SCALE_BUDGET,)
    rows = summarise(cells(asked.out / "cells", paths, budgets, solvers, 1, asked.time_limit))
    _save(rows, asked.out / "scale.csv")
    print(
        f"\n{'nodes':>8}{'budget':>9} {'solver':16}{'overhead %':>11}{'bound %':>9}{'seconds':>9}"
    )
    for row in rows:
        seconds = row.solve_seconds if row.command_seconds is None else row.command_seconds
        overhead = "none" if row.overhead_percent is None else f"{row.overhead_percent:.3f}"
        print(
            f"{row.nodes:8}{row.budget:>9} {row.solver:16}{overhead:>11}"
            f"{row.bound_percent:9.3f}{seconds:9.1f}"
        )
    _plot_scale(rows, budgets[0], asked.out / "scale.png")
    print(f"\n{asked.out / 'scale.png'}")


def _plot_scale(rows: Sequence[Row], budget: str, path: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    costs, times = figure.subplots(1, 2)
    for solver, style in styles(dict.fromkeys(row.solver for row in rows)).items():
        own = [row for row in rows if row.solver == solver and row.budget == budget]
        found = [row for row in own if row.overhead_percent is not None]
        costs.plot([r.nodes for r in found], [r.overhead_percent for r in found], **style)
        seconds = [r.command_seconds or r.solve_seconds for r in own]
        times.plot([r.nodes for r in own], seconds, **style)
        if solver == "auto":
            bounds = [row.bound_percent for row in own]
            costs.fill_between(
                [r.nodes for r in own], 0, bounds, color="0.85", lw=0, label="proven impossible"
            )
    costs.set(xlabel="nodes", ylabel="overhead (%)", xscale="log", ylim=(0, None))
    times.set(xlabel="nodes", ylabel="time (s)", xscale="log", yscale="log")
    costs.set_title(f"Overhead at a budget of {budget} of the peak")
    times.set_title("Time to the schedule (auto: of the whole command)")
    for axes in (costs, times):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)


def cells(
    folder: Path,
    paths: Iterable[Path],
    budgets: Sequence[str] | None,
    solvers: Iterable[str],
    seeds: int,
    time_limit: float | None,
) -> list[Cell]:
    """Every cell, measured now or before.

    Args:
      folder: where each is kept.
      paths: graph files.
      budgets: None for those of ``--ratios``.
      solvers: names in ``METHODS``, with options after a colon.
      seeds: of the methods that have any.
      time_limit: seconds of each solve; None for the solver's own.
    """
    load(Monitor())  # annealing is compiled first, and no solve's time goes into that
    solvers, found = tuple(dict.fromkeys(solvers)), []
    for path in paths:
        graph = load_graph(path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()  # costs included
        peak = simulate(graph, range(len(graph))).peak
        print(f"{graph.name}: {len(graph)} nodes, {format_bytes(peak)} in the given order")
        for solver in solvers:
            for budget in dict.fromkeys(budgets or _from_floor_to(peak, graph)):
                for seed in range(seeds if solver.partition(":")[0] in _SEEDED else 1):
                    key = f"{digest[:12]}-{solver}-{budget}-{seed}-{time_limit}"
                    file = folder / (re.sub(r"[^\w.%=-]", "_", key) + ".json")
                    job = partial(_report, path, graph, budget, solver, seed, time_limit)
                    found.append(Cell(**remembered(file, job)))
    return found


def _report(*job: Any) -> dict[str, Any]:
    """Measures a cell and says so."""
    cell = measure(*job)
    overhead = "none" if cell.overhead is None else f"{100 * cell.overhead:.3f} %"
    print(f"  {cell.solver} {cell.budget_text} seed {cell.seed}: {overhead}, {cell.seconds:.1f} s")
    return asdict(cell)


def _from_floor_to(peak: int, graph: Graph) -> list[str]:
    """The budgets of ``--ratios``, in bytes."""
    floor, _ = memory_floor(graph)
    return [str(floor + (peak - floor) * k // _RATIO_BUDGETS) for k in range(_RATIO_BUDGETS)]


def measure(
    path: Path, graph: Graph, budget: str, solver: str, seed: int, time_limit: float | None
) -> Cell:
    """Runs one method on one graph within one budget, with one seed.

    Raises:
      KeyboardInterrupt: if it was interrupted; what was found by then is no result.
      RuntimeError: if the command broke down.
    """
    name, _, options = solver.partition(":")
    allowed = parse_budget(budget, simulate(graph, range(len(graph))).peak)
    command_seconds: float | None = None
    if solver == "auto":
        started = time.monotonic()
        found = _run_command(path, budget, seed, time_limit)
        command_seconds = time.monotonic() - started
    else:
        result = solve(
            graph, allowed, solver=name, seed=seed, time_limit=time_limit, **_parse(options)
        )
        found = {field: getattr(result, field) for field in _FIELDS}
    if found["status"] == Status.INTERRUPTED:
        raise KeyboardInterrupt
    return Cell(
        graph=graph.name,
        nodes=len(graph),
        budget_text=budget,
        budget=allowed,
        solver=solver,
        seed=seed,
        status=str(found["status"]),
        overhead=found["overhead"],
        bound=found["lower_bound"] / graph.cost - 1 if graph.cost else 0.0,
        peak=found["peak"],
        seconds=found["seconds"],
        command_seconds=command_seconds,
    )


def _run_command(path: Path, budget: str, seed: int, time_limit: float | None) -> dict[str, Any]:
    """The last line of ``remat solve --log json``."""
    command = [
        sys.executable,
        "-m",
        "remat",
        "solve",
        str(path),
        "--budget",
        budget,
        "--log",
        "json",
    ]
    command += ["--seed", str(seed)]
    if time_limit is not None:
        command += ["--time-limit", str(time_limit)]
    with tempfile.TemporaryDirectory() as folder:
        command += ["-o", str(Path(folder) / "plan.json")]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 3, 130):
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _parse(options: str) -> dict[str, Any]:
    """``a=1,b=text`` as a mapping."""
    pairs = (option.partition("=") for option in options.split(",") if option)
    return {name: int(value) if value.isdigit() else value for name, _, value in pairs}


def summarise(cells: Sequence[Cell]) -> list[Row]:
    """Medians over seeds.  A method that finds nothing for most seeds found nothing.

    The bound is the best that any method has proven for the graph and budget.
    """
    groups: dict[tuple[str, int, str, str], list[Cell]] = {}
    bounds: dict[tuple[str, str], float] = {}
    for cell in cells:
        groups.setdefault((cell.graph, cell.nodes, cell.budget_text, cell.solver), []).append(cell)
        place = cell.graph, cell.budget_text
        bounds[place] = max(bounds.get(place, 0.0), cell.bound)
    rows = []
    for (graph, nodes, budget, solver), group in groups.items():
        overhead, bound = _median(cell.overhead for cell in group), bounds[graph, budget]
        row = Row(
            graph=graph,
            nodes=nodes,
            budget=budget,
            budget_bytes=group[0].budget,
            solver=solver,
            found=sum(cell.overhead is not None for cell in group),
            runs=len(group),
            status=group[0].status,
            overhead_percent=None if overhead is None else 100 * overhead,
            bound_percent=100 * bound,
            gap_points=None if overhead is None else 100 * (overhead - bound),
            solve_seconds=statistics.median(cell.seconds for cell in group),
            command_seconds=_median(cell.command_seconds for cell in group),
        )
        rows.append(row)
    return rows


def _median(values: Iterable[float | None]) -> float | None:
    median = statistics.median(math.inf if value is None else value for value in values)
    return None if median == math.inf else median


def _save(rows: Sequence[Row], path: Path) -> None:
    write_csv([{**asdict(row), **machine()} for row in rows], path)


if __name__ == "__main__":
    raise SystemExit(ended(main))
