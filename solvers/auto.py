"""The default: proofs and annealing side by side, until one meets the other.

The last worker begins with the schedules of the checkpointing heuristics
(``feng_huang``, ``chen_greedy``, ``griewank``): there is a plan within a
moment, and on thousands of nodes a start that annealing alone would not reach.
The first worker proves: the gap-cover bound (``gap_cover``), whose solution is
a good start on training graphs of any size; then the program over moments
(``moments``), whose solutions, even those above the budget, are the best starts
there are: a cool annealing makes them fit.
Their time begins once the solvers have started.
Where the gap cover proves anything, the default time limit is extended; and again
where a program over moments is cut short and the gap is still wide, but in reach.
Otherwise workers anneal: the latest such suggestion, again and again with other
seeds, and in between the best so far; where there is no suggestion, the given
order.  What comes of a suggestion then gets the best recomputations for its order
(``moments.refine_order``), which no annealing of that length finds.
Where a start is far above a tight budget, any schedule within it is found first, at
any cost, and this one is heated again and again.  ``solve`` stops the method once
the best schedule meets the bound.  A single worker does one after the other.
Of a graph of few nodes, all schedules are looked at instead (``exhaustive``).

The parts cite their papers.  Complexity: it takes the time that it is given;
see the parts.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count

from .anneal import anneal_once
from .best import check_options
from .chen import chen_greedy
from .compiling import excuse
from .exhaustive import MOST_NODES, UndecidedError, cheapest, least_peak
from .feng_huang import feng_huang
from .gap_cover import REPAIR, lower_bound
from .griewank import griewank
from .method import Monitor, Outcome, Problem
from .mip import BrokenSolverError, default_backend, start, wait_for
from .moments import BACKEND, refine, refine_order
from .schedule import Schedule, simulate

_HEURISTICS = (feng_huang, chen_greedy, griewank)

# First temperatures: from the given order, the best so far, what the moments suggest
# (closer to what fits than what the gap cover does: more heat would only undo it), and
# the best so far where nothing else leads to the budget.
_COLD_START, _REHEAT, _POLISH, _HEAT = 1.0, 0.1, 0.03, 1.0
# Times the budget: up to here a start needs polishing only, from here on that is in vain.
_NEAR, _FAR = 1.02, 1.3
# Share of the time limit that one annealing takes, at least; where nothing will be suggested.
_ROUND, _ROUND_HOPELESS = 0.1, 0.2
_SHORT = 0.04  # the same once there is something to polish: more seeds find more than more moves
# Nodes of a graph on which one annealing takes all the time: in general; where nothing will
# be suggested; of one that polishes.
_WHOLE, _WHOLE_HOPELESS, _WHOLE_POLISH = 10_000, 1000, 40_000
_NO_BETTER, _ANEW = 6, 0.3  # annealings that find nothing better; share of the one anew after these
# Times the budget, one after the other, that an annealing anew is for first: on the way down
# from a larger budget it comes to other schedules than from the given order.
_LOOSER = (1.25, 1.0, 1.5, 1.1)
_ORDER = 0.1  # share of the time that the programs for one order may take
_MOST_ORDER = 0.4  # the same once they were not solved in less
_EARLY = 0.15  # share of the time that each heuristic may take
_COVER = 0.3  # share of the time for the gap cover, whose start others do better without
_SHARE = 0.4  # of the time for proofs, if there is one worker only
_HOPEFUL_SHARE = 0.85  # of one worker's time for proofs, if there are more
_HOPELESS_SHARE = 0.25  # if they promise little
_START = 1.0  # seconds that proofs get in any case: solvers take a while to start
_WITHIN_REACH = 0.02  # a gap (as a fraction) that more time for proofs may close
_DENSE = 50_000  # edges beyond which a program takes longer to build than it is worth
_LARGE = 2000  # nodes from which on a cold start does not pay


def auto(problem: Problem, monitor: Monitor) -> Outcome:
    """Heuristics, proofs and annealing; see the module.  No options."""
    check_options(problem)
    if len(problem.graph) <= MOST_NODES:
        with contextlib.suppress(UndecidedError):
            return _look_at_all(problem, monitor.part(_EARLY * monitor.remaining()))
    board = _Board(problem, monitor)
    if problem.start is not None:
        board.offer(problem.start, REPAIR)
    with ThreadPoolExecutor(problem.workers, "remat-auto") as pool:
        jobs = [pool.submit(_work, board, worker) for worker in range(problem.workers)]
        for job in jobs:
            job.result()
    return Outcome(None, message=board.trouble or excuse(monitor))


def _look_at_all(problem: Problem, monitor: Monitor) -> Outcome:
    """Raises UndecidedError if there are too many schedules to look at."""
    if problem.minimize == "peak":
        leanest = least_peak(problem, monitor)
        return Outcome(leanest, infeasible=leanest is None)
    schedule = cheapest(problem.graph, problem.budget, monitor)
    if schedule is not None:
        return Outcome(schedule, simulate(problem.graph, schedule).cost)
    # It is proven; what is left to find is the least budget that works.
    given = simulate(problem.graph, range(len(problem.graph)))
    leanest = None
    with contextlib.suppress(UndecidedError):
        leanest = least_peak(replace(problem, budget=given.peak), monitor)
    return Outcome(leanest, infeasible=True)


def _work(board: _Board, worker: int) -> None:
    problem, monitor = board.problem, board.monitor
    if worker == problem.workers - 1:
        _begin(board)
    if worker == 0 and board.programs:
        board.unless_broken(lambda: _prove(board))
    for turn in count():
        if monitor.should_stop():
            return
        board.anneal(turn, seed=worker + turn * problem.workers)


def _begin(board: _Board) -> None:
    for method in _HEURISTICS:
        if board.monitor.should_stop() or not board.hopeful:
            return
        seconds = _EARLY * board.monitor.remaining()
        found = method(board.problem, board.monitor.part(seconds)).schedule
        if found is not None:
            board.offer(found, REPAIR)


def _prove(board: _Board) -> None:
    problem, monitor = board.problem, board.monitor
    if monitor.should_stop():
        return
    start(default_backend())
    start(BACKEND, min(2, problem.workers))
    wait_for(default_backend(), monitor)
    began = monitor.elapsed()
    bound, suggested = lower_bound(problem, monitor.part(_COVER * monitor.remaining()))
    monitor.bounded(bound)
    began += wait_for(BACKEND, monitor)
    # Where the gap cover proves nothing (random graphs), little more will be proven.
    if bound > problem.graph.cost * (1 + 1e-9):
        share = _SHARE if problem.workers == 1 else _HOPEFUL_SHARE
        monitor.persist()
    else:
        share, board.hopeful = _HOPELESS_SHARE, False
    until = began + max(_START, share * (monitor.elapsed() - began + monitor.remaining()))
    if suggested is not None:
        board.offer(suggested, REPAIR)
    left: list[float] = []  # seconds of the usual time

    def more() -> float:
        gap = board.cost - monitor.bound
        if not board.hopeful or gap > _WITHIN_REACH * problem.graph.cost:
            return 0.0
        left.append(monitor.remaining())
        added = monitor.persist()
        if added:
            board.plan_for(monitor.elapsed() + monitor.remaining())
        return added

    refine(
        problem,
        monitor,
        lambda schedule: board.offer(schedule, _POLISH),
        until - monitor.elapsed(),
        more,
    )
    if left:
        monitor.conclude(left[0])


class _Board:
    """Where the workers leave schedules for each other."""

    def __init__(self, problem: Problem, monitor: Monitor) -> None:
        self.problem = problem
        self.monitor = monitor
        # Whether programs over moments are worth building.
        self.programs = problem.minimize == "cost" and len(problem.graph.edges) <= _DENSE
        self.trouble = ""  # why there are no more of them
        self._best: Schedule | None = None
        self._rank = (math.inf, math.inf)
        self.cost = math.inf
        # What to try every other time, and its first temperature; whether it is yet untried.
        given = tuple(range(len(problem.graph)))
        self._start: tuple[Schedule, float] = given, _COLD_START
        self._fresh = False
        # Whether it is far above the budget, and annealing it led nowhere.
        self._far, self._vain = self._is_far(simulate(problem.graph, given).peak), False
        self._failed = False  # whether any annealing found nothing within the budget
        self._start_cost = problem.graph.cost
        self._no_better = 0  # annealings since one has found something better
        self._anews = 0  # annealings anew, from the given order, until now
        self.hopeful = True  # that proofs will suggest something
        self._annealing_until = 0.0
        self._lock = threading.Lock()
        self.plan_for(monitor.remaining())

    def plan_for(self, seconds: float) -> None:
        """Sets how long one annealing, and programs for one order, take in so many seconds."""
        count = len(self.problem.graph)
        self._round = max(0.3, max(_ROUND, count / _WHOLE) * seconds)
        self._long = max(0.3, max(_ROUND_HOPELESS, count / _WHOLE_HOPELESS) * seconds)
        self._short = max(_SHORT, count / _WHOLE_POLISH) * seconds
        self._anew = _ANEW * seconds
        self._order, self._most_order = _ORDER * seconds, _MOST_ORDER * seconds

    def offer(self, schedule: Schedule, hot: float) -> None:
        """Leaves a schedule; if it is above the budget, to be annealed from a temperature.

        Then it is the optimum of a program that sees a part of the memory: the dearer, the
        more it sees.  A cheaper one does not take its place.
        """
        self.monitor.found(schedule)
        truth = simulate(self.problem.graph, schedule)
        with self._lock:
            if truth.peak > self.problem.budget:
                far = self._is_far(truth.peak)
                if truth.cost >= self._start_cost and not (far and hot == _POLISH):
                    if truth.peak <= _NEAR * self.problem.budget:
                        hot = _POLISH
                    self._start, self._fresh = (schedule, hot), True
                    self._far, self._vain = far, False
                    self._start_cost = truth.cost
                return
            rank = self.problem.rank(truth.cost, truth.peak)
            if rank < self._rank:
                self._best, self._rank, self.cost = schedule, rank, truth.cost

    def anneal(self, turn: int, seed: int) -> None:
        """One annealing; what it finds goes on the board."""
        problem = self.problem
        lost = self._best is None and (self._far or self._failed)
        if problem.minimize == "cost" and lost:
            self._reach(seed)
        with self._lock:
            start, hot = self._start
            seconds = self._round if self.hopeful else self._long
            if hot == _POLISH:
                seconds = self._short
            again = turn % 2 == 0 and (hot == _POLISH or len(problem.graph) < _LARGE)
            if self._best is not None and (self._vain or not (self._fresh or again)):
                start, hot = self._best, _HEAT if self._vain else _REHEAT
            self._fresh = False
            rank, anew = self._rank, self._no_better >= _NO_BETTER and hot in (_POLISH, _REHEAT)
            if anew:
                start, hot, seconds = tuple(range(len(problem.graph))), _COLD_START, self._anew
                looser = _LOOSER[self._anews % len(_LOOSER)]
                self._no_better, self._anews = 0, self._anews + 1
        if anew and looser > 1:
            seconds /= 2
            roomy = replace(problem, budget=int(looser * problem.budget))
            start = anneal_once(roomy, self.monitor, start, seed, hot, seconds) or start
        found = anneal_once(problem, self.monitor, start, seed, hot, seconds, rescue=anew)
        if found is not None:
            self.offer(found, hot)
        with self._lock:
            self._no_better = self._no_better + 1 if self._rank >= rank else 0
            self._failed |= found is None
            if found is None and start is self._start[0]:
                self._vain = self._far
        if found is not None and hot == _POLISH and self._may_improve():
            self.unless_broken(lambda: self._improve(found, seed))

    def unless_broken(self, build: Callable[[], None]) -> None:
        """Builds programs; where their solver breaks down, annealing goes on without any."""
        try:
            build()
        except BrokenSolverError as error:
            self.programs, self.trouble = False, str(error)

    def _may_improve(self) -> bool:
        """One worker at a time, half of its time if in vain, while programs are solved in it."""
        with self._lock:
            rested = self.monitor.elapsed() >= self._annealing_until
            may = self.programs and rested and self._order <= self._most_order
            if may:
                self._annealing_until = math.inf
            return may

    def _improve(self, schedule: Schedule, seed: int) -> None:
        """Makes the most of the order in which the nodes of a schedule run first."""
        problem, monitor = self.problem, self.monitor
        began, cost = monitor.elapsed(), self.cost
        found = refine_order(problem, monitor, schedule, self._order)
        if found is None:
            self._order *= 2
        elif simulate(problem.graph, found).peak > problem.budget:
            found = anneal_once(problem, monitor, found, seed, _POLISH, self._short)
        if found is not None:
            self.offer(found, _POLISH)
        ended = monitor.elapsed()
        self._annealing_until = ended + (0.0 if self.cost < cost else ended - began)

    def _reach(self, seed: int) -> None:
        """Looks for any schedule within the budget, or else for the least peak."""
        start, hot = self._start
        problem, seconds = self.problem, self._round
        found = anneal_once(problem, self.monitor, start, seed, seconds=seconds, at_any_cost=True)
        if found is None:
            peak = simulate(problem.graph, start).peak
            lowest = replace(problem, minimize="peak", budget=peak)
            found = anneal_once(lowest, self.monitor, start, seed, seconds=seconds)
        if found is not None:
            self.offer(found, hot)

    def _is_far(self, peak: int) -> bool:
        return peak > _FAR * self.problem.budget
