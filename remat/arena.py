"""The memory pool: a model of TensorFlow's allocator, and how a step finds it.

``Arena`` follows the "best-fit with coalescing" allocator
(tensorflow/core/framework bfc_allocator): requests are rounded up to 256
bytes and served from the smallest free chunk that can hold them; a chunk
smaller than twice the request is handed out whole, a larger one is split; free
neighbours are merged.  The bytes in use that ``get_memory_info`` reports count
whole chunks.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

ALIGNMENT = 256  # bytes; every request is rounded up to a multiple
_BINS = 21
_SPLIT_WASTE = 128 << 20  # bytes; a larger remainder is always split off
_ENDLESS = 1 << 50  # bytes
_SMALL_VALUES = 1 << 19  # bytes for what no prediction sees

LEAST_AREA = 3 / 8
"""Of what a budget leaves: a pool with less than that in one piece is not divided."""

FIRST_REGION = 2 << 20
"""Bytes of a pool's first region; the next ones double."""

GRAIN = 1 << 14
"""Bytes: what is smaller finds room anywhere, and is not placed."""


class OutOfMemoryError(MemoryError):
    """A request does not fit in the arena's limit."""


@dataclass(slots=True)
class Chunk:
    """A stretch of the pool: in use, or free; neighbours are linked."""

    address: int
    size: int
    free: bool
    before: Chunk | None
    after: Chunk | None

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
        self._next_region = FIRST_REGION
        self._address = held
        self._bins: list[list[tuple[int, int]]] = [[] for _ in range(_BINS)]
        self._free: dict[int, Chunk] = {}  # by address
        if not growth:
            if limit is None:
                raise ValueError("an arena without growth needs a limit")
            self._add_region(limit // ALIGNMENT * ALIGNMENT)

    def allocate(self, size: int) -> Chunk:
        """Takes a chunk for ``size`` bytes.

        Raises:
          OutOfMemoryError: if no chunk is free and the limit forbids a region.
        """
        rounded = aligned(size)
        chunk = self.best_fit(rounded)
        if chunk is None:
            self._extend(rounded)
            chunk = self.best_fit(rounded)
        if chunk is None:
            raise OutOfMemoryError(f"no chunk of {rounded} bytes")
        self._remove(chunk)
        if is_split(chunk.size, rounded):
            rest = Chunk(chunk.address + rounded, chunk.size - rounded, True, chunk, chunk.after)
            if chunk.after is not None:
                chunk.after.before = rest
            chunk.after, chunk.size = rest, rounded
            self._insert(rest)
        chunk.free = False
        self.footprint = max(self.footprint, chunk.address + chunk.size)
        self.in_use += chunk.size
        return chunk

    def free(self, chunk: Chunk) -> None:
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
        while 2 * self._next_region - FIRST_REGION <= self.reserved:
            self._next_region *= 2  # it has doubled on the way to so many bytes

    def lay_slots(self, address: int, sizes: Iterable[int]) -> None:
        """Leaves free chunks of these sizes, walled off, at the start of the one
        at ``address``."""
        taken = [self.allocate(c.size) for c in self.free_chunks() if c.address != address]
        for size in sizes:
            taken.append(self.allocate(size))
            self.allocate(ALIGNMENT)
        for chunk in taken:
            self.free(chunk)

    def best_fit(self, size: int) -> Chunk | None:
        """The free chunk that a request of ``size`` bytes would be served from."""
        rounded = aligned(size)
        for number in range(_bin(rounded), _BINS):
            entries = self._bins[number]
            at = bisect.bisect_left(entries, (rounded, 0))
            if at < len(entries):
                return self._free[entries[at][1]]
        return None

    def free_at(self, address: int) -> Chunk | None:
        """The free chunk that starts at an address."""
        return self._free.get(address)

    def free_around(self, address: int) -> Chunk | None:
        """The free chunk that holds an address."""
        start = max((known for known in self._free if known <= address), default=None)
        chunk = None if start is None else self._free[start]
        return chunk if chunk is not None and address < chunk.address + chunk.size else None

    def free_chunks(self) -> list[Chunk]:
        """All free chunks, by address."""
        return [self._free[address] for address in sorted(self._free)]

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
        self._insert(Chunk(self._address, size, True, None, None))
        self._address += size  # chunks of two regions are never merged
        self.reserved += size

    def _insert(self, chunk: Chunk) -> None:
        bisect.insort(self._bins[_bin(chunk.size)], chunk.key())
        self._free[chunk.address] = chunk

    def _remove(self, chunk: Chunk) -> None:
        entries = self._bins[_bin(chunk.size)]
        del entries[bisect.bisect_left(entries, chunk.key())]
        del self._free[chunk.address]


def aligned(size: int, unit: int = ALIGNMENT) -> int:
    """``size`` rounded up to a multiple of ``unit``, at least one."""
    return max(unit, -(-size // unit) * unit)


def is_split(chunk: int, size: int) -> bool:
    """Whether a chunk of ``chunk`` bytes is cut for a request of ``size``, or
    handed out whole."""
    return chunk >= split_from(size)


def split_from(size: int) -> int:
    """Bytes of the smallest chunk that is cut for a request of ``size``."""
    return min(2 * size, size + _SPLIT_WASTE)


def is_roomy(area: int, left: int) -> bool:
    """Whether an area's free end is cut for every request as long as these take at most
    ``left`` bytes together."""
    return area >= 2 * left


def _bin(size: int) -> int:
    return min(_BINS - 1, max(size >> 8, 1).bit_length() - 1)


def slots_end(slots: Sequence[int]) -> int:
    """Bytes that slots take, with a wall after each."""
    return sum(slots) + len(slots) * ALIGNMENT


@dataclass(frozen=True)
class Layout:
    """How a pool was divided for the steps that use it.

    Between steps, batches and results come and go.  Each has a slot of its
    own, an exact fit and so the best fit, walled off by a chunk that is never
    freed; the area is left for what a step allocates while it runs.

    Attributes:
      in_use: bytes of all chunks in use before.
      before, after: sizes of the free chunks at lower and higher addresses.
      slots: sizes, in order.
      area: size of what follows the slots.
      beyond: sizes of the chunks that follow the area; not to be used.
    """

    in_use: int
    before: tuple[int, ...]
    slots: tuple[int, ...]
    area: int
    beyond: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def slots_end(self) -> int:
        """Bytes from the first slot to the area, walls included."""
        return slots_end(self.slots)

    @property
    def slot_addresses(self) -> range:
        """From the first slot to the area."""
        start = self.in_use + sum(self.before)
        return range(start, start + self.slots_end)

    @cached_property
    def slots_at(self) -> dict[int, int]:
        """The size of each slot, by where it starts."""
        lengths = (size + ALIGNMENT for size in self.slots)
        starts = itertools.accumulate(lengths, initial=self.slot_addresses.start)
        return dict(zip(starts, self.slots, strict=False))

    def serves(self, slots: Iterable[int]) -> bool:
        """Whether each of ``slots`` finds one of its size here."""
        return Counter(slots) <= Counter(self.slots)


@dataclass(frozen=True)
class Pool:
    """An allocator's memory pool as a step finds it.

    Attributes:
      held: sizes of what was allocated before the step was planned, in order.
      constants: sizes of what the lowered step holds.
      arguments, results: sizes of a batch and of what a step returns; its
        caller holds one of each while a step runs.
      small: bytes of values below ``GRAIN`` that a step holds at once.
      limit: bytes that it may hold, or None if that is no concern.
      highest: most bytes that were ever in use; 0 where nobody counts them.
      growth: whether it starts small and grows; else all of its limit is one piece.
      layout: how it was divided; guessed from the rest if None.
      quiet: whether nothing else allocates while a step runs, so that tensors
        can be placed (see ``placement``).
      shared: whether something else may, however it is divided.
      ahead: batches that an input pipeline may hold, too.
      outside: those of the constants that have no slots, as they were there when
        another step divided the pool.
      common: sizes of slots for the batches and results of other steps that take
        turns with this one.
    """

    held: tuple[int, ...]
    constants: tuple[int, ...] = ()
    arguments: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    small: int = 0
    limit: int | None = None
    highest: int = 0
    growth: bool = True
    layout: Layout | None = None
    quiet: bool = False
    shared: bool = False
    ahead: int = 0
    outside: tuple[int, ...] = ()
    common: tuple[int, ...] = ()

    @property
    def resident(self) -> int:
        """Bytes held throughout the step."""
        return sum(self.held) + sum(self.constants) + sum(self.arguments) + sum(self.results)

    @property
    def slots(self) -> tuple[int, ...]:
        """Sizes of the chunks to lay out, for this step and for those that take turns with it."""
        return (*self.own_slots, *(Counter(self.common) - Counter(self.own_slots)).elements())

    @property
    def own_slots(self) -> tuple[int, ...]:
        """Sizes of the chunks that this step needs: three for each tensor of a batch (the
        last one, the next one, and the copy that making it may take) and for
        what a pipeline holds, which would come and go in the area; two for
        each of the results (the last one is held while the next one is made);
        one for each constant; and many below ``GRAIN`` for small values,
        twice what they take, as a chunk may be twice its request."""
        between = (*self.arguments, *self.results) * 2 + self.arguments * (1 + self.ahead)
        inside = self.constants_inside
        single = [size for size in (*between, *inside) if size >= GRAIN]
        small = sum(aligned(size) for size in (*between, *inside) if size < GRAIN)
        count = -(-(2 * (self.small + small) + _SMALL_VALUES) // GRAIN)
        return (*[GRAIN - ALIGNMENT] * count, *map(aligned, single))

    @cached_property
    def free_slots(self) -> Counter[int]:
        """How many slots of each size are free while a step runs; of others' none."""
        held = Counter(map(aligned, (*self.constants_inside, *self.arguments, *self.results)))
        free = Counter(size for size in self.own_slots if size >= GRAIN) - held
        return Counter({**dict.fromkeys(self._others, 0), **free})

    def with_constants_outside(self) -> Pool:
        """The same, with no slots for constants but those for small values."""
        return replace(self, outside=tuple(size for size in self.constants if size >= GRAIN))

    @property
    def constants_inside(self) -> tuple[int, ...]:
        """Sizes of the constants that have slots."""
        return tuple((Counter(self.constants) - Counter(self.outside)).elements())

    @cached_property
    def _others(self) -> Counter[int]:
        """How many slots of each size are for other steps."""
        slots = self.slots if self.layout is None else self.layout.slots
        return Counter(size for size in slots if size >= GRAIN) - Counter(self.own_slots)

    def smaller(self, count: int) -> Pool:
        """The pool with so many bytes less at its end; without a limit it has none."""
        if self.limit is None:
            return self
        layout, limit = self.layout, self.limit - count
        if layout is not None:
            area = max(0, layout.area - count) // ALIGNMENT * ALIGNMENT
            layout = replace(layout, area=area)
        return replace(self, limit=limit, layout=layout)

    def unclaimed(self) -> int:
        """Bytes that the limit still allows for one more region, or that are left of the one.

        Raises:
          OutOfMemoryError: if not even what is held fits.
        """
        assert self.limit is not None
        return self.limit - self._start(self._grown())

    def arena(self) -> Arena:
        """A model of the pool, with slots laid and constants allocated.

        Raises:
          OutOfMemoryError: if not even that fits.
        """
        if self.layout is not None:
            layout = self.layout
            arena = Arena(held=layout.in_use)
            for size in layout.before:
                arena.claim(size)
            start, slots = arena.reserved, layout.slots
            for size in (layout.slots_end + layout.area, *layout.beyond, *layout.after):
                arena.claim(size)
        else:
            arena, slots = self._grown(), self.slots
            start = self._start(arena)
            arena.claim(_ENDLESS if self.limit is None else self.limit - arena.reserved)
        if self.quiet or self.limit is not None:
            arena.limit = arena.reserved  # there is no more
        arena.lay_slots(start, slots)
        for size in (*self.constants_inside, *self._others.elements()):
            arena.allocate(size)
        return arena

    def batch(self, arena: Arena) -> list[Chunk]:
        """Allocates a batch."""
        return [arena.allocate(size) for size in self.arguments if size]

    def last_results(self, arena: Arena) -> list[Chunk]:
        """Allocates the results of the step before."""
        return [arena.allocate(size) for size in self.results if size]

    @property
    def _grows(self) -> bool:
        """Whether there is not all of it from the start."""
        return self.growth or self.limit is None

    def _start(self, arena: Arena) -> int:
        """The address of what may be claimed, in the pool before anything is."""
        return arena.reserved if self._grows else arena.in_use

    def _grown(self) -> Arena:
        """The pool before anything is claimed."""
        arena = Arena(self.limit, growth=self._grows)
        for size in self.held:
            arena.allocate(size)
        missing = min(self.highest, self.limit or self.highest) - arena.reserved
        if missing > 0:
            arena.free(arena.allocate(missing))
        arena.limit = None  # what is claimed next may be as large as it likes
        return arena
