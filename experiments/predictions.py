"""Do predictions hold?  Peaks and seconds, as planned and as measured.

    python -m experiments.predictions                        everything (hours; it resumes)
    python -m experiments.predictions --models UNet --shares 0.5 --runs 2

For each network and each share of its plain peak, every run in a process of
its own:

budgeted   remat compiles the step under a hard limit of TensorFlow's allocator
           equal to the budget, and trains
again      the same by the saved plan, until there are as many runs as asked for
squeezed   that plan under a limit 3 % below the budget, without the measured
           run that would make another plan: is there slack?  None where it is
           foreseen not to fit, and planned again
timed      plain and planned steps by turns, twice; and once for each network the step
           without recomputation against the plain one, which is what the
           control edges cost
profiled   what is computed again by that plan and everything else, operation by operation
elsewhere  the step at twice the batch, priced from what is recorded: measured
           rows, fits from other sizes, rooflines
validated  recorded operations, predicted from the others

A budget that is infeasible is raised to the least one that is found to work;
where two shares come to one budget so, they are one row.
Each result is kept in a file; delete one to measure it again.  A process that
breaks down is a row of the table, never left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .models import CASES, FURTHER, TRAINED
from .process import Runner, Task, by_turns
from .tables import begin, command, ended, given, machine, positive_int, proper_share, write_csv

_MIB = 2**20
_SHARES = (0.7, 0.5, 0.35)
_SQUEEZE = 0.97  # of the budget
_STANDING = 1.05  # times what is there before the first step: the least limit that is tried
_TIMEOUT = 1800.0  # seconds

# What the project set out to show.
_ERROR_TARGET = 0.03  # of the predicted peak, the median
_BELOW_TARGET = 0.01  # by which a prediction may be too low
_OVERHEAD_TARGET = 0.05  # between overheads as predicted and as measured
_LOWERING_TARGET = 1.02  # times the plain step


@dataclass(frozen=True)
class Row:
    """One network within one budget.  Bytes, seconds; None where there is none.

    Attributes:
      share: of the plain peak, asked for; budget_share: what it came to.
      status: "done", "infeasible" or "failed".
      predicted: peak of the first run; measured: the highest of all runs.
      error: median over runs of predicted / measured - 1; lowest: the least.
      runs: processes that trained; broken: those that did not, or ran out of memory.
      squeezed: how the run under the lower limit ended.
      overhead_predicted, overhead_measured: fractions, of the plain step's time;
        overhead_profiled: of the planned step's operations, those that are computed again
        over the others.
      lowering: seconds of the step without recomputation / plain.
      share_measured, share_fitted, share_roofline: of the step's priced
        seconds; and the same at twice the batch (``..._elsewhere``).
      price_seconds: what pricing took, compile_seconds: from the model to the
        end of the first step, both in the first run.
    """

    model: str
    size: str
    share: float
    status: str = "failed"
    plain_peak: int | None = None
    budget: int | None = None
    budget_share: float | None = None
    predicted: int | None = None
    measured: int | None = None
    error: float | None = None
    lowest: float | None = None
    runs: int = 0
    broken: int = 0
    squeezed: str = ""
    overhead_predicted: float | None = None
    overhead_measured: float | None = None
    overhead_profiled: float | None = None
    lowering: float | None = None
    share_measured: float | None = None
    share_fitted: float | None = None
    share_roofline: float | None = None
    share_measured_elsewhere: float | None = None
    share_fitted_elsewhere: float | None = None
    share_roofline_elsewhere: float | None = None
    price_seconds: float | None = None
    compile_seconds: float | None = None
    message: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment; 1 if a run broke down or a prediction was too low."""
    parser = command("predictions", __doc__)
    everything = (*TRAINED, *FURTHER)
    parser.add_argument("--models", nargs="+", choices=CASES, default=everything, metavar="NAME")
    parser.add_argument(
        "--shares",
        nargs="+",
        type=proper_share,
        default=_SHARES,
        metavar="SHARE",
        help="of the plain peak (default: 0.7 0.5 0.35)",
    )
    parser.add_argument(
        "--runs", type=positive_int, default=3, help="processes a budget (default: 3)"
    )
    parser.add_argument(
        "--steps", type=positive_int, default=5, help="of each process (default: 5)"
    )
    asked = parser.parse_args(arguments)

    begin(asked.out)
    cases = _Cases(asked.out, asked.runs, asked.steps)
    rows: list[Row] = []
    for model in asked.models:
        for share in asked.shares:
            row = cases.row(model, share)
            if row.budget is not None and (model, row.budget) in (
                (other.model, other.budget) for other in rows
            ):
                continue
            rows.append(row)
            write_csv([{**asdict(row), **machine()} for row in rows], asked.out / "table.csv")
    print("\n" + table(rows))
    print("\n" + verdicts(rows))
    print(errors_of_prices(cases.runner.result(Task("validated", "recorded"))))
    print(f"\nsaved: {asked.out / 'table.csv'}; each result: {cases.runner.folder / 'results'}")
    return 1 if any(row.status == "failed" or row.broken or _is_too_low(row) for row in rows) else 0


class _Cases:
    """Runs what a row takes."""

    def __init__(self, folder: Path, runs: int, steps: int) -> None:
        self.runner = Runner(folder, "experiments.predictions_child", _TIMEOUT)
        self.runs = runs
        self.steps = steps

    def row(self, model: str, share: float) -> Row:
        """Everything about one network within one budget."""
        row = Row(model, CASES[model].size, share)
        whole = Task("plain", model, steps=self.steps)
        plain = self.runner.result(whole)
        if plain["status"] != "done":
            return replace(row, message=f"plain step: {plain['message']}")
        peak = plain["peak"]
        # Below what stands before any step TensorFlow itself breaks down, making the variables.
        asked = max(share * peak, _STANDING * plain["resident"])
        task, first = self.runner.within(self.runner.budgeted(whole, asked), peak)
        assert task.budget is not None
        row = replace(
            row,
            status=first["status"],
            plain_peak=peak,
            budget=task.budget,
            budget_share=task.budget / peak,
            message=first.get("message", ""),
        )
        if first["status"] != "done":
            return row
        results = [first] + [
            self.runner.result(replace(task, kind="again", repeat=number))
            for number in range(1, self.runs)
        ]
        squeezed = replace(task, kind="squeezed", limit_mib=int(_SQUEEZE * task.budget) // _MIB)
        # Either fits: the plain step, and the lowered one.
        lowering = replace(task, kind="timed", budget=2 * peak, limit_mib=None, plan=None)
        row = replace(row, squeezed=self.runner.result(squeezed)["status"])
        row = _with_seconds(
            row,
            by_turns(self.runner.result, task),
            self.runner.result(replace(task, kind="profiled")),
            self.runner.result(lowering),
        )
        row = _with_shares(row, first, "")
        row = _with_shares(row, self.runner.result(Task("elsewhere", model)), "_elsewhere")
        return replace(
            _with_peaks(row, results),
            overhead_predicted=first["overhead"],
            price_seconds=first["stage_seconds"]["price"],
            compile_seconds=first["compile_seconds"],
        )


def _with_peaks(row: Row, results: Sequence[Mapping[str, Any]]) -> Row:
    trained = [result for result in results if result["status"] == "done"]
    errors = [result["predicted"] / result["peak"] - 1 for result in trained]
    problems = [result["message"] for result in results if result["status"] != "done"]
    problems += [warning for result in trained for warning in result["warnings"]]
    return replace(
        row,
        predicted=results[0]["predicted"],
        measured=max(result["peak"] for result in trained),
        error=statistics.median(errors),
        lowest=min(errors),
        runs=len(trained),
        broken=len(results) - len(trained),
        message="; ".join(filter(None, [row.message, *problems])),
    )


def _with_seconds(
    row: Row, timed: Mapping[str, Any], profiled: Mapping[str, Any], lowering: Mapping[str, Any]
) -> Row:
    named = {"timed": timed, "profiled": profiled, "without recomputation": lowering}
    for what, result in named.items():
        if result["status"] != "done":
            row = replace(row, message=f"{row.message}; {what}: {result['message']}".lstrip("; "))
    return replace(
        row,
        overhead_measured=timed["ratio"] - 1 if timed["status"] == "done" else None,
        overhead_profiled=profiled.get("overhead"),
        lowering=lowering.get("ratio"),
    )


def _with_shares(row: Row, result: Mapping[str, Any], suffix: str) -> Row:
    if result["status"] != "done":
        return replace(row, message=f"{row.message}; prices: {result['message']}".lstrip("; "))
    seconds = result["priced_seconds"]
    total = sum(seconds.values())
    shares: dict[str, Any] = {
        f"share_{kind}{suffix}": seconds[kind] / total
        for kind in ("measured", "fitted", "roofline")
    }
    return replace(row, **shares)


def table(rows: Sequence[Row]) -> str:
    """The rows for people."""
    lines = [
        f"{'':17}{'budget':>12}{'peak, MiB':>20}{'error, %':>15}{'':>6}{'':>13}"
        f"{'overhead, %':>24}{'lowered':>9}{'compile':>9}\n"
        f"{'':17}{'MiB':>6}{'%':>6}{'predicted':>10}{'measured':>10}{'median':>8}{'least':>7}"
        f"{'runs':>6}{'3 % less':>13}{'predicted':>10}{'profd':>7}{'measd':>7}"
        f"{'/ plain':>9}{'s':>9}"
    ]
    for row in rows:
        lines.append(
            f"{row.model:17}{given(row.budget, '6.0f', _MIB)}"
            f"{given(row.budget_share, '6.1f', 0.01)}"
            f"{given(row.predicted, '10.1f', _MIB)}{given(row.measured, '10.1f', _MIB)}"
            f"{given(row.error, '8.2f', 0.01)}{given(row.lowest, '7.2f', 0.01)}"
            f"{f'{row.runs}/{row.runs + row.broken}':>6}{row.squeezed or '-':>13.13}"
            f"{given(row.overhead_predicted, '10.1f', 0.01)}"
            f"{given(row.overhead_profiled, '7.1f', 0.01)}"
            f"{given(row.overhead_measured, '7.1f', 0.01)}{given(row.lowering, '9.3f')}"
            f"{given(row.compile_seconds, '9.0f')}"
            f"{'' if row.status == 'done' else '  ' + row.status}"
        )
        if row.message:
            lines.append(f"    {row.message[:200]}")
    return "\n".join(lines)


def verdicts(rows: Sequence[Row]) -> str:
    """What was aimed at, and what came of it."""
    done = [row for row in rows if row.status == "done"]
    lines = [f"budgets: {len(done)} of {len(rows)} met"]
    if not done:
        return lines[0]
    runs, broken = sum(row.runs for row in done), sum(row.broken for row in done)
    squeezed = [row.squeezed for row in done]
    lines.append(
        f"runs that broke down or ran out of memory: {broken} of {runs + broken}; under a limit "
        f"3 % lower: {sum(end != 'done' for end in squeezed)} of {len(squeezed)}"
    )
    error = statistics.median(abs(row.error) for row in done if row.error is not None)
    too_low = sum(map(_is_too_low, done))
    lines.append(
        f"error of the predicted peak: median {100 * error:.2f} %, target "
        f"{100 * _ERROR_TARGET:g}: {_verdict(error <= _ERROR_TARGET)}; below the measured by more "
        f"than {100 * _BELOW_TARGET:g} %: {too_low}, target 0: {_verdict(not too_low)}"
    )
    overheads = [(row.overhead_predicted, row.overhead_measured, row.lowering) for row in done]
    timed = [
        (predicted, measured, lowered)
        for predicted, measured, lowered in overheads
        if predicted is not None and measured is not None and lowered is not None
    ]
    if timed:
        apart = [abs(measured - predicted) for predicted, measured, _ in timed]
        lines.append(f"overhead: {_apart(apart)}")
        apart = [
            abs(1 + measured - lowered * (1 + predicted)) for predicted, measured, lowered in timed
        ]
        lines.append(f"with what the control edges cost, as measured: {_apart(apart)}")
    profiled = [
        abs(row.overhead_profiled - row.overhead_predicted)
        for row in done
        if row.overhead_profiled is not None and row.overhead_predicted is not None
    ]
    if profiled:
        lines.append(f"recomputation alone, operation by operation: {_apart(profiled)}")
    lowering = {row.model: row.lowering for row in done if row.lowering is not None}
    if lowering:
        worst = max(lowering, key=lowering.__getitem__)
        lines.append(
            f"without recomputation / plain: at most {lowering[worst]:.3f} ({worst}), median "
            f"{statistics.median(lowering.values()):.3f}, target {_LOWERING_TARGET:g}: "
            f"{_verdict(lowering[worst] <= _LOWERING_TARGET)}"
        )
    for suffix, where in (("", "this step"), ("_elsewhere", "twice the batch")):
        shares = []
        for kind in ("measured", "fitted", "roofline"):
            found = [getattr(row, f"share_{kind}{suffix}") for row in done]
            known = [share for share in found if share is not None]
            if known:
                shares.append(f"{kind} {100 * statistics.mean(known):.1f} %")
        lines.append(f"seconds priced, {where}: {', '.join(shares)}")
    return "\n".join(lines)


def _apart(apart: Sequence[float]) -> str:
    """How far overheads are from those predicted."""
    within = sum(each <= _OVERHEAD_TARGET for each in apart)
    return (
        f"within {100 * _OVERHEAD_TARGET:g} points of the predicted: {within} of {len(apart)}, "
        f"median {100 * statistics.median(apart):.1f}: {_verdict(within == len(apart))}"
    )


def errors_of_prices(result: Mapping[str, Any]) -> str:
    """How well each kind of price predicts operations that it has not seen."""
    if result["status"] != "done":
        return f"prices could not be validated: {result['message']}"
    lines = [f"recorded operations: {result['rows']}, predicted from the others:"]
    for found in result["errors"]:
        lines.append(
            f"  {found['kind']:9} {found['rows']:5} of them: error "
            f"{100 * found['median_error']:.0f} % (median), "
            f"{100 * found['largest_tenth_error']:.0f} % (90th percentile), "
            f"sum {found['total_ratio']:.2f} x the measured"
        )
    return "\n".join(lines)


def _is_too_low(row: Row) -> bool:
    return row.lowest is not None and row.lowest < -_BELOW_TARGET


def _verdict(met: bool) -> str:
    return "met" if met else "MISSED"


if __name__ == "__main__":
    raise SystemExit(ended(main))
