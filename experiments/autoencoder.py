"""Memory-saving gradients in a real trainer: the autoencoder of face-swap programs.

    python -m experiments.autoencoder                modelled and measured
    python -m experiments.autoencoder --measure-only --loss dssim

One encoder, a decoder for each side, both trained in each step, 64 pixels.

Modelled, layer by layer (``experiments.accounting``), with both sides' weights
and both optimizers' slots: the largest batch in the memory that keeping
everything takes at a batch of 64, at no more than one more forward pass; by
the modes of OpenAI's package that such trainers use (speed, memory, and
collection, with the enlarging layers named), by remat, and by each with
ping-pong training (``remat.PingPong``: one side at a time, the other's decoder
and slots on the host).

Measured, at half the width: true peak and seconds of a step for both sides,
and of two steps for ping-pong training (one for each side, and what switching
every five steps adds).  Each is a process of its own; a result that is there
is not measured again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from remat.solvers import Graph, Status, simulate, solve

from .accounting import forward_share, layer_graph
from .largest_batch import last_batch
from .process import Runner, Task
from .tables import begin, command, ended, given, machine, remembered, show, write_csv

_BATCH = 64  # whose plain memory is what there is
_NUMBER = 4  # bytes of a float
_TIME_LIMIT = 5.0  # seconds
_STEPS = 11
_SHARES = (0.9, 0.8)  # of the plain peak, measured
_TIMEOUT = 900.0  # seconds
_MIB = 2**20

_MODES: dict[str, dict[str, Any]] = {
    "keep everything": {"solver": "checkpoint_all"},
    "speed": {"solver": "openai", "mode": "speed"},
    "memory": {"solver": "openai", "mode": "memory"},
    "collection": {"solver": "openai", "mode": "collection"},
    "remat": {"solver": "auto"},
}


@dataclass(frozen=True)
class Model:
    """The modelled trainer.

    Attributes:
      graph: one side's step at a batch of one.
      forward: share of a step's cost that is its forward pass.
      resident: bytes held throughout, both sides; turns: with ping-pong.
      collection: names of the layers that are kept in mode "collection".
    """

    graph: Graph
    forward: float
    resident: int
    turns: int
    collection: tuple[str, ...]

    def step(self, batch: int, ping_pong: bool) -> Graph:
        """One side's step; the sides follow one another, so both have its peak."""
        nodes = tuple(
            replace(node, bytes=batch * node.bytes, cost=batch * node.cost)
            for node in self.graph.nodes
        )
        return replace(self.graph, nodes=nodes, resident=self.turns if ping_pong else self.resident)


@dataclass(frozen=True)
class Row:
    """One mode: modelled or measured.

    Attributes:
      batch: largest; gain_percent: against keeping everything.
      overhead_percent: of a step; of both sides' steps, where measured.
      peak: bytes; peak_percent: of the plain step's.
    """

    kind: str
    mode: str
    batch: int | None = None
    gain_percent: float | None = None
    overhead_percent: float | None = None
    peak: int | None = None
    peak_percent: float | None = None
    seconds: float | None = None
    message: str = ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the experiment."""
    parser = command("autoencoder", __doc__)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--model-only", action="store_true", help="nothing is measured")
    only.add_argument("--measure-only", action="store_true", help="nothing is modelled")
    parser.add_argument("--loss", choices=("mae", "dssim"), default="mae", help="measured")
    asked = parser.parse_args(arguments)
    begin(asked.out)
    rows = [] if asked.measure_only else modelled(asked.out)
    if not asked.model_only:
        rows += measured(asked.out, asked.loss)
    write_csv([{**asdict(row), **machine()} for row in rows], asked.out / "table.csv")
    print("\n" + show([_line(row) for row in rows]))
    print(f"\nsaved: {asked.out / 'table.csv'}")


def modelled(folder: Path) -> list[Row]:
    """The largest batch of each mode, with and without ping-pong training."""
    model = _model()
    memory = _plain_peak(model.step(_BATCH, ping_pong=False))
    rows = []
    for ping_pong in (False, True):
        for mode in _MODES:
            name = f"{mode}, ping-pong" if ping_pong else mode
            print(f"  {name}", flush=True)
            found = remembered(
                folder / "modelled" / f"{name}.json",
                partial(_largest, model, mode, memory, ping_pong),
            )
            rows.append(
                Row(
                    "modelled",
                    name,
                    batch=found["batch"],
                    gain_percent=100 * (found["batch"] / _BATCH - 1),
                    overhead_percent=100 * found["overhead"],
                    peak=memory,
                )
            )
    return rows


def _largest(model: Model, mode: str, memory: int, ping_pong: bool) -> dict[str, Any]:
    """The largest batch of a mode in some bytes, and its overhead."""
    options = dict(_MODES[mode])
    if mode == "collection":
        options["names"] = list(model.collection)
    overheads = {0: 0.0}

    def fits(batch: int) -> bool:
        graph = model.step(batch, ping_pong)
        result = solve(graph, memory, time_limit=_TIME_LIMIT, **options)
        if result.status is Status.INTERRUPTED:
            raise KeyboardInterrupt
        if result.overhead is None or result.overhead > model.forward:
            return False
        overheads[batch] = result.overhead
        return True

    one = model.step(1, ping_pong)
    hopeless = (memory - one.resident) // max(node.bytes for node in one.nodes) + 1
    batch = last_batch(0, hopeless, fits, accuracy=0.0)
    return {"batch": batch, "overhead": overheads[batch]}


def _model() -> Model:
    from .autoencoder_model import build

    parts = build()
    graph = layer_graph(parts.side(0), "autoencoder", 1)
    encoder, decoder = (_NUMBER * m.count_params() for m in (parts.encoder, parts.decoders[0]))
    gradients, slots = encoder + decoder, 2 * (encoder + decoder)
    return Model(
        graph,
        forward=forward_share(graph),
        resident=encoder + 2 * decoder + gradients + 2 * slots,
        turns=encoder + decoder + gradients + slots,
        collection=tuple(n.name for n in graph.nodes if not n.backward and "shuffle" in n.name),
    )


def _plain_peak(graph: Graph) -> int:
    return simulate(graph, range(len(graph))).peak


def measured(folder: Path, loss: str) -> list[Row]:
    """Peak and seconds of both ways to train, plain and within shares of the plain peak."""
    runner = Runner(folder, "experiments.autoencoder_child", _TIMEOUT)
    plain = runner.result(Task("both", loss, steps=_STEPS))
    rows = [_measured_row("both sides", plain, plain)]
    if plain["status"] != "done":
        return rows
    tasks = [("both sides", Task("both", loss, steps=_STEPS), plain)]
    turns = runner.result(Task("ping_pong", loss, steps=_STEPS))
    rows.append(_measured_row("ping-pong", turns, plain))
    if turns["status"] == "done":
        tasks.append(("ping-pong", Task("ping_pong", loss, steps=_STEPS), turns))
    for name, task, own in tasks:
        for share in _SHARES:
            mebibytes = int(share * own["peak"] / _MIB)
            limited = replace(task, budget=mebibytes * _MIB, limit_mib=mebibytes)
            _, found = runner.within(limited, own["peak"])
            rows.append(_measured_row(f"{name}, remat", found, plain))
    return rows


def _measured_row(mode: str, found: Mapping[str, Any], plain: Mapping[str, Any]) -> Row:
    if found["status"] != "done":
        return Row("measured", mode, message=f"{found['status']}: {found['message']}"[:160])
    seconds = found["step_seconds"]
    if "turn" in found:  # a step for each side, and a switch every so many steps
        switches = found["switch_seconds"]
        seconds = 2 * (seconds + sum(switches) / len(switches) / found["turn"])
    return Row(
        "measured",
        mode,
        overhead_percent=100 * (seconds / plain["step_seconds"] - 1),
        peak=found["peak"],
        peak_percent=100 * found["peak"] / plain["peak"],
        seconds=seconds,
    )


def _line(row: Row) -> dict[str, Any]:
    return {
        "": row.kind,
        "mode": row.mode,
        "batch": row.batch,
        "gain, %": given(row.gain_percent, ".0f"),
        "time, +%": given(row.overhead_percent, ".1f"),
        "peak, MiB": given(row.peak, ".0f", _MIB),
        "% of plain": given(row.peak_percent, ".0f"),
        "s": given(row.seconds, ".2f"),
        "note": row.message,
    }


if __name__ == "__main__":
    raise SystemExit(ended(main))
