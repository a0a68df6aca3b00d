"""``remat solve`` and ``remat show``.  Neither imports TensorFlow."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .solvers import Graph, Plan, Result

_SOLVE = """\
Find a cheap schedule for a graph within a budget of memory.

GRAPH.json is a remat-graph/1 file (nodes with cost and bytes, edges).  The
schedule runs every node at least once, and runs some again rather than hold
their values.  Progress shows the overhead (extra cost in percent of running
every node once), the gap to the proven lower bound in percentage points, and
the seconds taken.  The plan is written whenever a better one is found, so a
job that is stopped loses nothing; Ctrl-C and SIGTERM end it in good order.
"""

_SOLVE_EXAMPLES = """\
examples:
  remat solve resnet50.json --budget 50% -o resnet50.plan.json
  remat solve resnet50.json --budget 11GiB --time-limit 600 -o resnet50.plan.json
  remat solve resnet50.json --budget 11GiB --warm-start resnet50.plan.json -o better.json
  remat solve resnet50.json --budget 100% --minimize peak --max-overhead 30

exit status: 0 done, 2 bad input, 3 no schedule within the budget (the message
names the least budget known to work and the proven floor), 130 interrupted.
"""

_SHOW = """\
Show a plan: its figures and, given its graph, what is computed again and the
memory over time.  With the graph, the plan is checked: the schedule is run on
paper, and the figures in the file must be what it takes.

--measured shows what a step took beside what was predicted, from a file that
step.measure().save(FILE) wrote; it needs no plan.
"""


def register(commands: Any) -> None:
    """Adds the parsers of this module's commands."""
    from .solvers.solving import METHODS

    raw = argparse.RawDescriptionHelpFormatter
    solve = commands.add_parser(
        "solve",
        help="find a schedule within a budget",
        description=_SOLVE,
        epilog=_SOLVE_EXAMPLES,
        formatter_class=raw,
    )
    solve.add_argument("graph", metavar="GRAPH.json", help="the graph, a remat-graph/1 file")
    solve.add_argument(
        "--budget",
        required=True,
        help="bytes that the peak may reach, resident bytes included: 4294967296, 4GiB, 900MB, "
        "or 50%% of the peak of the graph's own order",
    )
    solve.add_argument(
        "--solver", default="auto", choices=METHODS, metavar="NAME", help=", ".join(METHODS)
    )
    solve.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="stop after this long (default: 2 to 30, by the size of the graph)",
    )
    solve.add_argument("--seed", type=int, default=0, help="of every random choice (default 0)")
    solve.add_argument("--workers", type=int, help="processors to use (default: all)")
    solve.add_argument(
        "--max-overhead", type=float, metavar="PERCENT", help="largest overhead allowed"
    )
    solve.add_argument(
        "--minimize",
        choices=("cost", "peak"),
        default="cost",
        help="the cost within the budget (default), or the peak within --max-overhead",
    )
    solve.add_argument("--warm-start", metavar="PLAN.json", help="a plan to improve on")
    solve.add_argument(
        "--log",
        choices=("text", "json"),
        default="text",
        help=("json: one line a second on standard output instead of text"),
    )
    solve.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the solver, described in its module: moves=100000 (anneal), "
        "mode=speed (openai), backend=highs (checkmate); may be repeated",
    )
    solve.add_argument("-o", "--output", metavar="PLAN.json", help="where to write the plan")
    solve.set_defaults(run=_solve)

    show = commands.add_parser(
        "show", help="look at a plan", description=_SHOW, formatter_class=raw
    )
    show.add_argument("plan", metavar="PLAN.json", nargs="?", help="a remat-plan/1 file")
    show.add_argument("graph", metavar="GRAPH.json", nargs="?", help="the graph it was made for")
    show.add_argument(
        "--plot",
        metavar="FILE.png",
        help="draw memory over time, the budget and the recomputations (needs GRAPH.json, "
        "or --measured)",
    )
    show.add_argument("--measured", metavar="FILE.json", help="a remat-measured/1 file")
    show.set_defaults(run=_show)


def _solve(arguments: argparse.Namespace) -> int:
    from .cli import DONE, INFEASIBLE, INTERRUPTED
    from .solvers import (
        InfeasibleBudgetError,
        Plan,
        PlanError,
        ScheduleError,
        Status,
        load_graph,
        simulate,
        solve,
    )
    from .solvers.budget import parse_budget
    from .solvers.files import check_writable, is_replaced, is_standard_output

    graph = load_graph(arguments.graph)
    if arguments.output is not None:
        if os.path.realpath(arguments.output) == os.path.realpath(arguments.graph):
            raise ValueError(f"-o {arguments.output} is the graph, which a plan would replace")
        check_writable(arguments.output)
    start, bound = None, 0.0
    if arguments.warm_start is not None:
        # Costs and resident bytes may have been measured anew since.
        plan = Plan.load(arguments.warm_start)
        if plan.graph != graph.fingerprint:
            raise PlanError(f"{arguments.warm_start}: the plan was made for another graph")
        start = plan.schedule
        plain_peak = simulate(graph, range(len(graph))).peak
        bound = plan.bound_for(graph, parse_budget(arguments.budget, plain_peak))
        try:
            simulate(graph, start)
        except ScheduleError as error:
            raise PlanError(f"{arguments.warm_start}: steps: {error}") from None
    # What is not replaced (a pipe, /dev/stdout) gets the last plan only.
    replaced = arguments.output is not None and is_replaced(arguments.output)
    saves = arguments.output if replaced else None
    report = _Report(graph, saves, arguments.log == "json")
    settings: dict[str, Any] = {
        "solver": arguments.solver,
        "time_limit": arguments.time_limit,
        "max_overhead": None if arguments.max_overhead is None else arguments.max_overhead / 100,
        "minimize": arguments.minimize,
        "seed": arguments.seed,
        "workers": arguments.workers,
        "start": start,
        "lower_bound": bound,
        "progress": report,
    }
    options = dict(map(_option, arguments.option))
    for name in options.keys() & {"graph", "budget", "max_gap", *settings}:
        raise ValueError(f"--option {name}=... is not a setting of the solver alone")
    result = solve(graph, arguments.budget, **settings, **options)
    report.finish(result)
    try:
        plan = result.to_plan(graph)
    except InfeasibleBudgetError as error:
        interrupted = result.status is Status.INTERRUPTED
        print(f"remat: {error}", file=sys.stderr)
        if not error.proven:
            print(f"  {result.message}", file=sys.stderr)
        return INTERRUPTED if interrupted else INFEASIBLE
    if arguments.output is not None:
        plan.save(arguments.output)
    if arguments.log == "text":
        # What reads the plan from standard output is to get nothing else.
        apart = arguments.output is not None and is_standard_output(arguments.output)
        print(plan.summary(), file=sys.stderr if apart else sys.stdout)
    return INTERRUPTED if result.status is Status.INTERRUPTED else DONE


def _option(written: str) -> tuple[str, Any]:
    """``name=value`` as a pair; the value is JSON (a number, a list) or else text."""
    name, equals, value = written.partition("=")
    if not name.isidentifier() or not equals:
        raise ValueError(f"--option is NAME=VALUE, not {written!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


class _Report:
    """Shows progress, and writes each better plan."""

    def __init__(self, graph: Graph, output: str | None, as_json: bool) -> None:
        self.graph = graph
        self.output = output
        self.as_json = as_json
        self.live = sys.stderr is not None and sys.stderr.isatty() and not as_json
        self.shown = float("-inf")
        self.saved: tuple[int, ...] | None = None

    def __call__(self, result: Result) -> None:
        if self.output is not None and result.schedule not in (None, self.saved):
            result.to_plan(self.graph).save(self.output)
            self.saved = result.schedule
        if time.monotonic() - self.shown < (1.0 if self.as_json else 0.1):
            return
        self.shown = time.monotonic()
        self._show(result)

    def finish(self, result: Result) -> None:
        """The last line."""
        if self.live:
            print("\r\033[K", end="", file=sys.stderr)
        if self.as_json:
            self._show(result)

    def _show(self, result: Result) -> None:
        if self.as_json:
            line = {
                "seconds": round(result.seconds, 3),
                "status": str(result.status),
                "overhead": result.overhead,
                "gap": result.gap,
                "cost": result.cost,
                "lower_bound": result.lower_bound,
                "peak": result.peak,
                "budget": result.budget,
                "least_budget": result.least_budget,
                "floor": result.floor,
                "message": result.message,
            }
            print(json.dumps(line), flush=True)
        elif self.live:
            figures = "no schedule within the budget yet"
            if result.overhead is not None and result.gap is not None:
                figures = f"overhead {100 * result.overhead:.3f} %, gap {100 * result.gap:.3f}"
            print(f"\r\033[K{result.seconds:6.1f} s  {figures}", end="", file=sys.stderr)


def _show(arguments: argparse.Namespace) -> int:
    from .cli import DONE
    from .solvers import Plan, load_graph

    if arguments.measured is not None:
        if arguments.plan is not None:
            raise ValueError("--measured stands alone: remat show --measured FILE.json")
        return _show_measured(arguments)
    if arguments.plan is None:
        raise ValueError("nothing to show: remat show PLAN.json, or --measured FILE.json")
    graph = None if arguments.graph is None else load_graph(arguments.graph)
    plan = Plan.load(arguments.plan, graph)
    print(plan.summary())
    if graph is not None:
        print(_recomputations(plan, graph))
    if arguments.plot is not None:
        if graph is None:
            raise ValueError("--plot needs the graph: remat show PLAN.json GRAPH.json --plot FILE")
        from .plots import plot_plan

        plot_plan(plan, graph, arguments.plot)
    return DONE


def _show_measured(arguments: argparse.Namespace) -> int:
    from .cli import DONE
    from .measured import Measured

    measured = Measured.load(arguments.measured)
    print(measured.summary())
    if arguments.plot is not None:
        measured.plot(arguments.plot)
    return DONE


def _recomputations(plan: Plan, graph: Graph) -> str:
    """The nodes that the extra cost goes to, dearest first."""
    again = {index: runs - 1 for index, runs in Counter(plan.schedule).items() if runs > 1}
    if not again:
        return "  nothing is computed again"
    dearest = sorted(again, key=lambda index: -again[index] * graph.nodes[index].cost)
    lines = [f"  computed again: {len(again)} of {len(graph)} nodes; the dearest are"]
    for index in dearest[:10]:
        node = graph.nodes[index]
        share = 100 * again[index] * node.cost / graph.cost if graph.cost > 0 else 0.0
        lines.append(f"    {share:7.3f} %  {again[index]} x  {node.name}")
    return "\n".join(lines)
