"""Trains a network inside half of the memory that it takes: ``make demo``.

A U-Net learns to find discs in noise; plain, and then compiled by remat with
half of the plain step's measured peak as its budget.  Each trains in a process
of its own, the second under a hard limit of TensorFlow's allocator equal to the
budget.  What a step takes is told by two more processes, in which plain steps
and steps inside the budget run by turns.  Prints a table, and draws memory over
time in one step of each, from the allocator's own events.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from remat.plots import Curve, plot_memory

from .models import CASES
from .process import Task, by_turns, run
from .tables import ended

_MIB = 2**20
_MODEL = "UNet"
_TIMEOUT = 900.0  # seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demonstration; 1 if a process broke down."""
    parser = argparse.ArgumentParser(
        "python -m experiments.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=10, help="training steps (default: 10)")
    parser.add_argument(
        "--exact",
        action="store_true",
        help="run TensorFlow as it agrees with itself (oneDNN off, deterministic operations, "
        "one operation at a time): slower, and the weights have the same bits",
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"), metavar="DIR")
    asked = parser.parse_args(arguments)
    if asked.steps < 2:
        parser.error("--steps must be at least 2: the loss is to fall")
    asked.out.mkdir(parents=True, exist_ok=True)
    print(f"A U-Net ({CASES[_MODEL].size}) learns to find discs in noise, with Adam, on the CPU.")
    with tempfile.TemporaryDirectory() as folder:
        try:
            plain = _train(asked, "plain", folder)
            again = _train(asked, "plain again", folder)
            budget = plain["peak"] // 2 // _MIB * _MIB
            inside = _train(asked, "inside", folder, budget)
            # The same plan within the same limit.
            times = by_turns(
                lambda timed: _run("plain and inside by turns", timed, asked.out / "times.log"),
                inside["task"],
            )
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
        print("\n" + _table(plain, again, inside, times, budget))
    picture = asked.out / "memory.png"
    curves = [
        Curve(**{**result["curve"], "label": label})
        for result, label in ((plain, "plain step"), (inside, "step inside the budget"))
    ]
    plot_memory(
        curves,
        budget=budget,
        title="One training step of a U-Net, by the events of TensorFlow's allocator",
        path=picture,
    )
    print(f"\nmemory over time: {os.path.relpath(picture)}")
    return 0


def _train(
    asked: argparse.Namespace, name: str, folder: str, budget: int | None = None
) -> dict[str, Any]:
    """Trains in a process of its own; the result says with which task.

    Raises:
      RuntimeError: saying how it ended, if it broke down.
    """
    what = f"{asked.steps} steps, {name}"
    task = Task(
        "demonstrated",
        _MODEL,
        steps=asked.steps,
        weights=str(Path(folder) / f"{name}.npz"),
        exact=asked.exact,
    )
    if budget is not None:
        what += f" {budget // _MIB} MiB (remat.compile first)"
        plan = str(Path(folder) / f"{name}.plan.json")
        task = replace(task, budget=budget, limit_mib=budget // _MIB, plan=plan)
    result = _run(what, task, asked.out / f"{name}.log")
    return {**result, "task": task}


def _run(what: str, task: Task, log: Path) -> dict[str, Any]:
    print(f"{what} ...", end=" ", flush=True)
    result = run(task, timeout=_TIMEOUT, log=log)
    if result["status"] != "done":
        raise RuntimeError(f"{result['status']}: {result['message']}")
    print(f"{result['seconds']:.0f} s", flush=True)
    return result


def _largest_difference(one: str, other: str) -> float:
    """Between the weights in two files."""
    with np.load(one) as first, np.load(other) as second:
        return max(float(np.max(np.abs(first[name] - second[name]))) for name in first.files)


def _table(
    plain: Mapping[str, Any],
    again: Mapping[str, Any],
    inside: Mapping[str, Any],
    times: Mapping[str, Any],
    budget: int,
) -> str:
    seconds = [statistics.median(times[f"{which}_seconds"]) for which in ("plain", "lowered")]
    differences = [
        _largest_difference(plain["task"].weights, other["task"].weights)
        for other in (again, inside)
    ]
    mebibytes = "{:.1f} MiB".format
    percent = "{:.1f} %".format
    losses = [
        "{:.3f} -> {:.3f}".format(*r["losses"][:: len(r["losses"]) - 1]) for r in (plain, inside)
    ]
    lines = [
        ("", "plain", "inside the budget"),
        ("budget = hard limit", "", mebibytes(budget / _MIB)),
        (
            "peak, predicted",
            mebibytes(inside["plain_predicted"] / _MIB),
            mebibytes(inside["predicted"] / _MIB),
        ),
        ("peak, measured", mebibytes(plain["peak"] / _MIB), mebibytes(inside["peak"] / _MIB)),
        ("share of the plain peak", "", percent(100 * inside["peak"] / plain["peak"])),
        ("time a step", f"{seconds[0]:.2f} s", f"{seconds[1]:.2f} s"),
        ("overhead, predicted", "", percent(100 * inside["overhead"])),
        ("overhead, measured", "", percent(100 * (times["ratio"] - 1))),
        ("loss, first -> last step", *losses),
        ("weights, largest difference", *map(_difference_text, differences)),
    ]
    body = "\n".join(f"{name:28}{one:>20}{two:>20}" for name, one, two in lines)
    return (
        f"{body}\n\nOverhead, measured: median over neighbouring steps, plain and inside the "
        "budget by turns.\nDifference of weights: to the plain training; under plain, that of a "
        "second plain training."
    )


def _difference_text(difference: float) -> str:
    return f"{difference:.1e}" if difference else "0 (same bits)"


if __name__ == "__main__":
    raise SystemExit(ended(main))
