"""From what to keep to a schedule: what the checkpointing heuristics share.

The heuristics of the literature choose only which values of the forward pass
to keep; the functions here derive the schedule.  They work on any DAG:

* The *forward part* of a graph is the nodes that neither have the ``backward``
  flag nor need a node that has (as updates do).  Where no node has it, it is
  what runs before the moment of highest memory, so that everything later plays
  the part of the backward pass.
* The forward part is cut into *segments*.  The backward pass works on one at
  a time: a node of it belongs to the latest segment among the values it reads.
* A forward value that a backward node reads is computed again on demand, with
  whatever that needs in turn, unless it is kept or has been made or read for
  the same segment.  Nothing else is ever computed again.

A value that must not be computed again (``recomputable`` is false, or its
inputs have been overwritten) is simply read: a schedule holds every copy to
its last use, so the result is always legal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .graph import Graph
from .order import memory_order
from .schedule import Schedule, never, simulate

Keeps = Callable[[int, int, int], bool]

_SIZES = 64  # segment sizes that a search tries
_LONGEST = 20  # runs of a schedule worth having, as a multiple of the graph's nodes


@dataclass(frozen=True)
class Training:
    """A graph in one order, told apart into forward and backward.

    Attributes:
      graph: the graph.
      order: a schedule that runs every node once.
      forward: the nodes of the forward part, in that order.
      is_forward: for each node, whether it is one of them.
      check: called now and then by what works on it, which ends with what it raises:
        of a large graph one schedule takes a second to derive.
    """

    graph: Graph
    order: Schedule
    forward: tuple[int, ...]
    is_forward: tuple[bool, ...]
    check: Callable[[], None] = field(default=never, compare=False)


def training(graph: Graph, order: Schedule, check: Callable[[], None] = never) -> Training:
    """Tells the forward part of a graph from the backward part.  O(n + e)."""
    is_forward: list[bool] = []
    if any(node.backward for node in graph.nodes):
        for node, inputs in zip(graph.nodes, graph.predecessors, strict=True):
            is_forward.append(not node.backward and all(is_forward[value] for value in inputs))
    else:
        memory = simulate(graph, order, check).memory
        early = frozenset(order[: memory.index(max(memory))])
        is_forward.extend(index in early for index in range(len(graph)))
    forward = tuple(index for index in order if is_forward[index])
    return Training(graph, order, forward, tuple(is_forward), check)


def trainings(graph: Graph, check: Callable[[], None] = never) -> Iterator[Training]:
    """The graph in its given order and, if it differs, in ``memory_order``."""
    given = tuple(range(len(graph)))
    yield training(graph, given, check)
    order = memory_order(graph, check)
    if order != given:
        yield training(graph, order, check)


def segment_sizes(training: Training) -> Iterator[float]:
    """Sizes of segments to try, in bytes: from the whole forward part to its least node.

    64 of them, in geometric progression.
    """
    sizes = [training.graph.nodes[node].bytes for node in training.forward]
    total = max(1, sum(sizes))
    least = min((size for size in sizes if size), default=1)
    for step in range(_SIZES):
        yield total * (least / total) ** (step / (_SIZES - 1))


def keep_each(training: Training, choices: Iterable[frozenset[int]]) -> Iterator[Schedule | None]:
    """The schedule of each choice of values to keep that differs from those before it."""
    seen: set[frozenset[int]] = set()
    for kept in choices:
        training.check()
        if kept not in seen:
            seen.add(kept)
            yield keep(training, kept)


def keep(training: Training, kept: Collection[int]) -> Schedule | None:
    """The schedule that keeps some forward values; each ends a segment."""
    segment = [0] * len(training.graph)
    current = 0
    for node in training.forward:
        segment[node] = current
        current += node in kept
    return derive(training, segment, lambda node, made, now: node in kept)


def derive(training: Training, segment: Sequence[int], keeps: Keeps) -> Schedule | None:
    """The schedule that computes what is not kept on demand.

    Args:
      training: the graph and the order in which its nodes run first.
      segment: for each forward node, the number of its segment.  The backward
        pass is expected to go through them from the highest to the lowest.
      keeps: ``keeps(value, made, now)``: whether a forward value that was last
        made or read for segment ``made`` is still kept for segment ``now``.
        The end of the forward pass is the segment after the last one.

    Returns:
      The schedule, or None if it were of no use: more than 20 runs a node.

    Complexity: O(r) for r reads in the schedule.
    """
    graph, is_forward = training.graph, training.is_forward
    predecessors = graph.predecessors
    last = max((segment[node] for node in training.forward), default=0)
    made = [last + 1] * len(graph)
    fixed = [  # must not run again
        not (node.recomputable and forward)
        for node, forward in zip(graph.nodes, is_forward, strict=True)
    ]
    overwritten_by: list[list[int]] = [[] for _ in graph.nodes]
    for reader, writer in graph.order:
        overwritten_by[writer].append(reader)
    schedule: list[int] = []

    def at_hand(value: int, now: int) -> bool:
        if made[value] != now and not fixed[value] and not keeps(value, made[value], now):
            return False
        made[value] = now
        return True

    def bring(value: int, now: int) -> None:
        waiting = [value]
        while waiting:
            node = waiting[-1]
            if at_hand(node, now):
                waiting.pop()
                continue
            missing = [producer for producer in predecessors[node] if not at_hand(producer, now)]
            if missing:
                waiting.extend(reversed(missing))
            else:
                schedule.append(waiting.pop())
                made[node] = now

    for node in training.order:
        training.check()
        inputs = [value for value in predecessors[node] if is_forward[value]]
        if is_forward[node]:
            # What the last segment makes and reads is still there when the
            # backward pass starts.
            if segment[node] == last:
                for value in (node, *inputs):
                    made[value] = last
        elif inputs:
            now = max(segment[value] for value in inputs)
            for value in inputs:
                bring(value, now)
        schedule.append(node)
        if len(schedule) > _LONGEST * len(graph):
            return None
        for reader in overwritten_by[node]:
            fixed[reader] = True
    return tuple(schedule)
