"""The largest batch that really trains under a hard limit of the allocator.

    python -m experiments.largest_batch_measured
    python -m experiments.largest_batch_measured --models ResNet50 --limit 1024

For each network three ways: the plain ``tf.function``, the same under
``keras.RematScope("activations")``, and remat with the limit as its budget.
Each batch that is tried trains for some steps in a process of its own, whose
allocator has the hard limit; batches are halved in on.  A process that breaks
down, or is refused its budget, does not train.  A result that is there is not
measured again.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .largest_batch import last_batch
from .models import CASES
from .process import Runner, Task
from .tables import begin, command, ended, machine, positive_int, proper_share, show, write_csv

_WAYS = {"plain": "plain", "scope_activations": 'RematScope("activations")', "budgeted": "remat"}
_MODELS = ("UNet",)
_LIMIT = 512  # MiB
_STEPS = 3
_TIMEOUT = 900.0  # seconds
_MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One network, one way.

    Attributes:
      batch: the largest that trained; failed: the least that did not, of those tried.
      peak: bytes, of the largest; seconds: an image, the median of the steps after the first.
      gain: batch over the plain one's, as a ratio.
    """

    model: str
    way: str
    limit: int
    batch: int
    failed: int | None = None
    peak: int | None = None
    seconds: float | None = None
    gain: float | None = None
    tried: int = 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the experiment."""
    parser = command("largest_batch_measured", __doc__)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=CASES,
        default=_MODELS,
        metavar="NAME",
        help=f"of {', '.join(CASES)} (default: {' '.join(_MODELS)})",
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=_WAYS,
        default=_WAYS,
        metavar="WAY",
        help=f"of {', '.join(_WAYS)} (default: all)",
    )
    parser.add_argument(
        "--limit", type=positive_int, default=_LIMIT, metavar="MIB", help="default: %(default)s"
    )
    parser.add_argument(
        "--accuracy",
        type=proper_share,
        default=0.0,
        help="share of a batch (default: to the image)",
    )
    asked = parser.parse_args(arguments)
    begin(asked.out)
    rows: list[Row] = []
    for model in asked.models:
        for way in asked.ways:
            rows.append(measure(asked, model, way, rows))
            write_csv([{**asdict(row), **machine()} for row in rows], asked.out / "table.csv")
    print("\n" + show([_line(row) for row in rows]))
    print(f"\nsaved: {asked.out / 'table.csv'}")


def measure(asked: argparse.Namespace, model: str, way: str, before: Sequence[Row]) -> Row:
    """The largest batch of one network in one way.

    Args:
      asked: limit (MiB), accuracy and out.
      model: name in ``CASES``; way: in ``_WAYS``.
      before: rows that are there: the plain one's is compared with.
    """
    runner = Runner(asked.out / str(asked.limit), "experiments.child", _TIMEOUT)
    found: dict[int, dict[str, Any]] = {}

    def trains(batch: int) -> bool:
        task = Task(way, model, batch=batch, steps=_STEPS, limit_mib=asked.limit)
        if way == "budgeted":
            plan = str(runner.folder / f"{model}-{batch}.plan.json")
            task = replace(task, budget=asked.limit * _MIB, plan=plan)
        found[batch] = runner.result(task)
        return found[batch]["status"] == "done"

    low, high = 0, CASES[model].inputs[0]
    while trains(high):
        low, high = high, 2 * high
    batch = last_batch(low, high, trains, asked.accuracy)
    row = Row(model, way, asked.limit * _MIB, batch, tried=len(found))
    if not batch:
        return row
    seconds = statistics.median(found[batch]["step_seconds"][1:]) / batch
    plain = [r.batch for r in before if r.model == model and r.way == "plain" and r.batch]
    return Row(
        model=model,
        way=way,
        limit=asked.limit * _MIB,
        batch=batch,
        failed=min(b for b, result in found.items() if result["status"] != "done"),
        peak=found[batch]["peak"],
        seconds=seconds,
        gain=batch / plain[0] if plain else None,
        tried=len(found),
    )


def _line(row: Row) -> dict[str, Any]:
    return {
        "network": row.model,
        "way": _WAYS[row.way],
        "largest batch": row.batch,
        "failed at": row.failed,
        "x plain": None if row.gain is None else f"{row.gain:.2f}",
        "peak, MiB": None if row.peak is None else f"{row.peak / _MIB:.0f} of {row.limit // _MIB}",
        "ms an image": None if row.seconds is None else f"{1000 * row.seconds:.0f}",
        "batches tried": row.tried,
    }


if __name__ == "__main__":
    raise SystemExit(ended(main))
