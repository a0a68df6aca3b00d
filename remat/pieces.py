"""What control flow in pieces is made whole with (``loops``, ``conditionals``).

Before TensorFlow optimises a step it breaks loops and conditionals into pieces
(``Enter``, ``Merge``, ``Switch``, ``NextIteration``, ``Exit``; Yu et al.,
"Dynamic Control Flow in Large-Scale Machine Learning", EuroSys 2018), and it
rewrites arithmetic across them: the last digits of what they compute depend
on it.  A graph in pieces cannot be scheduled, though: which of its operations
run, and how often, is known only while it runs.  So after the same rewriting
each loop and each conditional becomes one operation again, of the very
operations that are left.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.framework.node_def_pb2 import NodeDef
from tensorflow.python.framework import graph_to_function_def, op_def_registry

# TensorFlow's own names: to be broken into pieces; shapes, and those of variables.
LOWERED = "_lower_using_switch_merge"
SHAPES = "_output_shapes"
# Only Python knows the shapes of what these return, and Grappler forgets them.
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
UNINFERABLE = ("EagerPyFunc", "PyFunc", *CALLS)
MakeWhole = Callable[[graph_pb2.GraphDef, Sequence[str]], graph_pb2.GraphDef]
_HANDLE = {"_handle_dtypes", "_handle_shapes"}


class UnknownFormError(Exception):
    """Control flow in pieces is not of the form that TensorFlow breaks it into."""


def parted(reference: str) -> tuple[str, int]:
    """The node and the output that a node reads; -1 for a control edge."""
    if reference.startswith("^"):
        return reference[1:], -1
    name, _, number = reference.partition(":")
    return name, int(number or 0)


def name_of(reference: str) -> str:
    """The node that a node of a graph or a function reads."""
    return reference.removeprefix("^").partition(":")[0]


def constant_node(name: str, array: np.ndarray) -> NodeDef:
    """The node of a constant."""
    node = NodeDef(name=name, op="Const")
    node.attr["dtype"].type = tf.dtypes.as_dtype(array.dtype).as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(array))
    return node


def has_pieces(nodes: Iterable[NodeDef]) -> bool:
    """Whether loops or conditionals among the nodes of a function are in pieces: what waits
    for an operation in one might wait for what never runs."""
    return any(node.op in ("Enter", "Switch", "_SwitchN") for node in nodes)


def runs(node: NodeDef) -> list[str]:
    """The names of the functions that a node runs, its own type among them: it may be one."""
    attributes = node.attr.values()
    called = [f.name for value in attributes for f in (value.func, *value.list.func)]
    return [node.op, *filter(None, called)]


def readers(graph_def: graph_pb2.GraphDef) -> dict[str, list[NodeDef]]:
    """What reads each node, once for each edge."""
    found: dict[str, list[NodeDef]] = {node.name: [] for node in graph_def.node}
    for node in graph_def.node:
        for reference in node.input:
            found[parted(reference)[0]].append(node)
    return found


def in_order(graph_def: graph_pb2.GraphDef) -> list[NodeDef]:
    """The nodes, each after those that it reads.

    Raises:
      UnknownFormError: if there is a cycle.
    """
    reading = readers(graph_def)
    missing = {node.name: len(node.input) for node in graph_def.node}
    ready = deque(node for node in graph_def.node if not node.input)
    order = []
    while ready:
        order.append(ready.popleft())
        for reader in reading[order[-1].name]:
            missing[reader.name] -= 1
            if not missing[reader.name]:
                ready.append(reader)
    if len(order) < len(graph_def.node):
        raise UnknownFormError("a cycle")
    return order


def acts(node: NodeDef, graph_def: graph_pb2.GraphDef) -> bool:
    """Whether it matters that an operation runs, and how often."""
    if node.op in ("ReadVariableOp", "VariableShape"):
        return False
    definition = op_def_registry.get(node.op)
    if definition is not None:
        return definition.is_stateful
    (called,) = (f.signature for f in graph_def.library.function if f.signature.name == node.op)
    return called.is_stateful


def as_function(
    name: str,
    graph_def: graph_pb2.GraphDef,
    inside: Mapping[str, NodeDef],
    arguments: Sequence[tuple[str, int]],
    within: Callable[[Iterable[str]], list[str]],
    results: Iterable[str],
    targets: Collection[str],
    device: str,
    make_whole: MakeWhole | None = None,
) -> list[FunctionDef]:
    """A function of what some tensors in a graph need, and of nodes that are to run as well.

    Args:
      name: of the function.
      graph_def: the graph, which has the operations outside of the function, too.
      inside: the nodes that may be part of it, by name.
      arguments: of each argument, its type and the node that it comes from.
      within: what a node reads, as the same node of the function reads it;
        an argument is ``argument_0:0`` and so on.
      results: the tensors.
      targets: the names of the nodes.
      device: where everything is that does not say otherwise.
      make_whole: ``conditionals.make_whole``, for those in the function; without it, or where
        one is not of the form that it expects, they stay in pieces.

    Returns:
      The function, and then the branches of what was made whole in it.
    """
    part = graph_pb2.GraphDef(library=graph_def.library, versions=graph_def.versions)
    sources = {node.name: node for node in graph_def.node}
    for number, (source, kind) in enumerate(arguments):
        node = part.node.add(name=f"argument_{number}", op="_Arg")
        node.attr["T"].type, node.attr["index"].i = kind, number
        for attribute in _HANDLE.intersection(sources[source].attr):
            node.attr[attribute].CopyFrom(sources[source].attr[attribute])
    results = within(results)
    needed = {node.name for node in part.node}
    waiting = [*results, *targets]
    while waiting:
        found, _ = parted(waiting.pop())
        if found in needed:
            continue
        needed.add(found)
        node = part.node.add()
        node.CopyFrom(inside[found])
        for attribute in ("_class", SHAPES):  # of the pieces
            node.attr.pop(attribute, None)
        if node.device == device:
            node.device = ""
        del node.input[:]
        node.input.extend(within(inside[found].input))
        waiting += node.input
    graph = _imported(part)
    if make_whole is not None:
        with contextlib.suppress(UnknownFormError):
            part, results, targets = _with_whole(part, graph, results, targets, make_whole)
            graph = _imported(part)
    tensor = graph.get_tensor_by_name
    made = graph_to_function_def.graph_to_function_def(
        graph,
        [operation for operation in graph.get_operations() if operation.type != "_Arg"],
        [tensor(f"argument_{number}:0") for number in range(len(arguments))],
        [tensor("{}:{}".format(*parted(result))) for result in results],
    )
    made.signature.name = name.replace("/", "_")
    for node in made.node_def:  # what is known of variables' shapes would be forgotten
        shapes = [t.shape.as_proto() for t in graph.get_operation_by_name(node.name).outputs]
        node.attr[SHAPES].list.shape.extend(shapes)
    for target in targets:
        made.signature.control_output.append(target)
        made.control_ret[target] = target
    return [made, *part.library.function[len(graph_def.library.function) :]]


def _imported(part: graph_pb2.GraphDef) -> tf.Graph:
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(part, name="")
    return graph


def _with_whole(
    part: graph_pb2.GraphDef,
    graph: tf.Graph,
    results: Sequence[str],
    targets: Iterable[str],
    make_whole: MakeWhole,
) -> tuple[graph_pb2.GraphDef, list[str], list[str]]:
    """A graph with whole conditionals, and how its results and targets are called in it."""
    read = graph_pb2.GraphDef()
    read.CopyFrom(part)
    for number, result in enumerate(results):
        node = read.node.add(name=f"result_{number}", op="Identity", input=[result])
        tensor = graph.get_tensor_by_name("{}:{}".format(*parted(result)))
        node.attr["T"].type = tensor.dtype.as_datatype_enum
    read.node.extend(
        NodeDef(name=f"end_{number}", op="NoOp", input=[f"^{target}"])
        for number, target in enumerate(targets)
    )
    ends = [node.name for node in read.node[len(part.node) :]]
    whole = make_whole(read, ends)
    found = {node.name: node.input[0] for node in whole.node if node.name in ends}
    kept = [node for node in whole.node if node.name not in found]
    del whole.node[:]
    whole.node.extend(kept)
    named = [found[name] for name in ends]
    return whole, named[: len(results)], [*dict.fromkeys(map(name_of, named[len(results) :]))]
