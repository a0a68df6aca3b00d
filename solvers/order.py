"""A topological order of low peak: what can be had without recomputation.

``memory_order`` is list scheduling.  A ready node whose run does not increase
the memory held (an optimizer update frees a gradient, a reduction shrinks its
input) runs at once.  Otherwise each of the next few ready nodes is tried
together with what follows from it, and the one is run whose follow-up needs
the least memory.  Sources wait for the first node that reads them.

The minimum is NP-hard to find already for trees with general sizes (Liu, "An
application of generalized tree pebbling to sparse matrix factorization", SIAM
J. Algebraic Discrete Methods, 1987, solves trees), so this is a heuristic; it
never returns an order with a higher peak than the given one.

Complexity: O((n + e) w d log n) for n nodes, e edges, a window of w ready
nodes and a lookahead of d runs; a second for 5,000 nodes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import product
from math import prod

from .graph import Graph
from .schedule import Schedule, never, simulate

# How many ready nodes are tried, and for how many runs each is followed.  No
# pair is best on every graph, and each is cheap: all are run, the best order wins.
_WINDOWS = (2, 4, 8)
_LOOKAHEADS = (1, 2, 4, 8)
_WORK = 5_000_000  # (nodes + edges) x window x lookahead, summed over pairs: seconds


def memory_order(graph: Graph, check: Callable[[], None] = never) -> Schedule:
    """A schedule that runs every node once, with a low peak.

    Args:
      graph: the graph.
      check: called now and then; what it raises ends the search.

    Returns:
      The given order, or the best order found if its peak is lower.
    """
    given = tuple(range(len(graph)))
    found, work = [given], 0
    for window, lookahead in sorted(product(_WINDOWS, _LOOKAHEADS), key=prod):
        found.append(_list_schedule(graph, window, lookahead, check))
        work += (len(graph) + len(graph.edges)) * window * lookahead
        if work > _WORK:
            break
    return min(found, key=lambda schedule: simulate(graph, schedule, check).peak)


def last_stages(graph: Graph) -> list[int]:
    """For each node, the last node of the given order before whose first run it may still run."""
    last = [len(graph) if node.recomputable else i for i, node in enumerate(graph.nodes)]
    for reader, writer in graph.order:
        last[reader] = min(last[reader], writer)
    return last


def _list_schedule(
    graph: Graph, window: int, lookahead: int, check: Callable[[], None]
) -> Schedule:
    state = _State(graph)
    # Sources wait until just before the first node that reads them.
    ranks = [
        (node if graph.predecessors[node] else min(graph.successors[node], default=node), node)
        for node in range(len(graph))
    ]
    ready = sorted(ranks[node] for node in range(len(graph)) if not state.waiting[node])
    shrinking = [rank for rank in ready if state.growth[rank[1]] <= 0]
    heapify(shrinking)
    done = [False] * len(graph)
    schedule: list[int] = []
    peak = 0
    while ready:
        check()
        if shrinking:
            node = heappop(shrinking)[1]
            if done[node]:
                continue
        else:
            choices = [rank[1] for rank in ready[:window]]
            node = choices[0]
            if len(choices) > 1:
                node = min(choices, key=lambda node: _follow(state, node, lookahead, peak))
        touched, reached = state.run(node)
        peak = max(peak, reached)
        done[node] = True
        schedule.append(node)
        del ready[bisect_left(ready, ranks[node])]
        for other in touched:
            insort(ready, ranks[other])
        # Who is now the last to read something may free it.
        readers = (state.last_reader(value) for value in graph.predecessors[node])
        touched.extend(reader for reader in readers if reader is not None)
        for other in touched:
            if not state.waiting[other] and state.growth[other] <= 0:
                heappush(shrinking, ranks[other])
    return tuple(schedule)


def _follow(state: _State, node: int, lookahead: int, peak: int) -> tuple[int, int]:
    """How bad it is to run ``node`` next; the state is left as it was.

    The node is followed by what becomes ready through it, the least growth
    first, until it has paid for itself.

    Returns:
      (bytes by which the peak rises, bytes that stay).
    """
    before, highest = state.held, 0
    ran: list[int] = []
    ready: list[tuple[int, int]] = [(0, node)]
    while ready and len(ran) < lookahead and (not ran or state.held > before):
        node = heappop(ready)[1]
        touched, reached = state.run(node)
        ran.append(node)
        highest = max(highest, reached)
        for other in touched:
            heappush(ready, (state.growth[other], other))
    after = state.held
    for node in reversed(ran):
        state.undo(node)
    return max(0, highest - peak), after - before


class _State:
    """What has run, and what is held; each run can be undone.

    Attributes:
      waiting: for each node, how many nodes must run before it.
      held: bytes of the values held.
      growth: for each node, the bytes by which running it would change that.
    """

    def __init__(self, graph: Graph) -> None:
        self._nodes, self._predecessors = graph.nodes, graph.predecessors
        after = [set(successors) for successors in graph.successors]
        for reader, writer in graph.order:
            after[reader].add(writer)
        self._after = [tuple(sorted(nodes)) for nodes in after]
        self.waiting = [0] * len(graph)
        for later in self._after:
            for node in later:
                self.waiting[node] += 1
        # Who has still to read each value: how many, and the sum of their
        # numbers, which is the last one's number once there is only one.
        self._readers = [len(successors) for successors in graph.successors]
        self._sum = [sum(successors) for successors in graph.successors]
        self._held_to_end = frozenset(graph.outputs)
        self.held = 0
        self.growth = [
            node.bytes if graph.successors[index] or index in self._held_to_end else 0
            for index, node in enumerate(graph.nodes)
        ]
        for value, readers in enumerate(self._readers):
            if readers == 1:
                self._freed_by_last(value, self._nodes[value].bytes)

    def _freed_by_last(self, value: int, size: int) -> None:
        """The one node that has still to read a value will free ``size`` bytes more."""
        if value not in self._held_to_end:
            self.growth[self._sum[value]] -= size

    def last_reader(self, value: int) -> int | None:
        """The only node that has still to read a value, if there is one."""
        return self._sum[value] if self._readers[value] == 1 else None

    def run(self, node: int) -> tuple[list[int], int]:
        """Runs a ready node; returns (nodes now ready, bytes reached)."""
        spec = self._nodes[node]
        in_place = (
            spec.forward is not None
            and self._readers[spec.forward] == 1
            and spec.forward not in self._held_to_end
        )
        reached = self.held + spec.workspace + (0 if in_place else spec.bytes)
        self.held += self.growth[node]
        for value in self._predecessors[node]:
            self._readers[value] -= 1
            self._sum[value] -= node
            if self._readers[value] == 1:
                self._freed_by_last(value, self._nodes[value].bytes)
        ready = []
        for other in self._after[node]:
            self.waiting[other] -= 1
            if not self.waiting[other]:
                ready.append(other)
        return ready, reached

    def undo(self, node: int) -> None:
        """Takes back the latest run."""
        for other in self._after[node]:
            self.waiting[other] += 1
        for value in self._predecessors[node]:
            if self._readers[value] == 1:
                self._freed_by_last(value, -self._nodes[value].bytes)
            self._readers[value] += 1
            self._sum[value] += node
        self.held -= self.growth[node]
