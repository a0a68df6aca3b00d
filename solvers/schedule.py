"""Schedules and the simulator, the one judge of their peak and cost.

A schedule is a sequence of node indices in execution order, in which a node
may appear more than once; nothing else.  A use reads the newest copy of a
value; a copy is freed right after its last use.  So frees are implied, as in
TensorFlow's own reference counting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .graph import Graph

Schedule = tuple[int, ...]

_STRIDE = 4096  # events between checks


class ScheduleError(ValueError):
    """A sequence of nodes is not a legal schedule of a graph."""


@dataclass(frozen=True)
class Simulation:
    """What running a schedule takes.

    Attributes:
      peak: the most bytes held at once, resident bytes included.
      cost: seconds of all runs.
      memory: bytes held during each event: resident + every live copy
        + the output and workspace of the node being run.
      last_use: for each event, the event after which its copy is freed.
    """

    peak: int
    cost: float
    memory: tuple[int, ...]
    last_use: tuple[int, ...]


def never() -> None:
    """A check that ends nothing."""


def simulate(
    graph: Graph, schedule: Sequence[int], check: Callable[[], None] = never
) -> Simulation:
    """Runs a schedule on paper, in exact integers.  O(events + reads).

    A node with ``forward`` takes over the buffer of that input, instead of
    allocating its own, where it is the last use of that copy.

    Args:
      graph: the graph.
      schedule: indices of its nodes.
      check: called now and then; what it raises ends the simulation.

    Raises:
      ScheduleError: if the schedule is not legal for the graph.
    """
    nodes, predecessors = graph.nodes, graph.predecessors
    count, length = len(nodes), len(schedule)
    newest = [-1] * count  # event that made the newest copy of each node
    last_use = list(range(length))
    taken: dict[int, int] = {}  # the copy whose buffer an event may take over
    writers: dict[int, list[int]] = {}
    for reader, writer in graph.order:
        writers.setdefault(reader, []).append(writer)

    for event, index in enumerate(schedule):
        if not 0 <= index < count:
            raise ScheduleError(f"event {event}: there is no node {index} (there are {count})")
        if newest[index] >= 0 and not nodes[index].recomputable:
            raise ScheduleError(
                f"event {event}: node {index} ({nodes[index].name}) must run exactly once"
            )
        if not event % _STRIDE:
            check()
        for producer in predecessors[index]:
            copy = newest[producer]
            if copy < 0:
                raise ScheduleError(
                    f"event {event}: node {index} ({nodes[index].name}) reads node {producer} "
                    f"({nodes[producer].name}), which has not run"
                )
            last_use[copy] = event
        for writer in writers.get(index, ()):
            if newest[writer] >= 0:
                raise ScheduleError(
                    f"event {event}: node {index} ({nodes[index].name}) must run before node "
                    f"{writer} ({nodes[writer].name}) overwrites what it reads"
                )
        forward = nodes[index].forward
        if forward is not None:
            taken[event] = newest[forward]
        newest[index] = event
    for index in range(count):
        if newest[index] < 0:
            raise ScheduleError(f"node {index} ({nodes[index].name}) never runs")
    for index in graph.outputs:
        last_use[newest[index]] = length - 1

    held_to_end = {newest[index] for index in graph.outputs}

    freed: list[int] = [0] * length
    held, memory = graph.resident, []
    for event, index in enumerate(schedule):
        if not event % _STRIDE:
            check()
        node = nodes[index]
        allocated = node.bytes
        source = taken.get(event)
        if source is not None and last_use[source] == event and source not in held_to_end:
            # The buffer changes hands: it is neither allocated nor freed.
            allocated = 0
            freed[event] -= node.bytes
        freed[last_use[event]] += node.bytes
        memory.append(held + allocated + node.workspace)
        held += allocated - freed[event]
    return Simulation(
        peak=max(memory),
        cost=math.fsum(nodes[index].cost for index in schedule),
        memory=tuple(memory),
        last_use=tuple(last_use),
    )
