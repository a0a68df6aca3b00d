"""Stage 1: a Python training step becomes one optimised graph with static shapes.

TensorFlow would run Grappler over the step before executing it, and what
Grappler does moves the last digits of the results.  So it runs here, once,
with the settings in force, and everything downstream works on what it
returns; the lowered function runs with Grappler off.  The lowered step is then
made of the very operations that the plain ``tf.function`` would have run.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import (
    attr_value_pb2,
    function_pb2,
    graph_pb2,
    node_def_pb2,
    tensor_shape_pb2,
    types_pb2,
)
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager import context
from tensorflow.python.framework import function_def_to_graph, kernels, smart_cond
from tensorflow.python.ops import handle_data_util

from . import conditionals, inline, loops
from .allocator import UNWRITTEN
from .executor import ONE_BY_ONE, execution_order
from .generators import Generators, is_draw, shapes_drawn, share
from .native import name_fused_convolutions
from .notices import warn
from .pieces import CALLS, SHAPES, UnknownFormError, name_of

_ARGUMENT, _RESULT = "_Arg", "_Retval"  # operations of a function's graph
_ANY_LENGTH = tf.TensorShape([None])  # of a list
_COUNTING = ("Where", "Unique", "ListDiff", "DynamicPartition", "NonMaxSuppression")
_HANDLE_DTYPES, _HANDLE_SHAPES = "_handle_dtypes", "_handle_shapes"  # TensorFlow's own names
Source = type[tf.data.IteratorSpec] | type[tf.OptionalSpec]
"""What a training loop takes a batch from inside its graph."""

_numbers = itertools.count()
_here = threading.local()


class TraceError(ValueError):
    """The step cannot be traced into one graph with static shapes."""


@dataclass(frozen=True)
class Body:
    """The operations of a function, with the shapes that they have in one call.

    Attributes:
      graph: the operations.
      arguments, results: tensors of it.
      bodies, branches: of its loops and conditionals, as ``Trace`` has them.
    """

    graph: tf.Graph
    arguments: list[tf.Tensor]
    results: list[tf.Tensor]
    bodies: Mapping[str, Body]
    branches: Mapping[str, Sequence[Body]]


@dataclass(frozen=True)
class Trace:
    """A traced step.

    Attributes:
      graph_def: the optimised graph.  Inputs are ``Placeholder`` nodes,
        captured variables ``VarHandleOp`` nodes (so that their shapes are
        known to anyone who reads the graph).
      graph: the same graph imported, for shapes, dtypes and op definitions.
      bodies: of its loops, by the loops' names.
      branches: of those of its conditionals that return what their gradients need, by
        the conditionals' names.
      inputs: node names of the step's arguments, in flattened order.
      captures: what the step captured: (node name, external tensor).
      outputs: tensor names of the flattened results.
      targets: node names that must run although nothing reads them.
      structured_outputs: nest of results, whose leaves index ``outputs``.
      pieces: the graph as TensorFlow runs it, loops and conditionals in pieces;
        captures are arguments there, of the same names.
      sources: arguments there that the inputs come from: themselves, or an iterator.
      taking: the type of the operation that takes them from there, all at once; None
        if they are arguments.
    """

    graph_def: graph_pb2.GraphDef
    graph: tf.Graph
    bodies: Mapping[str, Body]
    branches: Mapping[str, Sequence[Body]]
    inputs: tuple[str, ...]
    captures: tuple[tuple[str, tf.Tensor], ...]
    outputs: tuple[str, ...]
    targets: tuple[str, ...]
    structured_outputs: Any
    pieces: graph_pb2.GraphDef
    sources: tuple[str, ...]
    taking: str | None


def trace(
    function: Callable[..., Any],
    input_signature: Sequence[Any],
    *,
    autograph: bool = False,
    traced_for: Sequence[Any] | None = None,
    taken_from: Source | None = None,
    generators: Generators | None = None,
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
      taken_from: what the plain step takes its arguments (all of them tensors) from,
        where it is called by a graph that does so.
      generators: those that all shapes of ``traced_for`` have in common; None
        leaves them to each plan's own kernels.

    Raises:
      TraceError: if an argument's shape is not static, or the step does nothing.
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
    signature = traced_for or input_signature
    if taken_from is not None:
        traced = tf.function(_taking(traced, taken_from), autograph=False)
        signature = [taken_from(tuple(signature))]
    outer, _here.tracing = tracing(), True
    try:
        plain = traced.get_concrete_function(*signature)
    finally:
        _here.tracing = outer
    source = plain.graph
    arguments = len(source.inputs) - len(source.captures)
    graph_def = source.as_graph_def(add_shapes=True)
    inputs, results = _as_in_the_runtime(graph_def, plain)
    sources, captures = inputs[:arguments], inputs[arguments:]
    nodes = {node.name: node for node in graph_def.node}
    _describe_gradients(source, nodes)
    targets = [op.name for op in source.control_outputs]
    if not results and not targets:
        raise TraceError("the step returns no tensor and changes no variable: nothing to plan")
    with source.as_default():  # which knows the functions
        pieces, optimised, shared = _grappler(graph_def, results, [*inputs, *targets], generators)
    bodies_of = (function.node_def for function in optimised.library.function)
    compiled = {
        node.attr["f"].func.name
        for node in itertools.chain(optimised.node, *bodies_of)
        if "_XlaMustCompile" in node.attr and node.attr["_XlaMustCompile"].b
    }
    if compiled:
        warn(
            f"XLA compiles {', '.join(sorted(compiled))} (jit_compile=True): it is planned as one "
            "operation, and the last digits of what it computes may be others than in the plain "
            "step; leave jit_compile out, and its operations are planned, with the same bits",
        )
    inputs, taking = sources, None
    if taken_from is not None:
        inputs, taking = _hand_over(optimised, *sources)
        there = {node.name for node in optimised.node}
        targets = [name for name in targets if name in there]
    shapes = [spec.shape for spec in tf.nest.flatten(list(input_signature))]
    shapes += [tensor.shape for tensor in source.inputs[arguments:]]
    handed = dict(zip([*inputs, *captures], shapes, strict=True)) | {
        name: tf.TensorShape([]) for name, _ in shared
    }
    outputs = _as_inputs_and_outputs(optimised, handed, results)
    _bypass_loops(optimised)
    loops.one_turn_at_a_time(optimised)
    _rename_functions(optimised)
    try:
        graph = imported(optimised)
    except ValueError as error:
        raise TraceError(
            f"the sizes in the step contradict each other: {error}; where a tf.TensorArray grows, "
            "give it its size from the start"
        ) from error
    bodies = loop_bodies(graph, optimised)
    _check_loops(graph, bodies)

    return Trace(
        graph_def=optimised,
        graph=graph,
        bodies=bodies,
        branches=branch_bodies(graph, optimised),
        inputs=tuple(inputs),
        captures=(
            *(
                (name, external)
                for name, (external, _) in zip(captures, source.captures, strict=True)
            ),
            *shared,
        ),
        outputs=tuple(outputs),
        targets=tuple(targets),
        structured_outputs=plain.structured_outputs,
        pieces=pieces,
        sources=tuple(sources),
        taking=taking,
    )


def _taking(step: Callable[..., Any], source: Source) -> Callable[[Any], Any]:
    """What calls a step with a batch that it takes from a source, as Keras's ``fit`` does."""
    if source is tf.OptionalSpec:
        return lambda optional: step(*optional.get_value())
    return lambda iterator: step(*iterator.get_next())


def tracing() -> bool:
    """Whether a step is being traced by this thread."""
    return getattr(_here, "tracing", False)


def imported(graph_def: graph_pb2.GraphDef) -> tf.Graph:
    """The graph with shapes, those of what functions return included."""
    library = {function.signature.name: function for function in graph_def.library.function}
    nodes = {node.name: node for node in graph_def.node}
    while True:
        graph = tf.Graph()
        with graph.as_default():
            tf.graph_util.import_graph_def(graph_def, name="")
        found = False
        for operation in graph.get_operations():
            if _static(operation.outputs):
                continue
            results = _results(operation, library)
            if results and all(shape.is_fully_defined() for shape in results):
                shapes = nodes[operation.name].attr[SHAPES].list.shape
                del shapes[:]
                shapes.extend(shape.as_proto() for shape in results)
                found = True
        if not found:
            return graph


def loop_bodies(graph: tf.Graph, graph_def: graph_pb2.GraphDef) -> dict[str, Body]:
    """The bodies of the loops of a graph, by the loops' names."""
    library = {function.signature.name: function for function in graph_def.library.function}
    return {
        loop.name: body_of(loop.get_attr("body"), loop.inputs, library)
        for loop in graph.get_operations()
        if loop.type in loops.LOOPS
    }


def branch_bodies(graph: tf.Graph, graph_def: graph_pb2.GraphDef) -> dict[str, list[Body]]:
    """The branches of those conditionals of a graph that return what their gradients need."""
    library = {function.signature.name: function for function in graph_def.library.function}
    return {
        operation.name: [
            body_of(branch, operation.inputs[1:], library)
            for branch in conditionals.branches(operation)
        ]
        for operation in graph.get_operations()
        if operation.type in conditionals.CONDITIONALS
        and any(tensor.dtype == tf.variant for tensor in operation.outputs)
    }


def _check_loops(graph: tf.Graph, bodies: Mapping[str, Body]) -> None:
    """Checks that what goes into a turn of a loop and what comes out have the same shapes.

    While sizes are open, a value that grows has the same shape as one that does not.
    Some shapes that stay the same are not known after a turn, either; they are taken
    for others only where a turn computes how many of something there are.

    Raises:
      TraceError: naming a value of another shape.
    """
    for name, body in bodies.items():
        loop = graph.get_operation_by_name(name)
        operations = body.graph.get_operations()
        counts = any(operation.type.startswith(_COUNTING) for operation in operations)
        for before, result, returned in zip(loop.inputs, loop.outputs, body.results, strict=True):
            if before.dtype in (tf.resource, tf.variant):
                continue
            unknown = counts and not returned.shape.is_fully_defined()
            if unknown or not returned.shape.is_compatible_with(before.shape):
                raise TraceError(
                    f"the value {result.name} ({loop.type}) has the shape {before.shape} before "
                    f"a turn of the loop and {returned.shape} after it; remat needs every shape "
                    "to be known when the step is traced"
                )


def _results(
    operation: tf.Operation, library: Mapping[str, function_pb2.FunctionDef]
) -> list[tf.TensorShape]:
    """Shapes of an operation's results, if those are what functions say."""
    kind, inputs = operation.type, operation.inputs
    if is_draw(operation.node_def):
        return shapes_drawn(operation)
    if kind in CALLS and _static(inputs):
        return [tensor.shape for tensor in _returned(operation.get_attr("f"), inputs, library)]
    if kind in conditionals.CONDITIONALS and _static(inputs):
        branches = [
            [tensor.shape for tensor in _returned(branch, inputs[1:], library)]
            for branch in conditionals.branches(operation)
        ]
        return branches[0] if all(shapes == branches[0] for shapes in branches) else []
    if kind == "LookupTableFindV2" and _static(inputs[1:]):
        _, keys, default = inputs
        return [keys.shape.concatenate(default.shape)]
    if kind in ("TensorListStack", "TensorListGetItem"):
        stacked = _known(*_list(inputs[0], library))
        return [stacked[1:] if kind == "TensorListGetItem" else stacked]
    if kind == "TensorListElementShape":
        rank = _known(*_list(inputs[0], library))[1:].rank
        return [] if rank is None else [tf.TensorShape([rank])]
    return []


def _list(
    values: tf.Tensor,
    library: Mapping[str, function_pb2.FunctionDef],
    before: Sequence[tf.Tensor] = (),
) -> tuple[set[tf.TensorShape], set[tf.TensorShape]]:
    """What is known of a list of tensors.

    Args:
      values: the list.
      library: functions by name.
      before: lists that turns of loops begin with, about which others say enough.

    Returns:
      The lengths that it may have, of one dimension each, and the shapes that its parts
      may have.
    """
    operation, inputs = values.op, values.op.inputs
    if any(values.graph is each.graph and values.name == each.name for each in before):
        return set(), set()
    if operation.type in ("Identity", "ZerosLike"):
        return _list(inputs[0], library, before)
    if operation.type == "AddN":  # of lists that are alike
        lengths, parts = zip(*(_list(same, library, before) for same in inputs), strict=True)
        return min(lengths, key=_vague), min(parts, key=_vague)
    if operation.type == "TensorListFromTensor":
        return {inputs[0].shape[:1]}, {inputs[0].shape[1:]}
    if operation.type == "TensorListReserve":
        return {tf.TensorShape([_constant(inputs[1])])}, set()
    if operation.type == "TensorListSetItem":
        known, parts = _list(inputs[0], library, before)
        if operation.get_attr("resize_if_index_out_of_bounds"):
            known = {_grown(length, inputs[1]) for length in known or {_ANY_LENGTH}}
        return known, parts | {inputs[2].shape}
    if operation.type in loops.LOOPS and _static(inputs):
        body, slot = body_of(operation.get_attr("body"), inputs, library), values.value_index
        known, parts = _list(inputs[slot], library, before)
        after = _list(body.results[slot], library, [*before, body.arguments[slot]])
        return known | after[0], parts | after[1]
    return {_ANY_LENGTH}, {tf.TensorShape(None)}


def _vague(shapes: Collection[tf.TensorShape]) -> tuple[bool, int]:
    """A key by which one certain shape comes first, then what others say enough about."""
    certain = len(shapes) == 1 and all(shape.is_fully_defined() for shape in shapes)
    return not certain, len(shapes)


def _grown(length: tf.TensorShape, index: tf.Tensor) -> tf.TensorShape:
    """The length of a list once there is a part of some index."""
    position = _constant(index)
    if length[0] is None or position is None:
        return _ANY_LENGTH
    return tf.TensorShape([max(length[0], position + 1)])


def _constant(number: tf.Tensor) -> int | None:
    """A whole number, if it is known when the step is traced."""
    value = smart_cond.smart_constant_value(number)
    return None if value is None else int(value)


def _known(
    lengths: Collection[tf.TensorShape], parts: Collection[tf.TensorShape]
) -> tf.TensorShape:
    """The shape of a list's stacked parts, as far as there is only one that it may have."""
    (length,) = lengths if len(lengths) == 1 else (_ANY_LENGTH,)
    (part,) = parts if len(parts) == 1 else (tf.TensorShape(None),)
    return length.concatenate(part)


def _returned(
    called: attr_value_pb2.NameAttrList,
    arguments: Sequence[tf.Tensor],
    library: Mapping[str, function_pb2.FunctionDef],
) -> list[tf.Tensor]:
    """What a function returns, with the shapes that it has for some arguments."""
    return body_of(called, arguments, library).results


def body_of(
    called: attr_value_pb2.NameAttrList,
    arguments: Sequence[tf.Tensor],
    library: Mapping[str, function_pb2.FunctionDef],
) -> Body:
    """A function's operations, with the shapes that they have for some arguments."""
    function = library[called.name]
    shapes = [tensor.shape for tensor in arguments]
    variables = {}
    for argument, tensor in zip(function.signature.input_arg, arguments, strict=True):
        if tensor.dtype == tf.resource:
            behind = handle_data_util.get_resource_handle_data(tensor).shape_and_type
            if len(behind) == 1:
                variables[argument.name] = tf.TensorSpec(behind[0].shape, behind[0].dtype)
    graph_def, names = function_graph(function, shapes, library.values(), variables)
    graph = imported(graph_def)
    results = [function.ret[result.name] for result in function.signature.output_arg]
    return Body(
        graph,
        [graph.get_tensor_by_name(f"{one.name}:0") for one in function.signature.input_arg],
        [graph.get_tensor_by_name(names[result]) for result in results],
        loop_bodies(graph, graph_def),
        branch_bodies(graph, graph_def),
    )


def function_graph(
    function: function_pb2.FunctionDef,
    shapes: Sequence[tf.TensorShape],
    library: Iterable[function_pb2.FunctionDef],
    variables: Mapping[str, tf.TensorSpec],
) -> tuple[graph_pb2.GraphDef, dict[str, str]]:
    """The graph of a function for arguments of some shapes.

    Args:
      function: the function; its arguments become placeholders.
      shapes: of its arguments.
      library: the functions that it may call, and that the graph has.
      variables: behind handles, by the names of arguments: some operations ask for them.

    Returns:
      The graph, and the names that tensors have there, by those in the function.
    """
    known = graph_pb2.GraphDef()
    known.library.function.extend(library)
    with tf.Graph().as_default():  # where what it calls is looked up
        tf.graph_util.import_graph_def(known, name="")
        graph_def, names = function_def_to_graph.function_def_to_graph_def(function, shapes)
    graph_def.library.CopyFrom(known.library)
    for node in graph_def.node:
        if node.name in variables:
            spec = variables[node.name]
            shape = spec.shape.as_proto()
            node.CopyFrom(variable_node(node.name, spec.dtype.as_datatype_enum, shape))
    return graph_def, names


def _static(tensors: Sequence[tf.Tensor]) -> bool:
    return all(tensor.shape.is_fully_defined() for tensor in tensors)


def _as_in_the_runtime(graph_def: graph_pb2.GraphDef, plain: Any) -> tuple[list[str], list[str]]:
    """Makes the step's inputs and results the nodes that Grappler finds in the runtime.

    Grappler forgets the shapes of placeholders, because they can be fed, but
    knows those of a function's arguments.  And where it guesses which values
    are alive at once, the names and kinds of all nodes matter.

    Returns:
      The names of the inputs, captured ones last, and of the results.
    """
    graph, signature = plain.graph, plain.function_def.signature
    nodes = {node.name: node for node in graph_def.node}
    captured = {inner.op.name: external for external, inner in graph.captures}
    taken = nodes.keys() - {tensor.op.name for tensor in graph.inputs}
    names: dict[str, str] = {}  # of the inputs, here and in the runtime
    for index, (tensor, argument) in enumerate(zip(graph.inputs, signature.input_arg, strict=True)):
        name = argument.name
        while name in taken:
            name += "_"
        taken.add(name)
        names[tensor.op.name] = name
        node = nodes[tensor.op.name]
        node.Clear()
        node.name, node.op = name, _ARGUMENT
        if tensor.dtype not in (tf.resource, tf.variant):
            # The shape of an argument that is no resource would be forgotten,
            # too.  This operation has nothing but a shape, either.
            node.op = UNWRITTEN
            node.attr["dtype"].type = argument.type
            node.attr["shape"].shape.CopyFrom(tensor.shape.as_proto())
            continue
        node.attr["T"].type, node.attr["index"].i = argument.type, index
        handle = getattr(captured.get(tensor.op.name), "_handle_data", None)
        if handle is not None and handle.is_set and len(handle.shape_and_type) == 1:
            (data,) = handle.shape_and_type
            node.attr[_HANDLE_DTYPES].list.type.append(data.dtype)
            node.attr[_HANDLE_SHAPES].list.shape.append(data.shape)
    for node in graph_def.node:
        for slot, reference in enumerate(node.input):
            name = name_of(reference)
            node.input[slot] = reference.replace(name, names.get(name, name), 1)
    results = []
    for index, (tensor, result) in enumerate(zip(graph.outputs, signature.output_arg, strict=True)):
        source = tensor.op.name
        node = graph_def.node.add(name=f"{result.name}_RetVal", op=_RESULT)
        node.input.append(f"{names.get(source, source)}:{tensor.value_index}")
        node.attr["T"].type, node.attr["index"].i = result.type, index
        results.append(node.name)
    return list(names.values()), results


def _hand_over(graph_def: graph_pb2.GraphDef, source: str) -> tuple[list[str], str]:
    """Makes what is taken from an argument (an iterator) arguments in its place.

    Returns:
      Their names, and the type of the operation that took them.
    """
    (node,) = (node for node in graph_def.node if source in node.input)
    taking, kind, types = node.name, node.op, list(node.attr["output_types"].list.type)
    names = [f"{taking}/{number}" for number in range(len(types))]
    for node in graph_def.node:
        reads = [reference for reference in node.input if reference != f"^{taking}"]
        del node.input[:]
        for reference in reads:
            name, _, number = reference.partition(":")
            node.input.append(names[int(number or 0)] if name == taking else reference)
    _remove(graph_def, {source, taking})
    for name, dtype in zip(names, types, strict=True):
        graph_def.node.add(name=name, op=_ARGUMENT).attr["T"].type = dtype
    return names, kind


def _as_inputs_and_outputs(
    graph_def: graph_pb2.GraphDef, shapes: Mapping[str, tf.TensorShape], results: Sequence[str]
) -> list[str]:
    """Makes the arguments nodes that can stand in any graph, and removes the results.

    Returns:
      The tensors that are the results.
    """
    outputs = {}
    for node in graph_def.node:
        if node.name in results:
            name, _, number = node.input[0].partition(":")
            outputs[node.name] = f"{name}:{number or 0}"
        elif node.name in shapes:
            argument = node_def_pb2.NodeDef(name=node.name, op="Placeholder")
            argument.attr["dtype"].type = node.attr["T"].type or node.attr["dtype"].type
            argument.attr["shape"].shape.CopyFrom(shapes[node.name].as_proto())
            if _HANDLE_SHAPES in node.attr:
                (dtype,) = node.attr[_HANDLE_DTYPES].list.type
                (shape,) = node.attr[_HANDLE_SHAPES].list.shape
                argument = variable_node(node.name, dtype, shape)
            node.CopyFrom(argument)
    _remove(graph_def, outputs)
    return [outputs[name] for name in results]


def variable_node(
    name: str, dtype: types_pb2.DataType, shape: tensor_shape_pb2.TensorShapeProto
) -> node_def_pb2.NodeDef:
    """The node of a variable's handle, which tells readers of the graph its shape."""
    node = node_def_pb2.NodeDef(name=name, op="VarHandleOp")
    node.attr["dtype"].type = dtype
    node.attr["shape"].shape.CopyFrom(shape)
    node.attr["shared_name"].s = name.encode()
    return node


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
                del nodes[operation.name].attr[SHAPES].list.shape[:]
                nodes[operation.name].attr[SHAPES].list.shape.extend(shapes)


def _bypass_loops(graph_def: graph_pb2.GraphDef) -> None:
    """What reads a variable's handle after a loop, reads the one before it.

    A loop returns every handle that it takes, but not the shape behind it.
    """
    handles = {
        f"{node.name}:{number}": node.input[number]
        for node in graph_def.node
        if node.op in loops.LOOPS
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


_Handles = list[tuple[str, tf.Tensor]]


def _grappler(
    graph_def: graph_pb2.GraphDef,
    results: Sequence[str],
    keep: Sequence[str],
    generators: Generators | None,
) -> tuple[graph_pb2.GraphDef, graph_pb2.GraphDef, _Handles]:
    """Runs Grappler with the settings in force.

    Args:
      graph_def: the step.
      results, keep: names of nodes that are there afterwards: those whose
        values are read, and others.
      generators: as ``trace`` takes them.

    Returns:
      The graph as it would run, in pieces, and with nothing in pieces; and the
      handles of generators that these take.
    """
    config = config_pb2.ConfigProto()
    config.CopyFrom(context.context().config)
    if config.graph_options.rewrite_options.disable_meta_optimizer:
        shared = _share(graph_def, generators)
        return _copied(graph_def), graph_def, shared
    asked = {node.name: node.device for node in graph_def.node}
    pieces, whole, shared = _in_pieces_and_whole(graph_def, config, results, keep, generators)
    for node in whole.node:
        node.device = asked.get(node.name, "")
    return pieces, _restore_sums(whole), shared


def _share(graph_def: graph_pb2.GraphDef, generators: Generators | None) -> _Handles:
    return [] if generators is None else share(graph_def, generators)


def _in_pieces_and_whole(
    graph_def: graph_pb2.GraphDef,
    config: config_pb2.ConfigProto,
    results: Sequence[str],
    keep: Sequence[str],
    generators: Generators | None,
) -> tuple[graph_pb2.GraphDef, graph_pb2.GraphDef, _Handles]:
    """What Grappler makes of a graph, and the same with nothing in pieces, to be scheduled."""
    if loops.keep_shapes(graph_def):
        for hold in (False, True):
            held = _copied(graph_def)
            if hold:
                conditionals.hold(held)
            with contextlib.suppress(UnknownFormError):
                optimised = _optimised(held, config, results, keep)
                shared = _share(optimised, generators)
                whole = conditionals.make_whole(loops.make_whole(optimised), [*results, *keep])
                conditionals.release(whole)
                return optimised, whole, shared
    # For this executor Grappler breaks nothing up; the name does nothing else.
    config.experimental.executor_type = ONE_BY_ONE
    optimised = _optimised(graph_def, config, results, keep)
    shared = _share(optimised, generators)
    return _copied(optimised), optimised, shared


def _copied(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    copy = graph_pb2.GraphDef()
    copy.CopyFrom(graph_def)
    return copy


def _optimised(
    graph_def: graph_pb2.GraphDef,
    config: config_pb2.ConfigProto,
    results: Sequence[str],
    keep: Sequence[str],
) -> graph_pb2.GraphDef:
    """Runs Grappler on what the runtime makes of a graph before it does."""
    graph_def = inline.inlined(graph_def, config, results, keep)
    default = tf.config.list_logical_devices()[0].name
    accelerators = tf.config.list_logical_devices("GPU")
    device = accelerators[0].name if accelerators else default
    for node in graph_def.node:
        # Some rewrites (convolution + bias) want to know the device; the
        # runtime has placed every node by the time Grappler runs.
        if not node.device:
            node.device = device if _runs_on(node.op, device) else default
    graph_def = inline.optimised(graph_def, config, results, keep)
    name_fused_convolutions(graph_def)
    for node in graph_def.node:
        node.attr.pop("_class", None)  # "beside" an operation that may be in a branch by now
    return graph_def


def _restore_sums(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """Turns sums by accumulation into a temporary variable into chains of additions.

    Grappler's memory optimizer makes those, of ``AddN``, by a guess of the peak.
    They would hold a buffer from the first term to the last; memory is this
    project's own business.  The terms are added in the order in which the plain
    step, on one thread, accumulates them, so that the sum has the same bits.
    """
    sums = [node for node in graph_def.node if node.op == "DestroyTemporaryVariable"]
    if not sums:
        return graph_def
    number = {node.name: i for i, node in enumerate(graph_def.node)}
    producers = [
        [number[name_of(reference)] for reference in node.input] for node in graph_def.node
    ]
    order = execution_order([node.op for node in graph_def.node], producers)
    rank = {node: position for position, node in enumerate(order)}
    removed = set()
    for total in sums:
        (variable,) = (name for name in total.input if not name.startswith("^"))
        terms = [graph_def.node[i] for i in producers[number[total.name]]]
        terms = [term for term in terms if term.op == "AssignAdd"]
        terms.sort(key=lambda term: rank[number[term.name]])
        chain = [graph_def.node[number[name_of(variable)]]]
        while chain[-1].op != "TemporaryVariable":  # Assign: variable, zeros
            chain += [graph_def.node[i] for i in producers[number[chain[-1].name]][::-1]]
        removed |= {node.name for node in [*terms, *chain]}
        name, dtype, partial = total.name, total.attr["T"].type, terms[0].input[1]
        total.Clear()
        for count, term in enumerate(terms[1:], 2):
            last = count == len(terms)
            addition = total if last else graph_def.node.add()
            addition.name, addition.op = name if last else f"{name}/{count}_terms", "AddV2"
            addition.input.extend([partial, term.input[1]])
            addition.attr["T"].type = dtype
            partial = addition.name
    _remove(graph_def, removed)
    return graph_def


def _remove(graph_def: graph_pb2.GraphDef, names: Container[str]) -> None:
    """Takes the named nodes out of a graph."""
    kept = [node for node in graph_def.node if node.name not in names]
    del graph_def.node[:]
    graph_def.node.extend(kept)


@functools.cache
def _runs_on(operation: str, device: str) -> bool:
    kind = tf.DeviceSpec.from_string(device).device_type
    kernels_found = kernels.get_registered_kernels_for_op(operation).kernel
    return any(kernel.device_type == kind for kernel in kernels_found)
