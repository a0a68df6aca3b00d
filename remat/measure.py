"""Stage 7: a planned step, run to see whether its predictions hold."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import tensorflow as tf

from . import allocator
from .allocator import Device
from .arena import GRAIN
from .calibrate import requested_by_op
from .device import device_provenance
from .lower import node_name
from .measured import Measured, Operation
from .memory import requests, simulate
from .planning import Planned, Prepared
from .plots import of_allocations, of_runs
from .program import Kind, calls
from .timeline import record, record_seconds


def measure(
    function: Callable[[], list[tf.Tensor]],
    timed: Callable[[], list[tf.Tensor]],
    settled: Callable[[], AbstractContextManager[object]],
    prepared: Prepared,
    planned: Planned,
    device: Device,
    *,
    steps: int,
) -> Measured:
    """Runs a lowered step and compares what it takes with what was predicted.

    One run to warm up, ``steps`` that are timed, and two under the profiler:
    one for allocations, one (of its own lowering, warmed up, too) for the seconds of
    each operation.

    Args:
      function: runs the step once.
      timed: the same, so that the profiler sees the seconds of each operation.
      settled: puts the memory pool into the state that the plan is for.
      prepared, planned: what ``function`` was lowered from.
      device: where.
      steps: 1 or more.
    """
    on_gpu = device.name.startswith("GPU")

    def run(function: Callable[[], list[tf.Tensor]] = function) -> list[tf.Tensor]:
        results = function()
        if on_gpu:
            tf.test.experimental.sync_devices()
        return results

    seconds: list[float] = []
    peak: int | None = 0 if device.counted else None
    with settled():
        results = run()
    for _ in range(steps):
        if peak is not None:
            allocator.reset_peak(device)
        started = time.perf_counter()
        with settled():
            results = run()  # the last ones are held meanwhile, as in a training loop
        seconds.append(time.perf_counter() - started)
        if peak is not None:
            peak = max(peak, allocator.peak_bytes(device))
    with settled():
        before = allocator.bytes_in_use(device) if device.counted else 0
        allocations = record(run, on_gpu=on_gpu) if device.counted else []
    profiled: list[float] = []

    def run_timed() -> None:
        started = time.perf_counter()
        run(timed)
        profiled.append(time.perf_counter() - started)

    with settled():
        run(timed)
    with settled():
        by_node = record_seconds(run_timed, on_gpu=on_gpu)
    del results

    program, events, prices = prepared.program, planned.events, prepared.prices
    asked = requests(program, events, prices.workspace)
    found = requested_by_op(allocations)
    operations = []
    for event, taken in zip(events, asked.taken, strict=True):
        op = program.ops[event.op]
        if op.kind not in (Kind.PURE, Kind.ONCE) or set(op.dtypes) == {tf.resource}:
            continue  # computes nothing
        name = node_name(program, event)
        operations.append(
            Operation(
                name=name,
                type=op.type,
                again=event.copy > 0,
                seconds_predicted=prices.seconds[event.op],
                seconds_measured=by_node.get(name),
                bytes_predicted=sum(
                    asked.sizes[number] for number in taken if asked.sizes[number] >= GRAIN
                ),
                # What functions ask for inside goes by other names.
                bytes_measured=sum(found[name].elements())
                if allocations and not calls(op.type)
                else None,
            )
        )
    again = [event.copy > 0 and prices.seconds[event.op] > 0 for event in events]
    return Measured(
        name=planned.plan.graph_name,
        device=device_provenance(device.name)["device"],
        priced_for=prices.device,
        budget=planned.plan.budget,
        peak_predicted=planned.plan.peak,
        peak_measured=peak,
        seconds_predicted=sum(operation.seconds_predicted for operation in operations),
        seconds=tuple(seconds),
        seconds_profiled=profiled[0],
        operations=tuple(operations),
        memory_predicted=of_runs(
            "predicted",
            simulate(asked, prepared.pool, planned.fillers).held,
            [prices.seconds[event.op] for event in events],
            again,
        ),
        memory_measured=(of_allocations("measured", allocations, before) if allocations else None),
    )
