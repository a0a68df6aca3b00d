"""Stage 6: what one recorded run says about the model of its memory.

Two things about an operation's kernel are not written anywhere: whether it
takes over the buffer of an input, and how much scratch memory it asks for.
``memory`` knows what is usual; where a run differs, it is right.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import tensorflow as tf

from .arena import GRAIN
from .conditionals import CONDITIONALS
from .lower import FILLER, node_name
from .memory import Event, Requests, scratch_requests
from .program import Kind, Op, Program, calls
from .timeline import Allocation

_SOON = 20  # operations, among which is what comes after those that take over buffers


@dataclass(frozen=True)
class Corrections:
    """What to believe about kernels instead.

    Attributes:
      takes_over: by type of operation, whether an output takes over the buffer of
        an input of its size.
      workspace: by operation, bytes of scratch memory.
    """

    takes_over: dict[str, bool]
    workspace: dict[int, int]

    def __bool__(self) -> bool:
        return bool(self.takes_over or self.workspace)

    def followed_by(self, later: Corrections) -> Corrections:
        """These, and those of a later run."""
        return Corrections(
            {**self.takes_over, **later.takes_over}, {**self.workspace, **later.workspace}
        )

    def apply(self, program: Program) -> Program:
        """The program with its forwards corrected."""
        return replace(program, ops=tuple(self.corrected(op, program) for op in program.ops))

    def corrected(self, op: Op, program: Program) -> Op:
        """An operation with its forwards corrected."""
        if op.kind is not Kind.PURE or op.type not in self.takes_over or not op.bytes:
            return op
        sizes = [program.ops[source].bytes[number] for source, number in op.inputs]
        slots = [slot for slot, size in enumerate(sizes) if size == op.bytes[op.forwarded]]
        return replace(op, forwards=tuple(slots) if self.takes_over[op.type] else ())


def requested_by_op(recorded: Iterable[Allocation]) -> dict[str, Counter[int]]:
    """How many requests of how many bytes each operation made, small ones left out."""
    found: dict[str, Counter[int]] = defaultdict(Counter)
    for allocation in recorded:
        if allocation.requested >= GRAIN:
            found[allocation.op][allocation.requested] += 1
    return found


def _held_while_calling(
    program: Program,
    events: Sequence[Event],
    position: Mapping[str, int],
    recorded: Sequence[Allocation],
) -> dict[int, int]:
    """The most bytes that events which run functions held at once of what they took.

    What is allocated inside a function goes by names of its own operations.  Events
    run one after the other, so it was allocated between what the events before and
    after have asked for; of several that may be, by the one whose name it begins with,
    or else by the first.  Parts of lists that are freed meanwhile make room, whoever
    took them: a loop's gradient takes apart, turn by turn, what the loop has kept.

    Args:
      program, events, recorded: as ``compare`` takes them.
      position: the number of each event, by the name of its node.

    Returns:
      The bytes, by the number of the event.
    """
    names = list(position)
    calling = [at for at, event in enumerate(events) if calls(program.ops[event.op].type)]
    following = [len(events)] * len(recorded)  # the next event that asked for something
    for number in range(len(recorded) - 1, 0, -1):
        following[number - 1] = position.get(recorded[number].op, following[number])
    fills = {
        name for name, at in position.items() if tf.variant in program.ops[events[at].op].dtypes
    }
    holder: dict[int, tuple[int, int]] = {}  # by address: the event (-1: another), how much
    held: Counter[int] = Counter()
    most: dict[int, int] = {}
    latest = 0
    for allocation, end in zip(recorded, following, strict=True):
        latest = position.get(allocation.op, latest)
        around = calling[bisect_left(calling, latest) : bisect_right(calling, end)]
        if allocation.requested < 0:
            at, size = holder.pop(allocation.address, (-1, 0))
            held[at] -= size
            # The first thing freed in an event may be what the one before has left.
            if around and around[0] in most and around[0] != at:
                held[around[0]] -= size
            continue
        if allocation.op.startswith(FILLER):
            continue
        if allocation.op in position:
            around = [at for at in around if names[at] == allocation.op]
        if allocation.op in fills:
            holder[allocation.address] = -1, allocation.requested
        if around:
            named = (at for at in around if allocation.op.startswith(f"{names[at]}/"))
            at = next(named, around[0])
            holder[allocation.address] = at, allocation.requested
            held[at] += allocation.requested
            most[at] = max(most.get(at, 0), held[at])
    return most


def _lacked(
    program: Program,
    events: Sequence[Event],
    asked: Requests,
    workspace: Mapping[int, int],
    measured: Mapping[str, Counter[int]],
    last: int,
    lacking: int,
) -> dict[int, int]:
    """Scratch memory of the operation that a run without enough memory ended in, at least.

    That is the last one that allocated something or one of those that follow, which may have
    taken over buffers: the first of a type that has scratch memory, unless one of them was
    still to ask for as much as there was no room for.
    """
    computing = [
        at
        for at in range(last, len(events))
        if program.ops[events[at].op].kind in (Kind.PURE, Kind.ONCE)
    ][:_SOON]
    for at in computing:
        expected = Counter(asked.sizes[number] for number in asked.taken[at])
        if (expected - measured[node_name(program, events[at])])[lacking]:
            return {}
    types = {program.ops[index].type for index, count in workspace.items() if count}
    for at in computing:
        op = program.ops[events[at].op]
        if op.type in types and not calls(op.type):
            found = sum(measured[node_name(program, events[at])].elements())
            scratch = max(found - sum(op.bytes), 0) + lacking
            return {events[at].op: scratch} if scratch > workspace.get(events[at].op, 0) else {}
    return {}


def compare(
    program: Program,
    events: Sequence[Event],
    asked: Requests,
    workspace: Mapping[int, int],
    recorded: Sequence[Allocation],
    before: Corrections,
    lacking: int = 0,
) -> Corrections:
    """Compares what each event was expected to allocate with what it did.

    Args:
      program: the operations.
      events: their runs.
      asked: what they were expected to ask for.
      workspace: bytes of scratch memory that they were expected to ask for.
      recorded: of one run; it may have ended early.
      before: what earlier runs have corrected.  Scratch memory may depend on how many
        threads were free: the most ever asked for counts.  Of a type whose operations
        do both, none is believed to take over a buffer.
      lacking: if the run ended for want of memory, bytes of what there was no room for.
    """
    names = [node_name(program, event) for event in events]
    measured = requested_by_op(recorded)
    position = {name: at for at, name in enumerate(names)}
    # What was folded into a constant is allocated before its turn.
    order = [position[allocation.op] for allocation in recorded if allocation.op in position]
    reached = order[-1] if order else 0
    takes_over: dict[str, set[bool]] = defaultdict(set)
    found_workspace: dict[int, int] = {}
    while_calling = _held_while_calling(program, events, position, recorded)
    for at, (event, name, taken) in enumerate(
        zip(events[:reached], names, asked.taken, strict=False)
    ):
        op = program.ops[event.op]
        if calls(op.type):
            known = workspace.get(event.op, 0)
            scratch = while_calling.get(at, 0) + known - sum(asked.sizes[n] for n in taken)
            # The branch that was not taken may need more than the one that was.
            lower = op.type not in CONDITIONALS and event.op not in before.workspace
            if abs(scratch - known) >= GRAIN and (scratch > known or lower):
                found_workspace[event.op] = max(0, scratch)
            continue
        if op.kind not in (Kind.PURE, Kind.ONCE) or not op.bytes:
            continue
        expected = Counter(asked.sizes[n] for n in taken if asked.sizes[n] >= GRAIN)
        found = measured[name]
        if found == expected:
            continue
        missing, extra = expected - found, found - expected
        size = op.bytes[op.forwarded]
        if missing[size] and op.kind is Kind.PURE:
            takes_over[op.type].add(True)
            missing[size] -= 1
        elif extra[size] and op.forwards:
            takes_over[op.type].add(False)
            extra[size] -= 1
        if extra.total() or missing.total():
            known = workspace.get(event.op, 0)
            parts = scratch_requests(program, event.op, known)
            outputs = sum(expected.elements()) - sum(size for size in parts if size >= GRAIN)
            scratch = max(0, sum(found.elements()) - outputs)
            if scratch > known or (scratch < known and event.op not in before.workspace):
                found_workspace[event.op] = scratch
    if lacking >= GRAIN:
        found_workspace |= _lacked(program, events, asked, workspace, measured, reached, lacking)
    certain = {
        kind: found.pop()
        for kind, found in takes_over.items()
        if found == {False} or (found == {True} and kind not in before.takes_over)
    }
    corrections = Corrections(certain, found_workspace)
    # What is believed already is no correction (the last slice of a buffer, say, is
    # taken over by a kernel that takes over buffers, and no model knows that).
    changed = {op.type for op in program.ops if corrections.corrected(op, program) != op}
    return replace(corrections, takes_over={kind: certain[kind] for kind in changed})
