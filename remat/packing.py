"""Where blocks of memory with known lifetimes lie: dynamic storage allocation.

Finding the least height is NP-hard (Garey & Johnson 1979, problem SR2).
First fit places one block after the other at the lowest address that is free
throughout its lifetime; the order decides how good that is.  Large blocks,
those that are held for long and those that are held when memory is fullest
should come early; how much each of the three counts is drawn at random a few
times.  The best order is then improved by a walk in the spirit of "squeaky
wheel" optimisation (Joslin & Clements 1999): what sticks out above the capacity
is placed earlier.

One first fit costs O(blocks^2), with a small constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from numba import njit

from .solvers.solving import available_processors

_STARTS = 40  # orders tried before the walks
_MOST_DURATION, _MOST_PRESSURE, _MOST_NOISE = 0.6, 8.0, 0.1  # weights beside that of the size
_WALKS = 6  # of them that are improved
_MOVES = 2000  # first fits in a walk, at most ...
_WORK = 100_000_000  # ... and comparisons of two blocks in them: half a second
_COOLING = 0.003  # share of the capacity by which a worse order is readily accepted
_PATIENCE = 200  # moves without a better order until the walk goes back to the best
_ALWAYS = 1 << 60  # a moment that never comes
_TRIALS = 2000  # places tried for the blocks of a moment, to prove it crowded


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
) -> tuple[list[int], int]:
    """Places blocks so that no two that are held at the same time overlap.

    Args:
      blocks: what to place.
      capacity: bytes that would be low enough.
      walls: (address, bytes) of what is held all the time.
      seed: the same one gives the same result.

    Returns:
      The address of each block, and the height: the highest end of one.
    """
    sizes, first, last = (
        np.array(values, np.int64) for values in (blocks.sizes, blocks.first, blocks.last)
    )
    if not len(sizes):
        return [], 0
    fixed = np.array([*walls], np.int64).reshape(-1, 2)

    def walked(order: np.ndarray, moves: int) -> tuple[int, np.ndarray]:
        addresses, height = _walk(order, sizes, first, last, fixed, capacity, moves, _WORK, seed)
        return int(height), addresses

    held = _held(sizes, first, last)
    orders = _orders(sizes, first, last, held, seed)
    found = [walked(order, 0) for order in orders]
    height, addresses = min(found, key=lambda each: each[0])
    # Where one moment is too much already, nothing lies lower.
    if height > capacity >= held.max() and not crowded(blocks, capacity, walls):
        ranked = sorted(range(len(orders)), key=lambda number: found[number][0])
        with ThreadPoolExecutor(available_processors()) as pool:
            for reached, places in pool.map(
                walked, (orders[number] for number in ranked[:_WALKS]), repeat(_MOVES)
            ):
                if reached < height:
                    height, addresses = reached, places
                if height <= capacity:  # whatever the others would find
                    pool.shutdown(wait=False, cancel_futures=True)
                    break
    return addresses.tolist(), height


def crowded(
    blocks: Blocks, capacity: int, walls: Sequence[tuple[int, int]] = (), *, most: int = 64
) -> dict[int, tuple[int, ...]]:
    """Moments at which not even what is held just then fits between the walls.

    Three blocks of 6 bytes do not fit into rooms of 11 and 7 bytes, though these are
    18.  What is found is proven; what takes too many trials to prove is left out.

    Args:
      blocks, capacity, walls: as ``pack`` takes them.
      most: blocks of a moment that are looked at, the largest.

    Returns:
      For each such moment, the largest blocks held, as many of them as are too many.
    """
    sizes, first, last = (
        np.array(values, np.int64) for values in (blocks.sizes, blocks.first, blocks.last)
    )
    rooms, start = [], 0
    for address, count in [*sorted(walls), (capacity, 0)]:
        rooms.append(min(address, capacity) - start)
        start = address + count
    held = _held(sizes, first, last)
    found = {}
    for moment in np.unique(first).tolist():
        if held[moment] > max(rooms):
            here = np.flatnonzero((first <= moment) & (moment <= last))
            largest = here[np.argsort(-sizes[here], kind="stable")][:most].tolist()
            count = _too_many([int(sizes[block]) for block in largest], rooms)
            if count:
                found[moment] = tuple(largest[:count])
    return found


def _too_many(sizes: Sequence[int], rooms: Sequence[int]) -> int:
    """How many of the blocks, beginning with the first, are too many for the rooms; 0 if all
    fit, or if that takes too many trials to tell.  Depth first; the tightest room first."""
    left = list(rooms)
    trials = deepest = 0

    def fit(number: int) -> bool:
        nonlocal trials, deepest
        trials += 1
        if number == len(sizes) or trials > _TRIALS:
            return True
        deepest = max(deepest, number)
        for room in sorted(set(left)):
            if room >= sizes[number]:
                place = left.index(room)
                left[place] -= sizes[number]
                if fit(number + 1):
                    return True
                left[place] = room
        return False

    return 0 if fit(0) else deepest + 1


def _orders(
    sizes: np.ndarray, first: np.ndarray, last: np.ndarray, held: np.ndarray, seed: int
) -> list[np.ndarray]:
    """Orders to start from; the first one is by size."""
    pressure = np.log([held[start : end + 1].max() for start, end in zip(first, last, strict=True)])
    size, duration = np.log(sizes), np.log(last - first + 1)
    generator = np.random.default_rng(seed)
    orders = [np.lexsort((first - last, -sizes))]
    for _ in range(_STARTS - 1):
        weights = generator.uniform(0, (_MOST_DURATION, _MOST_PRESSURE, _MOST_NOISE))
        noise = generator.normal(size=len(sizes))
        rank = size + weights @ np.stack((duration, pressure, noise))
        orders.append(np.argsort(-rank, kind="stable"))
    return orders


def _held(sizes: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Bytes held at each moment."""
    changes = np.zeros(last.max() + 2, np.int64)
    np.add.at(changes, first, sizes)
    np.add.at(changes, last + 1, -sizes)
    return np.cumsum(changes)


@njit(cache=True)
def _first_fit(order, begin, sizes, first, last, walls, addresses, held):  # type: ignore
    """Places ``order[begin:]``, one after the other, beside the blocks before them.

    Args:
      addresses: of the blocks before; the others' are written there.
      held: room for (start, end, first, last) of what has been placed, by address.

    Returns:
      How many comparisons that took.
    """
    count = 0
    for wall in range(len(walls)):
        end = walls[wall, 0] + walls[wall, 1]
        _insert(held, count, count, walls[wall, 0], end, 0, _ALWAYS)
        count += 1
    before = order[:begin]
    for block in before[np.argsort(addresses[before])]:
        address, at = addresses[block], count
        while at > 0 and held[at - 1, 0] > address:  # a wall
            at -= 1
        _insert(held, count, at, address, address + sizes[block], first[block], last[block])
        count += 1
    work = 0
    for block in order[begin:]:
        size, begins, ends = sizes[block], first[block], last[block]
        address, at = 0, count
        for number in range(count):
            if held[number, 2] <= ends and held[number, 3] >= begins:
                if held[number, 0] - address >= size:
                    at = number
                    break
                if held[number, 1] > address:
                    address = held[number, 1]
        work += at
        while at > 0 and held[at - 1, 0] > address:
            at -= 1
        _insert(held, count, at, address, address + size, begins, ends)
        count += 1
        addresses[block] = address
    return work


@njit(cache=True)
def _insert(held, count, at, start, end, first, last):  # type: ignore
    """Makes room for an entry, and writes it."""
    for number in range(count, at, -1):
        held[number, 0] = held[number - 1, 0]
        held[number, 1] = held[number - 1, 1]
        held[number, 2] = held[number - 1, 2]
        held[number, 3] = held[number - 1, 3]
    held[at, 0] = start
    held[at, 1] = end
    held[at, 2] = first
    held[at, 3] = last


@njit(cache=True, nogil=True)
def _walk(order, sizes, first, last, walls, capacity, moves, work, seed):  # type: ignore
    """The addresses and the height of the best order on a walk from one."""
    np.random.seed(seed)
    count = len(sizes)
    held = np.empty((count + len(walls), 4), np.int64)
    addresses = np.zeros(count, np.int64)
    _first_fit(order, 0, sizes, first, last, walls, addresses, held)
    height = (addresses + sizes).max()
    trial_addresses = np.empty_like(addresses)
    best, best_order, best_addresses = height, order.copy(), addresses.copy()
    sticking = np.empty(count, np.int64)
    since = 0
    for _ in range(moves):
        if best <= capacity or work <= 0:
            break
        # Places in the order of the blocks that stick out above some height.
        above = best - (best - capacity) * np.random.random()
        found = 0
        while found == 0:
            for place in range(count):
                if addresses[order[place]] + sizes[order[place]] > above:
                    sticking[found] = place
                    found += 1
            above = height - 1
        trial = order.copy()
        begin = count
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
            begin = min(begin, to)
        trial_addresses[:] = addresses
        work -= _first_fit(trial, begin, sizes, first, last, walls, trial_addresses, held)
        reached = (trial_addresses + sizes).max()
        worse = reached - height
        if worse <= 0 or np.random.random() < np.exp(-worse / (_COOLING * capacity)):
            order, height = trial, reached
            addresses[:] = trial_addresses
        since += 1
        if height < best:
            best, best_order, since = height, order.copy(), 0
            best_addresses[:] = addresses
        elif since > _PATIENCE:
            order, height, since = best_order.copy(), best, 0
            addresses[:] = best_addresses
    return best_addresses, best
