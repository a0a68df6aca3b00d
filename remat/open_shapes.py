"""Shapes that only the run knows, and the largest that they can be.

Some operations count: ``tf.boolean_mask`` keeps as many rows as its mask says.
What they return has a dimension that is open while the step is traced, and so
has all that is computed from it.  Memory for the largest is set aside; and
as the sizes of what runs are not known, each runs once.

TensorFlow's own shape inference does it, on a copy of the graph in which what
counts returns as much as it can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.python.framework import tensor_util

from .conditionals import CONDITIONALS, branches
from .pieces import SHAPES, constant_node
from .trace import Trace, body_of, imported

_Shape = tuple[int | None, ...]


def largest_shapes(trace: Trace) -> dict[str, tuple[int, ...]]:
    """The largest shape of each value whose own is open, by tensor name, where one is known."""
    return _largest(trace.graph, trace.graph_def)


def _largest(graph: tf.Graph, graph_def: graph_pb2.GraphDef) -> dict[str, tuple[int, ...]]:
    unknown = [
        tensor.name
        for operation in graph.get_operations()
        for tensor in operation.outputs
        if _is_open(tensor)
    ]
    if not unknown:
        return {}
    changed = graph_pb2.GraphDef()
    changed.CopyFrom(graph_def)
    library = {function.signature.name: function for function in changed.library.function}
    nodes = {node.name: node for node in changed.node}
    for operation in graph.get_operations():
        shape = _given(operation)
        if shape is not None:
            _forget_inputs(nodes[operation.name], operation.outputs[0].dtype, shape)
    settled: set[str] = set()  # operations that return what they were told to
    while True:
        try:
            graph = imported(changed)
        except ValueError:  # not all can be at their largest at once
            return _sizes(graph, unknown)
        found = False
        for operation in graph.get_operations():
            if operation.name in settled or not any(map(_is_open, operation.outputs)):
                continue
            bounds = _bounds(operation, library)
            if bounds is not None:
                shapes = nodes[operation.name].attr[SHAPES].list.shape
                del shapes[:]
                shapes.extend(tf.TensorShape(bound).as_proto() for bound in bounds)
                settled.add(operation.name)
                found = True
        if not found:
            return _sizes(graph, unknown)


def _given(operation: tf.Operation) -> tf.TensorShape | None:
    """The shape of what an operation returns, if that is known although its inputs' are not, or
    the other way round: it may be known how much a mask keeps, which is not the most."""
    if len(operation.outputs) != 1:
        return None
    (result,) = operation.outputs
    if not _is_open(result):
        # Whole numbers may be sizes, and those are to be the largest, too.
        sized = result.dtype.is_floating and any(map(_is_open, operation.inputs))
        return result.shape if sized else None
    if operation.type != "Reshape" or _is_open(operation.inputs[0]) or result.shape.rank is None:
        return None
    sizes = result.shape.as_list()
    if sizes.count(None) != 1:
        return None
    known = math.prod(size for size in sizes if size is not None)
    rows = operation.inputs[0].shape.num_elements() // max(1, known)
    return tf.TensorShape([rows if size is None else size for size in sizes])


def _forget_inputs(node: node_def_pb2.NodeDef, dtype: tf.DType, shape: tf.TensorShape) -> None:
    name = node.name
    node.Clear()
    node.name, node.op = name, "Placeholder"
    node.attr["dtype"].type = dtype.as_datatype_enum
    node.attr["shape"].shape.CopyFrom(shape.as_proto())


def _sizes(graph: tf.Graph, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    sized = {name: _as_large(graph.get_tensor_by_name(name)) for name in names}
    return {name: tuple(tensor.shape) for name, tensor in sized.items() if not _is_open(tensor)}


def _as_large(tensor: tf.Tensor) -> tf.Tensor:
    """The value, or what it sums up, where it is open along which axes: that is no smaller."""
    return tensor.op.inputs[0] if _is_open(tensor) and tensor.op.type == "Sum" else tensor


def _is_open(tensor: tf.Tensor) -> bool:
    return tensor.dtype not in (tf.resource, tf.variant) and not tensor.shape.is_fully_defined()


def _bounds(operation: tf.Operation, library: Mapping[str, FunctionDef]) -> Sequence[_Shape] | None:
    """The largest shapes of what an operation returns, if it counts and its inputs are known."""
    if any(map(_is_open, operation.inputs)):
        return None
    if operation.type in CONDITIONALS:
        return _returned(operation, library)
    counted = _COUNTING.get(operation.type)
    rows = None if counted is None else counted(operation)
    return None if rows is None else [_with(tensor.shape, rows) for tensor in operation.outputs]


def _returned(operation: tf.Operation, library: Mapping[str, FunctionDef]) -> list[_Shape]:
    """The largest shapes of what a conditional returns, whichever branch it takes."""
    given = operation.inputs[1:]
    found = []
    for branch in branches(operation):
        body = body_of(branch, given, library)
        graph_def = body.graph.as_graph_def()
        nodes = {node.name: node for node in graph_def.node}
        for argument, tensor in zip(body.arguments, given, strict=True):
            value = tensor_util.constant_value(tensor)
            if value is not None:  # it may be a size
                nodes[argument.op.name].CopyFrom(constant_node(argument.op.name, value))
        graph = imported(graph_def)
        largest = _largest(graph, graph_def)
        results = [graph.get_tensor_by_name(tensor.name) for tensor in body.results]
        found.append([largest.get(tensor.name, _known(tensor)) for tensor in results])
    shapes = [*zip(*found, strict=True)]
    if all(None not in each and len(set(map(len, each))) == 1 for each in shapes):
        return [tuple(map(max, *each)) for each in shapes]
    # A branch that is not understood adds rows, as with sparse gradients: all that it reads.
    # What is returned beside them (their indices) has as many.
    rows = (sum(tensor.shape[0] for tensor in operation.inputs if tensor.shape.rank),)
    return [
        _with(tensor.shape, rows) if _is_open(tensor) else tuple(tensor.shape)
        for tensor in operation.outputs
    ]


def _known(tensor: tf.Tensor) -> _Shape | None:
    return None if _is_open(tensor) else tuple(tensor.shape)


def _with(shape: tf.TensorShape, largest: Sequence[int]) -> _Shape:
    """A shape with its open dimensions taken from another, as far as that goes."""
    if shape.rank is None:
        return tuple(largest)
    dimensions = zip(shape.as_list(), [*largest, *[None] * shape.rank], strict=False)
    return tuple(bound if size is None else size for size, bound in dimensions)


def _elements(*inputs: int) -> Callable[[tf.Operation], tuple[int, ...]]:
    """As many rows as some inputs have elements, multiplied."""
    return lambda operation: (
        math.prod(math.prod(operation.inputs[index].shape) for index in inputs),
    )


def _whole(operation: tf.Operation) -> tuple[int, ...] | None:
    """A part is at most the whole, if it has the same dimensions."""
    if any(operation.get_attr(f"{mask}_axis_mask") for mask in ("shrink", "new")):
        return None
    return tuple(operation.inputs[0].shape)


def _asked_for(operation: tf.Operation) -> tuple[int, ...] | None:
    """As many rows as are asked for."""
    most = _at_most(operation.inputs[2])
    return None if most is None else (most,)


def _bins(operation: tf.Operation) -> tuple[int, ...] | None:
    """As many bins as are asked for, for each row."""
    values, size, _ = operation.inputs
    most = _at_most(size)
    return None if most is None else (*values.shape[:-1], most)


def _at_most(number: tf.Tensor) -> int | None:
    """The most that any of some numbers can be, if that is said where they are computed."""
    known = tensor_util.constant_value(number)
    if known is not None:
        return int(np.max(known, initial=0))
    kind, inputs = number.op.type, number.op.inputs
    if kind in ("Identity", "Cast", "Reshape", "Max"):
        return 1 if inputs[0].dtype == tf.bool else _at_most(inputs[0])
    if kind not in ("Maximum", "Minimum", "ClipByValue", "AddV2", "Mul"):
        return None
    limits = [_at_most(tensor) for tensor in inputs]
    said = [limit for limit in limits if limit is not None]
    if kind == "Minimum":
        return min(said, default=None)
    if kind == "ClipByValue":
        return limits[2]
    if len(said) < len(limits):
        return None
    if kind == "Mul":  # by a condition
        conditions = [t.op.type == "Cast" and t.op.inputs[0].dtype == tf.bool for t in inputs]
        return max(said) if any(conditions) else None
    return sum(said) if kind == "AddV2" else max(said)


def _stitched(operation: tf.Operation) -> tuple[int, ...] | None:
    """As many rows as were divided, where parts are put together again."""
    indices = {tensor.op for tensor in operation.inputs[: operation.get_attr("N")]}
    divided = indices.pop()
    if indices or divided.type != "DynamicPartition":
        return None
    return (math.prod(divided.inputs[1].shape),)


def _segments(operation: tf.Operation) -> tuple[int, ...] | None:
    """As many rows as there are segments."""
    last = _at_most(operation.inputs[1])
    return None if last is None else (last + 1,)


def _ranks(operation: tf.Operation) -> tuple[int, ...]:
    """As many axes as there are."""
    return (max(tensor.shape[0] for tensor in operation.inputs),)


# The open dimensions of what these return, the first ones, at most.
_COUNTING: dict[str, Callable[[tf.Operation], tuple[int, ...] | None]] = {
    "Where": _elements(0),
    "Unique": _elements(0),
    "UniqueV2": _elements(0),
    "UniqueWithCounts": _elements(0),
    "UniqueWithCountsV2": _elements(0),
    "ListDiff": _elements(0),
    "DynamicPartition": _elements(1),
    "DynamicStitch": _stitched,
    "ParallelDynamicStitch": _stitched,
    "ComputeAccidentalHits": _elements(0, 1),
    "TopKV2": lambda operation: tuple(operation.inputs[0].shape),
    "BroadcastGradientArgs": _ranks,
    "DenseBincount": _bins,
    "NonMaxSuppressionV2": _asked_for,
    "NonMaxSuppressionV3": _asked_for,
    "NonMaxSuppressionV4": _asked_for,
    "NonMaxSuppressionV5": _asked_for,
    **dict.fromkeys(
        ("SegmentSum", "SegmentMean", "SegmentMax", "SegmentMin", "SegmentProd"), _segments
    ),
    "StridedSlice": _whole,
}
