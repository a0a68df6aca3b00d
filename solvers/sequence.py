"""A schedule that can be changed step by step, and back: compiled.

The state is the sequence of events itself, the copies of each node in order,
the last use of each copy, and the bytes held during each event.  A change
touches only the lifetimes that it alters; it is logged, so that a change that
does not pay is undone exactly.  All functions are compiled with numba and
release the interpreter lock.

An event is a run of a node; it has an identity (a small integer) that it
keeps while it moves.  A copy is the value that an event makes, so the two
share the identity.  A sentinel node at the end reads the outputs.  A copy is
held from its event to its last use, that included, unless the last use takes
over its buffer (``forward``): then up to the event before.

Everything is kept in few, wide arrays of one type, whose columns are named
below: what numba compiles grows with the arrays and types it sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit

from .graph import Graph

NONE = -1

# Columns of Tables.node.  A node's neighbours of one kind are
# Tables.neighbour[node[i, KIND] : node[i, KIND + 1]].
SIZE, WORK, FORWARD, ONCE, SOURCES, READERS, WRITERS, WRITTEN, _STOP = range(9)
# Columns of State.event, and of State.copies.
NODE, POSITION, EARLIER, LATER, LAST_USE, MARK = range(6)
FIRST, NEWEST = range(2)
# Entries of State.number.
LENGTH, SPARE, BUDGET, EXCESS, LOGGED, STAMP = range(6)
# Kinds of log entries.
_RANGE, _LAST_USE, _ATTACHED, _DETACHED, _MOVED = range(5)

MOST = 40  # events that one change may recompute or drag along
_LONGEST_CHANGE = 256  # attach, detach and move calls that one log can hold

# How long numba compiles matters: it is the first that a new user waits for.  What only compiled
# code calls has no wrappers for Python, and no place in the cache (its callers there contain it).
# Callers are optimised with all that they call: a large function with one caller becomes a part
# of it, or its code would be optimised once more.
_settings = {"nogil": True, "error_model": "numpy"}
_inner = {**_settings, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
entry = njit(cache=True, **_settings)
compiled = njit(**_inner)
part_of_caller = njit(inline="always", **_inner)


class Tables(NamedTuple):
    """A graph of n nodes, and the sentinel, as arrays.

    Attributes:
      node: (n + 1, 9), int64: bytes of the output and of the workspace
        (in units, rounded up), the input whose buffer is taken over (or
        NONE), whether it runs once, and where its neighbours begin: its
        inputs, its consumers, the writers that must follow it, the readers
        that must precede it (``order``).
      neighbour: the neighbours of all nodes.
      cost: (n + 1,), float: percent of the cost of running every node once.
    """

    node: np.ndarray
    neighbour: np.ndarray
    cost: np.ndarray


class State(NamedTuple):
    """A schedule.

    Attributes:
      at: the event at each position.
      held: bytes (in units, less the resident) held during the event at each
        position.
      event: (events, 6): node, position, the copies of the same node before
        and after it (or NONE), the event that reads it last (itself if none
        does), and a mark for whoever walks the events.
      copies: (n + 1, 2): first and last copy of each node.
      spare: stack of unused event identities.
      number: how many positions and spare identities there are, the budget,
        the bytes above it summed over all positions, the entries of the log,
        the last mark given.
      cost: (1,), float: percent of the cost of running every node once.
      log: (entries, 4): what was changed since LOGGED was set to 0.
      stack: (entries, 2): scratch for whoever walks the events.
    """

    at: np.ndarray
    held: np.ndarray
    event: np.ndarray
    copies: np.ndarray
    spare: np.ndarray
    number: np.ndarray
    cost: np.ndarray
    log: np.ndarray
    stack: np.ndarray


def make_tables(graph: Graph, unit: int) -> Tables:
    """The graph as arrays, with bytes in multiples of ``unit``."""
    count = len(graph)
    scale = 100 / graph.cost if graph.cost > 0 else 0.0
    columns = np.zeros((count + 1, 9), np.int64)
    neighbours: list[int] = []
    writers: list[list[int]] = [[] for _ in range(count + 1)]
    written: list[list[int]] = [[] for _ in range(count + 1)]
    for reader, writer in graph.order:
        writers[reader].append(writer)
        written[writer].append(reader)
    outputs = set(graph.outputs)
    for index, node in enumerate(graph.nodes):
        readers = graph.successors[index] + ((count,) if index in outputs else ())
        columns[index, :4] = (
            -(-node.bytes // unit),
            -(-node.workspace // unit),
            NONE if node.forward is None else node.forward,
            not node.recomputable,
        )
        for kind, group in (
            (SOURCES, graph.predecessors[index]),
            (READERS, readers),
            (WRITERS, writers[index]),
            (WRITTEN, written[index]),
        ):
            columns[index, kind] = len(neighbours)
            neighbours.extend(group)
        columns[index, _STOP] = len(neighbours)
    columns[count, :4] = 0, 0, NONE, 1
    columns[count, SOURCES] = len(neighbours)
    neighbours.extend(graph.outputs)
    columns[count, READERS:] = len(neighbours)
    return Tables(
        columns,
        np.array(neighbours, np.int64),
        np.array([node.cost * scale for node in graph.nodes] + [0.0]),
    )


def unit_of(graph: Graph, budget: int) -> int:
    """The bytes that arrays count in: 1 unless a sum might not fit 63 bits."""
    total = budget + sum(node.bytes + node.workspace for node in graph.nodes)
    return 1 + total * 64 * len(graph) // 2**62


def make_state(
    graph: Graph, tables: Tables, schedule: Sequence[int], budget: int, unit: int
) -> State:
    """The state of a legal schedule, judged against a budget in bytes."""
    count = len(graph)
    room = 4 * count + 2 * len(schedule) + 64
    widest = int((tables.node[:, READERS] - tables.node[:, SOURCES]).max())
    state = State(
        at=np.zeros(room, np.int64),
        held=np.zeros(room, np.int64),
        event=np.zeros((room, 6), np.int64),
        copies=np.full((count + 1, 2), NONE, np.int64),
        spare=np.arange(room, dtype=np.int64),
        number=np.zeros(6, np.int64),
        cost=np.zeros(1),
        log=np.zeros((_LONGEST_CHANGE * (3 * widest + 8), 4), np.int64),
        stack=np.zeros((room + (MOST + 1) * (widest + 1), 2), np.int64),
    )
    length = len(schedule) + 1
    events = np.arange(length)  # an event's identity is its position, to begin with
    nodes = np.array([*schedule, count])
    state.number[LENGTH], state.number[SPARE] = length, room - length
    state.number[BUDGET] = (budget - graph.resident) // unit
    state.spare[: room - length] = np.arange(length, room)
    state.at[:length] = state.event[:length, POSITION] = events
    state.event[:length, NODE] = nodes
    state.event[:length, LATER] = NONE
    last_use = events.copy()
    for event, node in enumerate(nodes):
        for source in graph.outputs if node == count else graph.predecessors[node]:
            last_use[state.copies[source, NEWEST]] = event
        before = state.copies[node, NEWEST]
        state.event[event, EARLIER] = before
        if before == NONE:
            state.copies[node, FIRST] = event
        else:
            state.event[before, LATER] = event
        state.copies[node, NEWEST] = event
    state.event[:length, LAST_USE] = last_use
    # What is held changes where a copy is made, and after the last event at which it is held.
    sizes, works, takes_over = tables.node[:, [SIZE, WORK, FORWARD]].T
    change = np.zeros(length + 1, np.int64)
    change[:length] = sizes[nodes]
    stop = last_use + np.where(takes_over[nodes[last_use]] == nodes, 0, 1)
    np.subtract.at(change, stop, sizes[nodes])
    state.held[:length] = np.cumsum(change[:length]) + works[nodes]
    excess = np.maximum(0, state.held[:length] - state.number[BUDGET])
    state.number[EXCESS] = excess.sum()
    state.cost[0] = tables.cost[nodes].sum()
    return state


@compiled
def copy_read(state: State, source: int, position: int) -> int:
    """The newest copy of a node before a position."""
    copy = state.copies[source, NEWEST]
    while copy != NONE and state.event[copy, POSITION] >= position:
        copy = state.event[copy, EARLIER]
    return copy


@compiled
def is_alone(state: State, event: int) -> bool:
    """Whether an event is the only run of its node."""
    return state.event[event, EARLIER] == NONE and state.event[event, LATER] == NONE


@compiled
def last_reader(tables: Tables, state: State, copy: int, leaving: int) -> int:
    """The last event that reads a copy, ``leaving`` not counted; itself if none.

    Where no event is leaving, it is the copy, which does not read itself.
    """
    node, found = state.event[copy, NODE], state.event[copy, POSITION]
    after = state.event[copy, LATER]
    stop = state.number[LENGTH] if after == NONE else state.event[after, POSITION]
    last = copy
    for i in range(tables.node[node, READERS], tables.node[node, READERS + 1]):
        reader = state.copies[tables.neighbour[i], NEWEST]
        while reader != NONE and (reader == leaving or state.event[reader, POSITION] > stop):
            reader = state.event[reader, EARLIER]
        if reader != NONE and state.event[reader, POSITION] > found:
            last, found = reader, state.event[reader, POSITION]
    return last


@compiled
def can_change(state: State) -> bool:
    """Whether the log has room for one more ``attach``, ``detach`` or ``move``."""
    return state.number[LOGGED] + len(state.log) // _LONGEST_CHANGE < len(state.log)


@compiled
def attach(tables: Tables, state: State, node: int, position: int) -> int:
    """Inserts a run of a node before the event at a position; returns the event."""
    held = _held_before(tables, state, position) + tables.node[node, WORK]
    state.number[SPARE] -= 1
    event = state.spare[state.number[SPARE]]
    state.event[event, NODE] = node
    state.cost[0] += tables.cost[node]
    _insert_slot(state, event, position, held)
    _log(state, _ATTACHED, event, 0, 0)
    _settle(tables, state, event)
    return event


@compiled
def detach(tables: Tables, state: State, event: int) -> None:
    """Removes an event.

    Whatever reads its copy reads the one before it then; the caller sees to
    it that there is one, or that nothing does.
    """
    _release(tables, state, event)
    position = state.event[event, POSITION]
    state.cost[0] -= tables.cost[state.event[event, NODE]]
    _log(state, _DETACHED, event, position, state.held[position])
    _delete_slot(state, event)


@part_of_caller
def move(tables: Tables, state: State, event: int, position: int) -> bool:
    """Moves an event to a position, counted without the event.

    Returns:
      Whether copies may be unread now: where other copies of its node or of
      its inputs exist, reads may have changed.
    """
    node, start = state.event[event, NODE], state.event[event, POSITION]
    several = not is_alone(state, event)
    for i in range(tables.node[node, SOURCES], tables.node[node, SOURCES + 1]):
        source = tables.neighbour[i]
        several = several or state.copies[source, FIRST] != state.copies[source, NEWEST]
    if several:
        _release(tables, state, event)
    _log(state, _MOVED, event, start, state.held[start])
    _unlink(state, event)
    if several:
        follower = position if position < start else position + 1
        held = _held_before(tables, state, follower)
        _move_slot(state, event, position, held + tables.node[node, WORK])
        _settle(tables, state, event)
    else:
        _move_slot(state, event, position, state.held[start])
        _stretch(tables, state, event, start)
    return several


@compiled
def undo(state: State) -> None:
    """Takes back everything in the log.  EXCESS and cost are left to the caller."""
    for i in range(state.number[LOGGED] - 1, -1, -1):
        kind, a, b, c = state.log[i]
        if kind == _RANGE:
            for position in range(a, b + 1):
                state.held[position] -= c
        elif kind == _LAST_USE:
            state.event[a, LAST_USE] = b
        elif kind == _MOVED:
            _unlink(state, a)
            _move_slot(state, a, b, c)
        elif kind == _ATTACHED:
            _delete_slot(state, a)
        else:
            state.number[SPARE] -= 1
            _insert_slot(state, a, b, c)
    state.number[LOGGED] = 0


@compiled
def _log(state: State, kind: int, a: int, b: int, c: int) -> None:
    entry = state.number[LOGGED]
    state.log[entry, 0] = kind
    state.log[entry, 1] = a
    state.log[entry, 2] = b
    state.log[entry, 3] = c
    state.number[LOGGED] = entry + 1


@compiled
def _settle(tables: Tables, state: State, event: int) -> None:
    """Lets an event that has its slot take its readers and read its inputs."""
    node, position = state.event[event, NODE], state.event[event, POSITION]
    before = state.event[event, EARLIER]
    last = event
    if before == NONE:
        last = last_reader(tables, state, event, event)
    elif state.event[state.event[before, LAST_USE], POSITION] > position:
        last = state.event[before, LAST_USE]
        _set_last_use(tables, state, before, last_reader(tables, state, before, before))
    # Its copy starts as one that nothing reads.
    _log(state, _LAST_USE, event, state.event[event, LAST_USE], 0)
    state.event[event, LAST_USE] = event
    _add(state, position, position, tables.node[node, SIZE])
    _set_last_use(tables, state, event, last)
    for i in range(tables.node[node, SOURCES], tables.node[node, SOURCES + 1]):
        copy = copy_read(state, tables.neighbour[i], position)
        if state.event[state.event[copy, LAST_USE], POSITION] < position:
            _set_last_use(tables, state, copy, event)


@compiled
def _stretch(tables: Tables, state: State, event: int, start: int) -> None:
    """Adjusts lifetimes to an event that moved from ``start``, without any release:
    it is the only run of its node, and so are those that it reads."""
    node, position = state.event[event, NODE], state.event[event, POSITION]
    later = position > start
    # The events that it passed; where it stands itself is summed up in ``held``.
    low, high = (start, position - 1) if later else (position + 1, start)
    size, held = tables.node[node, SIZE], tables.node[node, WORK]
    if state.event[event, LAST_USE] == event:
        held += size
    else:
        _add(state, low, high, -size if later else size)
    for i in range(tables.node[node, SOURCES], tables.node[node, SOURCES + 1]):
        source = tables.neighbour[i]
        copy, size = state.copies[source, FIRST], tables.node[source, SIZE]
        before = use = state.event[copy, LAST_USE]
        if later and use == event:
            _add(state, low, high, size)
        elif later and state.event[use, POSITION] < position:
            _add(state, _end(tables, state, copy) + 1, high, size)
            use = event
        elif not later and use == event:
            use = last_reader(tables, state, copy, event)
            if state.event[use, POSITION] < position:
                use = event
        if use != before:
            _log(state, _LAST_USE, copy, before, 0)
            state.event[copy, LAST_USE] = use
        if not later and before == event:
            end = position if use == event else _end(tables, state, copy)
            _add(state, end + 1, high, -size)
        if use == event and tables.node[node, FORWARD] != source:
            held += size
    held += _held_before(tables, state, position + 1)
    budget = state.number[BUDGET]
    state.number[EXCESS] += max(0, held - budget) - max(0, state.held[position] - budget)
    state.held[position] = held


@compiled
def _release(tables: Tables, state: State, event: int) -> None:
    """Takes its readers and inputs from an event, which keeps its slot."""
    node, position = state.event[event, NODE], state.event[event, POSITION]
    for i in range(tables.node[node, SOURCES], tables.node[node, SOURCES + 1]):
        copy = copy_read(state, tables.neighbour[i], position)
        if state.event[copy, LAST_USE] == event:
            _set_last_use(tables, state, copy, last_reader(tables, state, copy, event))
    last, before = state.event[event, LAST_USE], state.event[event, EARLIER]
    _set_last_use(tables, state, event, event)
    _add(state, position, position, -tables.node[node, SIZE])
    if before != NONE and last != event:
        _set_last_use(tables, state, before, last)


@compiled
def _set_last_use(tables: Tables, state: State, copy: int, use: int) -> None:
    before = _end(tables, state, copy)
    _log(state, _LAST_USE, copy, state.event[copy, LAST_USE], 0)
    state.event[copy, LAST_USE] = use
    after = _end(tables, state, copy)
    size = tables.node[state.event[copy, NODE], SIZE]
    _add(state, min(before, after) + 1, max(before, after), size if after > before else -size)


@compiled
def _end(tables: Tables, state: State, copy: int) -> int:
    """The last position at which a copy takes bytes of its own."""
    use = state.event[copy, LAST_USE]
    hands_over = tables.node[state.event[use, NODE], FORWARD] == state.event[copy, NODE]
    return state.event[use, POSITION] - hands_over


@compiled
def _add(state: State, start: int, stop: int, size: int) -> None:
    """Adds bytes to positions start..stop, both included."""
    if size == 0 or start > stop:
        return
    budget, held = state.number[BUDGET], state.held
    change = 0
    for position in range(start, stop + 1):
        now = held[position]
        change += max(0, now + size - budget) - max(0, now - budget)
        held[position] = now + size
    state.number[EXCESS] += change
    _log(state, _RANGE, start, stop, size)


@compiled
def _held_before(tables: Tables, state: State, position: int) -> int:
    """Bytes of the copies held across the point just before a position."""
    event = state.at[position]
    node = state.event[event, NODE]
    held = state.held[position] - tables.node[node, WORK] - tables.node[node, SIZE]
    source = tables.node[node, FORWARD]
    if source != NONE:
        copy = copy_read(state, source, position)
        if copy != NONE and state.event[copy, LAST_USE] == event:
            held += tables.node[source, SIZE]
    return held


@compiled
def _insert_slot(state: State, event: int, position: int, held: int) -> None:
    end = state.number[LENGTH]
    state.number[LENGTH] += 1
    state.at[end] = event
    state.event[event, POSITION] = end
    state.held[end] = 0
    _rotate(state, end, position)
    state.held[position] = held
    state.number[EXCESS] += max(0, held - state.number[BUDGET])
    _link(state, event)


@compiled
def _delete_slot(state: State, event: int) -> None:
    _unlink(state, event)
    position = state.event[event, POSITION]
    state.number[EXCESS] -= max(0, state.held[position] - state.number[BUDGET])
    state.number[LENGTH] -= 1
    _rotate(state, position, state.number[LENGTH])
    state.spare[state.number[SPARE]] = event
    state.number[SPARE] += 1


@compiled
def _move_slot(state: State, event: int, position: int, held: int) -> None:
    budget, start = state.number[BUDGET], state.event[event, POSITION]
    state.number[EXCESS] += max(0, held - budget) - max(0, state.held[start] - budget)
    _rotate(state, start, position)
    state.held[position] = held
    _link(state, event)


@compiled
def _rotate(state: State, start: int, position: int) -> None:
    """Takes the slot at ``start`` out and puts it back at ``position``."""
    event = state.at[start]
    step = 1 if position > start else -1
    for i in range(start, position, step):
        moved = state.at[i + step]
        state.at[i] = moved
        state.event[moved, POSITION] = i
        state.held[i] = state.held[i + step]
    state.at[position] = event
    state.event[event, POSITION] = position


@compiled
def _link(state: State, event: int) -> None:
    """Enters an event among the copies of its node, by position."""
    node = state.event[event, NODE]
    before = copy_read(state, node, state.event[event, POSITION])
    after = state.copies[node, FIRST] if before == NONE else state.event[before, LATER]
    state.event[event, EARLIER] = before
    state.event[event, LATER] = after
    _join(state, node, before, event)
    _join(state, node, event, after)


@compiled
def _unlink(state: State, event: int) -> None:
    _join(state, state.event[event, NODE], state.event[event, EARLIER], state.event[event, LATER])


@compiled
def _join(state: State, node: int, before: int, after: int) -> None:
    """Makes two copies of a node neighbours; NONE stands for the ends."""
    if before == NONE:
        state.copies[node, FIRST] = after
    else:
        state.event[before, LATER] = after
    if after == NONE:
        state.copies[node, NEWEST] = before
    else:
        state.event[after, EARLIER] = before
