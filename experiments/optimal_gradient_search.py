"""Eighteen networks at the memory and at the time of Feng & Huang (CVPR 2021).

    python -m experiments.optimal_gradient_search
    python -m experiments.optimal_gradient_search --networks ResNet50 --accounting step

Their "Optimal Gradient Checkpoint Search" reports for each network how much
less memory it takes (weights not counted) at how much more time.  Here, for
each: the time at their memory, with the proven least; the memory at their
time; and the best point, where the points of memory saved less the points of
time paid are the most.  All of it is computed (``experiments.accounting``),
nothing measured; theirs was measured with PyTorch on a GPU.  Counted layer by
layer, a gradient holds its layer's output and what the next layers made of it,
so that the first layers of the VGGs alone fill most of the memory; PyTorch
computes some of those in place, and TensorFlow fuses them: see "step".

Every solve is kept in a file of its own, so a run that was killed goes on
where it stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from remat.solvers import Graph, Status, load_graph, simulate, solve
from remat.solvers.floor import memory_floor

from .accounting import ACCOUNTINGS
from .graphs import graph_file
from .pictures import styles
from .tables import begin, command, ended, machine, positive, remembered, show, write_csv

_BATCH = 64
_ACCURACY = 0.01  # of the plain memory, to which the memory at their time is found

# Percent of memory saved, percent of time added.
PUBLISHED = {
    "AlexNet": (34, 34),
    "VGG11": (22, 34),
    "VGG13": (31, 33),
    "VGG16": (31, 32),
    "VGG19": (31, 33),
    "ResNet18": (35, 30),
    "ResNet34": (55, 35),
    "ResNet50": (63, 31),
    "ResNet101": (74, 35),
    "ResNet152": (81, 37),
    "DenseNet121": (78, 34),
    "DenseNet161": (82, 36),
    "DenseNet169": (82, 32),
    "DenseNet201": (85, 53),
    "InceptionV3": (71, 29),
    "NASNet-CIFAR": (81, 31),
    "AmoebaNet-CIFAR": (79, 36),
    "DARTS-CIFAR": (80, 55),
}


@dataclass(frozen=True)
class Job:
    """One network.

    Attributes:
      network: name in ``PUBLISHED``.
      accounting: "layers" or "step".
      time_limit: seconds for each solve, or None for the solver's own.
    """

    network: str
    accounting: str = "layers"
    time_limit: float | None = None


@dataclass(frozen=True)
class Point:
    """A solve: shares of the plain step's memory and time, weights not counted.

    Attributes:
      saved: share of memory that the budget is below the plain peak.
      overhead: fraction, or None if nothing was found; bound: proven least.
    """

    saved: float
    overhead: float | None
    bound: float
    status: str
    seconds: float


@dataclass(frozen=True)
class Row:
    """One network: percent of memory saved, percent of time added.

    Attributes:
      at_their_memory: time, None if not found; bound: proven least there.
      at_their_time: memory saved.
      best_saved, best_overhead: the best point.
      most_saved: what the proven floor leaves.
      peak: bytes of the plain step without weights.
    """

    network: str
    nodes: int
    peak: int
    published_saved: float
    published_overhead: float
    at_their_memory: float | None
    bound: float
    at_their_time: float | None
    best_saved: float
    best_overhead: float
    most_saved: float
    seconds: float

    @property
    def impossible(self) -> bool:
        """Whether their memory is proven to be too little."""
        return self.published_saved > self.most_saved


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the experiment."""
    parser = command("optimal_gradient_search", __doc__)
    parser.add_argument("--networks", nargs="+", choices=PUBLISHED, default=list(PUBLISHED))
    parser.add_argument("--accounting", choices=ACCOUNTINGS, default="layers")
    parser.add_argument(
        "--time-limit", type=positive, help="seconds a solve; default: the solver's"
    )
    asked = parser.parse_args(arguments)
    begin(asked.out)
    table = asked.out / f"{asked.accounting}.csv"
    rows: list[Row] = []
    for network in asked.networks:
        rows.append(measure(Job(network, asked.accounting, asked.time_limit), asked.out))
        print(f"{network}: {rows[-1].seconds:.0f} s", flush=True)
        write_csv([{**asdict(row), **machine()} for row in rows], table)
    print("\n" + show([_line(row) for row in rows]))
    reached = [r for r in rows if r.at_their_memory is not None]
    half = sum(2 * (r.at_their_memory or 0.0) <= r.published_overhead for r in reached)
    print(f"\nat their memory at most half of their time: {half} of {len(rows)}")
    _plot(rows, table.with_suffix(".png"))
    print(f"saved: {table}, {table.with_suffix('.png')}")


def measure(job: Job, folder: Path) -> Row:
    """Solves one network at their memory, and for their time."""
    graph = load_graph(graph_file(f"{job.accounting}:{job.network}:{_BATCH}", folder))
    plain = simulate(graph, range(len(graph))).peak - graph.resident
    most = 1 - (memory_floor(graph)[0] - graph.resident) / plain
    saved, slower = (percent / 100 for percent in PUBLISHED[job.network])
    points = [_solved(job, graph, plain, saved, folder)]
    below = saved if _within(points[0], slower) else 0.0
    above = most if below else min(saved, most)
    while above - below > _ACCURACY:
        points.append(_solved(job, graph, plain, (below + above) / 2, folder))
        if _within(points[-1], slower):
            below = points[-1].saved
        else:
            above = points[-1].saved
    known = [(point.saved, point.overhead) for point in points if point.overhead is not None]
    best_saved, best_overhead = max(known, key=lambda one: one[0] - one[1], default=(0.0, 0.0))
    first = points[0].overhead
    return Row(
        network=job.network,
        nodes=len(graph),
        peak=plain,
        published_saved=100 * saved,
        published_overhead=100 * slower,
        at_their_memory=None if first is None else 100 * first,
        bound=100 * points[0].bound,
        at_their_time=100 * below,
        best_saved=100 * best_saved,
        best_overhead=100 * best_overhead,
        most_saved=100 * most,
        seconds=sum(point.seconds for point in points),
    )


def _within(point: Point, slower: float) -> bool:
    return point.overhead is not None and point.overhead <= slower


def _solved(job: Job, graph: Graph, plain: int, saved: float, folder: Path) -> Point:
    """The point at a share of memory saved."""

    def find() -> dict[str, Any]:
        budget = graph.resident + int((1 - saved) * plain)
        result = solve(graph, budget, time_limit=job.time_limit)
        if result.status is Status.INTERRUPTED:
            raise KeyboardInterrupt
        bound = result.lower_bound / graph.cost - 1
        return asdict(Point(saved, result.overhead, bound, str(result.status), result.seconds))

    name = f"{graph.name}-{job.accounting}-{saved:.4f}-{job.time_limit}.json"
    return Point(**remembered(folder / "points" / name, find))


def _line(row: Row) -> dict[str, Any]:
    ours, bound = None, f"{row.bound:.2f}"
    if row.at_their_memory is not None:
        ours = f"{row.at_their_memory:.2f}"
    elif row.impossible:
        ours, bound = "proven impossible", "-"
    return {
        "network": f"{row.network} ({row.nodes} nodes)",
        "theirs: memory -%, time +%": f"{row.published_saved:.0f}, {row.published_overhead:.0f}",
        "time +% at their memory": ours,
        "proven least": bound,
        "memory -% at their time": f"{row.at_their_time:.0f}",
        "best point": f"{row.best_saved:.0f}, {row.best_overhead:.1f}",
        "memory -% at the floor": f"{row.most_saved:.0f}",
        "s": f"{row.seconds:.0f}",
    }


def _plot(rows: Sequence[Row], path: Path) -> None:
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    names = [row.network for row in rows]
    series: dict[str, list[float | None]] = {
        "Feng & Huang, published": [row.published_overhead for row in rows],
        "remat at their memory": [row.at_their_memory for row in rows],
        "proven least": [None if row.impossible else row.bound for row in rows],
    }
    for (name, values), look in zip(series.items(), styles(series).values(), strict=True):
        shown = [(i, value) for i, value in enumerate(values) if value is not None]
        axes.plot(*zip(*shown, strict=True), **{**look, "linestyle": "", "label": name})
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
    axes.set(ylabel="overhead (%)", ylim=(-1, None))
    axes.set_title("Time added at the memory that Feng & Huang report")
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    raise SystemExit(ended(main))
