"""Stage 1⅜: sums of many terms are added in the order in which the plain step adds them.

``AddN`` begins with the term whose buffer it can take over
(``aggregate_ops.cc`` in TensorFlow's source).  Which one that is depends on who
else holds the terms, so on the schedule, and with three terms or more the last
digits depend on it.  So each such sum becomes additions of two terms, in the
order of the plain step.  They also need the terms only one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

from tensorflow.core.framework import node_def_pb2

from .memory import plain_events, requests
from .program import Kind, Op, Program, Tensor

_ADDITION = "AddV2"
_FOLDED = 10 << 20  # bytes, at most, of a constant that the runtime makes
_GROUP = 8  # terms that ``AddN`` adds to each other before it adds them to the others


def order_sums(program: Program, plain: Callable[[], Program]) -> Program:
    """Makes additions of each ``AddN`` of three terms or more.

    Args:
      program: the step.
      plain: makes the same step as plain TensorFlow runs it, nothing folded.

    Returns:
      A program that gives the plain step's bits in whatever order it runs;
      ``program`` itself if there is no such sum.
    """
    sums = {
        index
        for index, op in enumerate(program.ops)
        if op.type == "AddN" and op.kind is Kind.PURE and len(op.inputs) > 2
    }
    if not sums:
        return program
    theirs = _held(plain())
    events = plain_events(theirs)
    taken_over = requests(theirs, events, {}).taken_over
    first = {theirs.ops[e.op].name: slot or 0 for e, slot in zip(events, taken_over, strict=True)}
    ops: list[Op] = []
    nodes: list[node_def_pb2.NodeDef] = []
    moved: dict[int, Tensor] = {}

    def add(one: Tensor, other: Tensor, total: int) -> Tensor:
        """Adds an addition that is a part of a sum of the old program."""
        op, node = program.ops[total], program.nodes[total]
        name = f"{op.name}/{len(ops)}"
        addition = node_def_pb2.NodeDef(name=name, op=_ADDITION, device=node.device)
        addition.attr["T"].CopyFrom(node.attr["T"])
        ops.append(replace(op, name=name, type=_ADDITION, inputs=(one, other), forwards=(0, 1)))
        nodes.append(addition)
        return len(ops) - 1, 0

    for index, (op, node) in enumerate(zip(program.ops, program.nodes, strict=True)):
        inputs = [(moved[source][0], number) for source, number in op.inputs]
        if index in sums:
            slot = first[op.name]
            inputs[0], inputs[slot] = inputs[slot], inputs[0]
            together = functools.partial(add, total=index)
            parts = [functools.reduce(together, inputs[group]) for group in _groups(len(inputs))]
            moved[index] = functools.reduce(together, parts)
            continue
        controls = tuple(moved[effect][0] for effect in op.controls)
        ops.append(replace(op, inputs=tuple(inputs), controls=controls))
        nodes.append(node)
        moved[index] = len(ops) - 1, 0
    return program.rewritten(ops, nodes, moved)


def _held(program: Program) -> Program:
    """The program as TensorFlow's runtime makes it ready: what depends on constants alone
    is one (``max_constant_size_in_bytes`` in constant_folding.h), whose buffer nobody gets."""
    ops = list(program.ops)
    for index in program.constant:
        if sum(ops[index].bytes) <= _FOLDED:
            ops[index] = replace(ops[index], type="Const", kind=Kind.CONSTANT, inputs=())
    return replace(program, ops=tuple(ops))


def _groups(count: int) -> Iterator[slice]:
    """The terms that ``AddN`` adds to each other: two to nine, then eight at a time."""
    end = (count - 2) % _GROUP + 2
    yield slice(end)
    for start in range(end, count, _GROUP):
        yield slice(start, start + _GROUP)
