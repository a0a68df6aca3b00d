"""The exact program of Checkmate, for the given order.

Jain, Jain, Nrusimha, Gholami, Abbeel, Keutzer, Stoica, Gonzalez: "Checkmate:
Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020.

Stage t ends with the first run of node t; before it, nodes i < t may run
again, in the given order.  Where the graph has outputs, one more stage ends
with a node that reads them all.

Variables (binary unless noted):
  R[t, i]     node i runs in stage t (i <= t);
  S[t, i]     value i is held between stages t - 1 and t (i < t);
  F[t, i, k]  value i is freed right after node k ran in stage t, for each
              input i of k and for k itself;
  U[t, k]     bytes held once node k has run (or not) in stage t, real.

Minimise the cost of all runs, subject to
  (1) R[t, t] = 1;
  (2) R[t, j] <= R[t, i] + S[t, i]        a node runs with its inputs held, for
                                          each edge i -> j, j <= t;
  (3) S[t + 1, i] <= R[t, i] + S[t, i]    only what is there can be held;
  (4) F[t, i, k] <= R[t, k]               freed is a value in the stage's last
      F[t, i, k] <= 1 - S[t + 1, i]       run that reads it, unless it is held;
      F[t, i, k] <= 1 - R[t, j]           for each consumer j of i, k < j <= t;
  (5) U[t, k] = U[t, k - 1] - sum over i of bytes(i) F[t, i, k - 1]
                + bytes(k) R[t, k]
      U[t, 0] = resident + sum over i of bytes(i) S[t, i] + bytes(0) R[t, 0];
  (6) U[t, k] + workspace(k) R[t, k] - bytes(k) F[t, forward(k), k] <= budget.
      The last term is an output that takes over the buffer of its input.
A node that runs once has R[t, i] = 0 for t > i, and so has a reader after its
writer: R[t, reader] = 0 for t > writer.

Stronger than the paper's: (4) row by row instead of one big-M row.  Fixed by
dominance: nothing runs again, and no value is held, after the last stage in
which a run could read it.

O(n (n + edges)) variables, and rows with one more for each two readers of a value
and stage: exact, and out of reach of open solvers past about 60 nodes.

Options:
  backend: "cbc" (default) or "highs".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .best import check_minimizes_cost
from .graph import Graph
from .method import Monitor, Outcome, Problem
from .mip import Builder, Formulation, check_backend, solve_mip
from .schedule import Schedule, simulate

_NO_GAP = 1e-6  # percentage points


_LARGEST = 5_000_000  # size of the graphs whose program is built: it takes some 10 GB
TOO_LARGE = "the graph is too large for Checkmate's program"


@dataclass(frozen=True)
class Checkmate:
    """The program of a graph and a budget.

    Attributes:
      formulation: costs are percent of running every node once, bytes are
        fractions of the budget.
      runs: (stages, n), the column of R[t, i], or -1 where it is fixed at 0.
      held: (stages, n), the column of S[t, i], or -1 where it is fixed at 0.
    """

    formulation: Formulation
    runs: np.ndarray
    held: np.ndarray


def checkmate(problem: Problem, monitor: Monitor) -> Outcome:
    """Solves the exact program.

    Its bound holds for the given order only; another order may be cheaper, so
    the bound is told in the message and is no ``lower_bound``.
    """
    check_backend(problem)
    check_minimizes_cost(problem, "checkmate")
    if size(problem.graph) > _LARGEST:
        return Outcome(None, message=TOO_LARGE)
    graph, known = problem.graph, None
    if problem.start is not None:
        start = simulate(graph, problem.start)
        known = start.cost if start.peak <= problem.budget else None
    program = formulate(graph, problem.budget, monitor, known)
    if program is None:
        return Outcome(None, message="time was up before the program was built")
    solution = solve_mip(
        program.formulation,
        time_limit=monitor.remaining(),
        backend=problem.options.get("backend"),
        should_stop=monitor.should_stop,
    )
    if solution.status == "infeasible":
        if known is None:
            return Outcome(None, message="no schedule that keeps the given order fits")
        return Outcome(problem.start, message="no schedule that keeps the given order is cheaper")
    if solution.values is None and solution.bound == -np.inf:
        return Outcome(None, message="time was up before the solver had a schedule or a bound")
    schedule = None if solution.values is None else decode(program, solution.values)
    bound = max(0.0, solution.bound - 100)
    return Outcome(
        schedule, message=f"in the given order the overhead is {bound:.4f} % or more (proven)"
    )


def size(graph: Graph) -> int:
    """What the variables of the program grow with."""
    return len(graph) * (len(graph) + len(graph.edges))


def formulate(
    graph: Graph, budget: int, monitor: Monitor, cost_below: float | None = None
) -> Checkmate | None:
    """Builds the program; None if it is to stop before that is done.

    Args:
      graph: the graph.
      budget: bytes that the peak may reach.
      monitor: says when to stop.
      cost_below: seconds that a schedule must cost less than, or None.
    """
    count, scale = len(graph), max(1, budget)
    to_percent = 100 / graph.cost if graph.cost > 0 else 0.0
    sources = list(graph.predecessors)
    readers = [list(group) for group in graph.successors]
    size = [node.bytes / scale for node in graph.nodes]
    if graph.outputs:  # the end reads them
        sources.append(graph.outputs)
        for index in graph.outputs:
            readers[index].append(count)
    stages = len(sources)
    may_run, last_read = _windows(graph, readers, stages)
    builder = Builder()
    runs = np.full((stages, stages), -1)
    held = np.full((stages, stages), -1)
    for t in range(stages):
        if monitor.should_stop():
            return None
        for i in np.flatnonzero(may_run[t]).tolist():
            cost = graph.nodes[i].cost * to_percent if i < count else 0.0
            runs[t, i] = builder.variable(cost, lower=float(i == t))  # (1)
        for i in range(min(t, count)):
            if last_read[i] >= t:
                held[t, i] = builder.variable()

    def present(t: int, i: int) -> list[tuple[float, int]]:
        return [(1.0, column) for column in (runs[t, i], held[t, i]) if column >= 0]

    for t in range(stages):
        if monitor.should_stop():
            return None
        freed: dict[tuple[int, int], int] = {}
        for k in np.flatnonzero(may_run[t]).tolist():
            for i in sources[k]:
                builder.constraint([(-1.0, runs[t, k]), *present(t, i)], lower=0.0)  # (2)
            for i in (*sources[k], k):
                if i == count:
                    continue
                free = freed[i, k] = builder.variable()
                rivals = [runs[t, j] for j in readers[i] if k < j <= t and runs[t, j] >= 0]
                if t + 1 < stages and held[t + 1, i] >= 0:
                    rivals.append(held[t + 1, i])
                builder.constraint([(1.0, free), (-1.0, runs[t, k])], upper=0.0)  # (4)
                for rival in rivals:
                    builder.constraint([(1.0, free), (1.0, rival)], upper=1.0)
        if t + 1 < stages:
            for i in np.flatnonzero(held[t + 1] >= 0).tolist():
                builder.constraint([(-1.0, held[t + 1, i]), *present(t, i)], lower=0.0)  # (3)
        # (5), (6): U is the sum of what was held, added and freed so far.
        total = [(size[i], held[t, i]) for i in np.flatnonzero(held[t] >= 0).tolist()]
        used = builder.variable(lower=0.0, upper=np.inf, integer=False)
        fixed = graph.resident / scale
        builder.constraint([*total, (-1.0, used)], -fixed, -fixed)
        for k in np.flatnonzero(may_run[t]).tolist():
            if k == count:
                continue
            node, run = graph.nodes[k], runs[t, k]
            now = builder.variable(lower=0.0, upper=np.inf, integer=False)
            builder.constraint([(1.0, used), (size[k], run), (-1.0, now)], 0.0, 0.0)
            peak = [(1.0, now), (node.workspace / scale, run)]
            if node.forward is not None:
                peak.append((-size[k], freed[node.forward, k]))
            builder.constraint(peak, upper=budget / scale)
            used = builder.variable(lower=0.0, upper=np.inf, integer=False)
            after = [(-size[i], freed[i, k]) for i in (*sources[k], k)]
            builder.constraint([(1.0, now), *after, (-1.0, used)], 0.0, 0.0)
    if cost_below is not None:
        terms = [
            (graph.nodes[i].cost * to_percent, runs[t, i])
            for t, i in zip(*np.nonzero(runs[:, :count] >= 0), strict=True)
        ]
        builder.constraint(terms, upper=cost_below * to_percent - _NO_GAP)
    return Checkmate(builder.build(), runs[:, :count], held[:, :count])


def decode(program: Checkmate, values: np.ndarray) -> Schedule:
    """The schedule that the values of R describe."""
    return tuple(
        int(i)
        for columns in program.runs
        for i in np.flatnonzero(columns >= 0)
        if values[columns[i]] > 0.5
    )


def _windows(
    graph: Graph, readers: Sequence[Sequence[int]], stages: int
) -> tuple[np.ndarray, list[int]]:
    """(stages, stages): which nodes may run in which stage to some use; and for each
    node the last stage in which something may read it (-1: none)."""
    may_run = np.eye(stages, dtype=bool)
    last_run = list(range(stages))
    last_read = [-1] * stages
    writer = [stages] * stages
    for reader, after in graph.order:
        writer[reader] = min(writer[reader], after)
    for i in range(len(graph) - 1, -1, -1):
        last_read[i] = max((last_run[j] for j in readers[i]), default=-1)
        if graph.nodes[i].recomputable:
            last_run[i] = max(i, min(last_read[i], writer[i]))
            may_run[i : last_run[i] + 1, i] = True
    return may_run, last_read
