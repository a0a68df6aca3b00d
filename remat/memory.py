"""Predicted memory: what running a list of events asks of TensorFlow's allocator.

``requests`` follows TensorFlow's reference counting.  Events run one after
the other; an output is allocated when its operation runs, or takes over the
buffer of an input that nobody else holds; a buffer is freed when the last
operation that reads it is done.

``simulate`` makes these requests of a model of the allocator (``arena``).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from .arena import GRAIN, Arena, Chunk, Pool, aligned
from .executor import execution_order
from .program import KEPT_SCRATCH, SCRATCH_FIRST, Kind, Op, Program, Tensor

_SHARES = 8  # of the largest that a value may be, that are tried: see ``as_run``
_STEPS = 12  # runs, at most, until batches and results lie where they did before


@dataclass(frozen=True, slots=True)
class Event:
    """One run of one operation.

    Attributes:
      op: index of the operation in the program.
      copy: 0 for the first run, then 1, 2, ...
      inputs: for each input, the event whose output it reads, and which.
    """

    op: int
    copy: int
    inputs: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Filler:
    """Memory that is held for a moment so that something else lies elsewhere.

    Attributes:
      bytes: how much; never read or written.
      during: held while the event runs, not only until it does.
    """

    bytes: int
    during: bool


Fillers = Mapping[int, Sequence[Filler]]
"""By event: what is allocated before it, in order."""


@dataclass(frozen=True)
class Requests:
    """What running a list of events asks of the allocator, whatever lies where.

    Requests are numbered in the order in which they are made.

    Attributes:
      sizes: bytes of each request.
      taken: for each event, the requests that it makes, in order.
      given: for each event, the requests that are given back once it has run.
      kept: the requests that hold what the step returns.
      taken_over: for each event, the input whose buffer one of its outputs takes
        over; None if none.
      varying: the requests that may be for less, as only the run knows their sizes, each with
        the values whose sizes these follow.
    """

    sizes: tuple[int, ...]
    taken: tuple[tuple[int, ...], ...]
    given: tuple[tuple[int, ...], ...]
    kept: tuple[int, ...]
    taken_over: tuple[int | None, ...]
    varying: Mapping[int, frozenset[Tensor]] = field(default_factory=dict)

    def lifetimes(self) -> tuple[list[int], list[int]]:
        """The first and the last event during which each request is held; the last
        is past the end for what is kept."""
        first = [event for event, taken in enumerate(self.taken) for _ in taken]
        last = [len(self.given)] * len(self.sizes)
        for event, numbers in enumerate(self.given):
            for number in numbers:
                last[number] = event
        return first, last

    def timeline(self, resident: int) -> list[int]:
        """Bytes held while each event runs, as requested."""
        held, found = resident, []
        for taken, given in zip(self.taken, self.given, strict=True):
            held += sum(self.sizes[number] for number in taken)
            found.append(held)
            held -= sum(self.sizes[number] for number in given)
        return found


@dataclass(frozen=True)
class Usage:
    """What a list of events takes.

    Attributes:
      peak: most bytes in use, as the allocator counts them, resident included.
      footprint: bytes of memory pool that the events need so as not to fail
        for want of a chunk: the highest address used.
      requested_peak: most bytes requested, resident included.
      held: most bytes in use while each event runs, as the allocator counts them.
      settled: whether each of the results lies in a slot of its size, so that the
        next step finds the pool as this one did.
    """

    peak: int
    footprint: int
    requested_peak: int
    held: tuple[int, ...] = field(repr=False)
    settled: bool


def as_run(asked: Requests, seed: int) -> Iterator[Requests]:
    """The requests as runs may make them, where only a run knows the sizes of some: all as
    large as they can be; at one share of that; at a share or at what it lacks; at any shares.

    Less is not always easier to find room for: it is cut from another chunk.
    """
    yield asked
    parts: dict[int, list[Tensor]] = {}  # of which each has a share of its own
    for source in sorted({source for follows in asked.varying.values() for source in follows}):
        parts.setdefault(source[0], []).append(source)
    if not parts:
        return
    rng = random.Random(seed)
    drawn = [dict.fromkeys(parts, number / _SHARES) for number in range(_SHARES)]
    for share in (number / (4 * _SHARES) for number in range(4 * _SHARES)):
        drawn.append({op: rng.choice((share, 1 - share)) for op in parts})
    drawn += [{op: rng.random() for op in parts} for _ in range(_SHARES)]
    for shares in drawn:
        of = {
            source: share
            for op, sources in parts.items()
            for source, share in zip(sources, _divided(shares[op], len(sources), rng), strict=True)
        }
        sizes = list(asked.sizes)
        for number, follows in asked.varying.items():
            if follows:
                sizes[number] = int(sizes[number] * fmean(of[source] for source in follows))
        yield replace(asked, sizes=tuple(sizes))


def _divided(share: float, count: int, rng: random.Random) -> list[float]:
    """Shares of the parts of a whole, one of which is given, or that of what is none."""
    others = [1 - rng.random() for _ in range(count - 1)]
    shares = [share, *((1 - share) * other / sum(others) for other in others)]
    rng.shuffle(shares)
    return shares


def simulate(requests: Requests, pool: Pool, fillers: Fillers | None = None) -> Usage:
    """Runs events one after the other, on paper.

    Args:
      requests: what they ask for.
      pool: the allocator's memory, in the state that the step finds it in.
      fillers: what is allocated besides, to steer what lies where.

    Raises:
      OutOfMemoryError: if a request does not fit in the pool's limit.
    """
    arena = pool.arena()
    batch, results = pool.batch(arena), pool.last_results(arena)
    held: list[int] = []
    peak = 0
    # In a quiet pool every step finds the same; else they are followed until batches
    # and results lie where they did before, and the pipeline is ahead as far as it gets.
    seen: set[tuple[int, ...]] = set()
    waiting: list[Chunk] = []
    for number in range(1 if pool.quiet else _STEPS):
        if 0 < number <= pool.ahead:
            waiting += pool.batch(arena)
        found = tuple(chunk.address for chunk in (*batch, *results, *waiting))
        if found in seen:
            break
        seen.add(found)
        start = arena.in_use
        held, returned = _simulate_step(requests, arena, fillers or {})
        peak = max(peak, start, *held)
        following = pool.batch(arena)
        for chunk in (*batch, *results):
            arena.free(chunk)
        batch, results = following, returned
    requested = max(requests.timeline(pool.resident), default=pool.resident)
    sizes = [aligned(requests.sizes[number]) for number in requests.kept]
    # A slot as a whole, and no part of a larger one.
    slots = None if pool.layout is None else pool.layout.slots_at
    settled = slots is None or all(
        size < GRAIN or size == chunk.size == slots.get(chunk.address)
        for size, chunk in zip(sizes, results, strict=True)
    )
    return Usage(peak, arena.footprint, requested, tuple(held), settled)


def _simulate_step(
    requests: Requests, arena: Arena, fillers: Fillers
) -> tuple[list[int], list[Chunk]]:
    """Most bytes in use during each event, and where the results are."""
    chunks: dict[int, Chunk] = {}
    held: list[int] = []
    for event, (taken, given) in enumerate(zip(requests.taken, requests.given, strict=True)):
        fill = [(arena.allocate(filler.bytes), filler) for filler in fillers.get(event, ())]
        filled = arena.in_use
        for chunk, filler in fill:
            if not filler.during:
                arena.free(chunk)
        for number in taken:
            if requests.sizes[number]:
                chunks[number] = arena.allocate(requests.sizes[number])
        held.append(max(filled, arena.in_use))
        for number in given:
            if requests.sizes[number]:
                arena.free(chunks.pop(number))
        for chunk, filler in fill:
            if filler.during:
                arena.free(chunk)
    return held, [chunks[number] for number in requests.kept if requests.sizes[number]]


@dataclass(slots=True)
class _Buffer:
    """Memory that tensors share, in one request or several (or none, if ``resident``).

    ``holds`` are others that are there as long as it is.
    """

    bytes: int
    requests: list[int] = field(default_factory=list)
    references: int = 0
    resident: bool = False
    holds: list[_Buffer] = field(default_factory=list)

    def hold(self, other: _Buffer) -> None:
        """Keeps another one as long as this is there."""
        other.references += 1
        self.holds.append(other)


def plain_events(program: Program) -> tuple[Event, ...]:
    """The plain step's operations in the order of TensorFlow's own executor."""
    ops = program.ops
    order = execution_order(
        [op.type for op in ops], [[*(p for p, _ in op.inputs), *op.controls] for op in ops]
    )
    position = {op: event for event, op in enumerate(order)}
    return tuple(
        Event(op, 0, tuple((position[source], number) for source, number in ops[op].inputs))
        for op in order
    )


def creation_events(program: Program) -> tuple[Event, ...]:
    """The plain step's operations in the order in which they were traced."""
    return tuple(Event(index, 0, op.inputs) for index, op in enumerate(program.ops))


def requests(
    program: Program,
    events: Sequence[Event],
    workspace: Mapping[int, int],
    given_up: Mapping[int, int] | None = None,
) -> Requests:
    """What events ask of the allocator when run one after the other.

    Args:
      program: the operations.
      events: their runs, in order; every input comes from an earlier event.
      workspace: bytes that an operation holds only while it runs.
      given_up: bytes of arguments that nobody else holds: they go with their last reader.
        They count as asked for when they come.
    """
    ops = program.ops
    references = _references(program, events)
    until = _scratch_readers(program, events)
    kept_scratch: dict[int, list[int]] = {}  # by the event that reads it last
    buffers: list[list[_Buffer]] = []
    sizes: list[int] = []
    varying: dict[int, frozenset[Tensor]] = {}
    all_taken, all_given = [], []
    taken_over: list[int | None] = []

    def release(buffer: _Buffer) -> list[int]:
        buffer.references -= 1
        if buffer.references or buffer.resident:
            return []
        return [*buffer.requests, *(given for held in buffer.holds for given in release(held))]

    for index, event in enumerate(events):
        op = ops[event.op]
        taken: list[int] = []
        given: list[int] = []
        slot: int | None = None

        def take(size: int, parts: int = 1, taken: list[int] = taken) -> list[int]:
            if not size:
                return []
            if size < parts * GRAIN:  # nobody places these
                parts = 1
            new = [*range(len(sizes), len(sizes) + parts)]
            sizes.extend([size // parts] * parts)
            taken += new
            return new

        if given_up and event.op in given_up:
            size = given_up[event.op]
            outputs = [_Buffer(size, take(size))]
        elif op.kind in (Kind.ARGUMENT, Kind.CONSTANT, Kind.READ):
            outputs = [_Buffer(0, resident=True) for _ in op.bytes]
        elif op.kind is Kind.ALIAS:
            source, number = event.inputs[0]
            outputs = [buffers[source][number] for _ in op.bytes]
        else:
            extra = scratch_requests(program, event.op, workspace.get(event.op, 0))
            first = op.type in SCRATCH_FIRST
            scratch = [number for size in extra if first for number in take(size)]
            outputs = []
            slot, passed = _taken_over(op, event, buffers), dict(op.passed)
            parts = dict(op.parts)
            for output, size in enumerate(op.bytes):
                if slot is not None and output == op.forwarded:
                    source, number = event.inputs[slot]
                    outputs.append(buffers[source][number])
                elif output in passed:
                    source, number = event.inputs[passed[output]]
                    outputs.append(buffers[source][number])
                else:
                    outputs.append(_Buffer(size, take(size, parts.get(output, 1))))
            for output, held in op.keeps:
                source, number = event.inputs[held]
                outputs[output].hold(buffers[source][number])
            for output, held in op.shares:
                outputs[output].hold(outputs[held])
            scratch += [number for size in extra if not first for number in take(size)]
            if index in until:
                kept_scratch.setdefault(until[index], []).extend(scratch)
            else:
                given += scratch
        if op.varies:
            follows = program.size_follows
            varying.update(dict.fromkeys(taken, follows[event.op, 0]))
            for output, buffer in enumerate(outputs):
                own = set(taken).intersection(buffer.requests)
                varying.update(dict.fromkeys(own, follows[event.op, output]))
        buffers.append(outputs)
        # While it runs, an operation holds its outputs; then its readers do.
        for number, buffer in enumerate(outputs):
            buffer.references += 1 + references[index][number]
        given += kept_scratch.get(index, [])
        for source, number in event.inputs:
            given += release(buffers[source][number])
        for buffer in outputs:
            given += release(buffer)
        all_taken.append(tuple(taken))
        all_given.append(tuple(given))
        taken_over.append(slot)
    newest = {event.op: index for index, event in enumerate(events)}
    returned = (buffers[newest[op]][number] for op, number in program.outputs)
    kept = dict.fromkeys(number for buffer in returned for number in buffer.requests)
    return Requests(
        tuple(sizes),
        tuple(all_taken),
        tuple(all_given),
        tuple(kept),
        tuple(taken_over),
        varying,
    )


def scratch_requests(program: Program, index: int, count: int) -> tuple[int, ...]:
    """The bytes of each request for an operation's ``count`` bytes of scratch memory.

    ``Einsum`` copies operands whose axes lie in another order than it needs, and its result
    where that has another order: these are taken to be as many of them as there is room
    for.  ``MaxPoolGrad`` finds the maxima once more (in the buffer of its last input, if that
    is nobody else's), and where they were, as 8 bytes each.
    """
    op = program.ops[index]
    if not count or op.type not in ("Einsum", "MaxPoolGrad"):
        return (count,) if count else ()
    sizes = [program.ops[source].bytes[number] for source, number in op.inputs]
    if op.type == "Einsum":
        sizes += op.bytes
        choices = (c for n in range(len(sizes) + 1) for c in itertools.combinations(sizes, n))
        copied = max((choice for choice in choices if sum(choice) <= count), key=sum)
    else:
        where = 8 * sizes[1] // op.dtypes[0].size
        copied = (count - where,) if count > where else ()
    return tuple(size for size in (*copied, count - sum(copied)) if size)


def _scratch_readers(program: Program, events: Sequence[Event]) -> dict[int, int]:
    """For each event that leaves scratch memory to others, the last one that reads it."""
    found = {}
    for index, event in enumerate(events):
        if program.ops[event.op].type not in KEPT_SCRATCH.values():
            continue
        for source, _ in event.inputs:
            while program.ops[events[source].op].kind is Kind.ALIAS:
                source = events[source].inputs[0][0]
            if KEPT_SCRATCH.get(program.ops[events[source].op].type) == program.ops[event.op].type:
                found[source] = index
    return found


def _references(program: Program, events: Sequence[Event]) -> list[list[int]]:
    """How often each output of each event is read; results are held for good."""
    counts = [[0] * len(program.ops[event.op].bytes) for event in events]
    newest: dict[int, int] = {}
    for index, event in enumerate(events):
        for source, number in event.inputs:
            counts[source][number] += 1
        newest[event.op] = index
    for op, number in program.outputs:
        counts[newest[op]][number] += 1
    return counts


def _taken_over(op: Op, event: Event, buffers: Sequence[Sequence[_Buffer]]) -> int | None:
    """The input whose buffer an output takes over, if there is one."""
    for slot in op.forwards:
        source, number = event.inputs[slot]
        buffer = buffers[source][number]
        if (
            buffer.references == 1
            and not buffer.resident
            and buffer.bytes == op.bytes[op.forwarded]
        ):
            return slot
    return None
