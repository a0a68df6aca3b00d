"""The real allocator: its counters, its limit, and claiming memory from it.

Counters exist on GPUs always, and on the CPU when TensorFlow is imported with
``TF_CPU_ALLOCATOR_USE_BFC=true`` in the environment, which makes the CPU use
the allocator that GPUs use (``TF_CPU_BFC_MEM_LIMIT_IN_MB`` then is a hard
limit).
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import tensorflow as tf

from .memory import ALIGNMENT

_SMALLEST_CLAIM = 1 << 20  # bytes
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
    if tf.config.list_logical_devices("GPU"):
        return Device("GPU:0", True, _gpu_limit(), _gpu_grows())
    pooled = os.environ.get("TF_CPU_ALLOCATOR_USE_BFC", "").lower() in ("1", "true")
    limit = os.environ.get("TF_CPU_BFC_MEM_LIMIT_IN_MB", "")
    return Device("CPU:0", pooled, int(limit) * 2**20 if pooled and limit.isdigit() else None, True)


def bytes_in_use(device: Device) -> int:
    """Bytes of all chunks in use now."""
    return int(tf.config.experimental.get_memory_info(device.name)["current"])


def peak_bytes(device: Device) -> int:
    """Most bytes in use since ``reset_peak``."""
    return int(tf.config.experimental.get_memory_info(device.name)["peak"])


@functools.cache
def peak_before_claims(device: Device) -> int:
    """Peak bytes when this process first planned a step: what shaped the pool
    before blocks of it were claimed."""
    return peak_bytes(device)


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
        return 0 <= _address(tensor) - self.address < self.bytes


_claimed: dict[str, Block] = {}  # by device: a pool that may not grow is claimed once


def claim(device: Device, count: int) -> Block | None:
    """Makes the allocator's pool hold one free block of ``count`` bytes.

    Returns:
      The block, or one that was claimed before if that is as large or nothing
      more can be had; None if there is none.
    """
    block = _claimed.get(device.name)
    if block is not None and (device.limit is not None or block.bytes >= count):
        return block
    if count < _SMALLEST_CLAIM:
        return None
    try:
        tensor, size = _chunk(device, count)
    except tf.errors.ResourceExhaustedError:
        return None  # the pool is not what its model says; the measured peak will tell
    _claimed[device.name] = Block(_address(tensor), size)
    return _claimed[device.name]


def lay_slots(
    device: Device, block: Block, sizes: Sequence[int]
) -> tuple[tuple[int, ...], list[tf.Tensor]]:
    """Leaves a free chunk of each size at the start of the largest one.

    ``memory.Arena.lay_slots`` says what for.

    Args:
      device: whose allocator.
      block: what is claimed.
      sizes: of the slots.

    Returns:
      The sizes of the free chunks before that, the largest last, and what
      walls the slots off, as long as it is kept.
    """
    # Holes are found by taking them: an allocation goes to the smallest chunk
    # that can hold it, and takes all of it below twice the request.
    before = bytes_in_use(device)
    holes = []
    size = 1 << (block.bytes // 2).bit_length() - 1
    while size >= ALIGNMENT:
        tensor, chunk = _chunk(device, size)
        if block.holds(tensor):
            size //= 2
        else:
            holes.append((tensor, chunk))
        del tensor
    largest = block.bytes
    if device.limit is not None:
        # Variables may have left a hole that is larger than what was to be claimed.
        rest = device.limit - before - block.bytes - sum(chunk for _, chunk in holes)
        if rest > block.bytes:
            try:
                tensor, largest = _chunk(device, rest - rest // 64)
                holes.append(_chunk(device, block.bytes))
                del tensor
            except tf.errors.ResourceExhaustedError:
                pass  # several holes: they are used, and not counted on
    slots: list[tf.Tensor] = []
    walls: list[tf.Tensor] = []
    try:
        for size in sizes:
            slots.append(_chunk(device, size)[0])
            walls.append(_chunk(device, 1)[0])
    except tf.errors.ResourceExhaustedError:
        walls = []  # hopelessly small; planning will say so
    return (*(chunk for _, chunk in holes), largest), walls


def _chunk(device: Device, count: int) -> tuple[tf.Tensor, int]:
    """A tensor of ``count`` bytes or a little more, and the size of its chunk."""
    shape = tf.constant([-(-count // ALIGNMENT), ALIGNMENT])
    before = bytes_in_use(device)
    with tf.device(device.name):
        tensor = tf.raw_ops.Empty(shape=shape, dtype=tf.uint8, init=False)
    return tensor, bytes_in_use(device) - before


def _address(tensor: tf.Tensor) -> int:
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
