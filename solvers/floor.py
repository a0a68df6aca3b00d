"""The proven floor: bytes that some node needs whatever the schedule does.

While a node runs it holds its inputs, its output (unless it takes over the
buffer of an input), its workspace and the resident bytes.  It also holds, in
any order, every value that runs exactly once, was needed to get there (its
producer is an ancestor) and is needed later (it is an output of the graph, or
one of its consumers is the node itself or a descendant).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .graph import Graph


@dataclass(frozen=True)
class Precedence:
    """Which nodes run first before which, in every schedule.

    Sets of nodes are integers used as bit sets: bit i stands for node i.

    Attributes:
      ancestors: for each node, the nodes whose first run precedes its first.
      descendants: for each node, the nodes whose first run follows its first.
      final: for each node, the nodes from whose first run on it cannot run
        again: all if it runs once, else its writers (``Graph.order``) and
        their descendants.
    """

    ancestors: tuple[int, ...]
    descendants: tuple[int, ...]
    final: tuple[int, ...]


def precedence(graph: Graph) -> Precedence:
    """Transitive closure of ``edges`` and ``order``.  O(edges x nodes / 64)."""
    before: list[list[int]] = [[] for _ in graph.nodes]
    for a, b in (*graph.edges, *graph.order):
        before[b].append(a)
    ancestors: list[int] = []
    for sources in before:
        reached = 0
        for source in sources:
            reached |= ancestors[source] | (1 << source)
        ancestors.append(reached)
    descendants = [0] * len(graph)
    for index in range(len(graph) - 1, -1, -1):
        reached = descendants[index] | (1 << index)
        for source in before[index]:
            descendants[source] |= reached
    return _precedence(graph, ancestors, descendants)


def given_order(graph: Graph) -> Precedence:
    """As if the given order were the only one in which the nodes may run first."""
    everything = (1 << len(graph)) - 1
    ancestors = [(1 << index) - 1 for index in range(len(graph))]
    descendants = [everything & ~(ancestors[index] | 1 << index) for index in range(len(graph))]
    return _precedence(graph, ancestors, descendants)


def _precedence(graph: Graph, ancestors: list[int], descendants: list[int]) -> Precedence:
    everything = (1 << len(graph)) - 1
    final = [0 if node.recomputable else everything for node in graph.nodes]
    for reader, writer in graph.order:
        final[reader] |= descendants[writer] | (1 << writer)
    return Precedence(tuple(ancestors), tuple(descendants), tuple(final))


def members(bits: int, count: int) -> np.ndarray:
    """A bit set over ``count`` nodes as an array of booleans, shape (count,)."""
    raw = np.frombuffer(bits.to_bytes((count + 7) // 8, "little"), np.uint8)
    return np.unpackbits(raw, count=count, bitorder="little").astype(bool)


@dataclass(frozen=True)
class Pending:
    """During whose first runs a value is needed later, in every schedule.

    Each such node first runs after the value's first run, and before the first
    run of some other consumer of the value (or the end, for an output).  So
    the value is held meanwhile, or its node runs again later.  Bit sets.

    Attributes:
      held: nodes during whose first run the value is held for certain,
        because its node cannot run again later.
      optional: nodes during whose first run it is held or its node runs again
        later.  None of them reads it.
      read: nodes that read it, while it is needed later too.
    """

    held: int
    optional: int
    read: int


def pending(graph: Graph, order: Precedence, index: int) -> Pending:
    """Where the value of a node is needed later; see ``Pending``."""
    readers = 0
    needed = order.descendants[index] if index in graph.outputs else 0
    for consumer in graph.successors[index]:
        readers |= 1 << consumer
        needed |= order.ancestors[consumer]
    needed &= order.descendants[index]
    others, final = needed & ~readers, order.final[index]
    return Pending(held=others & final, optional=others & ~final, read=needed & readers)


def first_run_bytes(graph: Graph, order: Precedence) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that concern the first run of each node in every schedule.

    Exact whatever the sizes.  O(nodes x (nodes + edges) / 64).

    Returns:
      The bytes held during it for certain, shape (n,); and with those of the
      values that are either held or computed again later, shape (n,).
    """
    nodes, count = graph.nodes, len(graph)
    total = graph.resident + sum(node.bytes + node.workspace for node in nodes)
    held = np.full(count, graph.resident, np.int64 if total < 2**62 else object)
    takers: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        inputs = sum(nodes[source].bytes for source in graph.predecessors[index])
        held[index] += inputs + node.workspace + node.bytes
        if node.forward is not None:
            takers.setdefault(node.forward, []).append(index)
    needed = held.copy()
    for index, node in enumerate(nodes):
        if node.bytes == 0:
            continue
        need = pending(graph, order, index)
        if need.held:
            held[members(need.held, count)] += node.bytes
        if need.held | need.optional:
            needed[members(need.held | need.optional, count)] += node.bytes
        for taker in takers.get(index, ()):
            # Its output may take over this value's buffer, unless the value
            # is needed later; but then it may be computed again.
            outlives = need.read >> taker & 1
            if not outlives:
                needed[taker] -= node.bytes
            if not outlives or node.recomputable:
                held[taker] -= node.bytes
    return held, needed


def memory_floor(graph: Graph, held: np.ndarray | None = None) -> tuple[int, tuple[int, ...]]:
    """The proven floor.

    Args:
      graph: the graph.
      held: bytes held for certain, as ``first_run_bytes`` gives them, where they are known.

    Returns:
      The bytes below which no schedule exists (the outputs alone included),
      and the nodes that need them.
    """
    if held is None:
        held, _ = first_run_bytes(graph, precedence(graph))
    floors = held.tolist()
    floor = max(floors)
    outputs = graph.resident + sum(graph.nodes[index].bytes for index in graph.outputs)
    if outputs > floor:
        return outputs, graph.outputs
    return floor, tuple(index for index, need in enumerate(floors) if need == floor)
