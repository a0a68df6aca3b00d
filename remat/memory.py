"""Predicted memory: what running a list of events asks of TensorFlow's allocator.

Two models, one on top of the other:

``simulate`` follows TensorFlow's reference counting.  Events run one after
the other; an output is allocated when its operation runs, or takes over the
buffer of an input that nobody else holds; a buffer is freed when the last
operation that reads it is done.

The events are run several times over, as a training loop runs a step: the
caller still holds the previous results while the next step runs, and the
previous batch while it makes the next one.  What they leave where decides
where the next step finds room.

``Arena`` follows TensorFlow's "best-fit with coalescing" allocator
(tensorflow/core/framework bfc_allocator): requests are rounded up to 256
bytes, a free chunk smaller than twice the request is handed out whole, free
neighbours are merged.  The peak that ``get_memory_info`` reports counts whole
chunks, so it is a few percent above the bytes requested.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .program import KEPT_SCRATCH, SCRATCH_FIRST, Kind, Program, Tensor

ALIGNMENT = 256  # bytes; every request is rounded up to a multiple
_BINS = 21
_SPLIT_WASTE = 128 << 20  # bytes; a larger remainder is always split off
_ENDLESS = 1 << 50  # bytes
_FIRST_REGION = 2 << 20  # bytes; regions then double
_STEPS = 12  # runs, at most, until batches and results lie where they did before
_SMALLEST_SLOT = 1 << 16  # bytes; what is smaller finds room anywhere
_SMALL_VALUES = 1 << 18  # bytes


class OutOfMemoryError(MemoryError):
    """A request does not fit in the arena's limit."""


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


@dataclass(frozen=True)
class Usage:
    """What a list of events takes.

    Attributes:
      peak: most bytes in use, as the allocator counts them, resident included.
      footprint: bytes of memory pool that the events need so as not to fail
        for want of a chunk: the highest address used.
      requested_peak: the same, as the operations requested them.
      timeline: bytes in use (whole chunks) while each event runs.
      requested: bytes requested while each event runs.
    """

    peak: int
    footprint: int
    requested_peak: int
    timeline: tuple[int, ...]
    requested: tuple[int, ...]


@dataclass(slots=True)
class _Chunk:
    address: int
    size: int
    free: bool
    before: _Chunk | None
    after: _Chunk | None

    def key(self) -> tuple[int, int]:
        return (self.size, self.address)


class Arena:
    """A model of one BFC allocator.

    Args:
      limit: bytes of all regions together, or None for no limit.
      growth: regions start small and double (CPU, or GPU memory growth);
        otherwise one region of ``limit`` bytes is there from the start.
      held: bytes in use of which nothing more needs to be known.
    """

    def __init__(self, limit: int | None = None, growth: bool = True, held: int = 0) -> None:
        self.limit = limit
        self.in_use = self.reserved = self.footprint = held
        self._next_region = _FIRST_REGION
        self._address = held
        self._bins: list[list[tuple[int, int]]] = [[] for _ in range(_BINS)]
        self._free: dict[int, _Chunk] = {}  # by address
        if not growth:
            if limit is None:
                raise ValueError("an arena without growth needs a limit")
            self._add_region(limit // ALIGNMENT * ALIGNMENT)

    def allocate(self, size: int) -> _Chunk:
        """Takes a chunk for ``size`` bytes.

        Raises:
          OutOfMemoryError: if no chunk is free and the limit forbids a region.
        """
        rounded = _rounded(size)
        chunk = self._find(rounded)
        if chunk is None:
            self._extend(rounded)
            chunk = self._find(rounded)
        if chunk is None:
            raise OutOfMemoryError(f"no chunk of {rounded} bytes")
        if chunk.size >= 2 * rounded or chunk.size - rounded >= _SPLIT_WASTE:
            rest = _Chunk(chunk.address + rounded, chunk.size - rounded, True, chunk, chunk.after)
            if chunk.after is not None:
                chunk.after.before = rest
            chunk.after, chunk.size = rest, rounded
            self._insert(rest)
        chunk.free = False
        self.footprint = max(self.footprint, chunk.address + chunk.size)
        self.in_use += chunk.size
        return chunk

    def free(self, chunk: _Chunk) -> None:
        """Gives a chunk back, merging it with its free neighbours."""
        self.in_use -= chunk.size
        chunk.free = True
        after = chunk.after
        if after is not None and after.free:
            self._remove(after)
            chunk.size += after.size
            chunk.after = after.after
            if after.after is not None:
                after.after.before = chunk
        before = chunk.before
        if before is not None and before.free:
            self._remove(before)
            before.size += chunk.size
            before.after = chunk.after
            if chunk.after is not None:
                chunk.after.before = before
            chunk = before
        self._insert(chunk)

    def claim(self, size: int) -> None:
        """Adds one free region of ``size`` bytes."""
        if size >= ALIGNMENT:
            self._add_region(size // ALIGNMENT * ALIGNMENT)

    def lay_slots(self, sizes: Iterable[int]) -> None:
        """Leaves a free chunk of each size at the start of the largest one.

        An exact fit is the best fit: what is allocated and freed between steps
        goes there, and the rest stays in one piece.  A chunk that is never
        freed walls each slot off.
        """
        holes = sorted(chunk.size for chunk in self._free.values())[:-1]
        taken = [self.allocate(size) for size in holes]
        for size in sizes:
            taken.append(self.allocate(size))
            self.allocate(ALIGNMENT)
        for chunk in taken:
            self.free(chunk)

    def _find(self, rounded: int) -> _Chunk | None:
        for number in range(_bin(rounded), _BINS):
            entries = self._bins[number]
            at = bisect.bisect_left(entries, (rounded, 0))
            if at < len(entries):
                return self._free.pop(entries.pop(at)[1])
        return None

    def _extend(self, rounded: int) -> None:
        available = None
        if self.limit is not None:
            available = (self.limit - self.reserved) // ALIGNMENT * ALIGNMENT
            if rounded > available:
                raise OutOfMemoryError(
                    f"{rounded} bytes asked for, {available} of {self.limit} not yet in a region"
                )
        doubled = False
        while rounded > self._next_region:
            self._next_region *= 2
            doubled = True
        size = self._next_region if available is None else min(self._next_region, available)
        self._add_region(size)
        if not doubled:
            self._next_region *= 2

    def _add_region(self, size: int) -> None:
        self._insert(_Chunk(self._address, size, True, None, None))
        self._address += size  # chunks of two regions are never merged
        self.reserved += size

    def _insert(self, chunk: _Chunk) -> None:
        bisect.insort(self._bins[_bin(chunk.size)], chunk.key())
        self._free[chunk.address] = chunk

    def _remove(self, chunk: _Chunk) -> None:
        entries = self._bins[_bin(chunk.size)]
        del entries[bisect.bisect_left(entries, chunk.key())]
        del self._free[chunk.address]


def _rounded(size: int) -> int:
    return max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)


def _bin(size: int) -> int:
    return min(_BINS - 1, max(size >> 8, 1).bit_length() - 1)


@dataclass(frozen=True)
class Pool:
    """An allocator's memory pool as a step finds it.

    Attributes:
      held: sizes of what was allocated before the step was planned, in order.
      constants: sizes of what the lowered step holds.
      arguments, results: sizes of a batch and of what a step returns; its
        caller holds one of each while a step runs.
      limit: bytes that it may hold, or None if that is no concern.
      growth: whether it started small and doubled.
      highest: most bytes that were ever in use.
      in_use: bytes of all chunks in use before the step, if ``free`` is known.
      free: sizes of the free chunks that were found, the largest (what is
        claimed) last; empty if they are to be guessed from the rest.
      withheld: bytes at the end of the largest chunk to leave alone.
    """

    held: tuple[int, ...]
    constants: tuple[int, ...] = ()
    arguments: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    limit: int | None = None
    growth: bool = True
    highest: int = 0
    in_use: int = 0
    free: tuple[int, ...] = ()
    withheld: int = 0

    @property
    def resident(self) -> int:
        """Bytes held throughout the step."""
        return sum(self.held) + sum(self.constants) + sum(self.arguments) + sum(self.results)

    @property
    def slots(self) -> tuple[int, ...]:
        """Sizes of the chunks to lay out: one for constants and other small
        values; three for each tensor of a batch (the last one, the next one,
        and the copy that making it may take); two for each of the results
        (the last one is held while the next one is made)."""
        small = _SMALL_VALUES + sum(map(_rounded, self.constants))
        large = (*self.arguments, *self.results, *self.arguments, *self.results, *self.arguments)
        return (small, *(size for size in large if size >= _SMALLEST_SLOT))

    def unclaimed(self) -> int:
        """Bytes that the limit still allows for one more region."""
        assert self.limit is not None
        return self.limit - self._grown().reserved

    def arena(self) -> Arena:
        """A model of the pool, with slots laid and constants allocated.

        Raises:
          OutOfMemoryError: if not even that fits.
        """
        if self.free:
            arena = Arena(held=self.in_use)
            for size in self.free[:-1]:
                arena.claim(size)
            largest = self.free[-1]
        else:
            arena = self._grown()
            largest = 0 if self.limit is None else self.limit - arena.reserved
        arena.claim(_ENDLESS if self.limit is None else largest - self.withheld)
        arena.limit = arena.reserved  # there is no more
        arena.lay_slots(self.slots)
        for size in self.constants:
            arena.allocate(size)
        return arena

    def _grown(self) -> Arena:
        """The pool before anything is claimed."""
        if not self.growth:
            arena = Arena(self.limit or _ENDLESS, growth=False)
        else:
            arena = Arena(self.limit)
        for size in self.held:
            arena.allocate(size)
        missing = min(self.highest, self.limit or self.highest) - arena.reserved
        if missing > 0:
            arena.free(arena.allocate(missing))
        arena.limit = None  # what is claimed next may be as large as it likes
        return arena


@dataclass(slots=True)
class _Buffer:
    bytes: int
    references: int
    resident: bool
    chunk: _Chunk | None = None
    beside: _Chunk | None = None


def simulate(
    program: Program,
    events: Sequence[Event],
    workspace: Mapping[int, int],
    pool: Pool,
) -> Usage:
    """Runs events one after the other, on paper, for a few steps.

    Args:
      program: the operations.
      events: their runs, in order; every input comes from an earlier event.
      workspace: bytes that an operation holds only while it runs.
      pool: the allocator's memory, in the state that the step finds it in.

    Raises:
      OutOfMemoryError: if a request does not fit in the pool's limit.
    """
    arena = pool.arena()
    references = _references(program, events)
    batch: list[_Chunk] = []
    results: list[_Chunk] = []
    steps = []
    seen: set[tuple[int, ...]] = set()
    for _ in range(_STEPS):
        next_batch = [arena.allocate(size) for size in pool.arguments if size]
        for chunk in batch:
            arena.free(chunk)
        batch = next_batch
        held = tuple(chunk.address for chunk in (*batch, *results))
        if held in seen:
            break
        seen.add(held)
        timeline, requested, returned = _simulate_step(
            program, events, references, workspace, arena, pool.resident
        )
        for chunk in results:
            arena.free(chunk)
        results = returned
        steps.append((timeline, requested))
    timeline, requested = max(steps, key=lambda step: max(step[0], default=0))
    return Usage(
        max(timeline, default=arena.in_use),
        arena.footprint,
        max(requested, default=pool.resident),
        tuple(timeline),
        tuple(requested),
    )


def _simulate_step(
    program: Program,
    events: Sequence[Event],
    references: Sequence[Sequence[int]],
    workspace: Mapping[int, int],
    arena: Arena,
    held: int,
) -> tuple[list[int], list[int], list[_Chunk]]:
    """Bytes in use and bytes requested while each event runs, and the results."""
    ops = program.ops
    buffers: list[list[_Buffer]] = []
    timeline, requested = [], []

    def release(buffer: _Buffer, count: int) -> int:
        buffer.references -= count
        if buffer.references or buffer.resident:
            return 0
        for chunk in (buffer.chunk, buffer.beside):
            if chunk is not None:
                arena.free(chunk)
        return buffer.bytes

    for index, event in enumerate(events):
        op = ops[event.op]
        extra, scratch = 0, None
        if op.kind in (Kind.ARGUMENT, Kind.CONSTANT, Kind.READ):
            outputs = [_Buffer(0, 0, True) for _ in op.bytes]
        elif op.kind is Kind.ALIAS:
            source, number = event.inputs[0]
            outputs = [buffers[source][number]]
        else:
            extra = workspace.get(event.op, 0)
            if extra and op.type in SCRATCH_FIRST:
                scratch = arena.allocate(extra)
            outputs = []
            for number, size in enumerate(op.bytes):
                buffer = None
                if number == 0:
                    buffer = _forwarded(op.forwards, size, event, buffers)
                if buffer is None:
                    buffer = _Buffer(size, 0, False, arena.allocate(size) if size else None)
                    held += size
                outputs.append(buffer)
            if extra and scratch is None:
                scratch = arena.allocate(extra)
            if scratch is not None and op.type in KEPT_SCRATCH:
                outputs[0].beside = scratch
                outputs[0].bytes += extra
                held += extra
                extra, scratch = 0, None
        timeline.append(arena.in_use)
        requested.append(held + extra)
        if scratch is not None:
            arena.free(scratch)
        buffers.append(outputs)
        # While it runs, an operation holds its outputs; then its readers do.
        for number, buffer in enumerate(outputs):
            buffer.references += 1 + references[index][number]
        for source, number in event.inputs:
            held -= release(buffers[source][number], 1)
        for buffer in outputs:
            held -= release(buffer, 1)
    newest = {event.op: index for index, event in enumerate(events)}
    returned = {id(b): b for b in (buffers[newest[op]][number] for op, number in program.outputs)}
    return timeline, requested, [b.chunk for b in returned.values() if b.chunk is not None]


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


def _forwarded(
    candidates: Sequence[int], size: int, event: Event, buffers: Sequence[Sequence[_Buffer]]
) -> _Buffer | None:
    """The input buffer that the output takes over, if there is one."""
    for slot in candidates:
        source, number = event.inputs[slot]
        buffer = buffers[source][number]
        if buffer.references == 1 and not buffer.resident and buffer.bytes == size:
            return buffer
    return None
