"""Random generators that several plans of one step have in common.

TensorFlow's own random operations keep their state in the kernel, and so each
plan would have one of its own, where the plain step has one for all shapes of
a batch.  ``tf.random.Generator`` draws some of the same numbers, by the same
Philox generator (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
SC 2011), from a state that lies in a variable: counter and key.  The plans
share that variable.  For the other operations they share a kernel: that of a
``tf.data`` iterator, which they ask for one draw after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2, op_def_pb2, types_pb2
from tensorflow.core.framework.node_def_pb2 import NodeDef
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from .loops import frames
from .pieces import name_of

_PHILOX = 1  # its number among TensorFlow's algorithms
_FROM_VARIABLE = {
    "RandomUniform": "StatefulUniform",
    "RandomUniformInt": "StatefulUniformInt",
    "RandomStandardNormal": "StatefulStandardNormalV2",
    "TruncatedNormal": "StatefulTruncatedNormal",
}
_DRAWN = "_remat_drawn"  # the attribute of a draw that says which operation draws
ASKING = ("QueueEnqueueV2", "IteratorGetNext")
_ASKED = 1 << 10  # threads that draw at once


@dataclass(frozen=True)
class Kernel:
    """A random operation that lives in an iterator.

    Attributes:
      node: the operation.
      asked: the queue of what it is to draw from.
      dataset: of what it has drawn.
      drawn: the handle of the iterator.
      draw: asks and takes at once, so that nothing that fails comes between; a
        function of the operation's inputs and the handles.
    """

    node: NodeDef
    asked: tf.queue.FIFOQueue
    dataset: tf.data.Dataset
    drawn: tf.Tensor
    draw: function_pb2.FunctionDef

    @property
    def handles(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Those of the queue and the iterator."""
        return self.asked.queue_ref, self.drawn


Generators = dict[str, tf.Variable | Kernel]
"""What the numbers come from, by the name of the operation that draws: the state
(int64, counter and key), or the operation's kernel."""


def kernel_handles(generators: Generators) -> list[tf.Tensor]:
    """The handles of the kernels that plans share."""
    kernels = (one for one in generators.values() if isinstance(one, Kernel))
    return [handle for kernel in kernels for handle in kernel.handles]


def keeps_state(type: str) -> bool:
    """Whether operations of a type draw random numbers by a state in their kernel."""
    definition = op_def_registry.get(type)
    if definition is None or not definition.is_stateful:
        return False
    handed = [*definition.input_arg, *definition.output_arg]
    seeded = {"seed", "seed2"} <= {attribute.name for attribute in definition.attr}
    return seeded and not any(a.type == types_pb2.DT_RESOURCE or a.is_ref for a in handed)


def share(graph_def: graph_pb2.GraphDef, generators: Generators) -> list[tuple[str, tf.Tensor]]:
    """Has random operations with seeds draw from what plans share.

    Args:
      graph_def: an optimised step; what is in functions stays as it is.
      generators: what other plans have; what is not there is added.

    Returns:
      The handles, each with the name of the argument that stands for it.

    Raises:
      UnknownFormError: if the graph has a cycle that is no loop.
    """
    drawing = [node for node in graph_def.node if keeps_state(node.op) and _shareable(node)]
    if not drawing:
        return []
    shared = _Shared(graph_def)
    for node in drawing:
        if node.name not in generators:
            with tf.init_scope():
                generators[node.name] = _generator(node)
        generator = generators[node.name]
        if isinstance(generator, Kernel):
            shared.draw_from_kernel(node, generator)
        else:
            shared.draw_from_variable(node, generator)
    # In front: numbers are drawn when they were, and so sums are added in the same order.
    nodes = [*shared.added.node, *graph_def.node]
    graph_def.library.function.extend(shared.added.library.function)
    del graph_def.node[:]
    graph_def.node.extend(nodes)
    return shared.captures


def apart(
    captures: Sequence[tuple[int, tf.Tensor]], generators: Generators
) -> tuple[tuple[tuple[int, tf.Tensor], ...], list[tf.Variable | Kernel]]:
    """What a run captures that draws for itself, from the start.

    Returns:
      The captures, and the generators among them, to be kept for as long as these are used.
    """
    own = [_anew(one) for one in generators.values()]
    others = {
        id(shared): mine
        for one, another in zip(generators.values(), own, strict=True)
        for shared, mine in zip(_handles(one), _handles(another), strict=True)
    }
    return tuple((at, others.get(id(handle), handle)) for at, handle in captures), own


def is_draw(node: NodeDef) -> bool:
    """Whether a node has an iterator's kernel draw."""
    return _DRAWN in node.attr


def shapes_drawn(draw: tf.Operation) -> list[tf.TensorShape]:
    """The shapes of what an iterator's kernel draws; none if the operation is no such draw."""
    if not is_draw(draw.node_def):
        return []
    with draw.graph.as_default(), tf.control_dependencies(None):
        operation = _drawing(NodeDef.FromString(draw.get_attr(_DRAWN)), draw.inputs[:-2])
    return [tensor.shape for tensor in operation.outputs]


class _Shared:
    """A graph whose random operations are being changed.

    Attributes:
      added: the nodes that are to be in front of the others.
      captures: the handles, by the names of those of them that are arguments.
    """

    def __init__(self, graph_def: graph_pb2.GraphDef) -> None:
        self.added = graph_pb2.GraphDef()
        self.captures: list[tuple[str, tf.Tensor]] = []
        self._frames = frames(graph_def)
        constants = {node.name for node in graph_def.node if node.op == "Const"}
        enters = (node for node in graph_def.node if node.op == "Enter")
        self._enters = {  # that of a counter, if there is one: it waits for nothing
            node.attr["frame_name"].s.decode(): node
            for node in sorted(enters, key=lambda enter: name_of(enter.input[0]) in constants)
        }
        self._arguments = sum(node.op == "_Arg" for node in graph_def.node)

    def draw_from_variable(self, node: NodeDef, state: tf.Variable) -> None:
        algorithm = self.added.node.add(
            name=f"{node.name}/algorithm", op="Const", device=node.device
        )
        algorithm.attr["dtype"].type = types_pb2.DT_INT64
        algorithm.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(_PHILOX, tf.int64))
        handle = self._argument(f"{node.name}/generator", state.handle, node)
        argument = self.added.node[-1]
        argument.attr["_handle_dtypes"].list.type.append(types_pb2.DT_INT64)
        argument.attr["_handle_shapes"].list.shape.append(state.shape.as_proto())
        reads = [
            self._inside(handle, types_pb2.DT_RESOURCE, node),
            self._inside(algorithm.name, types_pb2.DT_INT64, node),
            *node.input,
        ]
        drawn = node.attr["dtype"].type or node.attr["Tout"].type
        sizes = node.attr["T"].type
        node.op = _FROM_VARIABLE[node.op]
        node.attr.clear()
        node.attr["dtype"].type, node.attr["shape_dtype"].type = drawn, sizes
        del node.input[:]
        node.input.extend(reads)

    def draw_from_kernel(self, node: NodeDef, kernel: Kernel) -> None:
        handles = [
            self._inside(
                self._argument(f"{node.name}/{name}", handle, node), types_pb2.DT_RESOURCE, node
            )
            for name, handle in zip(("asked", "drawn"), kernel.handles, strict=True)
        ]
        read, given = _types(node)
        values, waits = node.input[: len(read)], node.input[len(read) :]
        reads = [*values, *handles, *waits]
        node.op = "StatefulPartitionedCall"
        node.attr.clear()
        del node.input[:]
        node.input.extend(reads)
        node.attr["Tin"].list.type.extend([*read, *[types_pb2.DT_RESOURCE] * len(handles)])
        node.attr["Tout"].list.type.extend(given)
        node.attr["f"].func.name = kernel.draw.signature.name
        node.attr[_DRAWN].s = kernel.node.SerializeToString()
        self.added.library.function.add().CopyFrom(kernel.draw)

    def _argument(self, name: str, handle: tf.Tensor, node: NodeDef) -> str:
        argument = self.added.node.add(name=name, op="_Arg", device=node.device)
        argument.attr["T"].type = types_pb2.DT_RESOURCE
        argument.attr["index"].i = self._arguments
        self._arguments += 1
        self.captures.append((name, handle))
        return name

    def _inside(self, name: str, kind: int, node: NodeDef) -> str:
        """A value from outside of all loops as a node reads it."""
        for frame in self._frames[node.name]:
            other = self._enters[frame]
            # Of a loop in a branch it is to be there if the other value is.
            there = self.added.node.add(
                name=f"{name}/there", op="Identity", input=other.input[:1], device=other.device
            )
            there.attr["T"].CopyFrom(other.attr["T"])
            enter = self.added.node.add()
            enter.CopyFrom(other)
            del enter.input[:]
            enter.input.extend([name, f"^{there.name}"])
            enter.name = name = f"{name}/enter"
            enter.attr["T"].type, enter.attr["is_constant"].b = kind, True
        return name


def _shareable(node: NodeDef) -> bool:
    """Whether an operation draws the same numbers in every run of a training; where it
    runs on another device than the kernels of iterators, it draws others."""
    if not (node.attr["seed"].i or node.attr["seed2"].i):
        return False
    elsewhere = (tf.DeviceSpec.from_string(node.device).device_type or "CPU") != "CPU"
    return node.op in _FROM_VARIABLE or not elsewhere


def _generator(node: NodeDef) -> tf.Variable | Kernel:
    if node.op in _FROM_VARIABLE:
        # No variable of a strategy, which would be the same for all replicas.
        return ResourceVariable([0, node.attr["seed2"].i, node.attr["seed"].i], dtype=tf.int64)
    drawing = NodeDef()
    drawing.CopyFrom(node)
    drawing.device = ""
    del drawing.input[:]
    for attribute in [name for name in drawing.attr if name.startswith("_")]:
        del drawing.attr[attribute]
    return _kernel(drawing)


def _anew(generator: tf.Variable | Kernel) -> tf.Variable | Kernel:
    """The same generator as it starts."""
    if isinstance(generator, Kernel):
        return _kernel(generator.node)
    _, *key = generator.numpy()
    return ResourceVariable([0, *key], dtype=tf.int64)


def _handles(generator: tf.Variable | Kernel) -> tuple[tf.Tensor, ...]:
    return generator.handles if isinstance(generator, Kernel) else (generator.handle,)


def _kernel(node: NodeDef) -> Kernel:
    read, given = _types(node)
    asked = tf.queue.FIFOQueue(_ASKED, [tf.as_dtype(kind) for kind in read])
    several = len(asked.dtypes) > 1

    def draw(_: tf.Tensor) -> tuple[tf.Tensor, ...]:
        inputs = asked.dequeue()
        return tuple(_drawing(node, inputs if several else [inputs]).outputs)

    options = tf.data.Options()  # one draw when it is asked for, and nothing in advance
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = False
    options.deterministic = True
    # As many threads as the plain step has: what is drawn may depend on how many there are.
    options.threading.max_intra_op_parallelism = 0
    dataset = tf.data.Dataset.counter().map(draw).with_options(options)
    drawn = tf.raw_ops.AnonymousIteratorV3(
        output_types=[tf.as_dtype(kind) for kind in given], output_shapes=[None for _ in given]
    )
    tf.raw_ops.MakeIterator(dataset=tf.data.experimental.to_variant(dataset), iterator=drawn)

    @tf.function(
        input_signature=[tf.TensorSpec(None, kind) for kind in asked.dtypes], autograph=False
    )
    def ask(*inputs: tf.Tensor) -> list[tf.Tensor]:
        with tf.control_dependencies([asked.enqueue(inputs)]):
            return tf.raw_ops.IteratorGetNext(
                iterator=drawn,
                output_types=[tf.as_dtype(kind) for kind in given],
                output_shapes=[None for _ in given],
            )

    found = ask.get_concrete_function()
    assert [id(handle) for handle in found.captured_inputs] == [id(asked.queue_ref), id(drawn)]
    return Kernel(node, asked, dataset, drawn, found.function_def)


def _drawing(node: NodeDef, inputs: Sequence[tf.Tensor]) -> tf.Operation:
    """The operation of a node, on some inputs, in the graph at hand."""
    graph_def = graph_pb2.GraphDef()
    for slot, tensor in enumerate(inputs):
        argument = graph_def.node.add(name=f"input_{slot}", op="Placeholder")
        argument.attr["dtype"].type = tensor.dtype.as_datatype_enum
    drawing = graph_def.node.add()
    drawing.CopyFrom(node)
    drawing.input.extend(argument.name for argument in graph_def.node[:-1])
    bound = {f"input_{slot}:0": tensor for slot, tensor in enumerate(inputs)}
    (operation,) = tf.graph_util.import_graph_def(
        graph_def, input_map=bound, return_elements=[node.name], name="draws"
    )
    return operation


def _types(node: NodeDef) -> tuple[list[int], list[int]]:
    """The types of what an operation takes and gives."""
    definition = op_def_registry.get(node.op)

    def types(arguments: Sequence[op_def_pb2.OpDef.ArgDef]) -> list[int]:
        return [one.type or node.attr[one.type_attr].type for one in arguments]

    return types(definition.input_arg), types(definition.output_arg)
