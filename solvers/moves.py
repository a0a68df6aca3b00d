"""Random changes of a schedule, and annealing at one temperature: compiled.

A change is one of

- *recompute*: run a node again just before one of its readers, and before
  that the inputs that are no longer held (or any), and theirs, up to a number drawn
  for the whole change; then nothing holds the older copy for that reader;
- *remove* a copy, and whatever only it read;
- *shift* an event to a place where the schedule stays legal;
- *push* an event further, dragging along the events in between that depend on
  it (later) or that it depends on (earlier).

Copies that nothing reads any more are removed along the way: they only cost.

A change costs O(inputs and consumers of the events it touches + length of the
lifetimes it alters); shifts and pushes are drawn so that short ones are common.
"""

from __future__ import annotations

import math

import numpy as np

from .sequence import (
    BUDGET,
    EARLIER,
    EXCESS,
    FIRST,
    LAST_USE,
    LATER,
    LENGTH,
    LOGGED,
    MARK,
    MOST,
    NEWEST,
    NODE,
    NONE,
    ONCE,
    POSITION,
    READERS,
    SOURCES,
    SPARE,
    STAMP,
    WRITERS,
    WRITTEN,
    State,
    Tables,
    attach,
    can_change,
    compiled,
    copy_read,
    detach,
    entry,
    is_alone,
    last_reader,
    move,
    part_of_caller,
    undo,
)

_RECOMPUTE, _REMOVE = 0.25, 0.2  # shares of the changes; the rest shift
_PUSH = 0.2  # share of the shifts beyond what is legal that drag others along


@entry
def anneal_at(
    tables: Tables,
    state: State,
    random: np.ndarray,
    best: np.ndarray,
    figure: np.ndarray,
    terms: np.ndarray,
    temperature: float,
    changes: int,
) -> None:
    """Tries random changes at one temperature (Metropolis).

    The energy is ``price * (cost above allowance) + weight * excess``, cost in
    percent of running every node once, excess in percent of the budget summed
    over all positions.

    Args:
      tables, state: the graph, and the schedule to change.
      random: (1,) uint64, the state of the random numbers.
      best: receives the best schedule within the budget (and allowance).
      figure: (2,): number of events in ``best``; its cost, or where
        ``tighten`` is above 0 its peak (in units, less the resident).
      terms: (5,): price, allowance, weight; ``tighten``: if above 0, the
        budget follows every peak found, this fraction below it; ``anew``: share
        of the recomputations that run their inputs again, too, even those held.
      temperature: in percent.
      changes: how many to try.
    """
    price, allowance, weight, tighten, anew = terms
    number = state.number
    weight *= 100.0 / max(1, number[BUDGET])
    energy = price * max(0.0, state.cost[0] - allowance) + weight * number[EXCESS]
    for _ in range(changes):
        cost, excess = state.cost[0], number[EXCESS]
        number[LOGGED] = 0
        legal = _change(tables, state, random, anew)
        if number[LOGGED] == 0:
            continue
        changed = price * max(0.0, state.cost[0] - allowance) + weight * number[EXCESS]
        if not legal or (
            changed > energy and _uniform(random) >= math.exp((energy - changed) / temperature)
        ):
            undo(state)
            state.cost[0], number[EXCESS] = cost, excess
            continue
        energy = changed
        if number[EXCESS] > 0:
            continue
        if tighten > 0:
            if state.cost[0] <= allowance:
                figure[1] = _peak(state)
                figure[0] = _copy_nodes(state, best)
                _set_budget(state, int((1 - tighten) * figure[1]))
                energy = price * max(0.0, state.cost[0] - allowance) + weight * number[EXCESS]
        elif state.cost[0] < figure[1] - 1e-9:
            figure[1] = state.cost[0]
            figure[0] = _copy_nodes(state, best)


@compiled
def _copy_nodes(state: State, nodes: np.ndarray) -> int:
    """Writes the schedule, without the sentinel; returns its length."""
    length = state.number[LENGTH] - 1
    for position in range(length):
        nodes[position] = state.event[state.at[position], NODE]
    return length


@compiled
def _peak(state: State) -> int:
    peak = state.held[0]
    for position in range(state.number[LENGTH]):
        peak = max(peak, state.held[position])
    return peak


@compiled
def _set_budget(state: State, budget: int) -> None:
    excess = 0
    for position in range(state.number[LENGTH]):
        excess += max(0, state.held[position] - budget)
    state.number[BUDGET], state.number[EXCESS] = budget, excess


@part_of_caller
def _change(tables: Tables, state: State, random: np.ndarray, anew: float) -> bool:
    """Makes one random change; False if it must be undone."""
    length = state.number[LENGTH]
    kind = _uniform(random)
    # The sentinel, which comes last, only reads: outputs may be computed again for it.
    event = state.at[_below(random, length if kind < _RECOMPUTE else length - 1)]
    node, position = state.event[event, NODE], state.event[event, POSITION]
    if kind < _RECOMPUTE:
        start, stop = tables.node[node, SOURCES], tables.node[node, SOURCES + 1]
        if start < stop:
            source = tables.neighbour[start + _below(random, stop - start)]
            most = int(math.exp(_uniform(random) * math.log(MOST)))
            held_too = anew > 0 and _uniform(random) < anew
            _recompute(tables, state, source, event, most, held_too)
        return True
    if kind < _RECOMPUTE + _REMOVE:
        for _ in range(8):  # most events are the only run of their node
            first = state.event[event, EARLIER] == NONE
            if not is_alone(state, event) and not (first and state.event[event, LAST_USE] != event):
                _drop(tables, state, event)
                break
            event = state.at[_below(random, length - 1)]
        return True
    distance = int(math.exp(_uniform(random) * math.log(length)))
    if _uniform(random) < 0.5:
        distance = -distance
    target = min(max(position + distance, 0), length - 2)
    low, high = _window(tables, state, event)
    push = (target < low or target > high) and _uniform(random) < _PUSH
    if not push:
        target = min(max(target, low), high)
    if target == position:
        return True
    state.stack[0, 0] = event
    count = 1
    if push and target > position:
        count = _dependants(tables, state, target)
    elif push:
        count = _dependencies(tables, state, target)
    return _place(tables, state, count, target)


@compiled
def _recompute(
    tables: Tables, state: State, source: int, reader: int, most: int, held_too: bool
) -> None:
    """Runs a node again just before a reader, and missing inputs (or ``held_too``) before that."""
    state.number[STAMP] += 1
    stamp = state.number[STAMP]
    stack, event = state.stack, state.event
    oldest = copy_read(state, source, event[reader, POSITION])
    if event[oldest, POSITION] + 1 == event[reader, POSITION]:
        return
    stack[0, 0], stack[0, 1] = source, reader
    top, done = 1, 0
    while top > 0 and done < most:
        top -= 1
        node, before = stack[top]
        position = event[before, POSITION]
        copy = copy_read(state, node, position)
        if event[copy, MARK] == stamp:
            continue
        if done > 0 and not held_too:
            # Missing is an input that only this change holds on to.
            if event[copy, LAST_USE] != before:
                continue
            without = last_reader(tables, state, copy, before)
            if event[without, POSITION] >= position - done - 1:
                continue
        if not _may_run(tables, state, node, position):
            continue
        new = attach(tables, state, node, position)
        event[new, MARK] = stamp
        done += 1
        for i in range(tables.node[node, SOURCES], tables.node[node, SOURCES + 1]):
            stack[top, 0], stack[top, 1] = tables.neighbour[i], new
            top += 1
    _drop_unread(tables, state, source)


@compiled
def _may_run(tables: Tables, state: State, node: int, position: int) -> bool:
    """Whether a node may run once more, before the event at a position."""
    if tables.node[node, ONCE] or state.number[SPARE] == 0 or not can_change(state):
        return False
    for i in range(tables.node[node, WRITERS], tables.node[node, WRITERS + 1]):
        writer = state.copies[tables.neighbour[i], FIRST]
        if state.event[writer, POSITION] < position:
            return False
    return True


@compiled
def _drop(tables: Tables, state: State, event: int) -> None:
    """Removes an event, and whatever nothing reads any more without it."""
    stack = state.stack
    stack[0, 0] = event
    top = 1
    while top > 0 and can_change(state):
        top -= 1
        event = stack[top, 0]
        if is_alone(state, event):
            continue
        node, position = state.event[event, NODE], state.event[event, POSITION]
        start = stop = top
        for i in range(tables.node[node, SOURCES], tables.node[node, SOURCES + 1]):
            copy = copy_read(state, tables.neighbour[i], position)
            if state.event[copy, LAST_USE] == event:
                stack[stop, 0] = copy
                stop += 1
        detach(tables, state, event)
        for i in range(start, stop):
            copy = stack[i, 0]
            if state.event[copy, LAST_USE] == copy:
                stack[top, 0] = copy
                top += 1


@compiled
def _drop_unread(tables: Tables, state: State, node: int) -> None:
    """Removes the copies of a node that nothing reads, except an only one."""
    copy = state.copies[node, FIRST]
    while copy != NONE:
        after = state.event[copy, LATER]
        if state.event[copy, LAST_USE] == copy and not is_alone(state, copy):
            _drop(tables, state, copy)
        copy = after


@compiled
def _window(tables: Tables, state: State, event: int) -> tuple[int, int]:
    """The positions to which an event may move (counted without it)."""
    node = state.event[event, NODE]
    low, high = 0, state.number[LENGTH] - 2
    for i in range(tables.node[node, SOURCES], tables.node[node, SOURCES + 1]):
        low = max(low, state.event[state.copies[tables.neighbour[i], FIRST], POSITION] + 1)
    for i in range(tables.node[node, WRITTEN], tables.node[node, WRITTEN + 1]):
        low = max(low, state.event[state.copies[tables.neighbour[i], NEWEST], POSITION] + 1)
    for i in range(tables.node[node, WRITERS], tables.node[node, WRITERS + 1]):
        high = min(high, state.event[state.copies[tables.neighbour[i], FIRST], POSITION] - 1)
    if state.event[event, EARLIER] == NONE:
        # Something must have run before the first reader: it, or the next copy.
        limit = state.number[LENGTH] - 1
        for i in range(tables.node[node, READERS], tables.node[node, READERS + 1]):
            limit = min(limit, state.event[state.copies[tables.neighbour[i], FIRST], POSITION])
        after = state.event[event, LATER]
        if after == NONE or state.event[after, POSITION] > limit:
            high = min(high, limit - 1)
    return low, high


@compiled
def _dependants(tables: Tables, state: State, target: int) -> int:
    """Adds to the stack what is up to ``target`` and depends on the event on it."""
    state.number[STAMP] += 1
    stamp, stack = state.number[STAMP], state.stack
    state.event[stack[0, 0], MARK] = stamp
    count = 1
    for position in range(state.event[stack[0, 0], POSITION] + 1, target + 1):
        event = state.at[position]
        node = state.event[event, NODE]
        for i in range(tables.node[node, SOURCES], tables.node[node, SOURCES + 1]):
            copy = copy_read(state, tables.neighbour[i], position)
            if state.event[copy, MARK] == stamp:
                state.event[event, MARK] = stamp
                stack[count, 0] = event
                count += 1
                break
        if count > MOST:
            break
    return count


@compiled
def _dependencies(tables: Tables, state: State, target: int) -> int:
    """Adds to the stack what is down to ``target`` and the event on it depends on."""
    state.number[STAMP] += 1
    stamp, stack = state.number[STAMP], state.stack
    state.event[stack[0, 0], MARK] = stamp
    count = 0
    for position in range(state.event[stack[0, 0], POSITION], target - 1, -1):
        event = state.at[position]
        if state.event[event, MARK] == stamp:
            stack[count, 0] = event
            count += 1
            node = state.event[event, NODE]
            for i in range(tables.node[node, SOURCES], tables.node[node, SOURCES + 1]):
                copy = copy_read(state, tables.neighbour[i], position)
                state.event[copy, MARK] = stamp
        if count > MOST:
            break
    return count


@part_of_caller
def _place(tables: Tables, state: State, count: int, position: int) -> bool:
    """Moves the events on the stack, from its top, to a position and those before it
    (if they come later now: behind it).

    Returns:
      False if one of them may not go there.
    """
    if count > MOST:
        return False
    stack, several = state.stack, False
    step = -1 if position > state.event[stack[0, 0], POSITION] else 1
    for i in range(count - 1, -1, -1):
        event = stack[i, 0]
        low, high = _window(tables, state, event)
        if position < low or position > high or not can_change(state):
            return False
        several = move(tables, state, event, position)
        position += step
    if several and count == 1:  # a push leaves every reader its copy
        node = state.event[stack[0, 0], NODE]
        _drop_unread(tables, state, node)
        for i in range(tables.node[node, SOURCES], tables.node[node, SOURCES + 1]):
            _drop_unread(tables, state, tables.neighbour[i])
    return True


@compiled
def _uniform(random: np.ndarray) -> float:
    """A number in [0, 1) (xorshift64*; Vigna 2016)."""
    x = random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    random[0] = x
    return ((x * np.uint64(0x2545F4914F6CDD1D)) >> np.uint64(11)) * 2.0**-53


@compiled
def _below(random: np.ndarray, stop: int) -> int:
    return int(_uniform(random) * stop)
