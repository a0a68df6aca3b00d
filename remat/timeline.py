"""The measured timeline: allocations and seconds of a run, as TensorFlow's profiler saw them."""

from __future__ import annotations

import tempfile
from collections import defaultdict
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
    """Runs a function under the profiler and returns its allocations in order."""
    return allocations(profile(run), on_gpu=on_gpu)


def record_seconds(run: Callable[[], object], *, on_gpu: bool) -> dict[str, float]:
    """Runs a function under the profiler; returns the seconds that each of its
    nodes took on the device, by node name.

    On a CPU that is the time inside the kernel; on a GPU the time of the
    kernels that it launched, on all streams.
    """
    space = profile(run, device=int(on_gpu))
    seconds: dict[str, float] = defaultdict(float)
    for plane in space.planes:
        if plane.name.startswith("/device:GPU") != on_gpu:
            continue
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                if on_gpu:
                    name = _Stats(plane, event).text("tf_op")
                node, colon, kind = name.rpartition(":")
                if colon and kind:
                    seconds[node] += event.duration_ps * 1e-12
    return dict(seconds)


def profile(run: Callable[[], object], *, device: int = 0) -> xplane_pb2.XSpace:
    """What the profiler saw of a run: each operation and allocation, and kernels on a
    device if asked for.

    Raises:
      tf.errors.AlreadyExistsError: if someone else is profiling.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Level 1 is what records memory; without any device tracing it is cheap.
        options = tf.profiler.experimental.ProfilerOptions(
            host_tracer_level=1, python_tracer_level=0, device_tracer_level=device
        )
        with tf.profiler.experimental.Profile(folder, options):
            run()
        space = xplane_pb2.XSpace()
        for path in Path(folder).rglob("*.xplane.pb"):
            space.MergeFromString(path.read_bytes())
    return space


def allocations(space: xplane_pb2.XSpace, *, on_gpu: bool) -> list[Allocation]:
    """The allocations of a profile, in order."""
    return [
        Allocation(
            seconds=seconds,
            requested=_SIGNS[name] * stats.number("requested_bytes"),
            chunk=_SIGNS[name] * stats.number("allocation_bytes"),
            address=stats.number("addr"),
            op=stats.text("tf_op"),
        )
        for seconds, name, stats in _noted(space, on_gpu)
    ]


def fragmentation(space: xplane_pb2.XSpace, *, on_gpu: bool) -> float:
    """The share of a pool's free bytes that is not in its largest free chunk, when the last
    chunk of a profile was taken or given back."""
    *_, (_, _, stats) = _noted(space, on_gpu)
    return stats.share("fragmentation")


def stretches(space: xplane_pb2.XSpace, prefix: str) -> list[tuple[str, float, float]]:
    """What was marked by a ``Trace`` whose name starts so: name, begin and end in seconds."""
    found = []
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                if name.startswith(prefix):
                    start = _seconds(line, event)
                    found.append((name, start, start + event.duration_ps * 1e-12))
    return found


def _noted(space: xplane_pb2.XSpace, on_gpu: bool) -> list[tuple[float, str, _Stats]]:
    """When a device's allocator gave or got back a chunk, which of them, and what was noted
    about it; in order."""
    found = []
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                if name not in _SIGNS:
                    continue
                stats = _Stats(plane, event)
                if stats.text("allocator_name").startswith("GPU") == on_gpu:
                    found.append((_seconds(line, event), name, stats))
    return sorted(found, key=lambda noted: noted[0])


def _seconds(line: xplane_pb2.XLine, event: xplane_pb2.XEvent) -> float:
    return (line.timestamp_ns * 1000 + event.offset_ps) * 1e-12


class _Stats:
    """What the profiler noted about an event."""

    def __init__(self, plane: xplane_pb2.XPlane, event: xplane_pb2.XEvent) -> None:
        self._names = plane.stat_metadata
        self._stats = {self._names[stat.metadata_id].name: stat for stat in event.stats}

    def number(self, name: str) -> int:
        stat = self._stats.get(name)
        return 0 if stat is None else stat.int64_value or stat.uint64_value

    def share(self, name: str) -> float:
        return self._stats[name].double_value

    def text(self, name: str) -> str:
        stat = self._stats.get(name)
        return "" if stat is None else stat.str_value or self._names[stat.ref_value].name
