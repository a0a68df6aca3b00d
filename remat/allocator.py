"""The real allocator: its counters, its limit, and claiming memory from it.

Counters exist on GPUs always, and on the CPU when TensorFlow is imported with
``TF_CPU_ALLOCATOR_USE_BFC=true`` in the environment, which makes the CPU use
the allocator that GPUs use (``TF_CPU_BFC_MEM_LIMIT_IN_MB`` then is a hard
limit).
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import psutil
import tensorflow as tf

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


def claim(device: Device, count: int) -> None:
    """Makes the allocator's pool hold one free block of ``count`` bytes.

    If the block cannot be had, nothing changes.
    """
    if not device.counted or count < _SMALLEST_CLAIM:
        return
    try:
        with tf.device(device.name):
            tf.raw_ops.Empty(shape=[count], dtype=tf.uint8, init=False)
    except tf.errors.ResourceExhaustedError:
        return  # the pool is not what its model says; the measured peak will tell


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
