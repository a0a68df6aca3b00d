"""Chen et al., "Training deep nets with sublinear memory cost", arXiv:1604.06174 (2016).

Keep some values of the forward pass, the checkpoints; in the backward pass,
compute each segment between two of them again just before it is needed.  At
most one extra forward pass on a chain.

``chen_sqrt`` cuts n forward nodes into about sqrt(n) segments of as many nodes.
``chen_greedy`` (Algorithm 3 there) walks the forward nodes, adds up their
bytes, and keeps the next value once the sum since the last checkpoint is over
a bound; the bound is searched.

Both were made for chains.  Jain et al., "Checkmate: breaking the memory wall
with optimal tensor rematerialization" (MLSys 2020), give two ways to take them
to other graphs, and the better one that fits is returned here:

* ``articulation``: only articulation points of the undirected forward graph
  may be checkpoints.  Without such a node the graph falls apart, so nothing
  after it needs anything before it.
* ``linearised``: any node may be a checkpoint, as if the forward nodes in
  topological order were a chain; what skips over a checkpoint is computed
  again on demand.

Complexity: O(n + e) for each schedule derived and simulated; ``chen_greedy``
derives at most 64 for each generalisation and order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from .best import best_schedule, check_options
from .keep import Training, keep, keep_each, segment_sizes, trainings
from .method import Monitor, Outcome, Problem
from .schedule import Schedule


def chen_sqrt(problem: Problem, monitor: Monitor) -> Outcome:
    """Segments of sqrt(n) nodes.

    Options:
      generalisation: "articulation" or "linearised"; by default the better.
    """
    check_options(problem, "generalisation")

    def schedules() -> Iterator[Schedule | None]:
        for training in trainings(problem.graph, monitor.check):
            for candidates in _candidates(problem, training):
                yield keep(training, frozenset(_every_sqrt(candidates)))

    return best_schedule(problem, monitor, schedules())


def chen_greedy(problem: Problem, monitor: Monitor) -> Outcome:
    """Segments of about equal bytes, for a searched number of bytes.

    Options:
      generalisation: "articulation" or "linearised"; by default the better.
    """
    check_options(problem, "generalisation")

    def schedules() -> Iterator[Schedule | None]:
        for training in trainings(problem.graph, monitor.check):
            for candidates in _candidates(problem, training):
                sizes = segment_sizes(training)
                choices = (_greedy(training, candidates, size) for size in sizes)
                yield from keep_each(training, choices)

    return best_schedule(problem, monitor, schedules())


def articulation_points(training: Training) -> tuple[int, ...]:
    """The articulation points of the undirected forward graph, in order.

    Hopcroft and Tarjan's depth-first search, without recursion.  O(n + e).
    """
    graph, is_forward = training.graph, training.is_forward
    neighbours = {
        node: [
            other
            for other in (*graph.predecessors[node], *graph.successors[node])
            if is_forward[other]
        ]
        for node in training.forward
    }
    reached: dict[int, int] = {}  # depth-first number
    lowest: dict[int, int] = {}  # least number reachable from the subtree by one edge
    points: set[int] = set()
    for root in training.forward:
        if root in reached:
            continue
        children = 0
        reached[root] = lowest[root] = len(reached)
        path = [(root, root, iter(neighbours[root]))]
        while path:
            node, parent, rest = path[-1]
            other = next(rest, None)
            if other is None:
                path.pop()
                if node != root:
                    lowest[parent] = min(lowest[parent], lowest[node])
                    if parent == root:
                        children += 1
                    elif lowest[node] >= reached[parent]:
                        points.add(parent)
            elif other not in reached:
                reached[other] = lowest[other] = len(reached)
                path.append((other, node, iter(neighbours[other])))
            elif other != parent:
                lowest[node] = min(lowest[node], reached[other])
        if children > 1:
            points.add(root)
    return tuple(node for node in training.forward if node in points)


def _candidates(problem: Problem, training: Training) -> Iterator[tuple[int, ...]]:
    """The nodes that may be checkpoints, for each generalisation asked for."""
    choices = {
        "articulation": lambda: articulation_points(training),
        "linearised": lambda: training.forward,
    }
    asked = problem.options.get("generalisation")
    if asked is not None and asked not in list(choices):
        raise ValueError(f"generalisation is one of {', '.join(choices)}; not {asked!r}")
    for name, candidates in choices.items():
        if asked in (None, name):
            yield candidates()


def _every_sqrt(nodes: tuple[int, ...]) -> tuple[int, ...]:
    """The last node of each of about sqrt(n) equal parts, but for the last part."""
    size = max(1, round(math.sqrt(len(nodes))))
    return nodes[size - 1 : len(nodes) - 1 : size]


def _greedy(training: Training, candidates: tuple[int, ...], bound: float) -> frozenset[int]:
    """The checkpoints for segments of about ``bound`` bytes."""
    allowed = frozenset(candidates)
    kept, size = [], 0
    for node in training.forward:
        size += training.graph.nodes[node].bytes
        if size > bound and node in allowed:
            kept.append(node)
            size = 0
    return frozenset(kept)
