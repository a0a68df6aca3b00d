"""The proven floor: bytes that some node needs whatever the schedule does.

While a node runs it holds its inputs, its output (unless it takes over the
buffer of an input), its workspace and the resident bytes.  It also holds, in
any order, every value that runs exactly once, was needed to get there (its
producer is an ancestor) and is needed later (it is an output of the graph, or
one of its consumers is the node itself or a descendant).
"""

from __future__ import annotations

from collections.abc import Iterable
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
    """

    ancestors: tuple[int, ...]
    descendants: tuple[int, ...]


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
    return Precedence(tuple(ancestors), tuple(descendants))


def members(bits: int, count: int) -> np.ndarray:
    """A bit set over ``count`` nodes as an array of booleans, shape (count,)."""
    raw = np.frombuffer(bits.to_bytes((count + 7) // 8, "little"), np.uint8)
    return np.unpackbits(raw, count=count, bitorder="little").astype(bool)


def needed_while(graph: Graph, order: Precedence, index: int) -> int:
    """The nodes during whose first run a need for value ``index`` is pending.

    In every schedule each of them first runs after the first run of ``index``
    and not after the first run of some consumer of it (or before the end, for
    an output).  So during that run the value is held, or it runs again later.

    Returns:
      A bit set.
    """
    if index in graph.outputs:
        return order.descendants[index]
    upstream = 0
    for consumer in graph.successors[index]:
        upstream |= order.ancestors[consumer] | (1 << consumer)
    return order.descendants[index] & upstream


def taken_over(graph: Graph, order: Precedence, index: int) -> bool:
    """Whether some schedule may let a node reuse the buffer of its ``forward``.

    It may not where that input runs once and must outlive this node.
    """
    source = graph.nodes[index].forward
    if source is None:
        return False
    if graph.nodes[source].recomputable:
        return True
    if source in graph.outputs:
        return False
    later = order.descendants[index]
    return not any(later >> consumer & 1 for consumer in graph.successors[source])


def memory_floors(graph: Graph, order: Precedence) -> list[int]:
    """For each node, bytes held during its first run in every schedule.

    O(nodes x nodes that run once / 64) and exact whatever the sizes.
    """
    nodes, count = graph.nodes, len(graph)
    total = graph.resident + sum(node.bytes + node.workspace for node in nodes)
    floors = np.zeros(count, np.int64 if total < 2**62 else object)
    for index, node in enumerate(nodes):
        held = set(graph.predecessors[index])
        own = 0 if taken_over(graph, order, index) else node.bytes
        floors[index] = (
            graph.resident + own + node.workspace + sum(nodes[source].bytes for source in held)
        )
    for index, node in enumerate(nodes):
        if node.recomputable or node.bytes == 0:
            continue
        pending = needed_while(graph, order, index)
        for consumer in graph.successors[index]:
            pending &= ~(1 << consumer)  # counted as an input already
        if pending:
            floors[members(pending, count)] += node.bytes
    return [int(floor) for floor in floors]


def memory_floor(graph: Graph) -> tuple[int, tuple[int, ...]]:
    """The proven floor.

    Returns:
      The bytes below which no schedule exists (the outputs alone included),
      and the nodes that need them.
    """
    floors = memory_floors(graph, precedence(graph))
    floor = max(floors)
    outputs = graph.resident + _bytes(graph, graph.outputs)
    if outputs > floor:
        return outputs, graph.outputs
    return floor, tuple(index for index, need in enumerate(floors) if need == floor)


def _bytes(graph: Graph, indices: Iterable[int]) -> int:
    return sum(graph.nodes[index].bytes for index in indices)
