"""Griewank & Walther, "Algorithm 799: revolve", ACM Trans. Math. Softw. 26(1), 2000.

Binomial checkpointing.  A chain of l states is needed from the last to the
first, and s of them may be stored at a time (the first one always is).  To
reverse l states, store one on the way, reverse what is behind it with the
s - 1 stores left, then reverse what is before it with s stores again.  With

    beta(s, r) = C(s + r, s),  beta(s, r - 1) < l <= beta(s, r),

no state is computed more than r times, and the total of

    r l - beta(s + 1, r - 1)

computations is the least possible if all states cost the same (Griewank,
"Achieving logarithmic growth of temporal and spatial complexity in reverse
automatic differentiation", Optim. Methods Softw. 1, 1992).  Here the first
state is the input, which takes no memory.

The linearisation for other graphs is Checkmate's (Jain et al., MLSys 2020):
the forward values that the backward pass reads are taken, in topological
order, for the states of a chain; what the chain leaves out (a skip connection)
is computed again on demand.  Sizes and costs are not looked at: the number of
stores is searched for the most that fit.

Where a gradient reads the input and the output of a layer, two neighbouring
gradients read the same state.  So there are two variants, of which the better
is returned: REVOLVE as it is, which computes that state twice, and with a state
held from one reversal to the next.

Complexity: O(t) to derive and simulate a schedule of t runs, for about
log2(l) + 8 numbers of stores a variant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from .best import best_schedule, check_options, dearest_cost
from .keep import Training, derive, trainings
from .method import Monitor, Outcome, Problem
from .schedule import Schedule, simulate

_AROUND = 4  # numbers of stores that are tried on either side of the one found


def griewank(problem: Problem, monitor: Monitor) -> Outcome:
    """Binomial checkpointing with the stores that fit.  No options."""
    check_options(problem)

    def schedules() -> Iterator[Schedule]:
        for training in trainings(problem.graph, monitor.check):
            for hold in (0, 1):
                yield from _search(problem, training, hold)

    return best_schedule(problem, monitor, schedules())


def recomputations(states: int, stores: int) -> int:
    """Least computations, after the first sweep, that reverse a unit chain.

    Args:
      states: states computed from the input, and needed from the last to the
        first.
      stores: states that may be stored at a time, the input not counted.
    """
    states, stores = states + 1, stores + 1
    repeats = 0
    while math.comb(stores + repeats, stores) < states:
        repeats += 1
    advances = repeats * states
    if repeats:
        advances -= math.comb(stores + repeats, repeats - 1)
    return advances - (states - 1)


def reverse(training: Training, stores: int, hold: int) -> Schedule | None:
    """The schedule that reverses the forward pass with a number of stores.

    Args:
      training: the graph.
      stores: states that may be stored at a time; at least 0.
      hold: for how many more reversals the values that one has made or read
        are held.  The states to reverse are then that many fewer.

    Returns:
      The schedule, or None as ``derive``.
    """
    position, is_state, states = _chain(training)
    since = _stored_since(max(0, states - hold), stores) + [-1] * hold

    def keeps(value: int, made: int, now: int) -> bool:
        if made - hold <= now <= made:
            return True
        return is_state[value] and min(made, states - 1) - hold <= since[position[value]]

    return derive(training, position, keeps)


def _chain(training: Training) -> tuple[list[int], list[bool], int]:
    """(for each node its state's number, whether it is that state, how many states)."""
    graph = training.graph
    is_state = [
        forward and not all(training.is_forward[reader] for reader in graph.successors[node])
        for node, forward in enumerate(training.is_forward)
    ]
    states = sum(is_state)
    position = [0] * len(graph)
    passed = 0
    for node in training.forward:  # what is no state is on the way to the next one
        position[node] = min(passed, max(0, states - 1))
        passed += is_state[node]
    return position, is_state, states


def _stored_since(states: int, stores: int) -> list[int]:
    """For each state, the state whose reversal it is stored for first (-1: none).

    It then stays until its own reversal.
    """
    since = [-1] * states
    # The input, state -1, takes no store of its own but is one to the formulae.
    ranges = [(-1, states + 1, stores + 1)]
    while ranges:
        first, length, free = ranges.pop()
        if first >= 0:
            since[first] = first + length - 1
        while length > 1 and free > 1:
            before = _split(length, free)
            ranges.append((first + before, length - before, free - 1))
            length = before
    return since


def _split(states: int, stores: int) -> int:
    """How many states lie before the next one to store; optimal for unit costs.

    Both parts must keep to the repeats that their numbers of states call for:
    beta(s, r-2) <= before <= beta(s, r-1), beta(s-1, r-1) <= behind <= beta(s-1, r).
    """
    repeats = 1
    while math.comb(stores + repeats, stores) < states:
        repeats += 1
    most = math.comb(stores + repeats - 1, stores)
    return min(most, states - math.comb(stores + repeats - 2, stores - 1))


def _search(problem: Problem, training: Training, hold: int) -> Iterator[Schedule]:
    """Schedules on the way to the number of stores that suits the problem best.

    First a store for each state, then bisection: as a rule fewer stores have a
    lower peak and a higher cost.  Not always, so the numbers around it follow.
    """
    _, _, states = _chain(training)
    low, stores, high = 0, states, states
    while low <= high:
        schedule = reverse(training, stores, hold)
        if schedule is None:
            fewer = False
        else:
            yield schedule
            result = simulate(problem.graph, schedule, training.check)
            if problem.minimize == "cost":
                fewer = result.peak > problem.budget
            else:
                fewer = result.cost <= dearest_cost(problem)
        low, high = (low, stores - 1) if fewer else (stores + 1, high)
        stores = (low + high) // 2
    for stores in range(max(0, low - _AROUND), min(states, low + _AROUND + 1)):
        schedule = reverse(training, stores, hold)
        if schedule is not None:
            yield schedule
