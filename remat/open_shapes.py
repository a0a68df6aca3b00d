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
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.python.framework import tensor_util

from .conditionals import CONDITIONALS
from .pieces import SHAPES
from .trace import Trace, imported

_Shape = tuple[int | None, ...]


def largest_shapes(trace: Trace) -> dict[str, tuple[int, ...]]:
    """The largest shape of each value whose own is open, by tensor name, where one is known."""
    unknown = [
        tensor.name
        for operation in trace.graph.get_operations()
        for tensor in operation.outputs
        if _is_open(tensor)
    ]
    if not unknown:
        return {}
    graph_def = graph_pb2.GraphDef()
    graph_def.CopyFrom(trace.graph_def)
    nodes = {node.name: node for node in graph_def.node}
    settled: set[str] = set()  # operations that return what they were told to
    while True:
        graph = imported(graph_def)
        found = False
        for operation in graph.get_operations():
            if operation.name in settled or not any(map(_is_open, operation.outputs)):
                continue
            bounds = _bounds(operation)
            if bounds is not None:
                shapes = nodes[operation.name].attr[SHAPES].list.shape
                del shapes[:]
                shapes.extend(tf.TensorShape(bound).as_proto() for bound in bounds)
                settled.add(operation.name)
                found = True
        if not found:
            tensors = [graph.get_tensor_by_name(name) for name in unknown]
            return {tensor.name: tuple(tensor.shape) for tensor in tensors if not _is_open(tensor)}


def _is_open(tensor: tf.Tensor) -> bool:
    return tensor.dtype not in (tf.resource, tf.variant) and not tensor.shape.is_fully_defined()


def _bounds(operation: tf.Operation) -> list[_Shape] | None:
    """The largest shapes of what an operation returns, if it counts and its inputs are known."""
    counted = _COUNTING.get(operation.type)
    if counted is None or any(map(_is_open, operation.inputs)):
        return None
    rows = counted(operation)
    if rows is None:
        return None
    return [_with(tensor.shape, rows) for tensor in operation.outputs]


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


def _rows_read(operation: tf.Operation) -> tuple[int, ...]:
    """A branch may add rows, as with sparse gradients in some optimizers: all that it reads."""
    return (sum(tensor.shape[0] for tensor in operation.inputs if tensor.shape.rank),)


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
    "DenseBincount": _bins,
    "NonMaxSuppressionV2": _asked_for,
    "NonMaxSuppressionV3": _asked_for,
    "NonMaxSuppressionV4": _asked_for,
    "NonMaxSuppressionV5": _asked_for,
    "StridedSlice": _whole,
    **dict.fromkeys(CONDITIONALS, _rows_read),
}
