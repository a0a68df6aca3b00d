"""What the processes of ``experiments.at_once`` do.

``python -m experiments.at_once_child TASK RESULT.json``
"""

from __future__ import annotations

import heapq
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import remat
from remat.arena import aligned
from remat.lower import as_function, build_graph
from remat.memory import Event, Requests, requests
from remat.program import Kind, Program

from .at_once import WORKERS
from .child import WARM_UP, Training, step_seconds
from .models import CASES
from .process import Task, serve

_AHEAD = 40  # operations among which another is looked for to run beside one
_STAGE = 12  # operations between two joins, at most
_WORTH = 1e-4  # seconds: what takes less has nothing run beside it
_LONGER = 1.5  # times the other lane: what would make a lane so long is not beside it
_EVEN = 0.85  # of the longer lane: lanes that end so close together are joined

# Events that run one after the other.
Lane = list[int]


def at_once(task: Task) -> dict[str, Any]:
    """Seconds of the plain step, and what those of the others are times these."""
    assert task.budget is not None
    training = Training(CASES[task.model])
    step = training.compiled(task.budget).compiled
    program, events = step.prepared.program, step.planned.events
    (batch,) = training.case.batches(1)
    needs = _needs(program, events)
    seconds = {index: step.prepared.prices.seconds[events[index].op] for index in needs}
    stages = {
        **{f"{count} workers": [_lanes(needs, seconds, count)] for count in WORKERS},
        "joined": _stages(needs, seconds),
        "any": [[[index] for index in needs]],
    }
    ways: dict[str, Callable[..., object]] = {
        "plain": training.plain_step(),
        "one": as_function(program, events, *build_graph(program, events, {}), in_turn=True),
        **{way: _ordered(program, events, each) for way, each in stages.items()},
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


def own_chunks(task: Task) -> dict[str, Any]:
    """Bytes that a schedule holds at its peak, and what they are where each tensor has a
    chunk of its own size; at the least budget known to work, if the task's does not."""
    assert task.share is not None
    training = Training(CASES[task.model])
    try:
        step = training.compiled(task.share).compiled
    except remat.InfeasibleBudgetError as error:
        step = training.compiled(error.least_budget).compiled
    prepared = step.prepared
    asked = requests(prepared.program, step.planned.events, prepared.prices.workspace)
    resident = prepared.extraction.graph.resident
    return {
        "budget": step.budget,
        "held": max(asked.timeline(resident)),
        "own_chunks": resident + _own_chunks(asked),
    }


def _own_chunks(asked: Requests) -> int:
    """Bytes of as many chunks of each size as are held at once."""
    held: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for taken, given in zip(asked.taken, asked.given, strict=True):
        held.update(aligned(asked.sizes[number]) for number in taken)
        most |= held
        held.subtract(aligned(asked.sizes[number]) for number in given)
    return sum(size * count for size, count in most.items())


def _ordered(
    program: Program, events: Sequence[Event], stages: Sequence[Sequence[Lane]]
) -> Callable[..., object]:
    """The step whose operations wait for what is before them in their lane, and the first
    ones of a stage for the last ones of the stage before it."""
    graph_def, names = build_graph(program, events, {})
    nodes = {node.name: node for node in graph_def.node}
    effects = _effects(program, events)
    ended: list[int] = []
    for stage in stages:
        for lane in stage:
            before = ended
            for index in lane:
                node = nodes[names[index]]
                after = {f"^{names[other]}" for other in (*before, *effects[index])}
                reads = [name for name in node.input if not name.startswith("^")]
                del node.input[:]
                node.input.extend([*reads, *sorted(after)])
                before = [index]
        ended = [lane[-1] for lane in stage if lane]
    return as_function(program, events, graph_def, names, in_turn=False)


def _effects(program: Program, events: Sequence[Event]) -> list[set[int]]:
    """For each event, those whose effects on variables come before it."""
    newest: dict[int, int] = {}
    found = []
    for index, event in enumerate(events):
        found.append({newest[op] for op in program.ops[event.op].controls})
        newest[event.op] = index
    return found


def _needs(program: Program, events: Sequence[Event]) -> dict[int, set[int]]:
    """For each event that computes, in their order, the ones that have to be done before."""
    computes: dict[int, set[int]] = {}
    through: list[set[int]] = []  # what is to be done before a reader of an event may start
    for index, (event, effects) in enumerate(zip(events, _effects(program, events), strict=True)):
        needs: set[int] = set()
        for source in effects | {source for source, _ in event.inputs}:
            needs |= through[source]
        op = program.ops[event.op]
        if op.kind in (Kind.PURE, Kind.ONCE) and event.op not in program.unfolded:
            computes[index] = needs
            through.append({index})
        else:  # takes no time
            through.append(needs)
    return computes


def _lanes(needs: Mapping[int, set[int]], seconds: Mapping[int, float], workers: int) -> list[Lane]:
    """What each worker runs, where one that is free takes, of what is ready, what is first
    in the schedule (list scheduling: Graham 1969)."""
    waiting = {index: len(each) for index, each in needs.items()}
    readers: dict[int, list[int]] = {index: [] for index in needs}
    for index, each in needs.items():
        for source in each:
            readers[source].append(index)
    ready = [index for index, count in waiting.items() if count == 0]
    free = list(range(workers))
    lanes: list[Lane] = [[] for _ in free]
    running: list[tuple[float, int, int]] = []
    now = 0.0
    while ready or running:
        if ready and free:
            index, worker = heapq.heappop(ready), heapq.heappop(free)
            lanes[worker].append(index)
            heapq.heappush(running, (now + seconds[index], index, worker))
        else:
            now, index, worker = heapq.heappop(running)
            heapq.heappush(free, worker)
            for reader in readers[index]:
                waiting[reader] -= 1
                if waiting[reader] == 0:
                    heapq.heappush(ready, reader)
    return lanes


def _stages(needs: Mapping[int, set[int]], seconds: Mapping[int, float]) -> list[list[Lane]]:
    """The schedule in stages of two lanes at most, which are joined at the end of each.

    The first operation that has not run is one lane; what is ready among those that follow
    soon is put into the shorter lane, until both take about as long.
    """
    left = list(needs)
    done: set[int] = set()
    stages = []
    while left:
        lanes: list[Lane] = [[left.pop(0)], []]
        lengths = [seconds[lanes[0][0]], 0.0]
        while lengths[0] >= _WORTH and len(lanes[0]) + len(lanes[1]) < _STAGE:
            short = 0 if lengths[0] < lengths[1] else 1
            own = set(lanes[short])
            found = next((index for index in left[:_AHEAD] if needs[index] - done <= own), None)
            if found is None or lengths[short] + seconds[found] > _LONGER * max(lengths):
                break
            left.remove(found)
            lanes[short].append(found)
            lengths[short] += seconds[found]
            if min(lengths) >= _EVEN * max(lengths):
                break
        stages.append(lanes)
        done.update(*lanes)
    return stages


if __name__ == "__main__":
    serve({"at_once": at_once, "own_chunks": own_chunks}, sys.argv[1:])
