"""Stage 6: what one recorded run says about the model of its memory.

Two things about an operation's kernel are not written anywhere: whether it
takes over the buffer of an input, and how much scratch memory it asks for.
``memory`` knows what is usual; where a run differs, it is right.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .arena import GRAIN
from .lower import node_name
from .memory import Event, Requests
from .program import Kind, Program
from .timeline import Allocation


@dataclass(frozen=True)
class Corrections:
    """What to believe about operations instead.

    Attributes:
      forwards: by operation, the inputs whose buffer output 0 may take over.
      workspace: by operation, bytes of scratch memory.
    """

    forwards: dict[int, tuple[int, ...]]
    workspace: dict[int, int]

    def __bool__(self) -> bool:
        return bool(self.forwards or self.workspace)

    def apply(self, program: Program) -> Program:
        """The program with its forwards corrected."""
        ops = [
            replace(op, forwards=self.forwards[index]) if index in self.forwards else op
            for index, op in enumerate(program.ops)
        ]
        return replace(program, ops=tuple(ops))


def compare(
    program: Program,
    events: Sequence[Event],
    asked: Requests,
    recorded: Iterable[Allocation],
) -> Corrections:
    """Compares what each event was expected to allocate with what it did.

    Args:
      program: the operations.
      events: their runs.
      asked: what they were expected to ask for.
      recorded: of one run; it may have ended early.
    """
    names = [node_name(program, event) for event in events]
    measured: dict[str, Counter[int]] = defaultdict(Counter)
    for allocation in recorded:
        if allocation.requested >= GRAIN:
            measured[allocation.op][allocation.requested] += 1
    reached = max((at for at, name in enumerate(names) if name in measured), default=0)
    forwards: dict[int, tuple[int, ...]] = {}
    workspace: dict[int, int] = {}
    for event, name, taken in zip(events[:reached], names, asked.taken, strict=False):
        op = program.ops[event.op]
        if op.kind not in (Kind.PURE, Kind.ONCE) or not op.bytes:
            continue
        expected = Counter(asked.sizes[n] for n in taken if asked.sizes[n] >= GRAIN)
        found = measured[name]
        if found == expected:
            continue
        missing, extra = expected - found, found - expected
        first = op.bytes[0]
        if missing[first] and op.kind is Kind.PURE:
            forwards[event.op] = tuple(
                slot
                for slot, (source, number) in enumerate(op.inputs)
                if program.ops[source].bytes[number] == first
            )
            missing[first] -= 1
        elif extra[first] and op.forwards:
            forwards[event.op] = ()
            extra[first] -= 1
        if extra.total() or missing.total():
            # An output that is not there either was never asked for by anyone.
            outputs = sum(size for size in op.bytes if size >= GRAIN and expected[size])
            workspace[event.op] = max(0, sum(found.elements()) - outputs)
    return Corrections(forwards, workspace)
