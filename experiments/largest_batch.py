"""The largest batch that trains in 16 GB, at the price of one forward pass: Checkmate's Fig. 6.

    python -m experiments.largest_batch                        all six networks
    python -m experiments.largest_batch --networks SegNet --accountings layers

Two accountings (``experiments.accounting``):

layers   as Checkmate counts: a node for each layer, multiplications, weights
         and their gradients, no optimizer
step     the whole step that TensorFlow runs, with Adam, its images, gradients
         and updates; seconds from the datasheet of a V100

For each batch a schedule is looked for whose peak is within the memory and
whose recomputation costs no more than one forward pass.  "ruled out" is the
least batch for which it is proven that there is none; between it and "fits"
nothing is known.  "floor" is the batch, as a real number, at which one node's
inputs and outputs alone fill the memory: Checkmate's program has a real number
for a batch, and where its published answer is the floor rounded up, no
schedule fits it.  All of it is computed; nothing is measured.

Each batch's result is written to its own file once it is there, so a run that
was killed goes on where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from remat.solvers import Graph, Status, simulate, solve

from .accounting import ACCOUNTINGS, forward_share, layer_graph, step_graph
from .networks import NETWORKS
from .pictures import COLOURS
from .tables import (
    begin,
    command,
    ended,
    machine,
    positive,
    positive_int,
    remembered,
    show,
    write_csv,
)

_MEMORY = 16 * 10**9  # bytes
_TIME_LIMIT = 8.0  # seconds for each batch
_ACCURACY = {"layers": 0.0, "step": 0.05}  # share of a batch: a step takes half a minute to trace
_PROBE = 8  # images of the batch that tells how memory grows

# Checkmate's Fig. 6: keeping everything (where the paper gives it), and its program's answer.
_PUBLISHED: dict[str, tuple[int | None, int]] = {
    "U-Net": (16, 61),
    "FCN8": (None, 60),
    "SegNet": (None, 62),
    "VGG19": (167, 289),
    "ResNet50": (None, 193),
    "MobileNet": (215, 1105),
}


@dataclass(frozen=True)
class Job:
    """One network in one accounting.

    Attributes:
      network: name in Checkmate's figure.
      accounting: "layers" or "step".
      memory: bytes.
      time_limit: seconds for each batch.
    """

    network: str
    accounting: str
    memory: int = _MEMORY
    time_limit: float = _TIME_LIMIT


@dataclass(frozen=True)
class Verdict:
    """Whether a batch trains.

    Attributes:
      allowed: one forward pass as a share of the step: what may be added.
      overhead, bound: fractions; overhead is None if nothing was found.
      plain_peak, floor: bytes.
      seconds: to make the graph and solve it.
    """

    batch: int
    allowed: float
    overhead: float | None
    bound: float
    status: str
    plain_peak: int
    resident: int
    floor: int
    nodes: int
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether a schedule is known."""
        return self.overhead is not None and self.overhead <= self.allowed

    @property
    def ruled_out(self) -> bool:
        """Whether it is proven that there is none."""
        return self.status == Status.INFEASIBLE or self.bound > self.allowed


@dataclass(frozen=True)
class Row:
    """The largest batches of one network in one accounting.

    Attributes:
      keep: with nothing computed again.
      fits: largest for which there is a schedule; overhead_percent: its.
      allowed_percent: one forward pass.
      ruled_out: least for which there is proven to be none, or None.
      floor: batch, a real number, whose largest node alone fills the memory.
      published_keep, published: Checkmate's.
      solves: batches looked at; seconds: that all of them took.
    """

    network: str
    accounting: str
    nodes: int
    keep: int
    fits: int
    overhead_percent: float
    allowed_percent: float
    ruled_out: int | None
    floor: float
    published_keep: int | None
    published: int
    solves: int
    seconds: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the experiment."""
    parser = command("largest_batch", __doc__)
    parser.add_argument("--networks", nargs="+", choices=_PUBLISHED, default=list(_PUBLISHED))
    parser.add_argument("--accountings", nargs="+", choices=ACCOUNTINGS, default=ACCOUNTINGS)
    parser.add_argument(
        "--memory", type=positive_int, default=_MEMORY, help="bytes (default: 16e9)"
    )
    parser.add_argument(
        "--time-limit", type=positive, default=_TIME_LIMIT, help="seconds a batch (default: 8)"
    )
    asked = parser.parse_args(arguments)
    begin(asked.out)
    rows: list[Row] = []
    for network in asked.networks:
        for accounting in asked.accountings:
            job = Job(network, accounting, asked.memory, asked.time_limit)
            rows.append(measure(job, asked.out))
            write_csv([{**asdict(row), **machine()} for row in rows], asked.out / "table.csv")
    print("\n" + show([_line(row) for row in rows]))
    _plot(rows, asked.out / "largest_batch.png")
    print(f"\nsaved: {asked.out / 'table.csv'}, {asked.out / 'largest_batch.png'}")


def measure(job: Job, folder: Path) -> Row:
    """The largest batches of one job; each verdict is kept in the folder."""
    print(f"{job.network}, {job.accounting}")
    judge = _Judge(job, folder / "verdicts")
    small = judge(_PROBE)
    large = judge(max(int(_PROBE * job.memory / small.plain_peak), _PROBE + 1))
    growth = (large.plain_peak - small.plain_peak) / (large.batch - _PROBE)  # bytes an image
    keep = _PROBE + int((job.memory - small.plain_peak) / growth)
    while not judge.keeps_all(keep):
        keep = min(keep - 1, int(keep * job.memory / judge(keep).plain_peak))
    # The floor grows from what is held whatever the batch; small batches have floors of their own.
    fixed = small.resident - _PROBE * (large.resident - small.resident) / (large.batch - _PROBE)
    floor = large.batch * (job.memory - fixed) / (large.floor - fixed)
    hopeless = int(1.1 * floor) + 1
    fits = last_batch(keep, hopeless, lambda batch: judge(batch).fits, _ACCURACY[job.accounting])
    known = [verdict.batch for verdict in judge.verdicts if verdict.ruled_out]
    last = last_batch(
        fits,
        min(known, default=hopeless),
        lambda batch: not judge(batch).ruled_out,
        _ACCURACY[job.accounting],
    )
    ruled_out = [verdict.batch for verdict in judge.verdicts if verdict.ruled_out]
    best = judge(fits)
    assert best.overhead is not None
    published_keep, published = _PUBLISHED[job.network]
    return Row(
        network=job.network,
        accounting=job.accounting,
        nodes=best.nodes,
        keep=keep,
        fits=fits,
        overhead_percent=100 * best.overhead,
        allowed_percent=100 * best.allowed,
        ruled_out=min((batch for batch in ruled_out if batch > last), default=None),
        floor=floor,
        published_keep=published_keep,
        published=published,
        solves=len(judge.verdicts),
        seconds=sum(verdict.seconds for verdict in judge.verdicts),
    )


class _Judge:
    """Verdicts on batches of one job: each is found once, and kept in a file.

    Attributes:
      verdicts: those asked for so far.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        self._job, self._folder = job, folder
        self._network = NETWORKS[job.network]
        self._model: Any = None
        self._latest: tuple[Graph, tuple[int, ...]] | None = None
        self._found: dict[int, Verdict] = {}

    @property
    def verdicts(self) -> list[Verdict]:
        return list(self._found.values())

    def __call__(self, batch: int) -> Verdict:
        if batch not in self._found:
            job = self._job
            key = f"{job.network}-{job.accounting}-{batch}-{job.memory}-{job.time_limit}.json"
            found = remembered(self._folder / key, lambda: asdict(self._find(batch)))
            verdict = self._found[batch] = Verdict(**found)
            overhead = "none" if verdict.overhead is None else f"{100 * verdict.overhead:.2f} %"
            print(
                f"  batch {batch}: {overhead}, at least {100 * verdict.bound:.2f} %, allowed "
                f"{100 * verdict.allowed:.2f} % ({verdict.status}, {verdict.seconds:.1f} s)",
                flush=True,
            )
        return self._found[batch]

    def keeps_all(self, batch: int) -> bool:
        """Whether it fits with nothing computed again, in the given order."""
        return self(batch).plain_peak <= self._job.memory

    def _find(self, batch: int) -> Verdict:
        started = time.monotonic()
        graph = self._graph(batch)
        start = None  # the schedule of the batch before, where the graphs are alike
        if self._latest is not None and self._latest[0].edges == graph.edges:
            start = self._latest[1]
        result = solve(graph, self._job.memory, time_limit=self._job.time_limit, start=start)
        if result.status is Status.INTERRUPTED:
            raise KeyboardInterrupt
        if result.schedule is not None:
            self._latest = graph, result.schedule
        return Verdict(
            batch=batch,
            allowed=forward_share(graph),
            overhead=result.overhead,
            bound=result.lower_bound / graph.cost - 1,
            status=str(result.status),
            plain_peak=simulate(graph, range(len(graph))).peak,
            resident=graph.resident,
            floor=result.floor,
            nodes=len(graph),
            seconds=time.monotonic() - started,
        )

    def _graph(self, batch: int) -> Graph:
        if self._model is None:
            self._model = self._network.model()
        if self._job.accounting == "layers":
            return layer_graph(self._model, self._network.name, batch)
        return step_graph(self._model, self._network.name, batch)


def last_batch(below: int, above: int, holds: Callable[[int], bool], accuracy: float) -> int:
    """The largest batch for which something holds, by bisection.

    Args:
      below: a batch for which it holds; above: one for which it does not.
      accuracy: how far it may be missed, as a share of it.
    """
    while above - below > max(1, accuracy * below):
        middle = (below + above) // 2
        if holds(middle):
            below = middle
        else:
            above = middle
    return below


def _line(row: Row) -> dict[str, Any]:
    return {
        "network": row.network,
        "accounting": f"{row.accounting} ({row.nodes} nodes)",
        "keep everything (published)": f"{row.keep} ({row.published_keep or '-'})",
        "published": row.published,
        "remat": row.fits,
        "ruled out (floor)": f"{row.ruled_out or '-'} ({row.floor:.2f})",
        "overhead %, of allowed": f"{row.overhead_percent:.2f} of {row.allowed_percent:.2f}",
        "batches tried, s": f"{row.solves}, {row.seconds:.0f}",
        "": _verdict(row),
    }


def _verdict(row: Row) -> str:
    if row.fits >= row.published:
        return ""
    if round(row.floor) == row.published:
        return "the published number is the floor, rounded up: no schedule fits it"
    if row.ruled_out is not None and row.ruled_out <= row.published:
        return "the published number is proven impossible in this accounting"
    return "NOT REACHED"


def _plot(rows: Sequence[Row], path: Path) -> None:
    networks = list(dict.fromkeys(row.network for row in rows))
    bars: dict[str, dict[str, int]] = {}
    for row in rows:
        bars.setdefault("Checkmate, published", {})[row.network] = row.published
        bars.setdefault(f"keep everything, {row.accounting}", {})[row.network] = row.keep
        bars.setdefault(f"remat, {row.accounting}", {})[row.network] = row.fits
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(bars)
    hatches = ("", "//", "", "\\\\", "")
    for number, (name, values) in enumerate(bars.items()):
        places = [networks.index(n) + (number - (len(bars) - 1) / 2) * width for n in values]
        drawn = axes.bar(
            places,
            list(values.values()),
            0.9 * width,
            label=name,
            color=COLOURS[number],
            hatch=hatches[number],
            edgecolor="white",
        )
        axes.bar_label(drawn, fontsize=6, rotation=90, padding=2)
    axes.set_yscale("log")
    axes.set(ylabel="images a batch", xticks=range(len(networks)), xticklabels=networks)
    axes.set_title("Largest batch in 16 GB at the price of one forward pass")
    axes.margins(y=0.15)
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    raise SystemExit(ended(main))
