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
nodes and a lookahead of d runs.
"""

from __future__ import annotations

from bisect import insort
from heapq import heapify, heappop, heappush
from itertools import product

from .graph import Graph
from .schedule import Schedule, simulate

# How many ready nodes are tried, and for how many runs each is followed.  No
# pair is best on every graph, and each is cheap: all are run, the best order wins.
_WINDOWS = (2, 4, 8)
_LOOKAHEADS = (1, 2, 4, 8)


def memory_order(graph: Graph) -> Schedule:
    """A schedule that runs every node once, with a low peak.

    Returns:
      The given order, or the best order found if its peak is lower.
    """
    given = tuple(range(len(graph)))
    found = [_list_schedule(graph, *setting) for setting in product(_WINDOWS, _LOOKAHEADS)]
    return min([given, *found], key=lambda schedule: simulate(graph, schedule).peak)


def last_stages(graph: Graph) -> list[int]:
    """For each node, the last node of the given order before whose first run it may still run."""
    last = [len(graph) if node.recomputable else i for i, node in enumerate(graph.nodes)]
    for reader, writer in graph.order:
        last[reader] = min(last[reader], writer)
    return last


def _list_schedule(graph: Graph, window: int, lookahead: int) -> Schedule:
    state = _State(graph)
    # Sources wait until just before the first node that reads them.
    ranks = [
        (node if graph.predecessors[node] else min(graph.successors[node], default=node), node)
        for node in range(len(graph))
    ]
    ready = sorted(ranks[node] for node in range(len(graph)) if not state.waiting[node])
    shrinking = [rank for rank in ready if state.growth(rank[1]) <= 0]
    heapify(shrinking)
    done = [False] * len(graph)
    schedule: list[int] = []
    peak = 0
    while ready:
        if shrinking:
            node = heappop(shrinking)[1]
            if done[node]:
                continue
        else:
            node = min(
                (rank[1] for rank in ready[:window]),
                key=lambda node: _follow(state, node, lookahead, peak),
            )
        touched, reached = state.run(node)
        peak = max(peak, reached)
        done[node] = True
        schedule.append(node)
        ready.remove(ranks[node])
        for other in touched:
            insort(ready, ranks[other])
        # Who reads what this run has read, or made, may now free it.
        for producer in graph.predecessors[node]:
            if state.uses[producer] == 1:
                touched = (*touched, *(s for s in graph.successors[producer] if not done[s]))
        for other in touched:
            if not state.waiting[other] and state.growth(other) <= 0:
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
            heappush(ready, (state.growth(other), other))
    after = state.held
    for node in reversed(ran):
        state.undo(node)
    return max(0, highest - peak), after - before


class _State:
    """What has run, and what is held; each run can be undone.

    Attributes:
      waiting: for each node, how many nodes must run before it.
      uses: for each node, how many nodes have still to read it.
      held: bytes of the values held.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._outputs = frozenset(graph.outputs)
        after = [set(successors) for successors in graph.successors]
        for reader, writer in graph.order:
            after[reader].add(writer)
        self._after = [tuple(sorted(nodes)) for nodes in after]
        self.waiting = [0] * len(graph)
        for later in self._after:
            for node in later:
                self.waiting[node] += 1
        self.uses = [len(successors) for successors in graph.successors]
        self.held = 0

    def _freed(self, node: int) -> int:
        """Bytes of the inputs that only ``node`` has still to read."""
        nodes, uses, outputs = self._graph.nodes, self.uses, self._outputs
        return sum(
            nodes[producer].bytes
            for producer in self._graph.predecessors[node]
            if uses[producer] == 1 and producer not in outputs
        )

    def _kept(self, node: int) -> int:
        """Bytes of the output that stay once ``node`` has run."""
        stays = self._graph.successors[node] or node in self._outputs
        return self._graph.nodes[node].bytes if stays else 0

    def growth(self, node: int) -> int:
        """Bytes by which running ``node`` now would change what is held."""
        return self._kept(node) - self._freed(node)

    def run(self, node: int) -> tuple[tuple[int, ...], int]:
        """Runs a ready node; returns (nodes now ready, bytes reached)."""
        spec = self._graph.nodes[node]
        allocated = spec.bytes
        if (
            spec.forward is not None
            and self.uses[spec.forward] == 1
            and spec.forward not in self._outputs
        ):
            allocated = 0
        reached = self.held + allocated + spec.workspace
        self.held += self.growth(node)
        for producer in self._graph.predecessors[node]:
            self.uses[producer] -= 1
        for other in self._after[node]:
            self.waiting[other] -= 1
        return tuple(s for s in self._after[node] if not self.waiting[s]), reached

    def undo(self, node: int) -> None:
        """Takes back the latest run."""
        for other in self._after[node]:
            self.waiting[other] += 1
        for producer in self._graph.predecessors[node]:
            self.uses[producer] += 1
        self.held -= self.growth(node)
