"""The measured timeline: every allocation of a run, as TensorFlow's profiler saw it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

_SIGNS = {"MemoryAllocation": 1, "MemoryDeallocation": -1}


@dataclass(frozen=True, slots=True)
class Allocation:
    """One chunk taken from, or given back to, a device's allocator.

    Attributes:
      seconds: when, since the start of the recording.
      requested: bytes asked for (negative when given back).
      chunk: bytes of the chunk (negative when given back).
      address: of the chunk.
      op: the operation that asked, if the profiler knew.
    """

    seconds: float
    requested: int
    chunk: int
    address: int
    op: str


def record(run: Callable[[], object], *, on_gpu: bool) -> list[Allocation]:
    """Runs a function under the profiler and returns its allocations in order.

    Only memory is recorded (host tracer level 1), which costs little time.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = tf.profiler.experimental.ProfilerOptions(
            host_tracer_level=1, python_tracer_level=0, device_tracer_level=0
        )
        with tf.profiler.experimental.Profile(folder, options):
            run()
        space = xplane_pb2.XSpace()
        for path in Path(folder).rglob("*.xplane.pb"):
            space.MergeFromString(path.read_bytes())
    return sorted(_allocations(space, on_gpu), key=lambda allocation: allocation.seconds)


def _allocations(space: xplane_pb2.XSpace, on_gpu: bool) -> list[Allocation]:
    found = []
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                sign = _SIGNS.get(plane.event_metadata[event.metadata_id].name)
                if sign is None:
                    continue
                stats = {plane.stat_metadata[stat.metadata_id].name: stat for stat in event.stats}

                def number(name: str, stats: dict = stats) -> int:
                    stat = stats.get(name)
                    return 0 if stat is None else stat.int64_value or stat.uint64_value

                def text(name: str, stats: dict = stats, plane: object = plane) -> str:
                    stat = stats.get(name)
                    if stat is None:
                        return ""
                    return stat.str_value or plane.stat_metadata[stat.ref_value].name  # type: ignore[attr-defined]

                if text("allocator_name").startswith("GPU") != on_gpu:
                    continue
                found.append(
                    Allocation(
                        seconds=(line.timestamp_ns * 1000 + event.offset_ps) * 1e-12,
                        requested=sign * number("requested_bytes"),
                        chunk=sign * number("allocation_bytes"),
                        address=number("addr"),
                        op=text("tf_op"),
                    )
                )
    return found
