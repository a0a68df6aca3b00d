"""Where blocks of memory with known lifetimes lie: dynamic storage allocation.

Finding the least height is NP-hard (Garey & Johnson 1979, problem SR2).
First fit places one block after the other at the lowest address that is free
throughout its lifetime; the order decides how good that is, and the largest
block first is a good one.  The order is then improved by a walk in the spirit
of "squeaky wheel" optimisation (Joslin & Clements 1999): what sticks out above
the capacity is placed earlier.

One first fit costs O(overlapping pairs * blocks alive at once).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

_MOVES = 8000  # first fits, at most
_COOLING = 0.003  # share of the capacity by which a worse order is readily accepted
_PATIENCE = 1000  # moves without a better order until the walk goes back to the best


@dataclass(frozen=True)
class Blocks:
    """Blocks of memory, one entry each.

    Attributes:
      sizes: bytes.
      first, last: the first and last moment at which each is held, inclusive.
    """

    sizes: Sequence[int]
    first: Sequence[int]
    last: Sequence[int]


def pack(
    blocks: Blocks,
    capacity: int,
    walls: Sequence[tuple[int, int]] = (),
    *,
    seed: int = 0,
    moves: int = _MOVES,
) -> tuple[list[int], int]:
    """Places blocks so that no two that are held at the same time overlap.

    Args:
      blocks: what to place.
      capacity: bytes that would be low enough.
      walls: (address, bytes) of what is held all the time.
      seed: the same one gives the same result.
      moves: how long to look.

    Returns:
      The address of each block, and the height: the highest end of one.
    """
    sizes, first, last = (
        np.array(values, np.int64) for values in (blocks.sizes, blocks.first, blocks.last)
    )
    if not len(sizes):
        return [], 0
    meet = (first[:, None] <= last[None, :]) & (first[None, :] <= last[:, None])
    np.fill_diagonal(meet, False)
    starts = np.concatenate(([0], np.cumsum(meet.sum(axis=1)))).astype(np.int64)
    others = np.nonzero(meet)[1].astype(np.int64)
    order = np.lexsort((first - last, -sizes)).astype(np.int64)
    fixed = np.array([*walls], np.int64).reshape(-1, 2)
    addresses, height = _search(order, sizes, starts, others, fixed, capacity, moves, seed)
    return addresses.tolist(), int(height)


@njit(cache=True)
def _first_fit(order, sizes, starts, others, walls, addresses, low, high):  # type: ignore
    """Places the blocks in this order; returns the height."""
    placed = np.zeros(len(order), np.bool_)
    height = 0
    for block in order:
        count = 0
        for number in range(len(walls) + starts[block + 1] - starts[block]):
            if number < len(walls):
                start, size = walls[number, 0], walls[number, 1]
            else:
                other = others[starts[block] + number - len(walls)]
                if not placed[other]:
                    continue
                start, size = addresses[other], sizes[other]
            at = count
            while at > 0 and low[at - 1] > start:
                low[at] = low[at - 1]
                high[at] = high[at - 1]
                at -= 1
            low[at] = start
            high[at] = start + size
            count += 1
        address = 0
        for number in range(count):
            if low[number] - address >= sizes[block]:
                break
            address = max(address, high[number])
        addresses[block] = address
        placed[block] = True
        height = max(height, address + sizes[block])
    return height


@njit(cache=True)
def _search(order, sizes, starts, others, walls, capacity, moves, seed):  # type: ignore
    """The addresses and the height of the best order found."""
    np.random.seed(seed)
    count = len(order)
    low = np.empty(count + len(walls), np.int64)
    high = np.empty(count + len(walls), np.int64)
    addresses = np.zeros(count, np.int64)
    height = _first_fit(order, sizes, starts, others, walls, addresses, low, high)
    best, best_order, best_addresses = height, order.copy(), addresses.copy()
    trial_addresses = np.zeros(count, np.int64)
    sticking = np.empty(count, np.int64)
    since = 0
    for _ in range(moves):
        if best <= capacity:
            break
        # Places in the order of the blocks that stick out above some height.
        above = best - (best - capacity) * np.random.random()
        found = 0
        for place in range(count):
            if addresses[order[place]] + sizes[order[place]] > above:
                sticking[found] = place
                found += 1
        if found == 0:
            above = height - 1
            for place in range(count):
                if addresses[order[place]] + sizes[order[place]] > above:
                    sticking[found] = place
                    found += 1
        trial = order.copy()
        for _ in range(1 + np.random.randint(3)):
            place = sticking[np.random.randint(found)]
            block = order[place]
            place = 0
            while trial[place] != block:
                place += 1
            if np.random.random() < 0.5:
                to = np.random.randint(place + 1)
            else:
                to = max(0, place - 1 - np.random.randint(1 + count // 20))
            for number in range(place, to, -1):
                trial[number] = trial[number - 1]
            trial[to] = block
        trial_height = _first_fit(trial, sizes, starts, others, walls, trial_addresses, low, high)
        worse = trial_height - height
        if worse <= 0 or np.random.random() < np.exp(-worse / (_COOLING * capacity)):
            order, height = trial, trial_height
            addresses[:] = trial_addresses
        since += 1
        if height < best:
            best, best_order, since = height, order.copy(), 0
            best_addresses[:] = addresses
        elif since > _PATIENCE:
            order, height, since = best_order.copy(), best, 0
            addresses[:] = best_addresses
    return best_addresses, best
