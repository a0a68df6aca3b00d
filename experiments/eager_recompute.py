"""What TensorFlow's own recomputation takes, beside remat: true peaks and seconds.

    python -m experiments.eager_recompute
    python -m experiments.eager_recompute --model UNet --shares 0.5 0.3
    python -m experiments.eager_recompute --model VGG16-224 --batch 64 --steps 2 --shares 0.5

The step of a small CNN (batch 16 at 256 x 256 x 1) as TensorFlow's users write
it: operation by operation ("eager") and as a ``tf.function``, plain and with
``tf.recompute_grad`` around about sqrt(n) blocks of layers; under
``keras.RematScope``; and by remat within shares of the plain step's peak (or
the least budget found to work), under a hard limit equal to the budget.

Each way is a process of its own.  Peaks are TensorFlow's allocator's, seconds
the median of the steps after the first.  A result that is there is not
measured again.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from .models import CASES, case_of
from .pictures import styles
from .process import Runner, Task
from .tables import (
    begin,
    command,
    ended,
    given,
    machine,
    positive_int,
    proper_share,
    show,
    write_csv,
)

_WAYS = {
    "plain": "tf.function",
    "eager": "eager",
    "recompute_grad": "tf.function, tf.recompute_grad",
    "eager_recompute_grad": "eager, tf.recompute_grad",
    "scope_full": 'RematScope("full")',
    "scope_activations": 'RematScope("activations")',
}
_SHARES = (0.5, 0.35, 0.2)
_TIMEOUT = 1800.0  # seconds
_MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One way to run the step.

    Attributes:
      way: for people.
      status: "done", "infeasible" or "failed".
      peak, budget: bytes; seconds: of a step.
      peak_share, slower: of the plain ``tf.function``'s; slower is a ratio.
      predicted: overhead as remat has it, a fraction.
    """

    way: str
    status: str
    budget: int | None = None
    peak: int | None = None
    peak_share: float | None = None
    seconds: float | None = None
    slower: float | None = None
    predicted: float | None = None
    message: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment; 1 if remat broke down or took more than its budget."""
    parser = command("eager_recompute", __doc__)
    parser.add_argument("--model", choices=CASES, default="SampleCNN")
    parser.add_argument("--batch", type=positive_int, help="default: the model's own")
    parser.add_argument("--ways", nargs="*", choices=_WAYS, default=list(_WAYS))
    parser.add_argument(
        "--shares",
        nargs="*",
        type=proper_share,
        default=_SHARES,
        help="remat's (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=positive_int, default=4, help="the first is not timed (default: 4)"
    )
    asked = parser.parse_args(arguments)
    if asked.steps < 2:
        parser.error("--steps must be at least 2: the first step is not timed")
    begin(asked.out)
    runner = Runner(asked.out, "experiments.child", _TIMEOUT)
    whole = Task("plain", asked.model, batch=asked.batch, steps=asked.steps)
    plain = runner.result(whole)
    if plain["status"] != "done":
        parser.exit(1, f"the plain step: {plain['message']}\n")
    rows = []
    for way in asked.ways:
        found = runner.result(replace(whole, kind=way))
        rows.append(_row(_WAYS[way], found, plain))
    for share in asked.shares:
        rows.append(_remat(runner, whole, share, plain))
        write_csv([{**asdict(row), **machine()} for row in rows], asked.out / "table.csv")
    size = case_of(asked.model, asked.batch).size
    print(f"\n{asked.model} ({size})\n\n{show([_line(row) for row in rows])}")
    _plot(rows, f"{asked.model} ({size})", asked.out / "eager_recompute.png")
    print(f"\nsaved: {asked.out / 'table.csv'}, {asked.out / 'eager_recompute.png'}")
    ours = [row for row in rows if row.budget is not None]
    return int(any(row.peak is None or row.peak > (row.budget or 0) for row in ours))


def _remat(runner: Runner, whole: Task, share: float, plain: Mapping[str, Any]) -> Row:
    """The row of remat within a share of the plain peak, or the least budget above it."""
    task, found = runner.within(runner.budgeted(whole, share * plain["peak"]), plain["peak"])
    assert task.budget is not None
    return _row(f"remat, {100 * task.budget / plain['peak']:.0f} %", found, plain, task.budget)


def _row(
    way: str, found: Mapping[str, Any], plain: Mapping[str, Any], budget: int | None = None
) -> Row:
    if found["status"] != "done":
        return Row(way, found["status"], budget, message=found["message"])
    seconds = statistics.median(found["step_seconds"][1:])
    return Row(
        way=way,
        status="done",
        budget=budget,
        peak=found["peak"],
        peak_share=found["peak"] / plain["peak"],
        seconds=seconds,
        slower=seconds / statistics.median(plain["step_seconds"][1:]),
        predicted=found.get("overhead"),
    )


def _line(row: Row) -> dict[str, Any]:
    return {
        "way": row.way,
        "peak, MiB": given(row.peak, ".0f", _MIB),
        "% of plain": given(row.peak_share, ".0f", 0.01),
        "s a step": given(row.seconds, ".2f"),
        "x plain": given(row.slower, ".2f"),
        "predicted overhead, %": given(row.predicted, ".1f", 0.01),
        "": row.message[:160] if row.message else "",
    }


def _plot(rows: Sequence[Row], network: str, path: Path) -> None:
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    names = [row.way.partition(",")[0] if row.budget else row.way for row in rows]
    for name, look in styles(dict.fromkeys(names)).items():
        own = [row for own, row in zip(names, rows, strict=True) if own == name and row.peak]
        if not own:  # it failed
            continue
        look |= {"linestyle": "-" if name == "remat" else "", "markersize": 8}
        axes.plot([(row.peak or 0) / _MIB for row in own], [row.slower or 0 for row in own], **look)
    axes.axhline(1.35, color="0.5", linestyle=":", linewidth=1, label="1.35 x the plain time")
    axes.margins(0.1)
    axes.set(xlabel="peak (MiB)", ylabel="time (x plain)", xlim=(0, None), ylim=(0, None))
    axes.set_title(f"{network}: measured peak and time of a step")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    raise SystemExit(ended(main))
