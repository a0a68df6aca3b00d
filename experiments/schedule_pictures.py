"""What schedules look like: Checkmate's Fig. 7, memory over time, and what is kept.

    python -m experiments.schedule_pictures                  U-Net, layer by layer
    python -m experiments.schedule_pictures step:VGG16:256 --budget 50%

For each graph (a file, or a name that ``experiments.graphs`` knows) and method
three pictures: the recomputation matrix (a row for each stage, in which one
node runs for the first time; a column for each node), memory over time, and
the graph, each node coloured by what the schedule does with its value.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from remat.plots import of_schedule, plot_memory
from remat.solvers import Graph, load_graph, simulate, solve
from remat.solvers.budget import format_bytes, parse_budget
from remat.solvers.schedule import Schedule

from .graphs import graph_files
from .tables import begin, command, ended

_GRAPHS = ("layers:U-Net:32",)
_SOLVERS = ("checkpoint_all", "chen_greedy", "auto")
_ALL = "every node once"
# Not held, held, runs for the first time, runs again (Okabe and Ito's colours).
_CELLS = {"held": "#C6DCEC", "first run": "#0072B2", "recomputation": "#D55E00"}
_NOTHING, _HELD, _FIRST, _AGAIN = range(4)
_KEPT = ("#0072B2", "#E69F00", "#D55E00")  # runs once, twice, more often


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws the pictures."""
    parser = command("schedule_pictures", __doc__)
    parser.add_argument("graphs", nargs="*", metavar="GRAPH", default=_GRAPHS)
    parser.add_argument(
        "--budget", default="60%", help="bytes, or %% of the given order's peak (default: 60%%)"
    )
    parser.add_argument(
        "--solvers",
        nargs="+",
        default=_SOLVERS,
        metavar="NAME",
        help="checkpoint_all is drawn whatever the budget (default: %(default)s)",
    )
    asked = parser.parse_args(arguments)
    begin(asked.out)
    paths = graph_files(parser, asked.graphs, asked.out)
    for path in paths:
        graph = load_graph(path)
        budget = parse_budget(asked.budget, simulate(graph, range(len(graph))).peak)
        schedules = _schedules(graph, budget, asked.solvers)
        name = path.stem
        draw_matrices(graph, schedules).savefig(asked.out / f"{name}-matrix.png", dpi=110)
        curves = [of_schedule(label, graph, schedule) for label, schedule in schedules.items()]
        plot_memory(
            curves,
            budget=budget,
            title=graph.name,
            time_label="cost of the runs so far",
            path=asked.out / f"{name}-memory.png",
        )
        draw_kept(graph, schedules).savefig(asked.out / f"{name}-kept.png", dpi=110)
        print(f"saved: {asked.out / name}-matrix.png, -memory.png, -kept.png")


def _schedules(graph: Graph, budget: int, solvers: Sequence[str]) -> dict[str, Schedule]:
    """The schedule of each method that has one, by what to call it."""
    found: dict[str, Schedule] = {}
    for solver in solvers:
        if solver == "checkpoint_all":
            found[_ALL] = tuple(range(len(graph)))
            continue
        result = solve(graph, budget, solver=solver)
        if result.schedule is None or result.overhead is None:
            print(f"{graph.name}: {solver} has no schedule within {format_bytes(budget)}")
            continue
        found[f"{solver} (+{100 * result.overhead:.1f} %)"] = result.schedule
    return found


def matrix(graph: Graph, schedule: Schedule) -> np.ndarray:
    """What happens to each node's value in each stage of a schedule.

    A stage ends when a node runs that had not run before.

    Returns:
      0 not held, 1 held, 2 runs for the first time, 3 runs again; shape (n, n):
      a row for each stage, a column for each node.
    """
    last_use = simulate(graph, schedule).last_use
    seen: set[int] = set()
    stages = []
    for index in schedule:
        stages.append(len(seen))
        seen.add(index)
    cells = np.full((len(graph), len(graph)), _NOTHING)
    for event, index in enumerate(schedule):
        until = stages[last_use[event]]
        cells[stages[event] : until + 1, index] = _HELD
    seen.clear()
    for event, index in enumerate(schedule):
        cells[stages[event], index] = _AGAIN if index in seen else _FIRST
        seen.add(index)
    return cells


def draw_matrices(graph: Graph, schedules: Mapping[str, Schedule]) -> Figure:
    """The matrices of several schedules, side by side."""
    figure = Figure(figsize=(4 * len(schedules) + 0.5, 4.8), layout="constrained")
    panels = figure.subplots(1, len(schedules), squeeze=False)[0]
    colours = ListedColormap(["white", *_CELLS.values()])
    for axes, (name, schedule) in zip(panels, schedules.items(), strict=True):
        picture = matrix(graph, schedule)
        axes.imshow(picture, cmap=colours, vmin=0, vmax=3, interpolation="nearest")
        axes.set(title=name, xlabel="node")
        backward = next((i for i, node in enumerate(graph.nodes) if node.backward), None)
        if backward is not None:
            for line in (axes.axvline, axes.axhline):
                line(backward - 0.5, color="0.5", linewidth=0.8, linestyle=":")
    panels[0].set_ylabel(f"stage of {graph.name}")
    keys = [Line2D([], [], marker="s", linestyle="", color=c, label=n) for n, c in _CELLS.items()]
    keys.append(Line2D([], [], color="0.5", linewidth=0.8, linestyle=":", label="first gradient"))
    figure.legend(handles=keys, loc="outside lower center", ncols=4, frameon=False)
    return figure


def draw_kept(graph: Graph, schedules: Mapping[str, Schedule]) -> Figure:
    """The graph under each schedule: how often each node runs.

    The forward pass runs from left to right in the upper row, the backward
    pass back in the lower; areas are bytes.
    """
    shown = {name: runs for name, runs in schedules.items() if name != _ALL} or schedules
    figure = Figure(figsize=(10, 0.6 + 2.6 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
    for axes, (name, schedule) in zip(panels, shown.items(), strict=True):
        _draw_graph(axes, graph, Counter(schedule))
        axes.set_title(f"{graph.name}, {name}")
    labels = ("runs once: its value is kept", "runs twice", "runs more often")
    keys: list[Any] = [
        Line2D([], [], marker=marker, linestyle="", color=colour, label=label)
        for marker, colour, label in zip("osD", _KEPT, labels, strict=True)
    ]
    figure.legend(handles=keys, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _draw_graph(axes: Axes, graph: Graph, runs: Mapping[int, int]) -> None:
    places = _places(graph)
    for a, b in graph.edges:
        (x0, y0), (x1, y1) = places[a], places[b]
        # Within a row the edges that skip nodes bow away from it.
        neighbours = abs(x1 - x0) < 3 / len(graph)
        bow = 0.0 if y0 != y1 or neighbours else (0.15 + 0.5 * abs(x1 - x0)) * math.copysign(1, y0)
        xs = np.linspace(x0, x1, 20)
        ys = np.linspace(y0, y1, 20) + bow * np.sin(np.linspace(0, np.pi, 20))
        axes.plot(xs, ys, color="0.8", linewidth=0.6, zorder=1)
    largest = max(node.bytes for node in graph.nodes) or 1
    for often, marker in enumerate("osD", start=1):
        own = [i for i in range(len(graph)) if min(runs[i], 3) == often]
        axes.scatter(
            [places[i][0] for i in own],
            [places[i][1] for i in own],
            s=[8 + 110 * graph.nodes[i].bytes / largest for i in own],
            c=_KEPT[often - 1],
            marker=marker,
            edgecolors="white",
            linewidths=0.5,
            zorder=2,
        )
    axes.set(xticks=[], yticks=[0.25, -0.25], yticklabels=["forward", "backward"])
    axes.margins(x=0.02, y=0.15)
    axes.spines[:].set_visible(False)


def _places(graph: Graph) -> list[tuple[float, float]]:
    """Where each node is drawn: x in [0, 1], and the row."""
    forward = [i for i, node in enumerate(graph.nodes) if not node.backward]
    backward = [i for i, node in enumerate(graph.nodes) if node.backward]
    places = [(0.0, 0.0)] * len(graph)
    for row, y in ((forward, 0.25), (backward[::-1], -0.25)):
        for place, index in enumerate(row):
            places[index] = place / max(1, len(row) - 1), y
    return places


if __name__ == "__main__":
    raise SystemExit(ended(main))
