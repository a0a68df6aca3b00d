"""Stage 5: events become a ``tf.function`` that runs exactly them, in order.

A new GraphDef is built with one node per event and imported into a function.
Every operation that computes is chained to the one before by a control edge:
without that, TensorFlow merges the copies or runs them at once, and memory
does not fall at all.  Reads of variables and aliases stay out of the chain
(they neither compute nor allocate), except for the edges that order them
against assignments.

Most steps on a CPU are run by the executor that TensorFlow has for running
operations in turn (``_runs_one_by_one``): the same allocations in less time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2, types_pb2
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager import context, execute

from .allocator import UNWRITTEN, Device, bytes_in_use, device_at_hand
from .conditionals import CONDITIONALS
from .executor import ONE_BY_ONE
from .memory import Event, Fillers
from .native import MERGED
from .onednn import second_name, unmerge
from .program import ON_VARIABLES, Kind, Program, calls, has_effects

# oneDNN's layout pass fuses these with the convolution beside them, without
# regard for control edges, and so closes cycles ("N nodes in a cycle").  An
# identity in front hides the pattern: (operation, input).  What it would fuse
# in the plain step is one operation already (``onednn``).
_SHIELDED = {"BiasAdd": 0, "BiasAddGrad": 0, "Conv2D": 0, "DepthwiseConv2dNative": 0, "Conv3D": 0}
FILLER = "remat/filler_"
"""Prefix of the names of the nodes that are fillers."""
_DROPPED_ATTRIBUTES = ("_class", "_output_shapes", "_grappler_do_not_remove")


def lower(
    program: Program,
    events: Sequence[Event],
    fillers: Fillers | None = None,
    constants: Mapping[int, tf.Tensor] | None = None,
    *,
    timed: bool = False,
) -> Callable[..., list[tf.Tensor]]:
    """Builds the function that runs ``events`` in order, with ``fillers`` between them.

    Args:
      program: the operations.
      events: their runs.
      fillers: what is allocated between them.
      constants: as ``held_constants`` makes them, where there are some already.
      timed: so that the profiler sees the seconds of each operation.

    Returns:
      A function of the step's flattened arguments that returns its flattened
      results.  It may be called eagerly or inside another ``tf.function``.
    """
    graph_def, names = build_graph(program, events, fillers or {})
    in_turn = not timed and _runs_one_by_one(program)
    return as_function(program, events, graph_def, names, constants, in_turn=in_turn)


def as_function(
    program: Program,
    events: Sequence[Event],
    graph_def: graph_pb2.GraphDef,
    names: Sequence[str],
    constants: Mapping[int, tf.Tensor] | None = None,
    *,
    in_turn: bool,
) -> Callable[..., list[tf.Tensor]]:
    """The function that runs a graph of ``events``.

    Args:
      program, events, constants: as ``lower`` takes them.
      graph_def, names: as ``build_graph`` gives them.
      in_turn: whether the executor runs that has operations run in turn.

    Returns:
      What ``lower`` returns.
    """
    newest = {event.op: index for index, event in enumerate(events)}
    outputs = [
        _tensor(program, events, names, newest[op], number) for op, number in program.outputs
    ]
    specs = [
        tf.TensorSpec(program.ops[index].shapes[0], program.ops[index].dtypes[0])
        for index in program.inputs
    ]

    held = held_constants(program, device_at_hand()) if constants is None else constants

    def body(*arguments: tf.Tensor) -> list[tf.Tensor]:
        graph = tf.compat.v1.get_default_graph()
        bound = {
            names[newest[index]]: tensor
            for index, tensor in zip(program.inputs, arguments, strict=True)
        }
        for index, external in program.captures:
            bound[names[newest[index]]] = graph.capture(external)
        for index in program.unfolded & newest.keys():
            bound[names[newest[index]]] = graph.capture(held[index])
        return tf.graph_util.import_graph_def(
            graph_def, input_map=bound, return_elements=outputs, name=""
        )

    for definition in program.library.library.function:
        register(definition)
    inner = tf.function(
        body,
        input_signature=specs,
        autograph=False,
        experimental_attributes={"_noinline": True},
    ).get_concrete_function()
    executor = ONE_BY_ONE if in_turn else ""
    captured = inner.captured_inputs
    kinds = [tensor.dtype for tensor in inner.outputs]

    name = inner.function_def.signature.name
    config = as_written()

    def call(*arguments: tf.Tensor) -> list[tf.Tensor]:
        args = [*arguments, *captured]
        if tf.inside_function():
            return tf.raw_ops.StatefulPartitionedCall(
                args=args, Tout=kinds, f=inner, config_proto=config, executor_type=executor
            )
        # As a kernel of its own, which is gone with the function: one that calls it, and
        # whatever that holds (constants), would stay for as long as the process runs.
        attributes = ("executor_type", executor, "config_proto", config)
        return list(execute.execute(name, len(kinds), args, attributes, context.context()))

    return call


def register(definition: FunctionDef) -> None:
    """Tells the runtime of a function: a graph knows those that its operations call, the
    runtime only those that were called from Python."""
    if not context.context().has_function(definition.signature.name):
        context.context().add_function_def(definition)


def as_written() -> bytes:
    """How a function is to be called so that Grappler leaves it as it is (a ``ConfigProto``)."""
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return bytes(config.SerializeToString())


def _runs_one_by_one(program: Program) -> bool:
    """Whether the executor that runs operations in turn, on one thread, can run a step.

    It takes less time between operations than the one that looks for what can run at
    the same time, which the chain forbids anyway.  It knows one device only, and must
    not wait for others: no loops or calls, collective operations, queues.
    """
    if len(tf.config.list_logical_devices()) > 1:
        return False
    types = {op.type for op in program.ops if op.kind in (Kind.PURE, Kind.ONCE)}
    return not any(calls(type) or has_effects(type, beside=ON_VARIABLES) for type in types)


def held_constants(program: Program, device: Device) -> dict[int, tf.Tensor]:
    """The constants that a lowered function takes as arguments, by operation."""

    def held(value: np.ndarray) -> tf.Tensor:
        if not device.counted:
            return tf.constant(value)
        before = bytes_in_use(device)
        constant = tf.constant(value)
        in_numpy = bytes_in_use(device) == before  # and not where it is foreseen
        return tf.raw_ops.DeepCopy(x=constant) if in_numpy else constant

    nodes = {index: program.nodes[index] for index in program.unfolded}
    return {
        index: held(tf.make_ndarray(node.attr["value"].tensor)) for index, node in nodes.items()
    }


def node_name(program: Program, event: Event) -> str:
    """The name of the node that an event becomes."""
    name = program.ops[event.op].name
    return f"{name}/copy_{event.copy}" if event.copy else name


def build_graph(
    program: Program, events: Sequence[Event], fillers: Fillers
) -> tuple[graph_pb2.GraphDef, list[str]]:
    """The graph of ``events``, and the name of each event's node."""
    graph_def = graph_pb2.GraphDef()
    graph_def.CopyFrom(program.library)
    names: list[str] = []
    ends: list[str] = []
    newest: dict[int, int] = {}
    previous: str | None = None
    for index, event in enumerate(events):
        op = program.ops[event.op]
        name = node_name(program, event)
        names.append(name)
        ends.append(name)
        newest[event.op] = index
        node = graph_def.node.add()
        node.CopyFrom(program.nodes[event.op])
        node.name = name
        for attribute in _DROPPED_ATTRIBUTES:
            node.attr.pop(attribute, None)
        del node.input[:]
        if op.kind is Kind.ARGUMENT or event.op in program.unfolded:
            _as_placeholder(node, op.dtypes[0])
            continue
        node.input.extend(
            _tensor(program, events, names, source, number) for source, number in event.inputs
        )
        node.input.extend(f"^{ends[newest[effect]]}" for effect in op.controls)
        if op.kind not in (Kind.PURE, Kind.ONCE):
            continue
        before: list[str] = []
        during: list[str] = []
        for number, filler in enumerate(fillers.get(index, ())):
            previous = _allocate(graph_def, f"{FILLER}{index}_{number}", filler.bytes, previous)
            (during if filler.during else before).append(previous)
        previous = _give_back(graph_def, f"{FILLER}{index}/before", before, previous)
        if previous is not None and f"^{previous}" not in node.input:
            node.input.append(f"^{previous}")
        if op.type in CONDITIONALS and op.dtypes:
            ends[index] = _end(graph_def, name, op.dtypes)
        previous = _give_back(graph_def, f"{FILLER}{index}/after", during, ends[index])
        if op.type in _SHIELDED:
            slot = _SHIELDED[op.type]
            shield = graph_def.node.add(name=f"{name}/shield", op="Identity")
            shield.attr["T"].type = op.dtypes[0].as_datatype_enum
            shield.input.append(node.input[slot])
            node.input[slot] = shield.name
        if op.type == MERGED:
            unmerge(node, graph_def.node.add())
    return graph_def, names


def _tensor(
    program: Program, events: Sequence[Event], names: Sequence[str], event: int, number: int
) -> str:
    """The name of an output of an event."""
    if number == 1 and program.ops[events[event].op].type == MERGED:
        return f"{second_name(names[event])}:0"
    return f"{names[event]}:{number}"


def _end(graph_def: graph_pb2.GraphDef, name: str, dtypes: Sequence[tf.DType]) -> str:
    """Adds what is done when all results of a conditional are there.

    What comes after a conditional itself comes after it is known which branch
    runs, and would not wait until that has read the variables that it reads.
    """
    node = graph_def.node.add(name=f"{name}/end", op="IdentityN")
    node.attr["T"].list.type.extend(dtype.as_datatype_enum for dtype in dtypes)
    node.input.extend(f"{name}:{number}" for number in range(len(dtypes)))
    node.input.append(f"^{name}")  # and until what it changes is changed
    return node.name


def _allocate(graph_def: graph_pb2.GraphDef, name: str, count: int, after: str | None) -> str:
    """Adds a node that allocates ``count`` bytes and does nothing with them."""
    node = graph_def.node.add(name=name, op=UNWRITTEN)
    node.attr["dtype"].type = types_pb2.DT_FLOAT
    node.attr["shape"].shape.dim.add(size=count // 4)
    if after is not None:
        node.input.append(f"^{after}")
    return name


def _give_back(
    graph_def: graph_pb2.GraphDef, name: str, fillers: Sequence[str], after: str | None
) -> str | None:
    """Adds the last reader of some fillers; what it returns nobody reads.

    Returns:
      What the next node comes after: this one, if there are any fillers.
    """
    if not fillers:
        return after
    node = graph_def.node.add(name=name, op="IdentityN")
    node.attr["T"].list.type.extend([types_pb2.DT_FLOAT] * len(fillers))
    node.input.extend(fillers)
    if after is not None and after not in fillers:
        node.input.append(f"^{after}")
    return name


def _as_placeholder(node: node_def_pb2.NodeDef, dtype: tf.DType) -> None:
    node.op = "Placeholder"
    node.attr.clear()
    node.attr["dtype"].type = dtype.as_datatype_enum
