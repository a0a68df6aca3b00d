"""Networks of Feng & Huang (CVPR 2021), trained in the memory that they report.

    python -m experiments.optimal_gradient_search_measured
    python -m experiments.optimal_gradient_search_measured --networks ResNet18 --batch 16

For each network, at its published images: the true peak of the plain step with
Adam, and remat's within a hard limit of the allocator that saves the share
that they report of what is not weights or slots (or the least budget that is
found to work); the time added, plain and planned steps by turns in two
processes.  Theirs was measured with PyTorch on a GPU, at other batches.  A
result that is there is not measured again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .models import case_of, published_case
from .optimal_gradient_search import PUBLISHED
from .process import Runner, Task, by_turns
from .tables import begin, command, ended, given, machine, positive_int, show, write_csv

_BATCH = 8
_STEPS = 3
_TIMEOUT = 1200.0  # seconds
_MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One network.

    Attributes:
      published_saved, published_overhead: percent of memory and of time, theirs.
      plain_peak, resident, budget, predicted, peak: bytes.
      saved: percent of the plain peak without what is resident that the
        measured peak is below it.
      overhead_predicted, overhead: percent, of the plain step's time.
      compile_seconds: from the model to the end of the first step.
    """

    network: str
    size: str
    published_saved: int
    published_overhead: int
    plain_peak: int | None = None
    resident: int | None = None
    budget: int | None = None
    predicted: int | None = None
    peak: int | None = None
    saved: float | None = None
    overhead_predicted: float | None = None
    overhead: float | None = None
    compile_seconds: float | None = None
    message: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment; 1 if a process broke down, or took more than its budget."""
    parser = command("optimal_gradient_search_measured", __doc__)
    parser.add_argument("--networks", nargs="+", choices=PUBLISHED, default=list(PUBLISHED))
    parser.add_argument("--batch", type=positive_int, default=_BATCH, help="default: %(default)s")
    asked = parser.parse_args(arguments)
    begin(asked.out)
    rows: list[Row] = []
    for network in asked.networks:
        rows.append(measure(asked, network))
        write_csv([{**asdict(row), **machine()} for row in rows], asked.out / "table.csv")
    print("\n" + show([_line(row) for row in rows]))
    print(f"\nsaved: {asked.out / 'table.csv'}")
    good = [row for row in rows if row.overhead is not None and row.peak is not None]
    return int(len(good) < len(rows) or any((r.peak or 0) > (r.budget or 0) for r in good))


def measure(asked: argparse.Namespace, network: str) -> Row:
    """One network in the memory that they report for it.

    Args:
      asked: batch and out.
      network: name in ``PUBLISHED``.
    """
    runner = Runner(asked.out / str(asked.batch), "experiments.child", _TIMEOUT)
    case = published_case(network)
    row = Row(network, case_of(case, asked.batch).size, *PUBLISHED[network])
    whole = Task("plain", case, batch=asked.batch, steps=_STEPS)
    plain = runner.result(whole)
    if plain["status"] != "done":
        return replace(row, message=plain["message"])
    peak, resident = plain["peak"], plain["resident"]
    row = replace(row, plain_peak=peak, resident=resident)
    wanted = resident + (1 - row.published_saved / 100) * (peak - resident)
    task, found = runner.within(runner.budgeted(whole, wanted), peak)
    row = replace(row, budget=task.budget)
    if found["status"] != "done":
        return replace(row, message=found["message"])
    row = replace(
        row,
        predicted=found["predicted"],
        peak=found["peak"],
        saved=100 * (peak - found["peak"]) / (peak - resident),
        overhead_predicted=100 * found["overhead"],
        compile_seconds=found["compile_seconds"],
    )
    timed = by_turns(runner.result, task)
    if timed["status"] != "done":
        return replace(row, message=timed["message"])
    return replace(row, overhead=100 * (timed["ratio"] - 1))


def _line(row: Row) -> dict[str, Any]:
    return {
        "network": f"{row.network} ({row.size})",
        "theirs: memory -%, time +%": f"{row.published_saved}, {row.published_overhead}",
        "plain, of it resident, MiB": f"{given(row.plain_peak, '.0f', _MIB)}, "
        f"{given(row.resident, '.0f', _MIB)}",
        "budget, peak, MiB": f"{given(row.budget, '.0f', _MIB)}, {given(row.peak, '.0f', _MIB)}",
        "memory -%": given(row.saved, ".0f"),
        "time +%: predicted, measured": f"{given(row.overhead_predicted, '.1f')}, "
        f"{given(row.overhead, '.1f')}",
        "compile, s": given(row.compile_seconds, ".0f"),
        "": row.message[:160],
    }


if __name__ == "__main__":
    raise SystemExit(ended(main))
