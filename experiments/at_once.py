"""What does it cost to run one operation at a time, and what would give it back?

    python -m experiments.at_once                  half an hour at most on 2 cores
    python -m experiments.at_once --models ViT --turns 9

A schedule is an order, and the lowered step runs its operations in that order, one
at a time: so its peak, and the address of every tensor, are known before it runs.
On a CPU plain TensorFlow runs as many operations at once as there are cores.  Here
nothing is recomputed and memory is ample, so that the order is all that differs:

plain      the step as TensorFlow runs it
one        the lowered step
W workers  the lowered step's operations in W lanes, one after the other in each: what W
           workers would run that take, of what is ready, what is first in the schedule
           (list scheduling, Graham 1969)
joined     the schedule in short stages of two lanes, each after both lanes of the one
           before it: so at the end of each it would be known what is in memory
any        the lowered step's operations, each after what it reads

Of all but the first two nobody could say what lies where: two operations that run at
once ask for memory in an order that changes from step to step.  All steps of a network
take turns in one process, and each is compared with the plain one beside it.

The order would not matter if each tensor had a chunk of exactly its size, kept apart
from its neighbours: the best fit then is that one, whoever asks first.  A second table
says what that takes at least: chunks for as many tensors of each size as a schedule holds
at once, running one operation at a time, beside what the schedule holds at its peak.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from .models import CASES
from .process import Runner, Task
from .tables import begin, command, ended, machine, positive_int, write_csv

MODELS = ("UNet", "Transformer", "ViT", "Decoder", "InceptionV3")
WORKERS = (2, 3, 4)
SHARES = (1.0, 0.7, 0.5)  # of the plain peak: budgets
_TIMEOUT = 1800.0  # seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table and saves it; 1 if a network's process broke down."""
    parser = command("at_once", __doc__)
    parser.add_argument("--models", nargs="+", choices=CASES, default=MODELS, metavar="NAME")
    parser.add_argument("--turns", type=positive_int, default=15, help="of each step (default: 15)")
    asked = parser.parse_args(arguments)
    begin(asked.out)
    runner = Runner(asked.out, "experiments.at_once_child", _TIMEOUT)
    rows: list[dict[str, Any]] = []
    for model in asked.models:
        task = Task("at_once", model, steps=asked.turns, budget=2**40)
        rows.append({"model": model, "size": CASES[model].size, **runner.result(task)})
        write_csv([{**row, **machine()} for row in rows], asked.out / "table.csv")
    chunks: list[dict[str, Any]] = []
    for model, share in itertools.product(asked.models, SHARES):
        found = runner.result(Task("own_chunks", model, steps=1, share=share))
        chunks.append({"model": model, "size": CASES[model].size, "share": share, **found})
        write_csv([{**row, **machine()} for row in chunks], asked.out / "chunks.csv")
    print("\n" + table(rows) + "\n\n" + chunk_table(chunks))
    print(f"\nsaved: {asked.out / 'table.csv'}, {asked.out / 'chunks.csv'}")
    return 0 if all(row["status"] == "done" for row in (*rows, *chunks)) else 1


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people."""
    ways = ("one", *(f"{count} workers" for count in WORKERS), "joined", "any")
    lines = [f"{'times the plain step':24}{'plain, s':>9}{''.join(f'{way:>11}' for way in ways)}"]
    for row in rows:
        if row["status"] != "done":
            lines.append(f"{row['model']:24}{row['status']}: {row['message'][:200]}")
            continue
        ratios = "".join(f"{row[way]:11.3f}" for way in ways)
        lines.append(f"{row['model']:24}{row['plain_seconds']:9.3f}{ratios}")
    return "\n".join(lines)


def chunk_table(rows: Sequence[dict[str, Any]]) -> str:
    """What schedules hold and what chunks of their own would take, for people."""
    lines = [f"{'MiB, resident included':24}{'budget':>9}{'held':>9}{'own chunks':>12}{'times':>8}"]
    for row in rows:
        label = f"{row['model']} at {row['share']:.0%}"
        if row["status"] != "done":
            lines.append(f"{label:24}{row['status']}: {row['message'][:200]}")
            continue
        budget, held, chunks = (row[key] / 2**20 for key in ("budget", "held", "own_chunks"))
        lines.append(f"{label:24}{budget:9.0f}{held:9.0f}{chunks:12.0f}{chunks / held:8.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(ended(main))
