"""The real allocator: its counters, its limit, and claiming memory from it.

Counters exist on GPUs always, and on the CPU when TensorFlow is imported with
``TF_CPU_ALLOCATOR_USE_BFC=true`` in the environment, which makes the CPU use
the allocator that GPUs use (``TF_CPU_BFC_MEM_LIMIT_IN_MB`` then is a hard
limit).
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import psutil
import tensorflow as tf
from tensorflow.python.eager import context, execute

from .arena import (
    ALIGNMENT,
    FIRST_REGION,
    GRAIN,
    LEAST_AREA,
    Layout,
    Pool,
    aligned,
    is_roomy,
    is_split,
    slots_end,
    split_from,
)
from .device import cpu_is_pooled, default_device
from .timeline import fragmentation, profile

UNWRITTEN = "_ParallelConcatStart"
"""An operation that allocates memory and does not write to it: the first half of
``tf.parallel_stack``, with the shape as an attribute."""

_SMALLEST_CLAIM = 1 << 20  # bytes
_TRIES = 3  # at a slot, among other free chunks of its size
_PIECES = 1024  # that a hole is divided in, at most
_SMALL_SLOT = GRAIN - ALIGNMENT  # bytes of a slot for small values
# Bytes of a piece that nothing large fits into, and that is no slot; of what is cut up into such.
_USELESS, _CUT_UP = _SMALL_SLOT - ALIGNMENT, 1 << 27
# Of what is free, until it is not in one piece; a chunk that is little larger is had whole.
_SHARES = (0.4, 0.6, 0.8, 0.9, 0.97)
# Share and bytes (the lower) of the largest free chunk: it is known from figures of six digits,
# and as if the pool had grown to exactly its limit.
_UNSURE = 0.03, 2**26
_TIGHT = 1.02  # times the budget: a limit up to this leaves the pool no room
_LACKING = re.compile(
    r"OOM when allocating tensor with shape\[(?P<shape>[\d,]*)\] and type (?P<type>\w+)"
)
_GPU_SHARE = 0.92  # of a GPU's memory that TensorFlow takes at most, by default


@dataclass(frozen=True)
class Device:
    """The device that runs steps.

    Attributes:
      name: for instance "GPU:0".
      counted: whether its allocator counts bytes.
      limit: bytes that its allocator may hold, if that is known.
      growth: whether its memory pool starts small and grows.
    """

    name: str
    counted: bool
    limit: int | None
    growth: bool


def device_at_hand() -> Device:
    """The first GPU, else the CPU."""
    name = default_device()
    if name.startswith("GPU"):
        return Device(name, True, _gpu_limit(), _gpu_grows())
    limit = os.environ.get("TF_CPU_BFC_MEM_LIMIT_IN_MB", "")
    pooled = cpu_is_pooled()
    bound = int(limit) * 2**20 if pooled and limit.isdigit() else None
    return Device(name, pooled, bound, name not in _whole)


def bytes_in_use(device: Device) -> int:
    """Bytes of all chunks in use now."""
    return int(tf.config.experimental.get_memory_info(device.name)["current"])


def peak_bytes(device: Device) -> int:
    """Most bytes in use since ``reset_peak``."""
    return int(tf.config.experimental.get_memory_info(device.name)["peak"])


def lacking_bytes(error: Exception) -> int:
    """Bytes of the tensor that there was no room for; 0 if the error says nothing of it."""
    found = _LACKING.search(str(error))
    if not isinstance(error, tf.errors.ResourceExhaustedError) or found is None:
        return 0
    sizes = [int(size) for size in found["shape"].split(",") if size]
    return math.prod(sizes) * tf.as_dtype(found["type"]).size


@functools.cache
def peak_before_claims(device: Device) -> int:
    """Peak bytes when this process first planned a step: what shaped the pool
    before blocks of it were claimed."""
    return _whole.get(device.name) or peak_bytes(device)


def reset_peak(device: Device) -> None:
    """Starts measuring the peak anew."""
    tf.config.experimental.reset_memory_stats(device.name)


@dataclass(frozen=True)
class Block:
    """A stretch of an allocator's pool that was free in one piece.

    Attributes:
      address: where it starts.
      bytes: how long it is.
    """

    address: int
    bytes: int

    def holds(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor lies in it."""
        return 0 <= address(tensor) - self.address < self.bytes


_claimed: set[str] = set()  # devices
_whole: dict[str, int] = {}  # by device whose pool was made one piece: its bytes


def claim_memory() -> int:
    """Has the CPU's memory pool take all that its limit allows in one piece.

    A GPU's pool is one piece from the start.  A CPU's grows in regions, each twice as
    large as the one before, which a tensor cannot straddle; what variables leave of the
    last ones is of little use then.  Call this before the model is made.

    Returns:
      Bytes of that piece; 0 where there is nothing to do: no limit, or a GPU.

    Raises:
      ValueError: if the pool has begun to grow, or a GPU's is to do so.
    """
    device = device_at_hand()
    if device.limit is None or device.limit <= FIRST_REGION or not device.growth:
        return 0
    if device.name.startswith("GPU"):
        raise ValueError(
            "the GPU's memory is to grow in pieces; leave out "
            "tf.config.experimental.set_memory_growth, and it is in one from the start"
        )
    if peak_bytes(device) > FIRST_REGION:
        raise ValueError(
            f"there have been tensors of {peak_bytes(device)} bytes already, and the regions of "
            "memory that they were in stay: call this before the model and the data are made"
        )
    count = _chunk(device, device.limit - FIRST_REGION)[1]  # given back at once
    _whole[device.name] = count
    reset_peak(device)  # no tensor was that large
    return count


def claim(device: Device, count: int, least: int, unclaimed: int | None = None) -> Block | None:
    """Makes the allocator's pool hold one free block of ``count`` bytes.

    A pool that grows by doubling ends up in many regions, and a tensor cannot
    straddle two: under a hard limit, much of it would be lost.

    Args:
      device: whose allocator.
      count: bytes, if this is the first claim.
      least: bytes, if it is not: what is claimed counts as in use for a moment.
      unclaimed: bytes that it may still grow by, if this is the first claim.

    Returns:
      The block, perhaps smaller; None if there is none.
    """
    shares: tuple[float, ...] = (1.0,)
    holding = False
    if device.name in _claimed:
        # What was claimed before may have been cut up since.
        count = min(count, least)
        laid = _laid.get(device.name)
        if laid is not None and device.limit is not None:
            laid.walls.clear()
            block = _around(device, laid.layout.area)
            if block is not None and 2 * block.bytes > device.limit - bytes_in_use(device):
                return block  # none is larger
            shares = _SHARES
    elif unclaimed is not None and unclaimed >= _SMALLEST_CLAIM:
        assert device.limit is not None
        count = min(count, unclaimed)
        # Maybe in holes, which then serve the claim: while they are held, one more makes
        # the pool grow.
        holes = device.limit - unclaimed - bytes_in_use(device)
        holding, shares = True, (1.0,) * (holes // count + 1)
    elif unclaimed is not None or device.name in _whole:  # the pool has grown to its limit
        count = min(count, _largest_free(device))
    sizes = [int(share * count) for share in shares if share * count >= _SMALLEST_CLAIM]
    blocks = _blocks(device, sizes, holding)
    if blocks:
        _claimed.add(device.name)
    if holding:
        blocks = _joined(blocks)
    return max(blocks, key=lambda block: block.bytes, default=None)


def _largest_free(device: Device) -> int:
    """Bytes for which a pool that has grown to its limit hands out its largest free chunk,
    all of it; 0 where someone else is profiling.

    To ask for more than there is would be to wait for ten seconds, so the allocator is
    asked what it notes of an allocation for the profiler: the share of the free bytes that
    is not in the largest chunk.
    """
    assert device.limit is not None
    try:
        space = profile(lambda: _chunk(device, ALIGNMENT))
    except tf.errors.AlreadyExistsError:
        return 0
    elsewhere = fragmentation(space, on_gpu=device.name.startswith("GPU"))
    largest = (1 - elsewhere) * (device.limit - bytes_in_use(device))
    share, most = _UNSURE
    return int(largest - min(share * largest, most))


def _blocks(device: Device, sizes: Iterable[int], holding: bool = False) -> list[Block]:
    """Where chunks of these sizes are found, until there is none.

    Args:
      device: whose allocator.
      sizes: bytes.
      holding: whether each is held while the next one is looked for.
    """
    found: list[Block] = []
    held: list[tf.Tensor] = []
    for size in sizes:
        try:
            tensor, chunk = _chunk(device, size)
        except tf.errors.ResourceExhaustedError:
            break  # after a wait of ten seconds for someone to free memory: once is enough
        found.append(Block(address(tensor), chunk))
        if holding:
            held.append(tensor)
        del tensor
    return found


def _around(device: Device, known: int) -> Block | None:
    """The free chunk that one of ``known`` bytes is part of by now, if there still is one.

    To ask for more than there is would be to wait for ten seconds.
    """
    size = known - ALIGNMENT
    while True:
        try:
            tensor, chunk = _chunk(device, size)
        except tf.errors.ResourceExhaustedError:
            return None
        if chunk > size:
            return Block(address(tensor), chunk)  # all of it
        del tensor
        size = split_from(size) - ALIGNMENT


def _joined(blocks: Iterable[Block]) -> list[Block]:
    """Those that follow each other as one."""
    found: list[Block] = []
    for block in sorted(blocks, key=lambda block: block.address):
        if found and found[-1].address + found[-1].bytes == block.address:
            block = Block(found[-1].address, found.pop().bytes + block.bytes)
        found.append(block)
    return found


@dataclass(frozen=True)
class Laid:
    """A layout that is in force as long as this is held.

    Attributes:
      layout: how the pool is divided.
      block: where the slots and the area are.
      walls: what keeps them apart; given up when the block is divided anew.
      beside: the area and what else is free and smaller, from ``GRAIN`` bytes on, by size.
    """

    layout: Layout
    block: Block
    walls: list[tf.Tensor]
    beside: tuple[Block, ...] = ()

    @property
    def slots(self) -> range:
        """The addresses of the slots."""
        return range(self.block.address, self.block.address + self.layout.slots_end)

    @cached_property
    def slots_at(self) -> dict[int, int]:
        """The size of each slot, by where it starts."""
        shift = self.block.address - self.layout.slot_addresses.start
        return {start + shift: size for start, size in self.layout.slots_at.items()}


_laid: dict[str, Laid] = {}  # by device: the latest


def is_tight(device: Device, budget: int) -> bool:
    """Whether the device's pool cannot hold (noticeably) more than the budget."""
    return device.limit is not None and device.limit <= budget * _TIGHT


def lay_out(
    device: Device,
    block: Block,
    pool: Pool,
    budget: int,
    move: Callable[[], object] = lambda: None,
) -> Laid | None:
    """Divides a block into slots and an area (see ``Layout``).

    A block that another step's layout is in is divided anew: ``is_in_force``
    tells it that its own is gone.

    Args:
      device: whose allocator.
      block: what is claimed.
      pool: for the slots.
      budget: bytes, everything included.
      move: moves what a step moves anyway, into the slots: where it lies between two
        holes, these would become one later.

    Returns:
      The layout; None if it would leave too little of the budget in one piece
      (``LEAST_AREA``).  Where the allocator chooses the places (``pool.shared``) and the
      block has room for it, the area is so large that whatever is free of it is cut for
      a request, and never handed out whole.
    """
    in_use = bytes_in_use(device)
    try:
        block, others = _free_chunks(device, block, budget)
    except tf.errors.ResourceExhaustedError:
        return None  # the block is an old one, and has been cut up
    sizes = pool.slots
    end = slots_end(sizes)
    cuts = _made_uneven(device, others, sizes)
    in_use += len(cuts) * ALIGNMENT
    left = budget - in_use
    if pool.shared and is_roomy(block.bytes - end, left):
        walls = _in_pieces(device, others)
        area = block.bytes - end
    else:
        block, walls = _into_hole(device, block, others, left)
        area = min(block.bytes, left - sum(_usable(others, left))) - end
    walls += cuts
    beyond = block.bytes - end - area
    if area < LEAST_AREA * left:
        return None
    # Smaller than the area, it would be the best fit for what goes in there, and to hold it
    # meanwhile would be above the budget.
    pieces = beyond // (_USELESS + ALIGNMENT) if beyond < min(area, _CUT_UP) else 0
    if beyond >= _SMALLEST_CLAIM:  # else not worth a wall, or there is no room for one
        area -= (1 + pieces) * ALIGNMENT
    slots = []
    for size in sizes:
        slots.append(_chunk(device, size)[0])
        walls.append(_chunk(device, ALIGNMENT)[0])
    if beyond >= _SMALLEST_CLAIM:
        # What comes after the area is not to be merged with it.
        rest = area
        while rest > 0:
            whole = is_split(rest + beyond, rest)
            slots.append(_chunk(device, rest if whole else aligned((rest + beyond) // 4))[0])
            rest -= slots[-1].shape[0] * 4
        walls.append(_chunk(device, ALIGNMENT)[0])
        for _ in range(pieces):
            slots.append(_chunk(device, _USELESS)[0])
            walls.append(_chunk(device, ALIGNMENT)[0])
    slots = [slot for slot in slots if slot.shape[0] * 4 >= GRAIN]
    move()  # while everything else is taken
    del slots
    others.clear()
    return renewed(device, Laid(Layout(in_use, (), sizes, area), block, walls), budget)


def renewed(device: Device, laid: Laid, budget: int) -> Laid | None:
    """The same slots, with what is free beside them by now.

    Args:
      device: whose allocator.
      laid: the layout in force.
      budget: bytes, everything included.

    Returns:
      The layout; None if nothing is left behind the slots, or none of those for small values.
    """
    layout = laid.layout
    known = max((layout.area, *layout.before, *layout.after))
    blocks = _blocks(device, [int(share * known) for share in _SHARES])
    if not blocks:
        return None
    largest = max(blocks, key=lambda block: block.bytes)
    largest, free = _free_chunks(device, largest, budget)
    slots = laid.slots
    taken = [(tensor, chunk) for tensor, chunk in free if address(tensor) in slots]
    holes = [(tensor, chunk) for tensor, chunk in free if address(tensor) not in slots]
    free.clear()
    if largest.address in slots or _SMALL_SLOT not in [chunk for _, chunk in taken]:
        return None
    # All of the slots is in use now.
    in_use = bytes_in_use(device) - sum(chunk for _, chunk in holes) - layout.slots_end
    cuts = _made_uneven(device, holes, layout.slots)
    del taken
    in_use += len(cuts) * ALIGNMENT
    left = budget - in_use
    blocks = [*(Block(address(tensor), chunk) for tensor, chunk in holes), largest]
    blocks.sort(key=lambda block: block.address)
    end = laid.block.address + laid.block.bytes
    within = [block for block in blocks if slots.stop <= block.address < end]
    if not within:
        return None
    area = max(within, key=lambda block: min(block.bytes, left))
    blocks.remove(area)
    lower = [block.bytes for block in blocks if block.address < slots.start]
    beyond = [block.bytes for block in within if block != area]
    higher = [block.bytes for block in blocks if block.address >= end]
    if area.bytes + layout.slots_end + sum(c for c in (*lower, *higher) if c <= left) < left:
        higher, beyond = beyond + higher, []
    layout = Layout(in_use, tuple(lower), layout.slots, area.bytes, tuple(beyond), tuple(higher))
    laid.walls.extend(cuts)  # the same list, which is emptied when all of it is divided anew
    smaller = [block for block in blocks if GRAIN <= block.bytes < area.bytes]
    beside = (*sorted(smaller, key=_by_size), area)
    _laid[device.name] = Laid(layout, laid.block, laid.walls, beside)
    return _laid[device.name]


def _free_chunks(
    device: Device, block: Block, budget: int
) -> tuple[Block, list[tuple[tf.Tensor, int]]]:
    """What is free of a block in one piece, and all smaller chunks, taken.

    What is larger than the block stays behind it, but for one hole that it may lie in.
    """
    # Free chunks are found by taking them: an allocation goes to the smallest one
    # that can hold it, and takes all of it below twice the request.
    others: list[tuple[tf.Tensor, int]] = []
    # Something small may have been left in the block since it was claimed.
    tensor, size = _chunk(device, block.bytes - block.bytes // 64)
    if not block.holds(tensor):  # a hole that is nearly as large
        try:
            found = _chunk(device, block.bytes - block.bytes // 64)
        except tf.errors.ResourceExhaustedError:
            pass  # the block has been cut up
        else:
            others.append((tensor, size))
            tensor, size = found
            del found
    block = Block(address(tensor), size)
    del tensor
    # Each size is more than half of all that are left.
    size = aligned(block.bytes // 2 + 1)
    while size > 0:
        tensor, chunk = _chunk(device, size)
        if block.holds(tensor):
            size = aligned(size // 2) if size > ALIGNMENT else 0
        else:
            others.append((tensor, chunk))
        del tensor
    rest = 0 if device.limit is None else device.limit - bytes_in_use(device)
    if is_tight(device, budget) and rest - block.bytes > block.bytes:
        # Variables have left a hole that is larger than what was to be claimed.
        part = (rest - block.bytes) * 63 // 64
        try:
            tensor, chunk = _chunk(device, part)
            itself = Block(address(tensor), chunk) == block
            if itself:  # it is nearly as large
                others.append((tensor, chunk))
                tensor, chunk = _chunk(device, part)
        except tf.errors.ResourceExhaustedError:
            # Several holes: they are used, and not counted on.
            others = [(t, chunk) for t, chunk in others if not block.holds(t)]
        else:
            hole = Block(address(tensor), chunk)
            if not itself and not hole.address <= block.address < hole.address + hole.bytes:
                others.append(_chunk(device, block.bytes))  # else it was all in one piece
            block = hole
    return block, others


def _made_uneven(
    device: Device, others: list[tuple[tf.Tensor, int]], sizes: Iterable[int]
) -> list[tf.Tensor]:
    """Makes free chunks smaller that are as large as a slot: they would serve in its stead.

    Args:
      device: whose allocator.
      others: all free chunks outside the block, which are changed accordingly.
      sizes: of the slots.

    Returns:
      What they are made smaller by.
    """
    cuts, slots = [], set(sizes)
    for size in [chunk for _, chunk in others if chunk in slots]:
        others.pop([chunk for _, chunk in others].index(size))
        cuts.append(_chunk(device, ALIGNMENT)[0])  # in there: nothing that is free is smaller
        others.append(_chunk(device, size - ALIGNMENT))
    return cuts


def _in_pieces(device: Device, others: list[tuple[tf.Tensor, int]]) -> list[tf.Tensor]:
    """Divides free chunks so that they serve nothing large: it would get one whole, and
    there is one to be cut for it.

    Args:
      device: whose allocator.
      others: all free chunks but that one, which are changed accordingly.

    Returns:
      The walls.
    """
    walls = []
    for size in [chunk for _, chunk in others]:
        piece = max(GRAIN, aligned(size // _PIECES))
        count = size // (piece + ALIGNMENT) - 1
        if count < 1:
            continue
        others.pop([chunk for _, chunk in others].index(size))
        for _ in range(count):  # nothing that is free is smaller
            others.append(_chunk(device, piece))
            walls.append(_chunk(device, ALIGNMENT)[0])
        others.append(_chunk(device, size - count * (piece + ALIGNMENT)))
    return walls


def _into_hole(
    device: Device, block: Block, others: list[tuple[tf.Tensor, int]], left: int
) -> tuple[Block, list[tf.Tensor]]:
    """The largest hole that variables have left instead of the block, if that holds more
    of what may be used: of the block then a part is walled off for the rest.

    Args:
      device: whose allocator.
      block: what is claimed.
      others: the other free chunks, which are changed accordingly.
      left: bytes that may be used.

    Returns:
      The block to divide, and the walls.
    """
    usable = _usable(others, left)
    part = aligned(left - sum(usable))
    if part >= left // 2 or left < sum(usable) or not is_split(block.bytes, part):
        return block, []
    tensor, size = others.pop([chunk for _, chunk in others].index(max(usable)))
    others.append(_chunk(device, part))
    walls = [_chunk(device, ALIGNMENT)[0]]
    others.append(_chunk(device, block.bytes - part - ALIGNMENT))
    return Block(address(tensor), size), walls


def _usable(others: Iterable[tuple[tf.Tensor, int]], left: int) -> list[int]:
    """Sizes of the free chunks to be used: what is larger than all that may be used is not
    the best fit for any of it."""
    return [chunk for _, chunk in others if chunk <= left]


@dataclass(frozen=True)
class Found:
    """How memory differs from how it was laid out.

    Attributes:
      slots_taken: something else lies in slots for batches and results.
      drifted: other memory is free beside them.
      free: where the slots start that are left free.
    """

    slots_taken: bool = False
    drifted: bool = False
    free: frozenset[int] = field(default=frozenset(), compare=False)


@contextmanager
def settled(device: Device, laid: Laid, free: Mapping[int, int]) -> Iterator[Found]:
    """Leaves a given number of slots free, however many batches and results are held.

    Args:
      device: whose allocator.
      laid: the layout in force.
      free: by size, how many slots a step is to find free.

    Yields:
      Whether there were as many, and what comes after them is what it was.
    """
    slots_taken = drifted = False
    found: dict[int, list[tf.Tensor]] = {}
    others: list[tf.Tensor] = []  # what is as large as a slot, and may serve in its stead
    for size in sorted(free, reverse=True):  # a small one must not take a large slot
        found[size] = []
        after = next((block.address for block in laid.beside if block.bytes >= size), None)
        tries = _TRIES
        while tries > 0:
            tensor = _chunk(device, size)[0]
            place = address(tensor)
            if laid.slots_at.get(place) == size:
                found[size].append(tensor)
                continue
            tries -= 1
            if place == after:
                break
            drifted = True
            slots_taken |= place in laid.slots  # what is left of one
            others.append(tensor)
        del tensor
    others.clear()
    slots_taken |= any(len(found[size]) < count for size, count in free.items())
    places: set[int] = set()
    for size, count in free.items():
        places.update(map(address, found[size][:count]))
        del found[size][:count]
    yield Found(slots_taken, drifted, frozenset(places))
    found.clear()


def differences(device: Device, laid: Laid, places: Collection[int], most: int) -> Found:
    """How what is free differs from what was free when memory was laid out.

    A request that is just too large for a free chunk goes into the next larger one,
    unless there is another.

    Args:
      device: whose allocator; it is ``settled``.
      laid: the layout in force.
      places: where the slots start that it found free.
      most: bytes that may be in use meanwhile; what that forbids is not looked at.
    """
    most -= bytes_in_use(device)
    vacant = {
        start: size
        for start, size in laid.slots_at.items()
        if size == _SMALL_SLOT or start in places
    }
    known = [*laid.beside, *(Block(start, size) for start, size in vacant.items())]
    size = _SMALL_SLOT
    for block in sorted(known, key=_by_size):
        if size > block.bytes:
            continue  # as large as the one before
        if (size if is_split(block.bytes, size) else block.bytes) > most:
            break
        expected: Collection[int] = vacant if block.address in vacant else [block.address]
        try:
            tensor = _chunk(device, size)[0]
        except tf.errors.ResourceExhaustedError:
            return Found(drifted=True)
        if (place := address(tensor)) not in expected:
            return Found(slots_taken=place in laid.slots, drifted=True)
        del tensor
        size = block.bytes + ALIGNMENT
    return Found()


def _by_size(block: Block) -> tuple[int, int]:
    """In the order in which the allocator hands out what is free."""
    return block.bytes, block.address


def is_in_force(device: Device, laid: Laid) -> bool:
    """Whether no other step, planned or refused, has divided the same memory anew."""
    latest = _laid.get(device.name)
    if latest is None:
        return False
    ours, theirs = laid.block, latest.block
    return (
        latest is laid
        or ours.address + ours.bytes <= theirs.address
        or theirs.address + theirs.bytes <= ours.address
    )


@contextmanager
def undone_if_refused(device: Device) -> Iterator[None]:
    """Gives up what was divided meanwhile where a step cannot be planned: its walls would be
    in the way of the next one."""
    before = _laid.get(device.name)
    try:
        yield
    except BaseException:
        if before is not None and before.walls:
            _laid[device.name] = before
        else:  # there was none, or it has been given up for this step
            _laid.pop(device.name, None)
        raise


def latest(device: Device) -> Laid | None:
    """The latest layout."""
    return _laid.get(device.name)


def is_as_good(device: Device, laid: Laid, pool: Pool, budget: int) -> bool:
    """Whether a layout serves another step as well as one of its own.

    Args:
      device: whose allocator.
      laid: the latest layout.
      pool: of the other step, with that layout.
      budget: bytes, of the other step; everything included.
    """
    if not laid.layout.serves(pool.own_slots) or not laid.walls:
        return False
    if budget - sum(laid.layout.beyond) < budget / _TIGHT:
        return False  # memory was divided for less
    with settled(device, laid, pool.free_slots) as found:
        return not found.slots_taken


def _chunk(device: Device, count: int) -> tuple[tf.Tensor, int]:
    """A tensor of ``count`` bytes or a little more, and the size of its chunk.

    Its shape is an attribute: as a tensor it would take a chunk of its own.
    """
    before = bytes_in_use(device)
    with tf.device(device.name):
        (tensor,) = execute.execute(
            UNWRITTEN.encode(),
            1,
            inputs=[],
            attrs=("shape", tf.TensorShape([aligned(count) // 4]), "dtype", tf.float32),
            ctx=context.context(),
        )
    return tensor, bytes_in_use(device) - before


def address(tensor: tf.Tensor) -> int:
    """Where a tensor's bytes are."""
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    # The first member of a DLManagedTensor is its address.
    return ctypes.cast(pointer(capsule, b"dltensor"), ctypes.POINTER(ctypes.c_uint64))[0]


def memory_for_budget(device: Device) -> tuple[int, str]:
    """Bytes that ``budget="auto"`` stands for, and where the figure comes from."""
    if device.limit is not None:
        margin = max(device.limit // 50, 16 << 20)
        return device.limit - margin, "the allocator's limit less 2 %"
    return int(psutil.virtual_memory().available * 0.9), "90 % of the available memory"


def _gpu_limit() -> int:
    gpu = tf.config.list_physical_devices("GPU")[0]
    configured = tf.config.get_logical_device_configuration(gpu)
    if configured and configured[0].memory_limit:
        return int(configured[0].memory_limit * 2**20)
    details = tf.config.experimental.get_device_details(gpu)
    total = details.get("memory_size") or _nvidia_memory()
    return int(total * _GPU_SHARE)


def _nvidia_memory() -> int:
    import subprocess

    answer = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(answer.stdout.split()[0]) * 2**20


def _gpu_grows() -> bool:
    gpu = tf.config.list_physical_devices("GPU")[0]
    return bool(tf.config.experimental.get_memory_growth(gpu))


def share(handle: tf.Tensor) -> None:
    """Has what reads a variable share its buffer, and not copy it (see ``copy_on_read``)."""
    tf.raw_ops.DisableCopyOnRead(resource=handle)


def own(handle: tf.Tensor, variable: tf.TensorSpec) -> None:
    """Gives a variable a buffer of its own in the allocator's memory, if it has none."""
    share(handle)
    # Writing no rows copies, as writing some would, what is not the variable's alone.
    tf.raw_ops.ResourceScatterUpdate(
        resource=handle,
        indices=tf.zeros([0], tf.int32),
        updates=tf.zeros([0, *variable.shape[1:]], variable.dtype),
    )
    share(handle)


def overwrite(handle: tf.Tensor, value: tf.Tensor) -> None:
    """Writes a value into a variable's own buffer, so that the pool stays as it was."""
    if value.shape.rank == 0:
        tf.raw_ops.AssignVariableOp(resource=handle, value=value)
        return
    tf.raw_ops.ResourceStridedSliceAssign(
        ref=handle, begin=[0], end=[0], strides=[1], value=value, ellipsis_mask=1
    )
    share(handle)  # assigning to a slice makes every later read a copy
