"""What lies where: every large tensor gets an address, and fillers see to it.

TensorFlow's allocator decides on its own where a tensor lies: in the smallest
free chunk that can hold it.  Left to that, memory is chopped up: 15 to 20 % of
a pool ends up in holes that nothing fits into, and so a schedule would have to
recompute more than the budget asks for.  But the allocator is deterministic,
and the step's allocations are known.  So

1. ``packing.pack`` chooses an address for each allocation from ``GRAIN`` bytes
   up, knowing how long each is held, in hardly more memory than is held at
   the worst moment; ``locality.warmed`` moves them to where something has just been;
2. ``place`` follows the step through the model of the allocator.  Where an
   allocation would go elsewhere, into the place of one that is still to come, that
   one gets another place.  Where there is none, fillers are
   allocated just before: what is left free then is a chunk that fits
   exactly, and an exact fit is the best fit.  A filler takes some microseconds
   and its memory is never touched.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from .arena import GRAIN, Arena, Chunk, OutOfMemoryError, Pool, aligned, is_split
from .locality import warmed
from .memory import Filler, Fillers, Requests
from .packing import Blocks, crowded, pack

_SMALLEST_HOLE = 1 << 20  # bytes; large tensors are placed in what is larger
_FEW = 5  # large requests: more of them fit once there are a few less
_TRIES = 16  # corrections, at most, until an event's allocations go where they should


@dataclass(frozen=True)
class Placement:
    """Addresses for a list of events, and how they are reached.

    Attributes:
      fillers: by event, what is allocated before it, in order.
      height: bytes that the packing takes.
      capacity: bytes that there are for it.
      astray: requests that are in the way of others nevertheless.
      crowds: if the packing is too high, events at which a few large requests do not
        even fit by themselves, and the bytes of these.
    """

    fillers: Fillers
    height: int
    capacity: int
    astray: int = 0
    crowds: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Area:
    """A free stretch of the pool that blocks are placed in.

    Attributes:
      start: where the packing counts it from.
      address: where it is.
      size: bytes to be used, a multiple of ``GRAIN``.
      chunk: bytes that there are.
    """

    start: int
    address: int
    size: int
    chunk: int


@dataclass(frozen=True)
class _Cell:
    """The place of one request.

    Attributes:
      start, end: its addresses.
      apart: bytes to leave free above, where others of its event may be.
    """

    start: int
    end: int
    apart: int


def place(
    requests: Requests, pool: Pool, ceiling: int, *, warm: bool = True, seed: int = 0
) -> Placement:
    """Finds an address for every large request, and the fillers it takes.

    Args:
      requests: what the step asks for.
      pool: where; it has a layout.
      ceiling: bytes, everything included, not to be exceeded.
      warm: whether to choose among the places that there are (``locality``).
      seed: the same one gives the same result.

    Raises:
      OutOfMemoryError: if not even what is held between steps fits.
    """
    arena = pool.arena()
    pool.batch(arena)
    pool.last_results(arena)
    areas, beyond = _areas(arena, pool, requests, ceiling)
    walls = [(area.start + area.size, GRAIN) for area in areas[:-1]]
    capacity = areas[-1].start + areas[-1].size
    first, last = requests.lifetimes()
    rooms = _rooms(requests)
    # What one operation allocates must not merge into one chunk: one grain between.
    together = {n: sum(other in rooms for other in requests.taken[first[n]]) > 1 for n in rooms}
    blocks = Blocks(
        [room + GRAIN * together[number] for number, room in rooms.items()],
        [first[number] for number in rooms],
        [last[number] for number in rooms],
    )
    starts, height = pack(blocks, max(capacity, GRAIN), walls, seed=seed)
    if height > capacity:
        numbers = list(rooms)
        crowds = {
            event: sum(requests.sizes[numbers[block]] for block in too_many)
            for event, too_many in crowded(blocks, capacity, walls, most=_FEW).items()
        }
        return Placement({}, height, capacity, crowds=crowds)
    if warm:
        starts = warmed(blocks, starts, capacity, walls, seed=seed)
    cells = {}
    for (number, room), start in zip(rooms.items(), starts, strict=True):
        area = next(area for area in reversed(areas) if area.start <= start)
        address = area.address + start - area.start
        cells[number] = _Cell(address, address + room, GRAIN * together[number])
    fillers, astray = _Steering(requests, arena, areas, beyond, cells).run()
    return Placement(fillers, height, capacity, astray)


def _areas(
    arena: Arena, pool: Pool, requests: Requests, ceiling: int
) -> tuple[list[_Area], list[range]]:
    """What there is to place blocks in, large free chunks and then the layout's area;
    and the addresses of what is not to be used."""
    layout = pool.layout
    assert layout is not None
    slots = layout.slot_addresses
    end = slots.stop + layout.area + sum(layout.beyond)
    # The slots for this step's results are for nothing else.
    results = [arena.allocate(requests.sizes[number]) for number in requests.kept]
    left = ceiling - layout.in_use - layout.slots_end
    chunks: list[Chunk] = []
    beyond: list[range] = []
    for chunk in arena.free_chunks():
        if chunk.size < _SMALLEST_HOLE or slots.stop <= chunk.address < end:
            continue
        if chunk.size > left and chunk.address not in slots:  # never the best fit
            beyond.append(range(chunk.address, chunk.address + chunk.size))
        else:
            chunks.append(chunk)
    for chunk in results:
        arena.free(chunk)
    # The area last: what is left of it stays in one piece.
    chunks += [chunk for chunk in arena.free_chunks() if chunk.address == slots.stop]
    areas: list[_Area] = []
    start = 0
    for chunk in chunks:
        size = chunk.size
        if chunk.address not in slots:
            size = min(size, left)
            left -= size
        areas.append(_Area(start, chunk.address, max(0, size // GRAIN * GRAIN), chunk.size))
        start += areas[-1].size + GRAIN
    beyond.append(range(areas[-1].address + areas[-1].chunk, end))
    return areas, beyond


def _rooms(requests: Requests) -> dict[int, int]:
    """Bytes to leave for each large request that does not outlive the step.

    Of two equal holes the allocator takes the lower one; what an operation
    asks for together gets holes of different sizes, so that each finds its own.
    """
    kept = set(requests.kept)
    rooms: dict[int, int] = {}
    for taken in requests.taken:
        used: set[int] = set()
        for number in taken:
            if requests.sizes[number] < GRAIN or number in kept:
                continue
            room = aligned(requests.sizes[number], GRAIN)
            while room in used:
                room += GRAIN
            used.add(room)
            rooms[number] = room
    return rooms


class _Steering:
    """Follows one step through the arena and adds fillers where they are needed.

    What it sees to: whatever an event allocates stays clear of the cells of the
    requests still to come, so that each cell is free when its time comes.  The cells are
    but a proof that all this fits: another one, beside what the allocator does by
    itself, will do.
    """

    def __init__(
        self,
        requests: Requests,
        arena: Arena,
        areas: Sequence[_Area],
        beyond: Sequence[range],
        cells: Mapping[int, _Cell],
    ) -> None:
        self.requests = requests
        self.arena = arena
        self.areas = areas
        self.beyond = beyond  # addresses that are not to be used
        self.placed = cells.keys()
        self.chunks: dict[int, Chunk] = {}  # of the requests that are held
        # Of each request, by number, and so in the order in which they come.  Where it is, or
        # will be; what is small is nowhere before it comes.
        self.starts = np.full(len(requests.sizes), -1, np.int64)
        self.ends = self.starts.copy()
        self.rooms, self.apart = np.zeros_like(self.starts), np.zeros_like(self.starts)
        self.firsts, self.lasts = (np.array(each, np.int64) for each in requests.lifetimes())
        for number, cell in cells.items():
            self.starts[number], self.ends[number] = cell.start, cell.end
            self.rooms[number], self.apart[number] = cell.end - cell.start, cell.apart
        beside = [arena.allocate(requests.sizes[number]) for number in requests.kept]
        for number, chunk in zip(requests.kept, beside, strict=True):
            self._lies(number, chunk)
            arena.free(chunk)

    def run(self) -> tuple[dict[int, tuple[Filler, ...]], int]:
        """The fillers, by event, and how many events go astray nevertheless."""
        fillers: dict[int, tuple[Filler, ...]] = {}
        astray = 0
        for event, given in enumerate(self.requests.given):
            found = self._steer(event)
            if found is None:
                astray += 1
                found = ()
            held = self._hold(found)
            self._allocate(event)
            for number in self.requests.taken[event]:
                self._lies(number, self.chunks[number])
                self.apart[number] = 0
            if found:
                fillers[event] = found
            for number in given:
                self.arena.free(self.chunks.pop(number))
            for chunk in held:
                self.arena.free(chunk)
        return fillers, astray

    def _lies(self, number: int, chunk: Chunk) -> None:
        """Notes where a request is."""
        self.starts[number], self.ends[number] = chunk.address, chunk.address + chunk.size

    def _steer(self, event: int) -> tuple[Filler, ...] | None:
        """The fewest fillers known with which an event's allocations are in nobody's
        way, if there are any; leaves the arena as it was."""
        fewest = self._fewest(event)
        if fewest != () and any(number in self.placed for number in self.requests.taken[event]):
            cells = self.starts.copy(), self.ends.copy()
            less = self._fewest(event) if self._gone_along(event) else None
            if less is not None and (fewest is None or len(less) < len(fewest)):
                return less
            self.starts, self.ends = cells
        return fewest

    def _fewest(self, event: int) -> tuple[Filler, ...] | None:
        """The same, with the cells as they are."""
        found = [self._corrected(event, ())]
        if found != [()]:
            carved = [self._carved(event, beside) for beside in ("walls", "all", "below")]
            found += [self._corrected(event, fillers) for fillers in carved if fillers is not None]
        return min((fillers for fillers in found if fillers is not None), key=len, default=None)

    def _gone_along(self, event: int) -> bool:
        """Whether an event's requests can have their cells where the allocator would have
        them by itself, in whole grains, and those that are in the way others; they get them."""
        chunks: list[Chunk] = []
        try:
            for number in self.requests.taken[event]:
                room = int(self.rooms[number] + self.apart[number])
                chunk = self.arena.allocate(room or self.requests.sizes[number])
                chunks.append(chunk)
                self._lies(number, chunk)
                self.ends[number] -= self.apart[number]
                if not self._is_usable(number, chunk) or not self._moved(self._met(number, chunk)):
                    return False
        except OutOfMemoryError:
            return False
        finally:
            for chunk in reversed(chunks):
                self.arena.free(chunk)
        return True

    def _moved(self, numbers: Sequence[int]) -> bool:
        """Whether there are other cells for some requests, which they get."""
        if not self.placed >= set(numbers):
            return False
        self.starts[numbers] = self.ends[numbers] = -1
        # What is much for long first: it is the hardest to find a place for.
        for number in sorted(
            numbers, key=lambda n: -self.rooms[n] * (self.lasts[n] - self.firsts[n] + 1)
        ):
            start = self._tightest(number)
            if start is None:
                return False
            self.starts[number], self.ends[number] = start, start + self.rooms[number]
        return True

    def _tightest(self, number: int) -> int | None:
        """Where the smallest room is that a request fits into as long as it is held."""
        meets = (self.lasts >= self.firsts[number]) & (self.firsts <= self.lasts[number])
        meets[number] = False
        order = np.argsort(self.starts[meets])
        starts, ends = self.starts[meets][order], (self.ends + self.apart)[meets][order]
        found: list[tuple[int, int]] = []
        for area in self.areas:
            end = area.address + area.size
            here = (starts < end) & (ends > area.address)
            free = np.maximum.accumulate(np.append(0, ends[here] - area.address))
            free = area.address + -(-free // GRAIN) * GRAIN  # cells start at whole grains
            rooms = np.append(starts[here], end) - free
            fits = np.flatnonzero(rooms >= self.rooms[number] + self.apart[number])
            if len(fits):
                best = fits[np.argmin(rooms[fits])]
                found.append((int(rooms[best]), int(free[best])))
        return min(found)[1] if found else None

    def _corrected(self, event: int, fillers: tuple[Filler, ...]) -> tuple[Filler, ...] | None:
        """The fillers, and as many more as it takes, if that helps."""
        for _ in range(_TRIES):
            try:
                astray = self._astray(event, fillers)
            except OutOfMemoryError:
                return None
            if astray is None:
                return fillers
            more = self._blocked(fillers, *astray)
            if more is None:
                return None
            fillers = more
        return None

    def _astray(self, event: int, fillers: Sequence[Filler]) -> tuple[int, int] | None:
        """The free chunk, as address and size, from which an event takes something that
        is then in another's way; None if there is none.  Leaves the arena as it was."""
        held = self._hold(fillers)
        try:
            return self._allocate(event)
        finally:
            for number in reversed(self.requests.taken[event]):
                if number in self.chunks:
                    self.arena.free(self.chunks.pop(number))
            for chunk in held:
                self.arena.free(chunk)

    def _hold(self, fillers: Sequence[Filler]) -> list[Chunk]:
        """Allocates fillers; returns the chunks that are held during the event."""
        chunks = [self.arena.allocate(filler.bytes) for filler in fillers]
        for chunk, filler in zip(chunks, fillers, strict=True):
            if not filler.during:
                self.arena.free(chunk)
        return [chunk for chunk, filler in zip(chunks, fillers, strict=True) if filler.during]

    def _allocate(self, event: int) -> tuple[int, int] | None:
        """Makes an event's allocations.

        Returns:
          Address and size of the free chunk that the first of them which is in the
          way of another one went into; None if there is none.
        """
        astray = None
        for number in self.requests.taken[event]:
            found = self.arena.best_fit(self.requests.sizes[number])
            address, size = (found.address, found.size) if found is not None else (0, 0)
            chunk = self.arena.allocate(self.requests.sizes[number])
            self.chunks[number] = chunk
            if astray is None and not self._is_clear(number, chunk):
                astray = address, size
        return astray

    def _is_clear(self, number: int, chunk: Chunk) -> bool:
        """Whether a request's chunk is in nobody's way as long as it is held."""
        return self._is_usable(number, chunk) and not self._met(number, chunk)

    def _is_usable(self, number: int, chunk: Chunk) -> bool:
        """Whether a request may have a chunk at all."""
        start, end = chunk.address, chunk.address + chunk.size
        if number in self.placed and any(start in unused for unused in self.beyond):
            return False
        for area in self.areas:
            if 0 <= start - area.address < area.chunk:
                if self.lasts[number] == len(self.requests.given):
                    return False  # what outlives the step has a slot
                top = end - area.address
                if top >= area.size + GRAIN:
                    return False  # above the ceiling
                if number in self.placed and top < area.size and top % GRAIN:
                    return False  # cells start at whole grains
        return True

    def _met(self, number: int, chunk: Chunk) -> list[int]:
        """The requests still to come in whose cells a request's chunk is when they do."""
        coming = slice(number + 1, None)
        meets = self.starts[coming] < chunk.address + chunk.size
        meets &= self.ends[coming] > chunk.address
        meets &= self.firsts[coming] <= self.lasts[number]
        return (np.flatnonzero(meets) + number + 1).tolist()

    def _carved(
        self, event: int, beside: Literal["walls", "all", "below"]
    ) -> tuple[Filler, ...] | None:
        """Fillers that leave the cells of an event's requests free, to be exact fits.

        What is held beside a cell while the event runs is a wall on either side, or all
        that was free there, or only what was free below (then the cell is where what is
        left begins, and the best fit if nothing else is).  A little takes few bytes, but
        whatever else is large enough has to be taken first; much takes many pieces, as
        a chunk is cut only for less than half of its size.
        """
        fillers: list[Filler] = []
        held: list[Chunk] = []
        fill = functools.partial(self._fill, fillers, held)
        mine = [
            range(int(self.starts[number]), int(self.ends[number]))
            for number in self.requests.taken[event]
            if number in self.placed
        ]
        chunks = [self.arena.free_around(cell.start) for cell in mine]
        found = all(
            chunk is not None and cell.stop <= chunk.address + chunk.size
            for cell, chunk in zip(mine, chunks, strict=True)
        )
        if not found:
            return None  # another request is astray, in this one's cell
        # Small chunks first: they are better fits than what is left of large ones.
        sizes = [chunk.size for chunk in chunks if chunk is not None]
        order = sorted(zip(sizes, mine, strict=True), key=lambda pair: (pair[0], pair[1].start))
        for _, cell in order:
            chunk = self.arena.free_around(cell.start)
            if chunk is None:  # what was there was the best fit for a filler
                found = False
                break
            end = chunk.address + chunk.size
            below = cell.start - chunk.address
            wall = min(GRAIN, below) if beside == "walls" else below
            fill(chunk.address, below - wall, False)
            fill(cell.start - wall, wall, True)
            if beside == "below":
                continue
            fill(cell.start, len(cell), False)
            if beside == "walls":
                fill(cell.stop, GRAIN, True)
            elif not any(cell.stop <= other.start < end for other in mine):  # whose below it is
                fill(cell.stop, self._reach(chunk) - cell.stop, True)
        for taken in held:
            self.arena.free(taken)
        return tuple(fillers) if found else None

    def _fill(
        self, fillers: list[Filler], held: list[Chunk], address: int, count: int, during: bool
    ) -> None:
        """Takes ``count`` bytes at ``address``, where a free chunk starts, if there is one."""
        while count > 0:
            chunk = self.arena.free_at(address)
            if chunk is None:
                return
            part = count
            if count < chunk.size and not is_split(chunk.size, count):
                part = min(count, chunk.size // 2 // GRAIN * GRAIN) or chunk.size
            while True:
                found = self.arena.best_fit(part)
                if found is None or found.address == address:
                    break
                # A better fit elsewhere: taken until the event runs.
                fillers.append(Filler(found.size, False))
                held.append(self.arena.allocate(found.size))
            fillers.append(Filler(part, during))
            held.append(self.arena.allocate(part))
            address += held[-1].size
            count -= held[-1].size

    def _reach(self, chunk: Chunk) -> int:
        """How far up in a free chunk fillers may reach: to a wall above its area, since
        what there is beyond that is above the ceiling."""
        end = chunk.address + chunk.size
        for area in self.areas:
            if area.address <= chunk.address < area.address + area.chunk:
                return min(end, area.address + area.size + GRAIN)
        return end

    def _blocked(
        self, fillers: Sequence[Filler], address: int, size: int
    ) -> tuple[Filler, ...] | None:
        """The fillers, and what keeps an event out of one more free chunk."""
        held = [self.arena.allocate(filler.bytes) for filler in fillers]
        result = [
            replace(filler, during=True) if address <= chunk.address < address + size else filler
            for filler, chunk in zip(fillers, held, strict=True)
        ]
        if result == list(fillers):
            chunk = self.arena.free_at(address)
            if chunk is not None and chunk.size == size:
                self._fill(result, held, address, self._reach(chunk) - address, True)
        for chunk in held:
            self.arena.free(chunk)
        return tuple(result) if result != list(fillers) else None
