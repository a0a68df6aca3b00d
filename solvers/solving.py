"""The one door to every method.

``solve`` checks the input, proves budgets infeasible where one node's run
shows it, runs a method, judges every schedule the method proposes with the
simulator, and keeps the best.  Methods only propose.
"""

from __future__ import annotations

import importlib
import math
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral, Real
from typing import Any, Literal

from .budget import format_bytes, parse_budget
from .graph import Graph
from .method import ROUNDING, Method, Monitor, Outcome, Problem
from .result import Result, Status
from .schedule import Schedule, simulate
from .tidy import in_given_order

METHODS = {
    "auto": "auto:auto",
    "anneal": "anneal:anneal",
    "moments": "moments:moments",
    "gap_cover": "gap_cover:gap_cover",
    "checkmate": "checkmate:checkmate",
    "checkpoint_all": "checkpoint_all:checkpoint_all",
    "chen_sqrt": "chen:chen_sqrt",
    "chen_greedy": "chen:chen_greedy",
    "griewank": "griewank:griewank",
    "openai": "openai_modes:openai",
    "feng_huang": "feng_huang:feng_huang",
    "lp_rounding": "lp_rounding:lp_rounding",
    "moccasin": "moccasin:moccasin",
}
"""Where each method is: "module:function" in this package, imported when used."""

OPTIMAL_GAP = 1e-9
"""A gap (fraction of the graph's cost) at which a schedule counts as optimal."""

CLOSE_GAP = 1e-4
"""A gap, as a fraction of the overhead, at which a solve ends: more time is not worth it."""

_LONG = 6.5  # seconds that a solve of any graph may take by default, if a proof may be in reach
_LONGEST = 30.0  # the same where it would otherwise end with a wide gap
_WIDE = 0.005  # from here on a gap (as a fraction) is
_TICK = 0.05  # seconds between looks at the method
_PEAK_SHARE = 0.8  # of the time, for the peak where that is minimized; the rest is for its cost
_LOADING = 1.0  # seconds that annealing may take to load


def check_method(name: str | Method) -> None:
    """Raises ``ValueError`` if there is no method of a name, ``TypeError`` if it is none."""
    if not isinstance(name, str):
        if not callable(name):
            raise TypeError(f"solver is {name!r}; it is a name, or a method of your own")
    elif name not in METHODS:
        raise ValueError(f"there is no solver {name!r}; choose one of {', '.join(METHODS)}")


def load_method(name: str | Method) -> Method:
    """The method of a name; a method of the user's own is returned as it is.

    Raises:
      ValueError, TypeError: if there is none of that name, or it is none.
    """
    check_method(name)
    if not isinstance(name, str):
        return name
    module, function = METHODS[name].split(":")
    return getattr(importlib.import_module(f".{module}", __package__), function)


def default_time_limit(graph: Graph) -> float:
    """Seconds that ``solve`` takes if not told: 2 to 7 for up to 350 nodes, at most 30.

    ``auto`` takes up to 6.5 for smaller graphs, too, if a proof may be in reach, and up
    to 30 if without it the gap would be above half a point, but below two.
    """
    share = len(graph) / 50
    return min(30.0, max(share, min(2.2 + share, _LONG)))


def solve(
    graph: Graph,
    budget: int | float | str,
    *,
    solver: str | Method = "auto",
    time_limit: float | None = None,
    max_overhead: float | None = None,
    max_gap: float = 0.0,
    minimize: Literal["cost", "peak"] = "cost",
    seed: int = 0,
    workers: int | None = None,
    start: Sequence[int] | None = None,
    lower_bound: float = 0.0,
    progress: Callable[[Result], None] | None = None,
    **options: Any,
) -> Result:
    """Finds a schedule for a graph within a budget.

    Args:
      graph: the graph.
      budget: bytes that the peak may reach, a fraction in (0, 1] of the peak
        of the given order, or text such as "4GiB" or "50%".
      solver: a name in ``METHODS``, or a method of your own (see ``method``).
      time_limit: seconds, kept within 10 %; None for ``default_time_limit``, or for
        none where there is a move limit.
        The first solve after an install compiles for some ten seconds (see
        ``compiling``): this extends the default, and a limit only while no
        schedule within the budget is known.
      max_overhead: largest allowed overhead as a fraction (0.3 is 30 %).
      max_gap: a gap (difference of overhead and proven bound, as a fraction) that
        is small enough to end with.
      minimize: "cost" for the cheapest schedule within the budget; "peak" for
        the one with the least peak within ``budget`` and ``max_overhead``, and of these
        for the cheapest: a fifth of the time is for that, and what is left.
      seed: of every random choice.  The same seed and move limit (an option
        of ``anneal``) give the same result; a time limit alone does not.
      workers: processors to use; None for all that this process may use.
      start: a schedule to improve on; it need not be within the budget.
      lower_bound: seconds that every schedule within ``budget`` is known to take, as
        proven before (``Plan.bound_for``).
      progress: called with the best so far whenever it or the bound improves
        (and at least once a second), and with the result, from the thread that
        called ``solve``.
      **options: settings of the method; see its module.

    Returns:
      A result whose schedule, if any, the simulator found legal and within
      ``budget`` and ``max_overhead``.  On Ctrl-C or SIGTERM (in the main
      thread) it is the best so far, with status ``interrupted``; a second
      signal acts as usual.

    Raises:
      ValueError: if an argument is not valid, or the solver does not know an
        option or cannot minimize the peak.
      ScheduleError: if ``start`` is not a legal schedule of the graph.

    Example:
      >>> from remat.solvers import Graph, Node, solve
      >>> nodes = tuple(Node(str(i), 1.0, size) for i, size in enumerate((1, 2, 2, 1)))
      >>> chain = Graph("chain", nodes, ((0, 1), (1, 2), (2, 3), (0, 3)))
      >>> solve(chain, 4, solver="anneal").schedule
      (0, 1, 2, 0, 3)
    """
    method = load_method(solver)
    limited = time_limit is not None
    patience: Sequence[tuple[float, float]] = ()
    if time_limit is None and "moves" not in options:
        time_limit = default_time_limit(graph)
        longer = max(time_limit, _LONG)
        patience = ((longer - time_limit, 0.0), (max(0.0, _LONGEST - longer), _WIDE))
    for name, value in (("seed", seed), ("workers", workers)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise ValueError(f"{name} is {value!r}; it must be a whole number")
    numbers = (
        ("time_limit", time_limit),
        ("max_overhead", max_overhead),
        ("max_gap", max_gap),
        ("lower_bound", lower_bound),
    )
    for name, number in numbers:
        if number is not None and (isinstance(number, bool) or not isinstance(number, Real)):
            raise ValueError(f"{name} is {number!r}; it must be a number or None")
    if time_limit is not None and not 0 < time_limit < math.inf:
        raise ValueError(f"time_limit is {time_limit} seconds; it must be above 0 and finite")
    if max_overhead is not None and not max_overhead >= 0:
        raise ValueError(f"max_overhead is {max_overhead}; it must be a fraction >= 0 or None")
    if lower_bound is None or not 0 <= lower_bound < math.inf:
        raise ValueError(f"lower_bound is {lower_bound}; it must be seconds >= 0 and finite")
    if max_gap is None or not max_gap >= 0:
        raise ValueError(f"max_gap is {max_gap}; it must be a fraction >= 0")
    if minimize not in ("cost", "peak"):
        raise ValueError(f'minimize is {minimize!r}; it must be "cost" or "peak"')
    if workers is None:
        workers = available_processors()
    if workers < 1:
        raise ValueError(f"workers is {workers}; it must be 1 or more")
    if seed < 0:
        raise ValueError(f"seed is {seed}; it must be 0 or more")
    if start is not None and (isinstance(start, str) or not isinstance(start, Iterable)):
        raise ValueError(f"start is {start!r}; it must be a schedule: indices of nodes")
    start = None if start is None else tuple(start)
    for index in start or ():
        if isinstance(index, bool) or not isinstance(index, Integral):
            raise ValueError(f"start has {index!r}, which is no index of a node")
    judge = _Judge(_name(solver))
    monitor = Monitor(
        time_limit,
        judge.schedule,
        judge.bound,
        may_extend=lambda: judge.may_extend(limited),
        patience=patience,
        max_gap=max_gap,
    )
    given = tuple(range(len(graph)))
    problem = Problem(
        graph=graph,
        budget=parse_budget(budget, simulate(graph, given).peak),
        minimize=minimize,
        max_overhead=max_overhead,
        seed=seed,
        workers=workers,
        start=start,
        options=options,
    )
    judge.open(problem, monitor)
    monitor.bounded(lower_bound)
    judge.schedule(given)
    if problem.start is not None:
        judge.schedule(problem.start)
    if problem.budget < judge.floor:
        method(problem, monitor.part(0.0))  # there is no time: it only checks its options
        method = _least_peak
    # With a move limit there is one search, which ranks schedules of one peak by their cost.
    if minimize == "peak" and problem.budget >= judge.floor and "moves" not in options:
        method = _peak_then_cost(judge, method)
    with ThreadPoolExecutor(1, "remat-solve") as pool, _stop_on_signals(monitor) as stopped:
        job = pool.submit(method, problem, monitor)
        reported, second = -1, 0
        try:
            while not wait([job], _TICK).done:
                judge.look()
                changed, now = judge.changes, int(monitor.elapsed())
                if progress is not None and (changed != reported or now != second):
                    reported, second = changed, now
                    progress(judge.result(None, False))
        finally:  # an error in ``progress`` must not wait for the method
            monitor.stop()
        result = judge.result(job.result(), stopped())
    if result.schedule is not None:
        schedule = in_given_order(graph, result.schedule)
        peak = simulate(graph, schedule).peak
        least = min(peak, result.least_budget)
        result = replace(result, schedule=schedule, peak=peak, least_budget=least)
    if progress is not None:
        progress(result)
    return result


def frontier(
    graph: Graph,
    budgets: Iterable[int | float | str],
    **arguments: Any,
) -> tuple[Result, ...]:
    """The trade-off between budget and cost.

    Budgets are solved from the largest to the smallest; each starts from the
    schedule before it, and a cheaper schedule found for a smaller budget
    replaces a dearer one for a larger (it fits there too), as a bound proven
    for a larger budget holds for every smaller one.

    Args:
      graph: the graph.
      budgets: as ``solve`` takes them.
      **arguments: as ``solve`` takes them; ``time_limit`` is for each budget.

    Returns:
      One result for each budget, in the order of ``budgets``; after Ctrl-C or SIGTERM
      for those that were solved by then, and the one that was interrupted.
    """
    plain_peak = simulate(graph, range(len(graph))).peak
    wanted = [parse_budget(budget, plain_peak) for budget in budgets]
    start = arguments.pop("start", None)
    by_cost = arguments.get("minimize", "cost") == "cost"
    results: dict[int, Result] = {}
    bound = graph.cost
    for budget in sorted(set(wanted), reverse=True):
        result = solve(graph, budget, start=start, **arguments)
        bound = max(bound, result.lower_bound) if by_cost else result.lower_bound
        results[budget] = _with_bound(graph, result, bound, by_cost)
        start = result.schedule or start
        if result.stopped:
            break

    def figure(result: Result) -> float:
        found = result.cost if by_cost else result.peak
        return math.inf if found is None else found

    best: Result | None = None
    for budget in sorted(results):
        result = results[budget]
        if best is not None and figure(best) < figure(result):
            result = replace(
                result,
                status=Status.FEASIBLE if result.schedule is None else result.status,
                schedule=best.schedule,
                cost=best.cost,
                peak=best.peak,
                overhead=best.overhead,
                least_budget=min(best.least_budget, result.least_budget),
                message=f"the schedule for a budget of {format_bytes(best.budget)} is "
                f"{'cheaper' if by_cost else 'leaner'}",
            )
            results[budget] = _with_bound(graph, result, result.lower_bound, by_cost)
        if results[budget].schedule is not None:
            best = results[budget]
    return tuple(results[budget] for budget in wanted if budget in results)


def _name(solver: str | Method) -> str:
    if isinstance(solver, str):
        return solver
    return str(getattr(solver, "__name__", type(solver).__name__))  # a partial has none


def overhead(graph: Graph, cost: float) -> float:
    """``cost`` / cost of running every node once, minus 1 (0 if all is free)."""
    return cost / graph.cost - 1 if graph.cost > 0 else 0.0


def available_processors() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Judge:
    """Simulates every proposed schedule and keeps the best; thread-safe."""

    problem: Problem
    monitor: Monitor

    def __init__(self, solver: str) -> None:
        self.solver = solver
        self.changes = 0
        self._lock = threading.Lock()
        self._best: Schedule | None = None
        self._cost = math.inf
        self._peak: int | float = math.inf
        self._least_peak: int | float = math.inf
        self._bound = 0.0
        self._impossible = False
        self._settled = False  # whether the peak was minimized: now only the cost is too high

    def open(self, problem: Problem, monitor: Monitor) -> None:
        """Starts judging."""
        self.problem, self.monitor = problem, monitor
        allowed = problem.max_overhead
        self._most_overhead = math.inf if allowed is None else allowed + ROUNDING
        self.floor, self.floor_nodes = problem.floor
        # Every node runs at least once, whatever the budget.
        self._bound = problem.graph.cost

    def schedule(self, schedule: Schedule) -> None:
        """Receives a proposed schedule."""
        schedule = tuple(map(int, schedule))
        if schedule == self._best:  # told again
            return
        truth = simulate(self.problem.graph, schedule)
        within = truth.peak <= self.problem.budget
        if overhead(self.problem.graph, truth.cost) > self._most_overhead:
            return
        with self._lock:
            self._least_peak = min(self._least_peak, truth.peak)
            rank = self.problem.rank
            # Of equals always the same one, whichever worker was first.
            new = (*rank(truth.cost, truth.peak), schedule)
            if within and new < (*rank(self._cost, self._peak), self._best or ()):
                self._best, self._cost, self._peak = schedule, truth.cost, truth.peak
                self.changes += 1
            self._stop_if_done()

    def least_peak(self, outcome: Outcome) -> Schedule | None:
        """Receives what minimizing the peak led to; what is proposed next is for its cost.

        Returns:
          The best schedule, if there is one.
        """
        if outcome.schedule is not None:
            self.schedule(outcome.schedule)
        self._settled = True
        return self._best

    def bound(self, lower_bound: float) -> None:
        """Receives a proven lower bound in seconds; inf if no schedule fits the budget."""
        with self._lock:
            if lower_bound == math.inf:
                self._impossible = True
            elif lower_bound > self._bound:
                self._bound = lower_bound
            else:
                return
            self.changes += 1
            self._stop_if_done()

    def look(self) -> None:
        """Ends the solve if its gap is small enough by now."""
        with self._lock:
            self._stop_if_done()

    def may_extend(self, limited: bool) -> bool:
        """Whether the solve may wait for code that is compiled once."""
        return self.problem.budget >= self.floor and not (limited and self._best is not None)

    def _proven(self) -> bool:
        """Whether nothing better than the best schedule exists."""
        if self.problem.budget < self.floor:  # then the least feasible budget is looked for
            return self._least_peak <= self.floor
        if self._best is None:
            return self._impossible or self._too_dear()
        if self.problem.minimize == "peak":
            return self._peak <= self.floor
        return self._cost - self._bound <= OPTIMAL_GAP * self.problem.graph.cost

    def _too_dear(self) -> bool:
        """Whether no schedule within the budget keeps ``max_overhead``."""
        return overhead(self.problem.graph, self._bound) > self._most_overhead + OPTIMAL_GAP

    def _stop_if_done(self) -> None:
        cost = self.problem.graph.cost
        extra = self._bound - cost  # of every schedule
        enough = max(CLOSE_GAP * extra, self.monitor.max_gap() * cost)
        by_cost = self.problem.minimize == "cost" or self._settled
        close = by_cost and self._cost - self._bound <= enough
        if close or (self._proven() and not self._settled):
            self.monitor.finish()

    def result(self, outcome: Outcome | None, interrupted: bool) -> Result:
        """The result: final after an outcome, the best so far without one."""
        graph, budget = self.problem.graph, self.problem.budget
        message = ""
        infeasible = budget < self.floor
        if outcome is not None:
            if outcome.schedule is not None:
                self.schedule(outcome.schedule)
            if outcome.lower_bound is not None:
                self.bound(outcome.lower_bound)
            message = outcome.message
            infeasible = infeasible or outcome.infeasible
        with self._lock:
            infeasible = infeasible or (self._impossible and self._best is None)
            # Rounding in a bound must not put it above a schedule that exists.
            bound = min(self._bound, self._cost)
            gap = (self._cost - bound) / graph.cost if graph.cost > 0 else 0.0
            gap = 0.0 if gap <= OPTIMAL_GAP else gap
            if infeasible:
                status = Status.INFEASIBLE
                names = ", ".join(graph.nodes[index].name for index in self.floor_nodes[:3])
                if budget < self.floor:
                    message = (
                        f"every schedule needs {self.floor:,} bytes for {names}; the least budget "
                        f"known to work is {self._least_peak:,} bytes"
                    )
                elif not message:
                    message = "no schedule fits the budget (proven)"
            elif self._best is None and self._too_dear():
                status = Status.INFEASIBLE
                message = (
                    "every schedule within the budget has an overhead of "
                    f"{100 * overhead(graph, bound):.3f} % or more (proven), above the one allowed"
                )
            elif self._proven():
                status = Status.OPTIMAL
            elif interrupted:
                status = Status.INTERRUPTED
            else:
                status = Status.NOTHING_FOUND if self._best is None else Status.FEASIBLE
            found = self._best is not None
            by_peak = self.problem.minimize == "peak"
            if found and by_peak:
                peak = (
                    "no schedule has a lower peak (proven)"
                    if status is Status.OPTIMAL
                    else f"no lower peak was found; every schedule needs {self.floor:,} bytes"
                )
                message = "; ".join(filter(None, (peak, message)))
            if not found and not message:
                message = (
                    "no schedule within the budget was found; the least peak of those tried"
                    f"{'' if self.problem.max_overhead is None else ' that keep max_overhead'} is "
                    f"{self._least_peak:,} bytes"
                )
            return Result(
                status=status,
                schedule=self._best,
                cost=self._cost if found else None,
                peak=int(self._peak) if found else None,
                overhead=overhead(graph, self._cost) if found else None,
                lower_bound=bound,
                bound_budget=int(self._peak) if found and by_peak else budget,
                gap=gap if found else None,
                budget=budget,
                floor=self.floor,
                floor_nodes=self.floor_nodes,
                least_budget=int(self._least_peak),
                solver=self.solver,
                seconds=self.monitor.elapsed(),
                message=message,
                stopped=interrupted,
            )


def _peak_then_cost(judge: _Judge, method: Method) -> Method:
    """A method that looks for the least peak, then for the least cost within that."""

    def run(problem: Problem, monitor: Monitor) -> Outcome:
        judge.monitor = monitor.part(_PEAK_SHARE * monitor.remaining()).stage()
        outcome = method(problem, judge.monitor)
        leanest = judge.least_peak(outcome)
        judge.monitor = monitor
        if leanest is None or monitor.should_stop():
            return outcome
        peak = simulate(problem.graph, leanest).peak
        return method(replace(problem, minimize="cost", budget=peak, start=leanest), monitor)

    return run


def _least_peak(problem: Problem, monitor: Monitor) -> Outcome:
    """Looks for the least feasible budget."""
    anything = replace(
        problem,
        budget=simulate(problem.graph, range(len(problem.graph))).peak,
        minimize="peak",
        options={},
    )
    # What a number of changes finds does not depend on the clock, this budget included.
    limit: dict[str, Any] = {"moves": problem.options.get("moves")}
    if limit["moves"] is None:
        seconds = min(2.0, 0.02 * len(problem.graph))
        limit, monitor = {"seconds": seconds}, monitor.part(seconds + _LOADING)
    # They propose as they go.
    for method in ("checkpoint_all", "chen_greedy"):
        load_method(method)(anything, monitor)
    load_method("anneal")(replace(anything, options=limit), monitor)
    return Outcome(None, infeasible=True)


def _with_bound(graph: Graph, result: Result, bound: float, by_cost: bool) -> Result:
    """The result with a bound on the cost that was proven elsewhere."""
    if result.cost is None:
        return replace(result, lower_bound=max(bound, result.lower_bound))
    bound = min(max(bound, result.lower_bound), result.cost)
    gap = (result.cost - bound) / graph.cost if graph.cost > 0 else 0.0
    status = Status.OPTIMAL if by_cost and gap <= OPTIMAL_GAP else result.status
    return replace(result, lower_bound=bound, gap=gap, status=status)


@contextmanager
def _stop_on_signals(monitor: Monitor) -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C or SIGTERM into ``monitor.stop()``."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in signals}

    def handle(number: int, frame: Any) -> None:
        received.append(number)
        monitor.stop()
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in signals:
        signal.signal(number, handle)
    try:
        yield lambda: bool(received)
    finally:
        restore()
