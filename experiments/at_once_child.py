"""What the processes of ``experiments.at_once`` do.

``python -m experiments.at_once_child TASK RESULT.json``
"""

from __future__ import annotations

import heapq
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from remat.lower import as_function, build_graph
from remat.memory import Event
from remat.program import Kind, Program

from .at_once import WIDTHS
from .child import WARM_UP, Training, step_seconds
from .models import CASES
from .process import Task, serve

_WORKERS = 2
_AHEAD = 300  # operations after the first that has not started: what is later waits for it


def at_once(task: Task) -> dict[str, Any]:
    """Seconds of the plain step, and what those of the others are times these."""
    assert task.budget is not None
    training = Training(CASES[task.model])
    step = training.compiled(task.budget).compiled
    program, events = step.prepared.program, step.planned.events
    seconds = step.prepared.prices.seconds
    (batch,) = training.case.batches(1)
    chain = [
        index
        for index, event in enumerate(events)
        if program.ops[event.op].kind in (Kind.PURE, Kind.ONCE) and event.op not in program.unfolded
    ]
    started = _starts(program, events, [seconds[event.op] for event in events], chain)
    ways: dict[str, Callable[..., object]] = {
        "plain": training.plain_step(),
        "one": _ordered(program, events, chain, 1),
        **{f"{width} at once": _ordered(program, events, started, width) for width in WIDTHS},
        "any": _ordered(program, events, chain, len(chain)),
    }
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(WARM_UP + task.steps):
        for way, run in ways.items():
            found[way].append(step_seconds(run, batch))
    timed = {way: each[WARM_UP:] for way, each in found.items()}
    base = timed.pop("plain")
    ratios = {
        way: statistics.median(own / other for own, other in zip(each, base, strict=True))
        for way, each in timed.items()
    }
    return {"plain_seconds": statistics.median(base), **ratios}


def _ordered(
    program: Program, events: Sequence[Event], order: Sequence[int], width: int
) -> Callable[..., object]:
    """The step whose operations that compute start in an order, ``width`` at once.

    Each waits for the ``width`` before the ``width - 1`` just before it, and so for all
    that these wait for.
    """
    graph_def, names = build_graph(program, events, {})
    if width > 1:
        nodes = {node.name: node for node in graph_def.node}
        effects = _effects(program, events)
        for place, index in enumerate(order):
            node = nodes[names[index]]
            before = order[max(0, place - 2 * width + 2) : max(0, place - width + 1)]
            after = {f"^{names[other]}" for other in (*before, *effects[index])}
            reads = [name for name in node.input if not name.startswith("^")]
            del node.input[:]
            node.input.extend([*reads, *sorted(after)])
    return as_function(program, events, graph_def, names, in_turn=width == 1)


def _effects(program: Program, events: Sequence[Event]) -> list[set[int]]:
    """For each event, those whose effects on variables come before it."""
    newest: dict[int, int] = {}
    found = []
    for index, event in enumerate(events):
        found.append({newest[op] for op in program.ops[event.op].controls})
        newest[event.op] = index
    return found


def _starts(
    program: Program, events: Sequence[Event], seconds: Sequence[float], chain: Sequence[int]
) -> list[int]:
    """The events that compute, in the order in which workers start them that take, of what
    is ready, what is first in the schedule."""
    computes = set(chain)
    effects = _effects(program, events)
    needs = [
        {source for source, _ in event.inputs} | before
        for event, before in zip(events, effects, strict=True)
    ]
    waiting = [len(each) for each in needs]
    readers: list[list[int]] = [[] for _ in events]
    for index, each in enumerate(needs):
        for source in each:
            readers[source].append(index)
    ready: list[int] = []
    running: list[tuple[float, int]] = []

    def done(index: int) -> None:
        for reader in readers[index]:
            waiting[reader] -= 1
            if waiting[reader] == 0:
                make_ready(reader)

    def make_ready(index: int) -> None:
        if index in computes:
            heapq.heappush(ready, index)
        else:  # takes no time
            done(index)

    for index in [index for index, count in enumerate(waiting) if count == 0]:
        make_ready(index)
    started: list[int] = []
    left = [*reversed(chain)]  # the first that has not started is last
    has_started = set()
    now = 0.0
    while ready or running:
        while left and left[-1] in has_started:
            left.pop()
        if ready and len(running) < _WORKERS and ready[0] <= left[-1] + _AHEAD:
            index = heapq.heappop(ready)
            started.append(index)
            has_started.add(index)
            heapq.heappush(running, (now + seconds[index], index))
        else:
            now, index = heapq.heappop(running)
            done(index)
    return started


if __name__ == "__main__":
    serve({"at_once": at_once}, sys.argv[1:])
