"""The graph that solvers see, and its file format.

A graph is a directed acyclic graph of operations.  Each node has a cost in
seconds, one output of a number of bytes that every consumer reads, and the
workspace bytes it holds only while it runs.  Nothing here knows about
TensorFlow.

File format ``remat-graph/1`` (JSON)::

    {"format": "remat-graph/1", "name": "vgg16",
     "nodes": [{"name": "conv1", "cost": 0.01, "bytes": 4096,
                "workspace": 0, "recomputable": true, "backward": false,
                "forward": 0}, ...],
     "edges": [[0, 1], ...],
     "resident": 0, "outputs": [7], "order": [[3, 9]]}

Only ``name``, ``nodes`` (``cost``, ``bytes``) and ``edges`` are required.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from .budget import LARGEST
from .files import read_json, write_json

FORMAT = "remat-graph/1"

_LIKE = 0.8  # another key of a file that is so similar to one that is read is misspelt

_DEAREST = 1e200  # seconds of a node: sums stay finite ...
_CHEAPEST = 1e-305  # ... and shares of them, too


class GraphError(ValueError):
    """A graph, or a file that should hold one, is not valid."""


@dataclass(frozen=True, slots=True)
class Node:
    """One operation, or a group of operations that is computed as one.

    Attributes:
      name: for people; need not be unique.
      cost: seconds to run it once (any unit works, if all nodes use it).
      bytes: bytes of its output.
      workspace: bytes it needs beside inputs and output while it runs.
      recomputable: False if it must run exactly once.
      backward: True if it belongs to the backward pass.
      forward: index of the predecessor whose buffer the output takes over
        when this run is that value's last use (in-place execution), or None.
        Both have the same number of bytes.
    """

    name: str
    cost: float
    bytes: int
    workspace: int = 0
    recomputable: bool = True
    backward: bool = False
    forward: int | None = None


@dataclass(frozen=True)
class Graph:
    """A validated DAG.

    Attributes:
      name: for people.
      nodes: in a topological order of ``edges`` and ``order``.
      edges: pairs ``(producer, consumer)``, without duplicates.
      resident: bytes held throughout (weights, optimizer state, batch).
      outputs: nodes whose value is held to the end.  Other sinks are freed
        as soon as they are computed.
      order: pairs ``(reader, writer)``: every copy of ``reader`` comes before
        the one run of ``writer`` (which is not recomputable), because the
        writer overwrites what the reader reads.

    Raises:
      GraphError: naming the first thing that is wrong.
    """

    name: str
    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]
    resident: int = 0
    outputs: tuple[int, ...] = ()
    order: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        # Files and callers repeat edges (a node that reads a value twice).
        object.__setattr__(self, "edges", tuple(dict.fromkeys(self.edges)))
        object.__setattr__(self, "outputs", tuple(dict.fromkeys(self.outputs)))
        object.__setattr__(self, "order", tuple(dict.fromkeys(self.order)))
        _check(self)

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the nodes whose values it reads."""
        return _adjacency(len(self.nodes), ((b, a) for a, b in self.edges))

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the nodes that read its value."""
        return _adjacency(len(self.nodes), self.edges)

    @cached_property
    def cost(self) -> float:
        """Seconds to run every node once."""
        return math.fsum(node.cost for node in self.nodes)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of what makes a schedule legal and how its values are held.

        Names, costs, workspace and resident bytes are left out: measured anew,
        they differ a little, and a plan is still a plan for the same graph.
        """
        content = [
            [[node.bytes, node.recomputable, node.forward] for node in self.nodes],
            sorted(self.edges),
            sorted(self.outputs),
            sorted(self.order),
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @cached_property
    def priced_fingerprint(self) -> str:
        """A digest of all that decides what a schedule costs and holds; names do not."""
        content = [
            self.fingerprint,
            [[node.cost, node.workspace] for node in self.nodes],
            self.resident,
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def reordered(self, order: Sequence[int]) -> Graph:
        """The same graph with its nodes in another topological order: node ``order[i]``
        becomes node i.

        Raises:
          GraphError: if the order is none.
        """
        if sorted(order) != list(range(len(self))):
            raise GraphError(f"an order of {self.name} has each of its {len(self)} nodes once")
        place = {index: position for position, index in enumerate(order)}
        return Graph(
            name=self.name,
            nodes=tuple(
                node if node.forward is None else replace(node, forward=place[node.forward])
                for node in (self.nodes[index] for index in order)
            ),
            edges=tuple((place[a], place[b]) for a, b in self.edges),
            resident=self.resident,
            outputs=tuple(place[index] for index in self.outputs),
            order=tuple((place[a], place[b]) for a, b in self.order),
        )

    def to_json(self) -> dict[str, Any]:
        """The graph as a ``remat-graph/1`` document."""
        nodes = []
        for node in self.nodes:
            entry: dict[str, Any] = {"name": node.name, "cost": node.cost, "bytes": node.bytes}
            if node.workspace:
                entry["workspace"] = node.workspace
            if not node.recomputable:
                entry["recomputable"] = False
            if node.backward:
                entry["backward"] = True
            if node.forward is not None:
                entry["forward"] = node.forward
            nodes.append(entry)
        document: dict[str, Any] = {
            "format": FORMAT,
            "name": self.name,
            "nodes": nodes,
            "edges": [list(edge) for edge in self.edges],
        }
        if self.resident:
            document["resident"] = self.resident
        if self.outputs:
            document["outputs"] = list(self.outputs)
        if self.order:
            document["order"] = [list(pair) for pair in self.order]
        return document

    @staticmethod
    def from_json(document: Any) -> Graph:
        """Reads a ``remat-graph/1`` document.

        Raises:
          GraphError: if it is not one; the message says where.
        """
        if not isinstance(document, Mapping):
            raise GraphError(f"a graph is a JSON object, not {type(document).__name__}")
        if document.get("format", FORMAT) != FORMAT:
            raise GraphError(f"format is {document['format']!r}; this version reads {FORMAT!r}")
        for key in ("name", "nodes", "edges"):
            if key not in document:
                raise GraphError(f"the graph has no {key!r}")
        _warn_of_misspelt(document, _KEYS, "the graph")
        name = document["name"]
        if not isinstance(name, str):
            raise GraphError(f"name must be text, not {name!r}")
        nodes = tuple(
            _node(index, entry) for index, entry in enumerate(_list(document["nodes"], "nodes"))
        )
        return Graph(
            name=name,
            nodes=nodes,
            edges=_pairs(document["edges"], "edges"),
            resident=document.get("resident", 0),
            outputs=_indices(document.get("outputs", [])),
            order=_pairs(document.get("order", []), "order"),
        )


_KEYS = ("format", *(key.name for key in fields(Graph)))
_NODE_KEYS = tuple(key.name for key in fields(Node))


def load_graph(path: str | os.PathLike[str]) -> Graph:
    """Reads a graph file.

    Raises:
      GraphError: naming the file and what is wrong with it.
      OSError: if it cannot be read.
    """
    document = read_json(path, GraphError)
    try:
        return Graph.from_json(document)
    except GraphError as error:
        raise GraphError(f"{path}: {error}") from None


def save_graph(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Writes a graph file; the old file stays whole until the new one is."""
    write_json(graph.to_json(), path)


def _adjacency(count: int, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    lists: list[list[int]] = [[] for _ in range(count)]
    for a, b in pairs:
        lists[a].append(b)
    return tuple(tuple(sorted(items)) for items in lists)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(graph: Graph) -> None:
    """Every check of a graph, in one place."""
    count = len(graph.nodes)
    if count == 0:
        raise GraphError("the graph has no nodes")
    for name in (graph.name, *(node.name for node in graph.nodes)):
        try:
            name.encode()
        except UnicodeEncodeError:
            raise GraphError(
                f"the name {name!a} has half a character, which no file holds"
            ) from None
    for index, node in enumerate(graph.nodes):
        where = f"node {index} ({node.name})"
        if not isinstance(node.cost, (int, float)) or isinstance(node.cost, bool):
            raise GraphError(f"{where}: cost must be a number of seconds, not {node.cost!r}")
        if not 0 <= node.cost <= _DEAREST:
            raise GraphError(f"{where}: cost is {node.cost}; it must be finite and not negative")
        for key in ("bytes", "workspace"):
            value = getattr(node, key)
            if not _is_integer(value) or value < 0:
                raise GraphError(f"{where}: {key} must be a whole number >= 0, not {value!r}")
            if value > LARGEST:
                raise GraphError(f"{where}: {key} has {value.bit_length()} bits, too many")
        for key in ("recomputable", "backward"):
            if not isinstance(getattr(node, key), bool):
                raise GraphError(f"{where}: {key} must be true or false")
    if 0 < graph.cost < _CHEAPEST:
        raise GraphError(
            f"the costs add up to {graph.cost}, too little to compare; write them in another unit"
        )
    if not _is_integer(graph.resident) or not 0 <= graph.resident <= LARGEST:
        raise GraphError(f"resident must be a whole number >= 0, not {graph.resident!r:.40}")
    for index in graph.outputs:
        if not _is_integer(index) or not 0 <= index < count:
            raise GraphError(f"outputs: {index!r} is not a node (there are {count})")
    for kind, pairs in (("edges", graph.edges), ("order", graph.order)):
        for a, b in pairs:
            if not (_is_integer(a) and _is_integer(b) and 0 <= a < count and 0 <= b < count):
                raise GraphError(f"{kind}: {[a, b]} does not join two of the {count} nodes")
            if a >= b:
                raise GraphError(
                    f"{kind}: {[a, b]} points backwards; nodes must be listed in a "
                    "topological order (is the graph cyclic?)"
                )
    for _, writer in graph.order:
        if graph.nodes[writer].recomputable:
            raise GraphError(
                f"order: node {writer} overwrites a value, so it cannot be recomputable"
            )
    edges = set(graph.edges)
    for index, node in enumerate(graph.nodes):
        if node.forward is None:
            continue
        if not _is_integer(node.forward) or (node.forward, index) not in edges:
            raise GraphError(
                f"node {index} ({node.name}): forward is {node.forward!r}, not one of its inputs"
            )
        if graph.nodes[node.forward].bytes != node.bytes:
            raise GraphError(
                f"node {index} ({node.name}): forward needs an input of the same bytes"
            )


def _list(value: Any, what: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise GraphError(f"{what} must be a list, not {type(value).__name__}")
    return value


def _indices(value: Any) -> tuple[int, ...]:
    for entry in _list(value, "outputs"):
        if not _is_integer(entry):
            raise GraphError(f"outputs: {entry!r} is not the index of a node")
    return tuple(value)


def _pairs(value: Any, what: str) -> tuple[tuple[int, int], ...]:
    pairs = []
    for entry in _list(value, what):
        if not isinstance(entry, list) or len(entry) != 2:
            raise GraphError(f"{what}: {entry!r} is not a pair of node indices")
        pairs.append((entry[0], entry[1]))
    try:
        return tuple(dict.fromkeys(pairs))
    except TypeError:
        raise GraphError(f"{what}: a pair does not hold node indices") from None


def _node(index: int, entry: Any) -> Node:
    if not isinstance(entry, Mapping):
        raise GraphError(f"node {index}: must be an object, not {type(entry).__name__}")
    for key in ("cost", "bytes"):
        if key not in entry:
            raise GraphError(f"node {index}: has no {key!r}")
    _warn_of_misspelt(entry, _NODE_KEYS, f"node {index}")
    name = entry.get("name", index)
    if not isinstance(name, (str, int, float)):
        raise GraphError(f"node {index}: name must be text, not {name!r:.40}")
    return Node(
        name=str(name),
        cost=entry["cost"],
        bytes=entry["bytes"],
        workspace=entry.get("workspace", 0),
        recomputable=entry.get("recomputable", True),
        backward=entry.get("backward", False),
        forward=entry.get("forward"),
    )


def _warn_of_misspelt(entry: Mapping[Any, Any], known: Sequence[str], where: str) -> None:
    """Other keys are the business of whoever wrote them, unless they look like ours."""
    for key in entry:
        if key in known or not isinstance(key, str):
            continue
        meant = difflib.get_close_matches(key, known, n=1, cutoff=_LIKE)
        if meant:
            warnings.warn(f"{where}: {key!r} is not read; is it {meant[0]!r}?", stacklevel=2)
