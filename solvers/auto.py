"""The default: a bound, good starts, annealing, and a stop as soon as it is proven.

One worker proves the gap-cover bound (``gap_cover``) and tries the schedule
that it suggests, while the others anneal from the given order.  Then all
anneal: some from that schedule, some from the best so far, in rounds that grow
longer.  ``solve`` stops the method once the best schedule meets the bound.

Options: none.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from .anneal import anneal_once
from .gap_cover import REPAIR, lower_bound
from .method import Monitor, Outcome, Problem
from .schedule import Schedule, simulate

_REHEAT = 0.1  # first temperature of a round that starts from the best so far


def auto(problem: Problem, monitor: Monitor) -> Outcome:
    """Bound, starts and annealing; see the module."""
    if problem.options:
        raise ValueError(f"auto has no option {', '.join(problem.options)}")
    board = _Board(problem, monitor)
    with ThreadPoolExecutor(problem.workers, "remat-auto") as pool:
        jobs = [pool.submit(_work, board, worker) for worker in range(problem.workers)]
        for job in jobs:
            job.result()
    return Outcome(None)


def _work(board: _Board, worker: int) -> None:
    problem, monitor = board.problem, board.monitor
    given = tuple(range(len(problem.graph)))
    if worker == 0 and problem.minimize == "cost":
        bound, start = lower_bound(problem, monitor)
        monitor.bounded(bound)
        if start is not None:
            board.found(start)
            board.anneal(start, worker, REPAIR, 0.3)
    elif worker == 1 or problem.workers == 1:
        board.anneal(given, worker, 1.0, 0.4)
    round = 0
    while not monitor.should_stop():
        round += 1
        cold = round % 2 == worker % 2
        seed = worker + round * problem.workers
        if cold or board.best is None:
            board.anneal(given, seed, 1.0, 0.5)
        else:
            board.anneal(board.best, seed, _REHEAT, 0.5)


class _Board:
    """Where workers share the best schedule."""

    def __init__(self, problem: Problem, monitor: Monitor) -> None:
        self.problem = problem
        self.monitor = monitor
        self.best: Schedule | None = None
        self._cost = float("inf")
        self._lock = threading.Lock()

    def found(self, schedule: Schedule) -> None:
        self.monitor.found(schedule)
        truth = simulate(self.problem.graph, schedule)
        if truth.peak <= self.problem.budget:
            with self._lock:
                if truth.cost < self._cost:
                    self.best, self._cost = schedule, truth.cost

    def anneal(self, start: Sequence[int], seed: int, hot: float, share: float) -> None:
        seconds = max(0.3, share * self.monitor.remaining())
        found = anneal_once(self.problem, self.monitor, start, seed, hot, seconds)
        if found is not None:
            self.found(found)
