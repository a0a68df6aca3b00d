"""A lower bound on the cost that holds for every order: the gap-cover program.

Take the consumers of value i that follow each other in every order (a chain
a1 < a2 < ... < ak in the graph, with a0 = i itself).  The first runs of a0,
a1, ..., ak cut time into gaps.  If i is not held at some moment of a gap, but
needed at the gap's end, node i runs again within the gap.

Variables (binary):
  x[i, g]   node i runs again in gap g of value i.

Minimise the cost of all x, such that for each moment, "while node t runs
first", the values that are not held then cover what is too much:

  sum over i of min(bytes(i), excess(t)) * (x[i, g] + ... + x[i, g'])
    >= excess(t) = bytes needed at t in every order - budget

over the values i that are needed at t in every order (``floor.pending``), each
with the gaps g..g' in which it would have to run again: from the last a_j that
is t or an ancestor of t, up to the first that is a descendant of t (or, where
t precedes only consumers outside the chain, to the end).  Needed at t are also
its inputs, output and workspace and the resident bytes, for certain; where t
may take over its input's buffer and that input is needed later, either its
output is extra, or the input runs again.

The dual bound of the solver is the bound; the values say which values to drop
in which gap, which is a good start for annealing once each dropped value is
computed again just before the gap's end.  That usually overflows the budget;
annealing repairs it.

This package's own; after the retention intervals of Moccasin (Bartan et al.,
ICML 2023), where a value is likewise held or computed again between its uses.

O(nodes^2) coefficients; of large graphs only the most demanding moments are
used, and the bound is as valid with any of them.

Options:
  backend: "cbc" (default) or "highs".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .anneal import anneal_once
from .compiling import excuse
from .floor import Precedence, members, pending
from .graph import Graph
from .method import Monitor, Outcome, Problem
from .mip import Formulation, check_backend, solve_mip
from .runner import Runner
from .schedule import Schedule

REPAIR = 0.1  # first temperature of the annealing that repairs a start
_SECONDS = 10.0  # CBC gains little after that
_LOOK_BACK = 64  # consumers that may come before one in a chain
_ROWS_BY_NODES = 300_000  # rows times nodes; of larger graphs the most demanding moments are taken
_LARGE = 500  # nodes from which on the proof may leave a relative gap
_SMALL_GAP = 1e-4


@dataclass(frozen=True)
class GapCover:
    """The program of a graph and a budget.

    Attributes:
      formulation: costs are percent of running every node once.
      chains: for each value, i itself and its chain of consumers (n stands
        for the end, which reads the outputs).
      column: for each value, the column of x[i, 0].
    """

    formulation: Formulation
    chains: tuple[tuple[int, ...], ...]
    column: np.ndarray


def gap_cover(problem: Problem, monitor: Monitor) -> Outcome:
    """Proves the bound, then lets annealing repair the schedule it suggests."""
    check_backend(problem)
    bound, start = lower_bound(problem, monitor)
    monitor.bounded(bound)
    schedule = anneal_once(
        problem, monitor, start or range(len(problem.graph)), worker=0, hot=REPAIR, rescue=True
    )
    return Outcome(schedule, bound, message=excuse(monitor))


def lower_bound(problem: Problem, monitor: Monitor) -> tuple[float, Schedule | None]:
    """The bound in seconds, and the schedule that its program suggests.

    The schedule is legal, but may overflow the budget; None if the solver had
    no values in time.
    """
    graph = problem.graph
    program = formulate(problem, monitor)
    if program is None:
        return graph.cost, None
    solution = solve_mip(
        program.formulation,
        time_limit=min(_SECONDS, monitor.remaining()),
        backend=problem.options.get("backend"),
        relative_gap=_SMALL_GAP if len(graph) > _LARGE else 0.0,
        should_stop=monitor.should_stop,
    )
    start = None if solution.values is None else decode(graph, program, solution.values)
    if solution.bound == np.inf:
        return np.inf, start
    return graph.cost * (1 + max(0.0, solution.bound) / 100), start


def formulate(problem: Problem, monitor: Monitor) -> GapCover | None:
    """Builds the program; None if no moment needs more than the budget, or time is up."""
    graph, order = problem.graph, problem.order
    count, nodes = len(graph), graph.nodes
    _, needed = problem.first_run_bytes
    excess = needed - min(problem.budget, int(needed.max(initial=0)))
    moments = np.flatnonzero(excess > 0)
    if len(moments) == 0:
        return None
    demanding = np.argsort([-float(need) for need in excess[moments]], kind="stable")
    moments = np.sort(moments[demanding[: max(10, _ROWS_BY_NODES // count)]])
    excess = excess[moments]
    chains = tuple(_chain(graph, order, index) for index in range(count))
    column = np.cumsum([0, *(len(chain) for chain in chains)])
    takers = [0] * count
    for index, node in enumerate(nodes):
        if node.forward is not None:
            takers[node.forward] |= 1 << index
    rows, columns, values = [], [], []
    for index, node in enumerate(nodes):
        if monitor.should_stop():
            return None
        if node.bytes == 0:
            continue
        need = pending(graph, order, index)
        optional = need.optional
        if node.recomputable:
            optional |= need.read & takers[index]
        here = np.flatnonzero(members(optional, count)[moments])
        if len(here) == 0:
            continue
        first, stop = _gaps(order, chains[index], count)
        weight = np.array([min(1.0, node.bytes / need) for need in excess[here]], float)
        for gap in range(len(chains[index])):
            inside = (first[moments[here]] <= gap) & (gap < stop[moments[here]])
            rows.append(here[inside])
            columns.append(np.full(inside.sum(), column[index] + gap))
            values.append(weight[inside])
    total = int(column[-1])
    scale = 100 / graph.cost if graph.cost > 0 else 0.0
    cost = np.repeat([node.cost * scale for node in nodes], [len(chain) for chain in chains])
    formulation = Formulation(
        cost=cost,
        lower=np.zeros(total),
        upper=np.ones(total),
        integer=np.ones(total, bool),
        row=np.concatenate(rows).astype(np.int32) if rows else np.empty(0, np.int32),
        column=np.concatenate(columns).astype(np.int32) if rows else np.empty(0, np.int32),
        value=np.concatenate(values) if rows else np.empty(0),
        row_lower=np.ones(len(moments)),
        row_upper=np.full(len(moments), np.inf),
    )
    return GapCover(formulation, chains, column)


def decode(graph: Graph, program: GapCover, values: np.ndarray) -> Schedule:
    """The given order, with each dropped value computed again late in its gap.

    Just before it is read at the gap's end, or earlier if another value that
    is computed again reads it.
    """
    runner = Runner(graph)
    for index in range(len(graph)):
        runner.run(index)
        for value in (index, *graph.predecessors[index]):
            chain = program.chains[value]
            gap = chain.index(index) if index in chain else len(chain)
            if gap + 1 < len(chain) and values[program.column[value] + gap] > 0.5:
                runner.present.discard(value)
    for value in graph.outputs:
        runner.run(value)
    return tuple(runner.schedule)


def _chain(graph: Graph, order: Precedence, index: int) -> tuple[int, ...]:
    """A node and a long chain of its consumers, each an ancestor of the next.

    The longest, unless there are hundreds of consumers: any chain is valid.
    """
    consumers = graph.successors[index]
    longest: dict[int, tuple[int, int]] = {}  # consumer -> (length, the one before it)
    for place, consumer in enumerate(consumers):
        best = (1, -1)
        for other in consumers[max(0, place - _LOOK_BACK) : place]:
            if order.ancestors[consumer] >> other & 1:
                best = max(best, (longest[other][0] + 1, other))
        longest[consumer] = best
    chain = [len(graph)] if index in graph.outputs else []
    last = max(longest, key=lambda consumer: longest[consumer][0], default=-1)
    while last >= 0:
        chain.append(last)
        last = longest[last][1]
    return (index, *reversed(chain))


def _gaps(order: Precedence, chain: tuple[int, ...], count: int) -> tuple[np.ndarray, np.ndarray]:
    """For each moment, the first gap in which a value not held may run again, and the end."""
    first = np.full(count, -1)
    stop = np.full(count, len(chain))
    for gap, node in enumerate(chain):
        if node == count:  # the end: everything precedes it
            stop -= 1
            continue
        first += members(order.descendants[node] | (1 << node), count)
        if gap > 0:
            stop -= members(order.ancestors[node], count)
    return first, stop
