"""All schedules of a graph of few nodes, by Dijkstra's search.

A state is the values that are held and the nodes that have run; one step from it
lets go of a value or runs a node.  The way of least cost to a state in which
every node has run and the outputs are held is the cheapest schedule in any order,
and where there is none, no schedule fits the budget.  A way of least peak is found
alike: a way's peak is that of its steps.

There are 3^n states of n nodes (not run; run and held; run and let go), with n
steps from each.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator

from .graph import Graph
from .method import Monitor, Problem
from .schedule import Schedule

MOST_NODES = 9  # 20,000 states: a fraction of a second

_State = tuple[int, int]  # held, run: sets as bits
_Step = tuple[int | None, _State, int]  # node that runs, if any; state then; bytes meanwhile


def best_of_all(problem: Problem, monitor: Monitor) -> Schedule | None:
    """The best schedule within the budget.

    ``max_overhead`` is left to the caller: where the peak is minimized, the search
    does not see all ways that keep it.

    Returns:
      None if no schedule fits the budget, or time ran out.
    """
    graph, steps_from = problem.graph, _steps(problem.graph)
    outputs = sum(1 << index for index in graph.outputs)
    everything = (1 << len(graph)) - 1
    start: _State = (0, 0)
    ranks = {start: problem.rank(0.0, 0)}
    came: dict[_State, tuple[_State, int | None]] = {}
    tie = itertools.count()  # of equals the latest first: that one is closer to the end
    queue = [(ranks[start], 0, start, 0.0, 0)]
    while queue and not monitor.should_stop():
        rank, _, state, cost, peak = heapq.heappop(queue)
        if rank > ranks[state]:
            continue
        if state[1] == everything and state[0] & outputs == outputs:
            schedule = []
            while state in came:
                state, ran = came[state]
                if ran is not None:
                    schedule.append(ran)
            return tuple(reversed(schedule))
        for ran, after, held in steps_from(state):
            if held > problem.budget:
                continue
            total = cost if ran is None else cost + graph.nodes[ran].cost
            highest = max(peak, held)
            rank = problem.rank(total, highest)
            if after not in ranks or rank < ranks[after]:
                ranks[after], came[after] = rank, (state, ran)
                heapq.heappush(queue, (rank, -next(tie), after, total, highest))
    return None


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
