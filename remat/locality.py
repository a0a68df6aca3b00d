"""Which of the places that there are: memory that was used a moment ago.

Writing to memory that is in no cache costs its way there and back.  A step in ample
memory, whose allocator gives out again what has just been freed, finds much of it warm;
one whose tensors are packed into little lies wherever there is room.  So blocks
are moved, as long as they fit, to where others have just been: a local search, in
which no move makes the whole colder.  How cold memory is is measured by its stack
distance, the bytes that were touched since (Mattson et al., IBM Systems Journal 1970).

A trial costs O(blocks), and one that fits O(bytes touched in a step / cell).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

from .packing import Blocks

_HALF = 24 << 20  # bytes touched since, by which a place is half cold: about a cache
_CELL = 1 << 16  # bytes that are warm or cold together, ...
_CELLS = 1 << 15  # ... or more, so that there are no more of them than this
_WORK = 600_000_000  # cells and blocks looked at: half a second
_REACH = 64  # events ago that a place was given up, at most


def warmed(
    blocks: Blocks,
    addresses: Sequence[int],
    capacity: int,
    walls: Sequence[tuple[int, int]] = (),
    *,
    seed: int = 0,
) -> list[int]:
    """Moves blocks to memory that was touched not long before.

    Args:
      blocks: what is placed.
      addresses: where, so that no two that are held at the same time overlap.
      capacity: bytes that there are.
      walls: (address, bytes) of what is held all the time.
      seed: the same one gives the same result.

    Returns:
      The address of each block; they do not overlap either, and end within the capacity.
    """
    sizes, first, last, places = (
        np.array(values, np.int64)
        for values in (blocks.sizes, blocks.first, blocks.last, addresses)
    )
    if len(sizes):
        count = len(sizes)
        # An operation reads what it is the last to read, and writes what it is the first to.
        touched = np.concatenate((np.arange(count), np.arange(count)))
        order = np.lexsort((np.repeat((0, 1), count), np.concatenate((last, first))))
        fixed = np.array([*walls], np.int64).reshape(-1, 2)
        cell = max(_CELL, capacity // _CELLS)
        _search(
            places, sizes, first, last, fixed, capacity, touched[order], order >= count, cell, seed
        )
    return places.tolist()


@njit(cache=True)
def _search(  # type: ignore
    places, sizes, first, last, walls, capacity, touched, written, cell, seed
):
    """Moves blocks, drawn by how cold their places are, as long as there is work left.

    Args:
      places: of the blocks; changed.
      touched, written: the block of each touch, in order, and whether it is written then.
      cell: bytes.
    """
    np.random.seed(seed)
    count = len(sizes)
    by_block, trial = np.zeros(count), np.zeros(count)
    touches = np.full(capacity // cell + 2, -1.0)  # bytes touched before, at the last one
    freed = np.empty(count, np.int64)
    coldness = _coldness(places, sizes, touched, written, cell, touches, by_block)
    work = _WORK
    looks = 2 * (sizes // cell + 1).sum()
    while work > 0 and coldness > 0:
        drawn, block = np.random.random() * coldness, 0
        while block < count - 1 and drawn > by_block[block]:
            drawn -= by_block[block]
            block += 1
        found = 0
        for other in range(count):
            if last[other] < first[block] and last[other] >= first[block] - _REACH:
                freed[found] = other
                found += 1
        work -= 2 * count
        if found == 0:
            continue
        other = freed[np.random.randint(found)]
        old, place = places[block], places[other]
        if np.random.random() < 0.5:
            place += sizes[other] - sizes[block]
        if place == old or not _is_free(place, block, places, sizes, first, last, walls, capacity):
            continue
        places[block] = place
        changed = _coldness(places, sizes, touched, written, cell, touches, trial)
        work -= looks
        if changed <= coldness:
            coldness = changed
            by_block[:] = trial
        else:
            places[block] = old


@njit(cache=True)
def _is_free(place, block, places, sizes, first, last, walls, capacity):  # type: ignore
    """Whether a block fits at a place, beside all that is held while it is."""
    end = place + sizes[block]
    if place < 0 or end > capacity:
        return False
    for wall in range(len(walls)):
        if place < walls[wall, 0] + walls[wall, 1] and walls[wall, 0] < end:
            return False
    for other in range(len(sizes)):
        if (
            places[other] < end
            and place < places[other] + sizes[other]
            and first[other] <= last[block]
            and first[block] <= last[other]
            and other != block
        ):
            return False
    return True


@njit(cache=True)
def _coldness(places, sizes, touched, written, cell, touches, by_block):  # type: ignore
    """Bytes that are written, each as cold as its place, in a step that follows one like it.

    Args:
      touches: room for each cell's last touch.
      by_block: receives each block's share.
    """
    touches[:] = -1e18  # longer ago than anything
    clock = total = 0.0
    for step in range(2):
        for number in range(len(touched)):
            block = touched[number]
            begin = places[block] // cell
            end = (places[block] + sizes[block] - 1) // cell + 1
            if step == 1 and written[number]:
                cold = 0.0
                for at in range(begin, end):
                    age = clock - touches[at]
                    cold += age / (age + _HALF)
                cold *= sizes[block] / (end - begin)
                by_block[block] = cold
                total += cold
            clock += sizes[block]
            touches[begin:end] = clock
    return total
