"""Stage 1½: a value that repeats a smaller one is written out as late as can be.

The gradient of a mean repeats one number for each element that was averaged, in a
tensor as large as an activation, divides all of them by their count, and multiplies
the result by something else:

    Mul(Mul(Tile(gradient), 1 / count), x)

But operations that compute element by element repeat a smaller operand themselves:

    Mul(Mul(gradient, 1 / count), x)

is the same multiplication of the same numbers for each element, so the same bits,
with two passes over memory less, and an activation's size less of it.  Each
normalization has two such means.  Where an operation reads the repeated value that
cannot repeat it itself, it is written out just before.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2, types_pb2

from .program import Kind, Op, Program, Rewriter, Tensor

# What repeats a value, and which input that is.
_REPEATS = {"Tile": 0, "BroadcastTo": 0, "Fill": 1}
# Results that IEEE arithmetic prescribes to the last bit, whatever lies beside an element:
# vectorized kernels of other functions, and what is left over at the end of a vector, may
# round each in its own way.
_EXACT = frozenset(
    ["Add", "AddV2", "Cast", "Mul", "Neg", "RealDiv", "Square", "SquaredDifference", "Sub"]
)
_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
_SUM, _ADDITION = "AddN", "AddV2"


def broadcast_late(program: Program) -> Program:
    """Computes with small values what plain TensorFlow computes with repeated ones.

    Returns:
      A program that computes the same bits; ``program`` itself if there is nothing to gain.
    """
    repeated = {index for index, op in enumerate(program.ops) if _repeats(program, op)}
    readers = {reader for index in repeated for reader in program.consumers[index]}
    if not any(_broadcasts(program.ops[reader]) for reader in readers):
        return program
    rewriter = _Late(program)
    for index in range(len(program.ops)):
        rewriter.take(index)
    for index in (*(index for index, _ in program.outputs), *program.targets):
        rewriter.whole((index, 0))
    return rewriter.rewritten()


def _repeats(program: Program, op: Op) -> bool:
    """Whether an operation does nothing but repeat a smaller value along dimensions."""
    if op.type not in _REPEATS or op.kind is not Kind.PURE or op.dtypes[0] not in _DTYPES:
        return False
    source, number = op.inputs[_REPEATS[op.type]]
    small, (shape,) = program.ops[source].shapes[number], op.shapes
    if program.ops[source].varies or math.prod(small) >= math.prod(shape):
        return False
    # ``Tile`` may also repeat a dimension that has more than one element.
    pairs = zip(reversed(small), reversed(shape), strict=False)
    return all(size in (1, repeated) for size, repeated in pairs)


def _broadcasts(op: Op) -> bool:
    """Whether an operation may read a smaller value instead of one that repeats it."""
    exact = op.type in _EXACT or (op.type == _SUM and len(op.inputs) == 2)
    return exact and op.kind is Kind.PURE and op.dtypes[0] in _DTYPES


class _Late(Rewriter):
    """Writes the program anew; ``small``: of tensors that repeat a smaller one, that."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.small: dict[Tensor, Tensor] = {}

    def take(self, index: int) -> None:
        """Adds an old operation, or the small one of which it is a repetition."""
        op, node = self.program.ops[index], self.program.nodes[index]
        if _repeats(self.program, op):
            source = op.inputs[_REPEATS[op.type]]
            self.small[index, 0] = self.small.get(source) or self._tensor(source)
            return
        if not _broadcasts(op) or not any(tensor in self.small for tensor in op.inputs):
            inputs = tuple(map(self.whole, op.inputs))
            moved = replace(op, inputs=inputs, controls=self.new(op.controls))
            self.moved[index] = self.add(moved, node)
            return
        inputs = tuple(self.small.get(tensor) or self._tensor(tensor) for tensor in op.inputs)
        shapes = [self.ops[source].shapes[number] for source, number in inputs]
        shape = np.broadcast_shapes(*shapes)
        if op.type == _SUM:
            node = node_def_pb2.NodeDef(op=_ADDITION, device=node.device)
            node.attr["T"].CopyFrom(self.program.nodes[index].attr["T"])
        computed = replace(
            op,
            type=node.op,
            inputs=inputs,
            shapes=(shape,),
            bytes=(math.prod(shape) * op.dtypes[0].size,),
            forwards=tuple(
                slot
                for slot, (source, number) in enumerate(inputs)
                if shapes[slot] == shape
                and self.ops[source].dtypes[number] == op.dtypes[0]
                and (slot in op.forwards or shape != op.shapes[0])
            ),
        )
        added = self.add(computed, node)
        if shape == op.shapes[0]:
            self.moved[index] = added
        else:  # smaller, or without leading dimensions of one element
            self.small[index, 0] = added, 0

    def whole(self, tensor: Tensor) -> Tensor:
        """An old tensor, written out if it repeats a smaller one."""
        index, _ = tensor
        if index not in self.moved:
            self.moved[index] = self._written_out(tensor)
        return self._tensor(tensor)

    def _tensor(self, tensor: Tensor) -> Tensor:
        return self.moved[tensor[0]], tensor[1]

    def _written_out(self, tensor: Tensor) -> int:
        """Adds the operation that repeats a value; returns its index."""
        index, _ = tensor
        op, node = self.program.ops[index], self.program.nodes[index]
        if _repeats(self.program, op):
            return self.add(replace(op, inputs=tuple(map(self.whole, op.inputs))), node)
        (shape,) = op.shapes
        name = f"{op.name}/whole"
        repeat = node_def_pb2.NodeDef(op="BroadcastTo", device=node.device)
        repeat.attr["T"].type = op.dtypes[0].as_datatype_enum
        repeat.attr["Tidx"].type = types_pb2.DT_INT32
        inputs = (self.small[tensor], self.add_constant(f"{name}/shape", shape))
        return self.add(
            replace(op, name=name, type=repeat.op, inputs=inputs, controls=(), forwards=()), repeat
        )
