"""Stage 1: a Python training step becomes one optimised graph with static shapes.

TensorFlow would run Grappler over the step before executing it, and what
Grappler does moves the last digits of the results.  So it runs here, once,
with the settings in force, and everything downstream works on what it
returns; the lowered function runs with Grappler off.  The lowered step is then
made of the very operations that the plain ``tf.function`` would have run.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2, types_pb2
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2
from tensorflow.python.eager import context
from tensorflow.python.framework import function_def_to_graph, kernels
from tensorflow.python.grappler import tf_optimizer

from .executor import execution_order

_HANDLE = "/remat_handle"  # suffix of the stand-in for an argument's variable
_SHAPES = "_output_shapes"  # TensorFlow's own name
# Only Python knows the shapes of these, and Grappler forgets them.
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_UNINFERABLE = ("EagerPyFunc", "PyFunc", *_CALLS)
_numbers = itertools.count()


class TraceError(ValueError):
    """The step cannot be traced into one graph with static shapes."""


@dataclass(frozen=True)
class Trace:
    """A traced step.

    Attributes:
      graph_def: the optimised graph.  Inputs are ``Placeholder`` nodes,
        captured variables ``VarHandleOp`` nodes (so that their shapes are
        known to anyone who reads the graph).
      graph: the same graph imported, for shapes, dtypes and op definitions.
      inputs: node names of the step's arguments, in flattened order.
      captures: what the step captured: (node name, external tensor).
      outputs: tensor names of the flattened results.
      targets: node names that must run although nothing reads them.
      structured_outputs: nest of results, whose leaves index ``outputs``.
      plain: the plain concrete function, which the step is compared with.
    """

    graph_def: graph_pb2.GraphDef
    graph: tf.Graph
    inputs: tuple[str, ...]
    captures: tuple[tuple[str, tf.Tensor], ...]
    outputs: tuple[str, ...]
    targets: tuple[str, ...]
    structured_outputs: Any
    plain: Any


def trace(
    function: Callable[..., Any],
    input_signature: Sequence[Any],
    *,
    autograph: bool = False,
    traced_for: Sequence[Any] | None = None,
) -> Trace:
    """Traces ``function`` for arguments of the given ``tf.TensorSpec`` nests.

    Args:
      function: the step.
      input_signature: the shapes that it will run on.
      autograph: whether its Python control flow over tensors is converted.
      traced_for: what the plain step is traced for, where that leaves
        dimensions open.  Grappler does other things to a graph whose shapes it
        does not know, and results differ in the last digits; so the step is
        optimised for these shapes, and only then told its real ones.

    Raises:
      TraceError: if an argument's shape is not static.
    """
    for spec in tf.nest.flatten(list(input_signature)):
        if not isinstance(spec, tf.TensorSpec):
            raise TraceError(f"{spec!r} is not supported: remat needs dense tensors")
        if not spec.shape.is_fully_defined():
            raise TraceError(
                f"the input {spec.name or spec} has the shape {spec.shape}; a plan is for fixed "
                "shapes: give every dimension, the batch included"
            )
    traced = tf.function(function, autograph=autograph, jit_compile=False)
    plain = traced.get_concrete_function(*(traced_for or input_signature))
    source = plain.graph
    captured = source.captures  # (external, placeholder) pairs
    arguments = source.inputs[: len(source.inputs) - len(captured)]

    graph_def = source.as_graph_def(add_shapes=True)
    nodes = {node.name: node for node in graph_def.node}
    values = [*arguments]
    for external, placeholder in captured:
        if external.dtype in (tf.resource, tf.variant):
            _describe_variable(nodes[placeholder.op.name], external)
        else:
            values.append(placeholder)
    for tensor in values:
        _describe_value(graph_def, nodes[tensor.op.name], tensor.shape)
    _describe_gradients(source, nodes)
    keep = [tensor.op.name for tensor in source.inputs]
    outputs = [tensor.name for tensor in source.outputs]
    targets = [op.name for op in source.control_outputs]
    optimised = _grappler(graph_def, [*keep, *outputs, *targets])
    shapes = {tensor.op.name: tensor.shape for tensor in values}
    for tensor, spec in zip(arguments, tf.nest.flatten(list(input_signature)), strict=True):
        shapes[tensor.op.name] = spec.shape
    for node in optimised.node:
        if node.name in shapes:
            _restore_value(node, shapes[node.name])
        elif node.op in _UNINFERABLE and node.name in nodes:
            node.attr[_SHAPES].CopyFrom(nodes[node.name].attr[_SHAPES])
    _bypass_loops(optimised)
    _rename_functions(optimised)

    return Trace(
        graph_def=optimised,
        graph=_imported(optimised),
        inputs=tuple(tensor.op.name for tensor in arguments),
        captures=tuple((inner.op.name, external) for external, inner in captured),
        outputs=tuple(outputs),
        targets=tuple(targets),
        structured_outputs=plain.structured_outputs,
        plain=plain,
    )


def _imported(graph_def: graph_pb2.GraphDef) -> tf.Graph:
    """The graph with shapes, those of what functions return included."""
    library = {function.signature.name: function for function in graph_def.library.function}
    nodes = {node.name: node for node in graph_def.node}
    while True:
        graph = tf.Graph()
        with graph.as_default():
            tf.graph_util.import_graph_def(graph_def, name="")
        found = False
        for operation in graph.get_operations():
            if operation.type not in _CALLS or _static(operation.outputs):
                continue
            if not _static(operation.inputs):
                continue
            body = function_def_to_graph.function_def_to_graph(
                library[operation.get_attr("f").name],
                input_shapes=[tensor.shape for tensor in operation.inputs],
            )
            if _static(body.outputs):
                shapes = nodes[operation.name].attr[_SHAPES].list.shape
                del shapes[:]
                shapes.extend(tensor.shape.as_proto() for tensor in body.outputs)
                found = True
        if not found:
            return graph


def _static(tensors: Sequence[tf.Tensor]) -> bool:
    return all(tensor.shape.is_fully_defined() for tensor in tensors)


def _describe_variable(node: Any, external: tf.Tensor) -> None:
    """Turns the placeholder of a captured variable into a ``VarHandleOp``.

    The runtime tells Grappler the shapes behind resource arguments; a bare
    placeholder would not.
    """
    handle = getattr(external, "_handle_data", None)
    if external.dtype != tf.resource or handle is None or not handle.is_set:
        return
    (data,) = handle.shape_and_type
    node.op = "VarHandleOp"
    node.attr.clear()
    node.attr["dtype"].type = data.dtype
    node.attr["shape"].shape.CopyFrom(data.shape)
    node.attr["shared_name"].s = node.name.encode()


def _describe_value(
    graph_def: graph_pb2.GraphDef, node: node_def_pb2.NodeDef, shape: tf.TensorShape
) -> None:
    """Turns the placeholder of an argument, or of a tensor that the step captured,
    into the read of a variable of its shape.

    Grappler forgets the shapes of placeholders, because they can be fed; in
    the runtime it knows those of a function's arguments.
    """
    dtype = node.attr["dtype"].type
    handle = graph_def.node.add(name=f"{node.name}{_HANDLE}", op="VarHandleOp")
    handle.attr["dtype"].type = dtype
    handle.attr["shape"].shape.CopyFrom(shape.as_proto())
    handle.attr["shared_name"].s = handle.name.encode()
    node.op = "ReadVariableOp"
    node.input.append(handle.name)
    node.attr.clear()
    node.attr["dtype"].type = dtype


def _describe_gradients(graph: tf.Graph, nodes: dict[str, node_def_pb2.NodeDef]) -> None:
    """Gives gradients of Python functions the shapes of what they are the gradients of.

    TensorFlow runs the gradient of a ``tf.py_function`` as one, after it and
    under its name, and says nothing of shapes.
    """
    for operation in graph.get_operations():
        if operation.type != "EagerPyFunc":
            continue
        for forward in operation.control_inputs:
            if (
                forward.type == "EagerPyFunc"
                and operation.name.startswith(f"gradient_tape/{forward.name}")
                and [t.dtype for t in operation.outputs] == [t.dtype for t in forward.inputs]
            ):
                shapes = [tensor.shape.as_proto() for tensor in forward.inputs]
                del nodes[operation.name].attr[_SHAPES].list.shape[:]
                nodes[operation.name].attr[_SHAPES].list.shape.extend(shapes)


def _restore_value(node: node_def_pb2.NodeDef, shape: tf.TensorShape) -> None:
    restored = node_def_pb2.NodeDef(name=node.name, op="Placeholder", device=node.device)
    restored.attr["dtype"].type = node.attr["dtype"].type
    restored.attr["shape"].shape.CopyFrom(shape.as_proto())
    node.CopyFrom(restored)


def _bypass_loops(graph_def: graph_pb2.GraphDef) -> None:
    """What reads a variable's handle after a loop, reads the one before it.

    A loop returns every handle that it takes, but not the shape behind it.
    """
    handles = {
        f"{node.name}:{number}": node.input[number]
        for node in graph_def.node
        if node.op in ("While", "StatelessWhile")
        for number, kind in enumerate(node.attr["T"].list.type)
        if kind == types_pb2.DT_RESOURCE
    }
    for node in graph_def.node:
        for slot, name in enumerate(node.input):
            while name in handles:
                name = handles[name]
            node.input[slot] = name


def _rename_functions(graph_def: graph_pb2.GraphDef) -> None:
    """Gives the functions that operations call names that no other step has.

    Grappler makes variants of functions, under names that may be those of
    other variants, made for another step.
    """
    number = next(_numbers)
    functions = graph_def.library.function
    names = {f.signature.name: f"{f.signature.name}_{number}" for f in functions}
    for function in functions:
        function.signature.name = names[function.signature.name]
    for node in [*graph_def.node, *(node for f in functions for node in f.node_def)]:
        node.op = names.get(node.op, node.op)
        for value in node.attr.values():
            called = list(value.list.func)
            if value.HasField("func"):
                called.append(value.func)
            for function in called:
                function.name = names.get(function.name, function.name)


def _grappler(graph_def: graph_pb2.GraphDef, keep: Sequence[str]) -> graph_pb2.GraphDef:
    """Runs Grappler with the settings in force, keeping the named nodes."""
    config = config_pb2.ConfigProto()
    config.CopyFrom(context.context().config)
    # Conditionals and loops stay whole: in pieces (switches and merges, which
    # the runtime makes of them later) they could not be scheduled.  Grappler
    # breaks them up unless this executor runs them; the name does nothing else.
    config.experimental.executor_type = "SINGLE_THREADED_EXECUTOR"
    if config.graph_options.rewrite_options.disable_meta_optimizer:
        return graph_def
    meta_graph = meta_graph_pb2.MetaGraphDef()
    meta_graph.graph_def.CopyFrom(graph_def)
    meta_graph.collection_def["train_op"].node_list.value.extend(keep)
    asked = {node.name: node.device for node in graph_def.node}
    default = tf.config.list_logical_devices()[0].name
    accelerators = tf.config.list_logical_devices("GPU")
    device = accelerators[0].name if accelerators else default
    for node in meta_graph.graph_def.node:
        # Some rewrites (convolution + bias) want to know the device; the
        # runtime has placed every node by the time Grappler runs.
        if not node.device:
            node.device = device if _runs_on(node.op, device) else default
    optimised = tf_optimizer.OptimizeGraph(config, meta_graph)
    for node in optimised.node:
        node.device = asked.get(node.name, "")
    return _restore_sums(optimised)


def _restore_sums(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """Turns sums by accumulation into a temporary variable back into ``AddN``.

    Grappler's memory optimizer makes those by a guess of the peak.  They would
    hold a buffer from the first term to the last; memory is this project's own
    business.  The terms are added in the order in which the plain step, on one
    thread, accumulates them, so that the sum has the same bits.
    """
    sums = [node for node in graph_def.node if node.op == "DestroyTemporaryVariable"]
    if not sums:
        return graph_def
    number = {node.name: i for i, node in enumerate(graph_def.node)}
    producers = [
        [number[name.lstrip("^").split(":")[0]] for name in node.input] for node in graph_def.node
    ]
    order = execution_order([node.op for node in graph_def.node], producers)
    rank = {node: position for position, node in enumerate(order)}
    removed = set()
    for total in sums:
        (variable,) = (name for name in total.input if not name.startswith("^"))
        terms = [graph_def.node[i] for i in producers[number[total.name]]]
        terms = [term for term in terms if term.op == "AssignAdd"]
        terms.sort(key=lambda term: rank[number[term.name]])
        chain = [graph_def.node[number[variable.split(":")[0]]]]
        while chain[-1].op != "TemporaryVariable":  # Assign: variable, zeros
            chain += [graph_def.node[i] for i in producers[number[chain[-1].name]][::-1]]
        removed |= {node.name for node in [*terms, *chain]}
        inputs = [term.input[1] for term in terms]
        name, dtype = total.name, total.attr["T"].type
        total.Clear()
        total.name, total.op = name, "AddN"
        total.input.extend(inputs)
        total.attr["N"].i, total.attr["T"].type = len(inputs), dtype
    kept = [node for node in graph_def.node if node.name not in removed]
    del graph_def.node[:]
    graph_def.node.extend(kept)
    return graph_def


@functools.cache
def _runs_on(operation: str, device: str) -> bool:
    kind = tf.DeviceSpec.from_string(device).device_type
    kernels_found = kernels.get_registered_kernels_for_op(operation).kernel
    return any(kernel.device_type == kind for kernel in kernels_found)
