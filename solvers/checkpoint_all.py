"""No recomputation: every value is kept until its last use.

What frameworks do, and what every other method is measured against: in the
given order, and in the order of low peak that ``memory_order`` finds.

Complexity: that of ``memory_order``.
"""

from __future__ import annotations

from collections.abc import Iterator

from .best import best_schedule, check_options
from .method import Monitor, Outcome, Problem
from .order import memory_order
from .schedule import Schedule


def checkpoint_all(problem: Problem, monitor: Monitor) -> Outcome:
    """The given order, or ``memory_order`` if that fits where this does not.  No options."""
    check_options(problem)

    def schedules() -> Iterator[Schedule]:
        yield tuple(range(len(problem.graph)))
        yield memory_order(problem.graph, monitor.check)

    return best_schedule(problem, monitor, schedules())
