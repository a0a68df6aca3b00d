"""Stage 1½: what a large variable's update needs is taken a few rows at a time.

Adam's update of a kernel holds, beside the gradient, another value or two of
the kernel's size; where one kernel is a large part of the step, that alone
sets the least feasible budget.  But an update is computed element by element:

    variable += f(gradient, variable, ...)

is, for the rows of each block in turn,

    variable[rows] = variable[rows] + f(gradient[rows], variable[rows], ...)

with the same operations on the same elements, so with the same bits.  Slices
of whole rows share the buffer they are slices of, so a block takes no more
than what ``f`` holds for its rows.

And where a variable is given a new value as a whole (momentum in SGD, moving
averages), that is written into the buffer that the variable has.  TensorFlow
would let the new value's buffer take its place, and variables that are
somewhere else after each step break up the pool: even small ones do, where they
lie between holes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2, types_pb2

from .constants import filled_in_functions
from .inplace import counting, sharing, stays, writing, written_in_functions
from .program import ELEMENTWISE, Kind, Op, Program, Rewriter, Tensor

_LARGE = 0.05  # of the plain peak: a variable from this size on is updated in blocks ...
_BLOCK = 0.02  # ... of about this size
_LEAST = 1 << 20  # bytes: nobody lacks what is smaller
_ROW = 64  # elements; slices share their source's buffer only at multiples of 64 bytes
# What each assignment computes from the old value and the update.
_NEW_VALUE = {"AssignAddVariableOp": "AddV2", "AssignSubVariableOp": "Sub", "AssignVariableOp": ""}

_ELEMENTWISE = ELEMENTWISE | {"_UnaryOpsComposition"}


def split_updates(program: Program, plain_peak: int) -> Program:
    """Computes the updates of large variables in blocks of rows.

    Args:
      program: the step.
      plain_peak: bytes, which say what is large.

    Returns:
      A program that computes the same bits, and leaves variables where they are;
      ``program`` itself if nothing is to be changed.
    """
    # What overwrites the variable of a read comes after it, by a control edge.
    awaited = {control for op in program.ops for control in op.controls}
    found = [
        _Update.of(program, index, plain_peak, awaited)
        for index, op in enumerate(program.ops)
        if op.type in _NEW_VALUE and op.kind is Kind.ONCE
    ]
    updates = {update.assignment: update for update in found if update is not None}
    whole = {
        index
        for index, op in enumerate(program.ops)
        if op.type == "AssignVariableOp" and index not in updates and _moves(program, op)
    }
    for change in (written_in_functions, filled_in_functions):
        library = change(program)
        if library is not program.library:
            program = replace(program, library=library)
    return _Splitter(program, updates, whole).run() if updates or whole else program


def _moves(program: Program, assignment: Op) -> bool:
    """Whether a variable is somewhere else after an assignment, and need not be."""
    variable = program.variables.get(assignment.inputs[0][0])
    value, number = assignment.inputs[1]
    if variable is None or not stays(variable):
        return False
    return bool(variable.shape == program.ops[value].shapes[number])


@dataclass(frozen=True)
class _Update:
    """An assignment and the operations that compute nothing but its value.

    Attributes:
      assignment: the operation that assigns.
      inside: operations whose values have the variable's shape and that
        nothing else reads, in order.
      rows: (first, past the last) of each block.
    """

    assignment: int
    inside: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]

    @staticmethod
    def of(program: Program, assignment: int, plain_peak: int, awaited: Set[int]) -> _Update | None:
        """The update to split; None if it is small or cannot be split.

        ``awaited`` are the operations that others wait for without reading them.
        """
        ops = program.ops
        op = ops[assignment]

        def may_be_read_in_blocks(source: int, number: int) -> bool:
            read = ops[source]
            if read.shapes[number] != shape:
                return read.shapes[number] == ()  # read as a whole
            if read.kind is not Kind.READ:
                return True
            # Each block reads anew: what is there by then must be what was read.
            if read.inputs[0] == op.inputs[0]:
                return source in op.controls
            return source not in awaited

        size = program.variable_bytes.get(op.inputs[0][0], 0)
        value, number = op.inputs[1]
        shape = ops[value].shapes[number]
        if size < max(_LEAST, _LARGE * plain_peak) or not shape:
            return None
        if shape[0] < 2 or math.prod(shape[1:]) % _ROW:
            return None
        inside: set[int] = set()
        pending = [value]
        returned = {index for index, _ in program.outputs}
        while pending:
            index = pending.pop()
            candidate = ops[index]
            if (
                candidate.kind is Kind.PURE
                and candidate.type in _ELEMENTWISE
                and candidate.shapes == (shape,)
                and set(program.consumers[index]) <= inside | {assignment}
                and index not in returned
                and all(may_be_read_in_blocks(*tensor) for tensor in candidate.inputs)
            ):
                inside.add(index)
                pending += [source for source, _ in candidate.inputs if source not in inside]
        if value not in inside:
            return None  # it is there as a whole already
        count = max(1, int(_BLOCK * plain_peak) * shape[0] // size)
        starts = range(0, shape[0], count)
        rows = tuple((start, min(start + count, shape[0])) for start in starts)
        return _Update(assignment, tuple(sorted(inside)), rows) if len(rows) > 1 else None


class _Splitter(Rewriter):
    """Writes the program anew, with blocks in place of the updates."""

    def __init__(self, program: Program, updates: Mapping[int, _Update], whole: Set[int]) -> None:
        super().__init__(program)
        self.updates = updates
        self.whole = whole  # assignments of all rows at once

    def run(self) -> Program:
        """The new program."""
        program = self.program
        inside = {index for update in self.updates.values() for index in update.inside}
        for index, op in enumerate(program.ops):
            if index in self.updates:
                self.moved[index] = self._split(self.updates[index])
            elif index in self.whole:
                value, number = op.inputs[1]
                rows = (0, program.ops[value].shapes[number][0])
                tensor = (self.moved[value], number)
                self.moved[index] = self.write(op, op.name, rows, tensor, self.new(op.controls))
            elif index not in inside:
                inputs = tuple((self.moved[source], number) for source, number in op.inputs)
                self.moved[index] = self.add(
                    replace(op, inputs=inputs, controls=self.new(op.controls)),
                    program.nodes[index],
                )
        return self.rewritten()

    def write(
        self, assignment: Op, name: str, rows: tuple[int, int], value: Tensor, before: Sequence[int]
    ) -> int:
        """Adds what writes into a variable's buffer; returns the last operation.

        Args:
          assignment: the old operation.
          name: of what is added.
          rows: the first to be written and the one past the last.
          value: of these rows.
          before: new indices of what must come before.
        """
        variable = (self.moved[assignment.inputs[0][0]], 0)
        node = writing(self.ops[value[0]].dtypes[value[1]])
        inputs = (variable, self._numbers(name, rows), value)
        written = self._effect(f"{name}/write", node, inputs, before)
        return self._effect(f"{name}/share", sharing(), (variable,), (written,))

    def _numbers(self, name: str, rows: tuple[int, int]) -> Tensor:
        """The numbers of some rows."""
        count = rows[1] - rows[0]
        op = Op(
            name=f"{name}/range",
            type="Range",
            kind=Kind.PURE,
            inputs=(
                self.add_constant(f"{name}/range/start", rows[0]),
                self.add_constant(f"{name}/range/limit", rows[1]),
                self.add_constant(f"{name}/range/delta", 1),
            ),
            controls=(),
            bytes=(4 * count,),
            shapes=((count,),),
            dtypes=(tf.int32,),
        )
        return self.add(op, counting()), 0

    def _effect(
        self,
        name: str,
        node: node_def_pb2.NodeDef,
        inputs: tuple[Tensor, ...],
        controls: Sequence[int],
    ) -> int:
        op = Op(
            name=name,
            type=node.op,
            kind=Kind.ONCE,
            inputs=inputs,
            controls=tuple(sorted(set(controls))),
            bytes=(),
            shapes=(),
            dtypes=(),
        )
        return self.add(op, node)

    def _split(self, update: _Update) -> int:
        """Adds the blocks of an update; returns the operation that ends the last."""
        assignment = self.program.ops[update.assignment]
        own = {update.assignment, *update.inside}
        consumers = self.program.consumers
        before = self.new(
            [
                control
                for control in assignment.controls
                # Each block reads the variable anew.
                if self.program.ops[control].kind is not Kind.READ
                or not own.issuperset(consumers[control])
            ]
        )
        stride = self.add_constant(f"{assignment.name}/stride", [1])
        for number, rows in enumerate(update.rows):
            block = _Block(self, update, number, rows, stride, before)
            for index in update.inside:
                block.compute(index)
            before = (block.write(),)
        return before[0]


class _Block:
    """The operations for some rows of a variable.

    Args:
      splitter: what they are added to.
      update: which variable; number: which block of it.
      rows: the first row and the one past the last.
      stride: the constant 1.
      before: new indices of what must come before the variable is written.
    """

    def __init__(
        self,
        splitter: _Splitter,
        update: _Update,
        number: int,
        rows: tuple[int, int],
        stride: Tensor,
        before: tuple[int, ...],
    ) -> None:
        self.splitter = splitter
        self.program = splitter.program
        self.assignment = self.program.ops[update.assignment]
        self.variable = self.assignment.inputs[0][0]
        self.suffix = f"rows_{number}"
        self.rows, self.count = rows, rows[1] - rows[0]
        self.before = before
        name = f"{self.assignment.name}/{self.suffix}"
        self.bounds = (
            splitter.add_constant(f"{name}/begin", rows[:1]),
            splitter.add_constant(f"{name}/end", rows[1:]),
            stride,
        )
        self.values: dict[int, Tensor] = {}  # of these rows, by the old operation
        self.reads: list[int] = []  # of the variable

    def compute(self, index: int) -> None:
        """Adds an operation inside the update, for these rows."""
        op = self.program.ops[index]
        inputs = tuple(self._input(source, number) for source, number in op.inputs)
        self.values[index] = self._add(op, self.program.nodes[index], inputs)

    def write(self) -> int:
        """Adds what writes the new value; returns the last operation."""
        value = self.values[self.assignment.inputs[1][0]]
        new_value = _NEW_VALUE[self.assignment.type]
        if new_value:
            node = node_def_pb2.NodeDef(op=new_value)
            node.attr["T"].type = self.splitter.ops[value[0]].dtypes[0].as_datatype_enum
            like = replace(
                self.program.ops[self.assignment.inputs[1][0]],
                name=self.assignment.name,
                type=new_value,
                forwards=(0, 1),
            )
            value = self._add(like, node, (self._old_value(), value))
        name = f"{self.assignment.name}/{self.suffix}"
        before = (*self.before, *self.reads)
        return self.splitter.write(self.assignment, name, self.rows, value, before)

    def _input(self, source: int, number: int) -> Tensor:
        """These rows of what an operation reads; all of a scalar."""
        op = self.program.ops[source]
        if source in self.values:
            return self.values[source]
        if op.shapes[number] == ():
            return self.splitter.moved[source], number
        if op.kind is not Kind.READ:
            return self._slice((self.splitter.moved[source], number), op)
        if op.resource == self.variable:
            return self._old_value()
        self.values[source] = self._slice(self._read(op, self.splitter.new(op.controls)), op)
        return self.values[source]

    def _old_value(self) -> Tensor:
        """These rows of the variable, as they are before they are written."""
        if self.variable not in self.values:
            value, number = self.assignment.inputs[1]
            like = self.program.ops[value]
            read = Op(
                name=f"{self.assignment.name}/read",
                type="ReadVariableOp",
                kind=Kind.READ,
                inputs=((self.variable, 0),),
                controls=(),
                bytes=(like.bytes[number],),
                shapes=(like.shapes[number],),
                dtypes=(like.dtypes[number],),
            )
            earlier = [i for i in self.before if self.splitter.ops[i].kind is Kind.ONCE]
            tensor = self._read(read, tuple(earlier))
            self.reads.append(tensor[0])
            self.values[self.variable] = self._slice(tensor, read)
        return self.values[self.variable]

    def _read(self, read: Op, controls: tuple[int, ...]) -> Tensor:
        node = node_def_pb2.NodeDef(op="ReadVariableOp")
        node.attr["dtype"].type = read.dtypes[0].as_datatype_enum
        name = f"{self.assignment.name}/{self.suffix}/{read.name}"
        inputs = ((self.splitter.moved[read.resource], 0),)
        moved = replace(read, name=name, inputs=inputs, controls=controls)
        return self.splitter.add(moved, node), 0

    def _slice(self, tensor: Tensor, whole: Op) -> Tensor:
        """These rows of a tensor, in its own buffer."""
        node = node_def_pb2.NodeDef(op="StridedSlice")
        node.attr["T"].type = whole.dtypes[tensor[1]].as_datatype_enum
        node.attr["Index"].type = types_pb2.DT_INT32
        like = replace(
            whole,
            name=f"{self.assignment.name}/{whole.name}",
            type="StridedSlice",
            kind=Kind.ALIAS,
            bytes=(whole.bytes[tensor[1]],),
            shapes=(whole.shapes[tensor[1]],),
            dtypes=(whole.dtypes[tensor[1]],),
            controls=(),
            forwards=(),
        )
        return self._add(like, node, (tensor, *self.bounds))

    def _add(self, whole: Op, node: node_def_pb2.NodeDef, inputs: tuple[Tensor, ...]) -> Tensor:
        """Adds an operation on all rows, for these."""
        (shape,), (size,) = whole.shapes, whole.bytes
        op = replace(
            whole,
            name=f"{whole.name}/{self.suffix}",
            inputs=inputs,
            shapes=((self.count, *shape[1:]),),
            bytes=(size // shape[0] * self.count,),
        )
        return self.splitter.add(op, node), 0
