"""What methods that look at many schedules share: judging them, and their options."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable

from .method import ROUNDING, Monitor, Outcome, Problem, StoppedError
from .schedule import Schedule, never, simulate

_COST_ONLY = ("checkmate", "lp_rounding", "moments")


class Best:
    """The best of the schedules offered that does what the problem asks.

    Attributes:
      schedule: the cheapest (or the one of least peak) within the budget and
        ``max_overhead``, or None.
      least_peak: of those within ``max_overhead``, in bytes.
      offered: how many schedules there were.
      done: whether none can be cheaper, as nothing is computed again.
    """

    def __init__(self, problem: Problem, monitor: Monitor) -> None:
        self.schedule: Schedule | None = None
        self.least_peak = math.inf
        self.offered = 0
        self.done = False
        self._problem, self._monitor = problem, monitor
        self._key = (math.inf, math.inf)

    def offer(self, schedule: Schedule, check: Callable[[], None] = never) -> None:
        """Judges a schedule, and reports it if it is the best so far.

        Args:
          schedule: the schedule.
          check: called now and then; what it raises ends the judging.
        """
        problem = self._problem
        result = simulate(problem.graph, schedule, check)
        self.offered += 1
        if result.cost > dearest_cost(problem):
            return
        if problem.budget < result.peak < self.least_peak:
            self._monitor.found(schedule)  # the least budget known
        self.least_peak = min(self.least_peak, result.peak)
        key = problem.rank(result.cost, result.peak)
        if result.peak <= problem.budget and key < self._key:
            self.schedule, self._key = schedule, key
            self.done = problem.minimize == "cost" and len(schedule) == len(problem.graph)
            self._monitor.found(schedule)

    def outcome(self) -> Outcome:
        """The outcome; without a schedule it says why not."""
        if self.schedule is not None:
            return Outcome(self.schedule, message=f"best of {self.offered} schedules")
        if not self.offered:
            return Outcome(None, message="it was stopped before it had a schedule")
        if self.least_peak == math.inf:
            return Outcome(None, message=f"none of {self.offered} schedules keeps max_overhead")
        return Outcome(
            None,
            message=f"the least peak of {self.offered} schedules is {self.least_peak} bytes, "
            f"over the budget of {self._problem.budget} bytes",
        )


def best_schedule(
    problem: Problem, monitor: Monitor, schedules: Iterable[Schedule | None]
) -> Outcome:
    """The best of some schedules; None is passed over.

    Judges them one by one until nothing better can come or the monitor says stop
    (what makes them may be ended by its ``check``).
    """
    best = Best(problem, monitor)
    with contextlib.suppress(StoppedError):
        for schedule in schedules:
            if schedule is not None:
                best.offer(schedule, monitor.check)
            if best.done or monitor.should_stop():
                break
    return best.outcome()


def dearest_cost(problem: Problem) -> float:
    """Seconds that ``max_overhead`` allows a schedule to take."""
    if problem.max_overhead is None:
        return math.inf
    return (1 + problem.max_overhead + ROUNDING) * problem.graph.cost


def check_minimizes_cost(problem: Problem, solver: str) -> None:
    """Refuses to minimize the peak, for a solver that cannot.

    Raises:
      ValueError: naming those that cannot either; all others can.
    """
    if problem.minimize != "cost":
        others = " and ".join(name for name in _COST_ONLY if name != solver)
        raise ValueError(
            f"the solver {solver} minimizes the cost only, as do {others}; "
            'choose "auto", or any other, to minimize the peak'
        )


def check_options(problem: Problem, *known: str) -> None:
    """Refuses options that the method does not have.

    Raises:
      ValueError: naming the first of them and those that there are.
    """
    for name in problem.options:
        if name not in known:
            there = f"its options are {', '.join(known)}" if known else "it has none"
            raise ValueError(f"the solver has no option {name!r}; {there}")
