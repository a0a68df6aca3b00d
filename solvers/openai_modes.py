"""The modes of OpenAI's gradient-checkpointing package (Salimans and Bulatov, 2018).

https://github.com/cybertronai/gradient-checkpointing.  As in Chen et al. 2016
the backward pass computes what lies between two checkpoints again; the modes
differ in the checkpoints they choose:

* ``memory`` (the default): the articulation points of the forward graph, the
  values that everything must pass; if there are many, about sqrt(n) of them,
  evenly spread over the graph.  For chains this is the O(sqrt(n)) memory of
  the paper.
* ``speed``: the outputs of what is dear to compute, convolutions and matrix
  products, so that only cheap operations run again.  The package goes by the
  type of an operation; a graph has names only, so it is by name here.
* ``collection``: the nodes whose names the caller gives.
* an explicit list of node indices.

There is nothing to search: each choice gives one schedule (two, if the graph
has an order of lower peak), which fits the budget or not.

Complexity: O(n + e).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from .best import best_schedule, check_options
from .chen import articulation_points
from .graph import Graph
from .keep import Training, keep, trainings
from .method import Monitor, Outcome, Problem
from .schedule import Schedule

# The last word of a name says what it is: "conv1_bn" is no convolution.
_DEAR = re.compile(
    r"(conv(olution)?(_[dp]w)?|depthwise|matmul|dense|fc|einsum|dot)"
    r"([123]d)?(_?transpose)?[_\d]*$",
    re.IGNORECASE,
)


def openai(problem: Problem, monitor: Monitor) -> Outcome:
    """Keeps the checkpoints of a mode, or given ones.

    Options:
      mode: "memory", "speed", "collection", or a list of node indices.
      names: for "collection": names of the nodes to keep (a list, or text with
        commas between them).

    Raises:
      ValueError: if an option is not one of these, or names no node.
    """
    check_options(problem, "mode", "names")
    choose = _chooser(problem.graph, problem.options)

    def schedules() -> Iterator[Schedule | None]:
        for training in trainings(problem.graph, monitor.check):
            yield keep(training, choose(training))

    return best_schedule(problem, monitor, schedules())


def _chooser(graph: Graph, options: Mapping[str, Any]) -> Callable[[Training], Collection[int]]:
    """The function that chooses the checkpoints."""
    mode = options.get("mode", "memory")
    if "names" in options and mode != "collection":
        raise ValueError('names are for mode="collection"')
    if mode == "memory":
        return _bottlenecks
    if mode == "speed":
        return _dear
    if mode == "collection":
        named = _named(graph, options.get("names", ()))
        return lambda training: named
    if isinstance(mode, Sequence) and not isinstance(mode, str):
        listed = _listed(graph, mode)
        return lambda training: listed
    raise ValueError(
        f'mode is "memory", "speed", "collection" or a list of node indices; not {mode!r}'
    )


def _bottlenecks(training: Training) -> frozenset[int]:
    """About sqrt(n) articulation points, evenly spread."""
    points = articulation_points(training)
    wanted = math.ceil(math.sqrt(len(training.forward)))
    if len(points) <= wanted + 1:
        return frozenset(points)
    step = math.ceil(len(points) / wanted)
    return frozenset(points[::step])


def _dear(training: Training) -> frozenset[int]:
    """Convolutions and matrix products."""
    nodes = training.graph.nodes
    return frozenset(node for node in training.forward if _DEAR.search(nodes[node].name))


def _named(graph: Graph, names: Sequence[str]) -> frozenset[int]:
    listed = names.split(",") if isinstance(names, str) else names
    if not isinstance(listed, Sequence) or not all(isinstance(name, str) for name in listed):
        raise ValueError(f"names is {names!r}; it must be a list of nodes' names")
    wanted = set(listed)
    unknown = wanted - {node.name for node in graph.nodes}
    if unknown or not wanted:
        raise ValueError(
            f"names: there is no node {sorted(unknown)[0]!r}"
            if unknown
            else 'mode="collection" needs names, the nodes to keep'
        )
    return frozenset(index for index, node in enumerate(graph.nodes) if node.name in wanted)


def _listed(graph: Graph, indices: Sequence[int]) -> frozenset[int]:
    for index in indices:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(graph):
            raise ValueError(f"mode: {index!r} is not the index of a node (0 to {len(graph) - 1})")
    return frozenset(indices)
