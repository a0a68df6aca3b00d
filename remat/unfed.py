"""What a step does where its arguments never come.

Keras takes a batch inside the graph of its step.  Where it does not know how
many there are, it looks for one more after the last, and whatever does not
wait for a batch (seeds, the optimizer's count of steps, weight decay) happens
once more.  Later epochs start from that.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.framework.node_def_pb2 import NodeDef

from .allocator import UNWRITTEN
from .generators import is_draw
from .loops import frames
from .lower import as_written, register
from .pieces import acts, as_function, name_of, parted, readers

_ARGUMENTS = ("_Arg", UNWRITTEN)
_numbers = itertools.count()


@dataclass(frozen=True)
class Unfed:
    """The effects of a step that wait for none of its arguments.

    Attributes:
      function: has them; called: what it calls.
      captures: what it takes: names of nodes of the step.
    """

    function: FunctionDef
    called: tuple[FunctionDef, ...]
    captures: tuple[str, ...]

    def run(self, values: Mapping[str, tf.Tensor]) -> None:
        """Has the effects, given the captures."""
        for function in (*self.called, self.function):
            register(function)
        tf.raw_ops.StatefulPartitionedCall(
            args=[values[capture] for capture in self.captures],
            Tout=[],
            f=self.function.signature.name,
            config_proto=as_written(),
        )


def unfed(graph_def: graph_pb2.GraphDef, arguments: Sequence[str]) -> Unfed:
    """Finds the effects of a step that wait for none of its arguments.

    Those inside functions that it calls are left out, but for draws (``generators``).

    Args:
      graph_def: the step as it would run, optimised and in pieces.
      arguments: names of nodes.
    """
    waiting = _waiting(graph_def, arguments)
    functions = {function.signature.name for function in graph_def.library.function}
    nodes = {
        node.name: _first_only(node, waiting) for node in graph_def.node if node.name not in waiting
    }
    captures = [node for node in nodes.values() if node.op in _ARGUMENTS]
    places = {node.name: f"argument_{place}" for place, node in enumerate(captures)}

    def within(references: Iterable[str]) -> list[str]:
        return [
            reference.replace(name, places.get(name, name), 1)
            for reference, (name, _) in zip(references, map(parted, references), strict=True)
        ]

    (function,) = as_function(
        f"remat_unfed_{next(_numbers)}",
        graph_def,
        nodes,
        [(node.name, node.attr["T" if "T" in node.attr else "dtype"].type) for node in captures],
        within,
        [],
        [
            node.name
            for node in nodes.values()
            if node.name not in places
            and acts(node, graph_def)
            and (
                is_draw(node)
                or not any(value.func.name in functions for value in node.attr.values())
            )
            and node.op not in functions
        ],
        device="",
    )
    function.attr["_noinline"].b = True  # or the effects in loops and branches would have to end
    names = {node.attr["f"].func.name for node in function.node_def if is_draw(node)}
    called = [f for f in graph_def.library.function if f.signature.name in names]
    return Unfed(function, tuple(called), tuple(places))


def _waiting(graph_def: graph_pb2.GraphDef, arguments: Sequence[str]) -> set[str]:
    """The nodes that wait for an argument.

    What changes from turn to turn of a loop is there in the first turn if what goes in is.
    """
    nodes = {node.name: node for node in graph_def.node}
    reading = readers(graph_def)
    waiting, left = set(arguments), [*arguments]
    while left:
        name = left.pop()
        for reader in reading[name]:
            goes_on = nodes[name].op == "NextIteration" and reader.op == "Merge"
            if reader.name not in waiting and not goes_on:
                waiting.add(reader.name)
                left.append(reader.name)
    # Of a loop whose turns do not overlap there is no second turn, then.
    inside = frames(graph_def)
    unended = {frame for name in waiting for frame in inside[name]}
    overlapping = {
        node.attr["frame_name"].s.decode()
        for node in graph_def.node
        if node.op == "Enter" and node.attr["parallel_iterations"].i > 1
    }
    waiting.update(
        node.name
        for node in graph_def.node
        if node.op == "NextIteration" and inside[node.name][-1] in unended - overlapping
    )
    return waiting


def _first_only(node: NodeDef, waiting: Collection[str]) -> NodeDef:
    """A node without what it would read from an earlier turn of a loop, if that waits."""
    there = [reference for reference in node.input if name_of(reference) not in waiting]
    if len(there) == len(node.input):
        return node
    first = NodeDef()
    first.CopyFrom(node)
    del first.input[:]
    first.input.extend(there)
    first.attr["N"].i = 1
    return first
