"""Simulated annealing over event sequences, with reordering.

The state is the schedule itself; any sequence in which each input appears
earlier is legal, and what is held when follows from it (``sequence``).  Random
changes (``moves``) recompute, remove, shift and push events.  The energy is
the overhead in percent plus a weight times the bytes above the budget in
percent, summed over the schedule.  The weight rises as the temperature falls:
from so little that only what saves most for its cost is recomputed, so that the
rest is chosen beside that.  Towards the end it rises while the schedule is above
the budget and falls while it is within, and so the search goes to and fro across
the budget (strategic oscillation; Glover 1977), where the best schedules are.
Nothing is fixed by the order that the graph came in, so the overhead can reach
0 where recomputing in that order would not.

Each worker anneals on its own, in a thread of its own (the compiled code
releases the interpreter lock): the first from the start it is given, the
others from the given order.  A change costs O(inputs and consumers of the
node + length of the lifetimes it alters).

Options:
  moves: changes that each worker tries; without it, the time limit ends the
    search.  With it the result depends on the seed and ``workers`` alone.
  seconds: to take, if that is less than the time limit.

After FastSA (Imanishi, Xu, Takagi, Wang, Castillo: "A fast heuristic to optimize
time-space tradeoff for large models", NeurIPS 2023) in spirit; the state, the
changes and the incremental profile here are this package's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .best import check_options
from .compiling import excuse, load
from .method import Monitor, Outcome, Problem
from .schedule import Schedule

_HOT, _COLD = 1.0, 0.003  # temperatures, in units of a node's mean cost
# Weights of one percent above the budget, where costs are minimised: light, so that what saves
# most for its cost is recomputed first, and the rest only as the weight rises ...
_LIGHT, _HEAVY = 0.0003, 0.1
_RISE = 0.8  # ... until here in the cooling; then it follows what is found:
_FOLLOW = 1.2  # it changes by this factor at each look at the schedule ...
_LEAST, _MOST = 1e-9, 1e9  # ... between these
_STEEP = 0.1, 10.0  # first and last weight where something else is looked for
_NEAR_THE_END = 0.9  # of the changes or the time
_ANEW = 0.3  # share of the recomputations after that whose inputs run again even if held
_LAST_MOMENT = 0.5  # seconds after a stop, where nothing was found
_LOOKS = 400  # at the schedule in a cooling, at least
_APART, _LOOKS_APART = 0.2, 10  # seconds, looks: between reports
_SECONDS, _CHUNK = 0.02, 1000  # between looks, at most: seconds; changes, by the move count


def anneal(problem: Problem, monitor: Monitor) -> Outcome:
    """Anneals on every worker; see the module."""
    check_options(problem, "moves", "seconds")
    moves, seconds = problem.options.get("moves"), problem.options.get("seconds", math.inf)
    if moves is not None and (type(moves) is not int or moves < 1):
        raise ValueError(f"moves is {moves!r}; it must be a whole number >= 1")
    if not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ValueError(f"seconds is {seconds!r}; it must be a number above 0")
    given = tuple(range(len(problem.graph)))
    load(monitor)  # before a worker is done: the others would not begin
    with ThreadPoolExecutor(problem.workers, "remat-anneal") as pool:
        jobs = [
            pool.submit(
                anneal_once,
                problem,
                monitor,
                (problem.start if worker == 0 else None) or given,
                worker,
                seconds=seconds,
                moves=moves,
                rescue=problem.minimize == "cost",
            )
            for worker in range(problem.workers)
        ]
        for job in jobs:
            job.result()
    message = excuse(monitor)
    if moves is not None and monitor.remaining() <= 0:
        message = "the time limit came before the last move: the result is of this run only"
    return Outcome(None, message=message)


def anneal_once(
    problem: Problem,
    monitor: Monitor,
    start: Sequence[int],
    worker: int,
    hot: float = _HOT,
    seconds: float = math.inf,
    moves: int | None = None,
    at_any_cost: bool = False,
    rescue: bool = False,
) -> Schedule | None:
    """Cools once, and proposes each better schedule it finds.

    Args:
      problem: what is to be solved.
      monitor: told of every schedule that is better than this cooling's last.
      start: a legal schedule.
      worker: makes the random numbers differ from those of other workers.
      hot: first temperature, in units of a node's mean cost.
      seconds: to take, at most what the monitor leaves.
      moves: changes to try, instead of ``seconds``.
      at_any_cost: end with the first schedule within the budget, however dear.  Where
        budgets are tight this takes a moment, and cooling alone would often miss them.
      rescue: if nothing within the budget was found until near the end, what is left
        is another cooling, at any cost until something is: what two dear changes lead
        to is out of reach where the first of them gains nothing.  After a stop it is
        done in a moment, too, so that there is a schedule.

    Returns:
      The best schedule found within the budget, or None (if time ran out before it began, too).
    """
    # As many changes as asked for, even if another worker has proven its schedule optimal:
    # when it does so is chance.
    should_stop = monitor.should_stop if moves is None else monitor.interrupted
    anneal_at = load(monitor)
    if anneal_at is None or should_stop():
        return None
    from .sequence import EXCESS, make_state, make_tables, unit_of

    graph = problem.graph
    unit = unit_of(graph, problem.budget)
    tables = make_tables(graph, unit)
    state = make_state(graph, tables, start, problem.budget, unit)
    random = np.array([_seed(problem.seed, worker)], np.uint64)
    best = np.empty(len(state.at), np.int64)
    figure = np.array([0.0, math.inf])
    price, allowance, tighten = (0.0, 0.0, 0.0) if at_any_cost else _terms(problem)
    mean = 100 / len(graph)
    began, done = monitor.elapsed(), 0
    seconds = min(seconds, monitor.remaining())
    reported, chunk = math.inf, _CHUNK
    told, looks = began, 0
    # A start that is heated less goes on where a cooling is as warm.
    first = math.log(hot / _HOT) / math.log(_COLD / _HOT)
    for_cost = problem.minimize == "cost" and not at_any_cost
    weight = _HEAVY
    rescued = False
    while not should_stop():
        now = monitor.elapsed()
        if moves is not None:
            progress = done / moves
        else:
            progress = (now - began) / seconds
        if progress >= 1 or (at_any_cost and figure[0] > 0):
            break
        lost = rescue and progress > _NEAR_THE_END and figure[0] == 0
        rescued |= lost
        if rescued:  # where it is colder, nothing crosses what lies between
            progress = (progress - _NEAR_THE_END) / (1 - _NEAR_THE_END)
        temperature = mean * _between(hot, _COLD, progress)
        cooled = first + (1 - first) * progress
        if lost or not for_cost:
            weight = _between(*_STEEP, progress)
        elif cooled < _RISE and not rescued:
            weight = _between(_LIGHT, _HEAVY, cooled / _RISE)
        else:
            weight *= _FOLLOW if state.number[EXCESS] > 0 else 1 / _FOLLOW
            weight = min(max(weight, _LEAST), _MOST)
        terms = np.array(
            [0.0 if lost else price, allowance, weight, tighten, _ANEW if rescued else 0.0]
        )
        if moves is not None:
            chunk = min(_CHUNK, max(1, moves // _LOOKS), moves - done)
        anneal_at(tables, state, random, best, figure, terms, temperature, chunk)
        done += chunk
        if moves is None:
            took = max(monitor.elapsed() - now, 1e-6)
            apart = min(_SECONDS, seconds / _LOOKS)
            chunk = int(min(2 * chunk, max(1, chunk * apart / took)))
        looks += 1
        # With a move limit nothing depends on the clock, the least budget seen included.
        due = monitor.elapsed() - told > _APART if moves is None else looks % _LOOKS_APART == 0
        if due and figure[1] < reported:
            reported, told = figure[1], monitor.elapsed()
            monitor.found(tuple(best[: int(figure[0])].tolist()))
    if figure[0] == 0:
        if rescue and monitor.stopped():  # while it was hot still
            last = monitor.after_stop(_LAST_MOMENT)
            return anneal_once(problem, last, start, worker, hot)
        return None
    found = tuple(best[: int(figure[0])].tolist())
    monitor.found(found)
    return found


def _between(first: float, last: float, progress: float) -> float:
    """What is ``first`` at 0 and ``last`` at 1, by equal factors in equal steps."""
    return first * (last / first) ** progress


def _terms(problem: Problem) -> tuple[float, float, float]:
    if problem.minimize == "cost":
        return 1.0, 0.0, 0.0
    if problem.max_overhead is None:
        return 0.02, math.inf, 0.003
    return 1.0, 100 * (1 + problem.max_overhead), 0.003


def _seed(seed: int, worker: int) -> int:
    return int(np.random.SeedSequence([seed, worker]).generate_state(1, np.uint64)[0]) | 1
