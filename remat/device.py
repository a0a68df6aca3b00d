"""The device at hand: which one, what decides costs on it, where these are recorded."""

from __future__ import annotations

import datetime
import os
import platform
import re
from pathlib import Path

import tensorflow as tf

from .profiles.table import cache_path

CLOCK = "time.perf_counter around a synchronised function, less an empty one"


def default_device() -> str:
    """The first GPU, else the CPU."""
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def cpu_is_pooled() -> bool:
    """Whether the CPU uses the allocator that GPUs use, which counts bytes."""
    return os.environ.get("TF_CPU_ALLOCATOR_USE_BFC", "").lower() in ("1", "true")


def device_provenance(device: str) -> dict[str, str]:
    """The provenance columns of rows measured on ``device`` now."""
    kind, _, index = device.partition(":")
    if kind == "GPU":
        physical = tf.config.list_physical_devices("GPU")[int(index or 0)]
        name = tf.config.experimental.get_device_details(physical).get("device_name", "GPU")
        build = tf.sysconfig.get_build_info()
        driver = f"CUDA {build.get('cuda_version')}, cuDNN {build.get('cudnn_version')}"
        version = Path("/proc/driver/nvidia/version")
        if version.exists():
            found = re.search(r"\d+\.\d+(\.\d+)?", version.read_text())
            driver = f"NVIDIA {found[0] if found else '?'}, {driver}"
    else:
        name = cpu_name()
        # What decides the price of an operation on a CPU, beside the CPU.
        threads = tf.config.threading.get_intra_op_parallelism_threads() or "all"
        driver = (
            f"oneDNN {os.environ.get('TF_ENABLE_ONEDNN_OPTS', 'default')}, {threads} threads, "
            f"{'BFC' if cpu_is_pooled() else 'system'} allocator"
        )
    return {
        "device": name,
        "driver": driver,
        "tensorflow": tf.__version__,
        "date": datetime.date.today().isoformat(),
        "clock": CLOCK,
    }


def cpu_name() -> str:
    """Model and number of usable cores, for instance "AMD EPYC, 2 cores"."""
    model = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        found = re.search(r"model name\s*:\s*(.+)", information.read_text())
        model = found[1].strip() if found else model
    usable = getattr(os, "sched_getaffinity", None)  # Linux only
    return f"{model}, {len(usable(0)) if usable else os.cpu_count()} cores"


def table_path(device: str) -> Path:
    """Where the user's own costs of a device are recorded."""
    provenance = device_provenance(device)
    return cache_path(provenance["device"], provenance["driver"], provenance["tensorflow"])
