"""All schedules of a graph of few nodes, by the A* search.

A state is the values that are held and the nodes that have run; one step from it
lets go of a value or runs a node.  The way of least cost to a state in which
every node has run and the outputs are held is the cheapest schedule in any order,
and where there is none, no schedule fits the budget.  What is still to come costs
at least one run of each node that has not run (Hart, Nilsson and Raphael, "A Formal
Basis for the Heuristic Determination of Minimum Cost Paths", 1968), so only runs
beyond the first count.

There are up to 3^n states of n nodes (not run; run and held; run and let go), with
n steps from each; those that need more again than the best schedule are not seen.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator

from .best import dearest_cost
from .graph import Graph
from .method import Monitor, Problem
from .schedule import Schedule, simulate

MOST_NODES = 14
_MOST_STATES = 100_000  # about a second

_State = tuple[int, int]  # held, run: sets as bits
_Step = tuple[int | None, _State, int]  # node that runs, if any; state then; bytes meanwhile


class UndecidedError(Exception):
    """There are too many states, or there is too little time."""


def cheapest(graph: Graph, budget: int, monitor: Monitor) -> Schedule | None:
    """The cheapest schedule within a budget in bytes; None if there is none.

    Raises:
      UndecidedError: if that was not found out.
    """
    steps_from = _steps(graph)
    outputs = sum(1 << index for index in graph.outputs)
    everything = (1 << len(graph)) - 1
    start: _State = (0, 0)
    again = {start: 0.0}  # seconds of all runs beyond a first
    came: dict[_State, tuple[_State, int | None]] = {}
    tie = itertools.count()  # of equals the latest first: that one is closer to the end
    queue = [(0.0, 0, start)]
    while queue:
        if monitor.should_stop() or len(again) > _MOST_STATES:
            raise UndecidedError
        cost, _, state = heapq.heappop(queue)
        if cost > again[state]:
            continue
        run = state[1]
        if run == everything and state[0] & outputs == outputs:
            schedule = []
            while state in came:
                state, ran = came[state]
                if ran is not None:
                    schedule.append(ran)
            return tuple(reversed(schedule))
        for index, after, held in steps_from(state):
            if held > budget:
                continue
            repeated = index is not None and run >> index & 1
            total = cost + (graph.nodes[index].cost if index is not None and repeated else 0.0)
            if after not in again or total < again[after]:
                again[after], came[after] = total, (state, index)
                heapq.heappush(queue, (total, -next(tie), after))
    return None


def least_peak(problem: Problem, monitor: Monitor) -> Schedule | None:
    """The schedule of least peak within the budget and ``max_overhead``; None if there is none.

    Raises:
      UndecidedError: if that was not found out.
    """
    found, low, high = None, -1, problem.budget  # no schedule within low; perhaps within high
    while low < high:
        middle = high if found is None else (low + high + 1) // 2
        schedule = cheapest(problem.graph, middle, monitor)
        truth = None if schedule is None else simulate(problem.graph, schedule)
        if truth is None or truth.cost > dearest_cost(problem):
            if found is None:
                return None
            low = middle
        else:
            found, high = schedule, truth.peak - 1
    return found


def _steps(graph: Graph) -> Callable[[_State], Iterator[_Step]]:
    """What the steps from a state are."""
    nodes, count = graph.nodes, len(graph)
    inputs, writers, readers = [0] * count, [0] * count, [0] * count
    for index, group in enumerate(graph.predecessors):
        inputs[index] = sum(1 << source for source in group)
    for reader, writer in graph.order:
        writers[reader] |= 1 << writer
        readers[writer] |= 1 << reader
    bytes_of = [graph.resident]  # of each set of values, and what is resident
    for node in nodes:
        bytes_of += [held + node.bytes for held in bytes_of]

    def steps_from(state: _State) -> Iterator[_Step]:
        live, run = state
        for index, node in enumerate(nodes):
            bit = 1 << index
            if live & bit:
                yield None, (live & ~bit, run), 0
                continue
            again = run & bit and not node.recomputable
            overwritten = run & writers[index] or readers[index] & ~run
            if again or overwritten or live & inputs[index] != inputs[index]:
                continue
            after = live | bit, run | bit
            yield index, after, bytes_of[after[0]] + node.workspace
            if node.forward is not None:  # takes over the buffer of that input
                without = after[0] & ~(1 << node.forward)
                yield index, (without, run | bit), bytes_of[live] + node.workspace

    return steps_from
