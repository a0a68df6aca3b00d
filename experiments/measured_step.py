"""Does it hold what it promises?  Real networks inside real limits.

    python -m experiments.measured_step                      the whole table (an hour or two)
    python -m experiments.measured_step --exact              and bit for bit
    python -m experiments.measured_step --models UNet --budgets 0.5

For each network the peak of the plain step is measured in several processes;
the budgets are shares of their median.  Then, each in a process of its own:

budgeted   remat compiles the step for the budget, under a hard limit of the
           allocator equal to it, and trains some steps: the peak as predicted
           and as measured, the seconds that compiling took
timed      that plan within that limit and plain steps by turns, each in its
           process; and, in each of several processes, the step lowered with no
           recomputation at all, where memory is ample, and the plain one by turns
compared   weights, optimizer slots, averages, losses and predictions after
           some Adam steps, against the plain step: as users run, and with
           --exact in the setting in which TensorFlow agrees with itself

"least" is the least budget that was found to work: what remat names when it
is asked for a hopeless one, then upwards until it compiles and trains.

Each result is written to its own file once it is there, so a run that was
killed goes on where it stopped; delete a file to measure it again.  A process
that breaks down is a row of the table, never left out.  TensorFlow counts
bytes on the CPU only in the allocator that it uses on GPUs; that is switched
on for every process.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .models import CASES, LARGE, TRAINED
from .process import Runner, Task, by_turns
from .tables import begin, command, ended, given, machine, positive, positive_int, write_csv

_MIB = 2**20
_BUDGETS = ("0.7", "0.5", "0.35", "least")
_LARGE_BUDGET = "0.5"
_TIMEOUT = 1800.0  # seconds

# What the project set out to show: medians over the networks.
_OVERHEAD_TARGETS = {"0.7": 0.04, "0.5": 0.10, "0.35": 0.18}
_PREDICTION_TARGET = 0.05
_LOWERING_TARGET = 1.02
_DIFFERENCE_TARGET = 1e-5
_COMPILE_TARGETS = {**dict.fromkeys(TRAINED, 60.0), **dict.fromkeys(LARGE, 180.0)}


@dataclass(frozen=True)
class Row:
    """One network within one budget.  Bytes, seconds; None where there is none.

    Attributes:
      plain_peak: median over processes; plain_spread: largest less smallest.
      resident_share: of the plain peak.
      plain_seconds: of one plain step, the median by turns with the lowered one.
      budget: bytes; budget_share: of the plain peak.
      status: "done", "infeasible" or "failed".
      predicted, measured: peak.
      overhead_predicted, overhead_measured: fractions; overhead_fastest: of the
        fastest step of each kind, which other work has slowed least.
      lowering: seconds of the step lowered without recomputation / plain, the
        median over processes; lowering_spread: largest less smallest;
        lowering_fastest: of the fastest step of each kind.
      differing: arrays that differ in any bit from the plain step's, in the
        exact setting, of all those compared.
      exact_budget: bytes it was compared within (the least feasible ones, if
        the budget is not feasible in that setting);
      exact_recomputations: runs of the schedule that are not the first of a node.
      difference: largest relative difference of an array as users run;
        loss_difference: the same of losses.
      plain_differing, plain_difference, plain_loss_difference: the same
        between plain steps, run again.
      compile_seconds: from the model to the end of the first step.
      host_peak: real memory of the process, TensorFlow's pool included;
      host_compile: what compiling added to it; host_solver: of the processes
        that it started.
    """

    model: str
    size: str
    budget_text: str
    plain_peak: int | None = None
    plain_spread: int | None = None
    resident_share: float | None = None
    plain_seconds: float | None = None
    budget: int | None = None
    budget_share: float | None = None
    status: str = "failed"
    predicted: int | None = None
    measured: int | None = None
    floor: int | None = None
    least_known: int | None = None
    overhead_predicted: float | None = None
    overhead_measured: float | None = None
    overhead_fastest: float | None = None
    lowering: float | None = None
    lowering_spread: float | None = None
    lowering_fastest: float | None = None
    differing: int | None = None
    plain_differing: int | None = None
    exact_budget: int | None = None
    exact_recomputations: int | None = None
    difference: float | None = None
    plain_difference: float | None = None
    loss_difference: float | None = None
    plain_loss_difference: float | None = None
    compile_seconds: float | None = None
    trace_seconds: float | None = None
    price_seconds: float | None = None
    solve_seconds: float | None = None
    lower_seconds: float | None = None
    check_seconds: float | None = None
    host_peak: int | None = None
    host_compile: int | None = None
    host_solver: int | None = None
    message: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment; 1 if a process broke down, or took more than its budget."""
    parser = command("measured_step", __doc__)
    parser.add_argument(
        "--models",
        nargs="+",
        metavar="NAME",
        choices=CASES,
        default=[*TRAINED, *LARGE],
        help=f"of {', '.join(CASES)} (default: {', '.join([*TRAINED, *LARGE])})",
    )
    parser.add_argument(
        "--budgets",
        nargs="+",
        metavar="SHARE",
        default=_BUDGETS,
        help='shares of the plain peak in (0, 1], or "least" (default: %(default)s); '
        f"for {' and '.join(LARGE)} always {_LARGE_BUDGET}, and only compiled and trained",
    )
    parser.add_argument("--steps", type=positive_int, default=3, help="Adam steps (default: 3)")
    parser.add_argument(
        "--repeats",
        type=positive_int,
        default=3,
        help="processes for the plain peak, and for what lowering alone costs (default: 3)",
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=Task.seconds,
        help="of steps that are timed, once there are enough (default: %(default)g)",
    )
    parser.add_argument("--exact", action="store_true", help="compare bit for bit as well")
    asked = parser.parse_args(arguments)
    for budget in asked.budgets:
        if budget != "least" and not _is_share(budget):
            parser.error(f'--budgets: {budget!r} is neither in (0, 1] nor "least"')

    begin(asked.out)
    runner = Runner(asked.out, "experiments.child", _TIMEOUT)
    rows: list[Row] = []
    for model in asked.models:
        print(f"\n{model} ({CASES[model].size})")
        for budget in [_LARGE_BUDGET] if model in LARGE else asked.budgets:
            rows.append(_row(runner, asked, model, budget))
            _save(rows, asked.out / "table.csv")
    print("\n" + table(rows))
    print("\n" + targets(rows))
    print(f"\nsaved: {asked.out / 'table.csv'}; each result: {asked.out / 'results'}")
    return 1 if any(row.status == "failed" or _over(row) for row in rows) else 0


def _is_share(text: str) -> bool:
    try:
        return 0 < float(text) <= 1
    except ValueError:
        return False


def _row(runner: Runner, asked: argparse.Namespace, model: str, budget_text: str) -> Row:
    """Everything about one network within one budget."""
    values: dict[str, Any] = {
        "model": model,
        "size": CASES[model].size,
        "budget_text": budget_text,
    }
    whole = Task("plain", model, steps=asked.steps)
    plain = [runner.result(replace(whole, repeat=number)) for number in range(asked.repeats)]
    broken = [result for result in plain if result["status"] != "done"]
    if broken:
        return Row(**values, message=f"plain step: {broken[0]['message']}")
    peak = int(statistics.median(result["peak"] for result in plain))
    values |= {
        "plain_peak": peak,
        "plain_spread": max(r["peak"] for r in plain) - min(r["peak"] for r in plain),
        "resident_share": plain[0]["resident"] / peak,
    }
    if budget_text == "least":
        hopeless = runner.result(Task("floor", model))
        if hopeless["status"] != "infeasible":
            return Row(**values, message=f"least budget: {hopeless['message']}")
        # Whole MiB, and not less.
        least = runner.budgeted(whole, hopeless["least_budget"] + _MIB - 1)
        task, found = runner.within(least, peak)
    else:
        task = runner.budgeted(whole, float(budget_text) * peak)
        found = runner.result(task)
    assert task.budget is not None
    values |= {"budget": task.budget, "budget_share": task.budget / peak}
    values["status"] = found["status"]
    if found["status"] != "done":
        values |= {"message": found["message"], "floor": found.get("floor")}
        return Row(**values, least_known=found.get("least_budget"))
    stages = {f"{stage}_seconds": value for stage, value in found["stage_seconds"].items()}
    values |= {
        **{key: value for key, value in stages.items() if key in Row.__dataclass_fields__},
        "predicted": found["predicted"],
        "measured": found["peak"],
        "overhead_predicted": found["overhead"],
        "compile_seconds": found["compile_seconds"],
        "host_peak": found["host_peak"],
        "host_compile": found["host_after_compile"] - found["host_before"],
        "host_solver": found["solver_host_peak"],
        "message": "; ".join(found["warnings"]),
    }
    if model in LARGE:
        return Row(**values)
    return Row(**_behaviour(runner, asked, task, 2 * peak, values))


def _behaviour(
    runner: Runner, asked: argparse.Namespace, task: Task, ample: int, values: dict[str, Any]
) -> dict[str, Any]:
    """Adds time and results, both against the plain step's.

    Args:
      task: that made the plan.
      ample: bytes in which the plain step fits as well.
      values: of the row.
    """
    problems = [values["message"]] if values["message"] else []

    def use(what: str, result: Mapping[str, Any], found: Mapping[str, str]) -> None:
        if result["status"] != "done":
            problems.append(f"{what}: {result['message']}")
            values["status"] = "failed"
            return
        for name, path in found.items():
            value: Any = result
            for key in path.split("."):
                value = value[key]
            values[name] = value

    free = replace(task, budget=ample, limit_mib=None)
    unplanned = replace(free, kind="timed", plan=None, seconds=asked.seconds)
    lowerings = [
        runner.result(replace(unplanned, repeat=number)) for number in range(asked.repeats)
    ]
    for lowering in lowerings:
        use("lowered without recomputation", lowering, {})
    if all(lowering["status"] == "done" for lowering in lowerings):
        ratios = [lowering["ratio"] for lowering in lowerings]
        values["lowering"] = statistics.median(ratios)
        values["lowering_spread"] = max(ratios) - min(ratios)
        values["lowering_fastest"] = _fastest(*lowerings)
    timed = by_turns(runner.result, replace(task, seconds=asked.seconds))
    use("timed", timed, {"overhead_measured": "ratio"})
    if timed["status"] == "done":
        values["overhead_measured"] -= 1
        values["overhead_fastest"] = _fastest(timed) - 1
        values["plain_seconds"] = statistics.median(timed["plain_seconds"])
    use(
        "compared as users run",
        runner.result(replace(free, kind="compared")),
        {
            "difference": "remat.largest",
            "plain_difference": "plain.largest",
            "loss_difference": "remat.loss",
            "plain_loss_difference": "plain.loss",
        },
    )
    if asked.exact:
        use(
            "compared bit for bit",
            runner.result(replace(task, kind="compared", limit_mib=None, plan=None, exact=True)),
            {
                "differing": "remat.differing",
                "plain_differing": "plain.differing",
                "exact_budget": "budget",
                "exact_recomputations": "recomputations",
            },
        )
        if values.get("exact_recomputations") == 0:
            problems.append(
                f"compared bit for bit: within {values['exact_budget'] / _MIB:.0f} MiB, where "
                "nothing is recomputed"
            )
    return {**values, "message": "; ".join(problems)}


def _fastest(*timed: Mapping[str, Any]) -> float:
    """Seconds of the fastest lowered step / those of the fastest plain one."""
    lowered, plain = (
        min(min(result[f"{kind}_seconds"]) for result in timed) for kind in ("lowered", "plain")
    )
    return lowered / plain


def table(rows: Iterable[Row]) -> str:
    """The rows for people."""
    head = (
        f"{'':13}{'budget':>13}{'peak, MiB':>19}{'':>9}{'overhead, %':>25}"
        f"{'lowered':>9}{'differing':>11}{'relative (plain)':>19}{'compile':>9}{'host':>7}\n"
        f"{'':13}{'MiB':>7}{'%':>6}{'predicted':>10}{'measured':>9}{'error %':>9}"
        f"{'predicted':>10}{'median':>7}{'fastest':>8}{'/ plain':>9}"
        f"{'exact':>11}{'as run':>19}{'s':>9}{'MiB':>7}"
    )
    lines = [head]
    last = ""
    for row in rows:
        if row.model != last and row.plain_peak is not None:
            lines.append(
                f"{row.model} ({row.size}): plain peak {row.plain_peak / _MIB:.0f} MiB "
                f"(spread {(row.plain_spread or 0) / _MIB:.0f}), "
                f"resident {100 * (row.resident_share or 0):.0f} %"
            )
        last = row.model
        error = None
        if row.predicted is not None and row.measured is not None:
            error = 100 * (row.predicted / row.measured - 1)
        line = (
            f"{row.budget_text:>13}{given(row.budget, '7.0f', _MIB)}"
            f"{given(row.budget_share, '6.1f', 0.01)}"
            f"{given(row.predicted, '10.0f', _MIB)}{given(row.measured, '9.0f', _MIB)}"
            f"{given(error, '+9.1f')}{given(row.overhead_predicted, '10.1f', 0.01)}"
            f"{given(row.overhead_measured, '7.1f', 0.01)}"
            f"{given(row.overhead_fastest, '8.1f', 0.01)}{given(row.lowering, '9.3f')}"
            f"{given(row.differing, '11.0f')}{given(row.difference, '10.0e')}"
            f"{given(row.plain_difference, '9.0e')}"
            f"{given(row.compile_seconds, '9.0f')}{given(row.host_peak, '7.0f', _MIB)}"
        )
        verdict = "over budget" if _over(row) else "" if row.status == "done" else row.status
        lines.append(f"{line}  {verdict}".rstrip())
        if row.message:
            lines.append(f"{'':15}{row.message}")
    return "\n".join(lines)


def _over(row: Row) -> bool:
    return row.measured is not None and row.budget is not None and row.measured > row.budget


def targets(rows: Sequence[Row]) -> str:
    """What was aimed at, and what came of it."""
    trained = [row for row in rows if row.status == "done"]
    within = sum(not _over(row) for row in trained)
    infeasible = [row for row in rows if row.status == "infeasible"]
    proven = sum(row.floor is not None and row.floor > (row.budget or 0) for row in infeasible)
    failed = sum(row.status == "failed" for row in rows)
    lines = [
        f"within the budget: {within} of {len(trained)}; infeasible: {len(infeasible)}, "
        f"{proven} of them proven; broken down: {failed}"
    ]
    errors = [
        abs(row.predicted / row.measured - 1) for row in trained if row.predicted and row.measured
    ]
    lines += _verdict("error of the predicted peak", max, errors, _PREDICTION_TARGET, "largest")
    for text, target in _OVERHEAD_TARGETS.items():
        own = [row for row in trained if row.budget_text == text]
        measured = [r.overhead_measured for r in own if r.overhead_measured is not None]
        lines += _verdict(f"overhead at {text}", statistics.median, measured, target, "median")
        fastest = [r.overhead_fastest for r in own if r.overhead_fastest is not None]
        if fastest:
            lines.append(f"  of the fastest steps: median is {statistics.median(fastest):.4g}")
    ratios = {row.model: row.lowering for row in trained if row.lowering is not None}
    lines += _verdict("lowered / plain", max, list(ratios.values()), _LOWERING_TARGET, "largest")
    for text, name in (
        ("of the fastest steps: largest is", "lowering_fastest"),
        ("between processes of one network: spread at most", "lowering_spread"),
    ):
        found = [value for row in trained if (value := getattr(row, name)) is not None]
        if found:
            lines.append(f"  {text} {max(found):.4g}")
    differing = [float(row.differing) for row in trained if row.differing is not None]
    lines += _verdict("arrays that differ, exact setting", max, differing, 0, "largest")
    for what in ("loss_difference", "difference"):
        differences, plain = (
            [value for row in trained if (value := getattr(row, name)) is not None]
            for name in (what, f"plain_{what}")
        )
        text = f"relative {what.replace('_', ' ')} as users run"
        lines += _verdict(text, max, differences, _DIFFERENCE_TARGET, "largest")
        if plain:
            lines.append(f"  between plain steps, run again: largest is {max(plain):.4g}")
    for models, name in ((TRAINED, "compile, s"), (LARGE, f"compile {', '.join(LARGE)}, s")):
        seconds = [r.compile_seconds for r in trained if r.model in models and r.compile_seconds]
        lines += _verdict(name, max, seconds, _COMPILE_TARGETS[models[0]], "largest")
    return "\n".join(lines)


def _verdict(
    what: str, figure: Any, values: Sequence[float], target: float, name: str
) -> list[str]:
    if not values:
        return []
    reached = figure(values)
    verdict = "met" if reached <= target else "MISSED"
    return [f"{what}: {name} of {len(values)} is {reached:.4g}, target {target:g}: {verdict}"]


def _save(rows: Sequence[Row], path: Path) -> None:
    write_csv([{**asdict(row), **machine()} for row in rows], path)


if __name__ == "__main__":
    raise SystemExit(ended(main))
