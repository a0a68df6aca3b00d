"""Bartan et al., "MOCCASIN: efficient tensor rematerialization for neural networks", ICML 2023.

Constraint programming over *retention intervals*, solved by CP-SAT of OR-tools
(an extra: ``pip install "remat-tf[moccasin]"``).

Time.  The nodes are in a fixed topological order, the given one.  Stage j ends
with the first run of node j, and before that any node k < j may run again, in
that order.  So node k has one possible moment in each stage j >= k,

    T(j, k) = n j + k,

and no two runs can ever meet.  (The paper counts j (j + 1) / 2 + k; with the
gaps left in, a start is linear in its stage, which CP-SAT presolves faster.)

Variables.  Node k has up to C retention intervals (2 by default, and 1 if it
must run once).  An interval has a start s = T(j, k) for a stage j, an end e,
and a flag that says whether it exists: then the node runs at s, and its value
is held through e.  The first interval exists and starts at T(k, k).

Constraints.
  order       an interval exists only if the one before does, and starts after
              that one ended;
  precedence  a run of v at time s needs each input u to be held: one interval
              of u has s_u < s <= e_u.  If v takes over the buffer of u,
              e_u = s - 1 is enough;
  memory      at every moment the bytes of the intervals that are open, and the
              workspace of the node being run, are within the budget less the
              resident bytes (one cumulative constraint);
  outputs     the last interval of an output lasts to the end;
  overwriting a reader runs only before the writer (the graph's ``order``).

Objective.  The cost of all intervals that exist.  As in the paper there are
two phases: the first finds the least memory, and stops as soon as it is within
the budget; the second starts from there and minimises the cost.

Bytes are exact unless the sum over time of all bytes could overflow CP-SAT's
64 bits; then they are counted in larger units, rounded so that what fits the
model fits the budget.  The model's own bound holds for its order and C
only, so it is no lower bound for the graph, and none is returned.

Complexity: O(C n) integer variables and O(C^2 e) constraints; the problem is
NP-hard.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import pairwise
from types import ModuleType
from typing import Any

from .best import Best, check_options
from .method import Monitor, Outcome, Problem
from .order import last_stages
from .schedule import simulate

_COSTS = 10**7  # units in the cost of running every node once
_OVERFLOW = 2**60  # bytes x moments that CP-SAT can count with room to spare
_MOST_COPIES = 8  # the program has a constraint for each pair of copies and edge
_TICK = 0.05  # seconds between looks at the monitor


def moccasin(problem: Problem, monitor: Monitor) -> Outcome:
    """Retention intervals by CP-SAT.

    Options:
      copies: C, how often a node may run; 1 to 8.

    Raises:
      ModuleNotFoundError: if OR-tools is not installed.
      RuntimeError: if TensorFlow is loaded in this process.
      ValueError: if ``copies`` is not such a number.
    """
    check_options(problem, "copies")
    copies = problem.options.get("copies", 2)
    if not isinstance(copies, int) or isinstance(copies, bool) or not 1 <= copies <= _MOST_COPIES:
        raise ValueError(
            f"copies is {copies!r}; it must be a whole number from 1 to {_MOST_COPIES}"
        )
    if "tensorflow" in sys.modules:
        # Both carry their own copy of the same C++ libraries: a segmentation fault.
        raise RuntimeError(
            'the solver "moccasin" cannot run in a process that has imported TensorFlow; '
            "save the graph and solve it with `remat solve --solver moccasin`"
        )
    try:
        from ortools.sat.python import cp_model
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            'the solver "moccasin" needs OR-tools: pip install "remat-tf[moccasin]"'
        ) from None
    if problem.budget < problem.floor[0]:
        return Outcome(None, infeasible=True, message="one node's run alone is over the budget")
    model = _build(cp_model, problem, copies, monitor)
    best = Best(problem, monitor)
    if model is None:
        return Outcome(None, message="time was up before the program was built")
    search = _Search(cp_model, model, problem, monitor, best)

    for variable, value in model.start:
        model.program.add_hint(variable, value)
    model.program.minimize(model.memory)
    status = search.run()
    if problem.minimize == "cost" and search.memory <= model.capacity:
        model.program.clear_hints()
        for variable, value in search.values:
            model.program.add_hint(variable, value)
        model.program.add(model.memory <= model.capacity)
        model.program.minimize(model.cost)
        status = search.run()
    outcome = best.outcome()
    about = f"CP-SAT: {status.lower()} for the given order and {copies} runs a node"
    return replace(outcome, message=f"{about}; {outcome.message}")


@dataclass(frozen=True)
class _Interval:
    """One retention interval: open from its start to before its stop, e + 1.

    Attributes:
      flag: whether it exists.
      start, stop: moments, linear in the variables.
    """

    flag: Any
    start: Any
    stop: Any


@dataclass(frozen=True)
class _Model:
    """The constraint program.

    Attributes:
      program: the ``CpModel``.
      variables: all its variables.
      start: (variable, value): the solution in which nothing runs twice, but
        for what follows from these.
      intervals: for each node, its retention intervals.
      memory: the most bytes open at once; no less than ``capacity`` if the
        least cost is wanted.
      capacity: the budget less the resident bytes.
      cost: of all runs.
    """

    program: Any
    variables: list[Any]
    start: list[tuple[Any, int]]
    intervals: list[list[_Interval]]
    memory: Any
    capacity: int
    cost: Any


def _build(cp_model: ModuleType, problem: Problem, copies: int, monitor: Monitor) -> _Model | None:
    """Builds the program of the module's docstring, in its order; None if it is to stop."""
    graph, nodes, count = problem.graph, problem.graph.nodes, len(problem.graph)
    program = cp_model.CpModel()
    variables: list[Any] = []
    start_from: list[tuple[Any, int]] = []

    def new(variable: Any, value: int | None = None) -> Any:
        variables.append(variable)
        if value is not None:
            start_from.append((variable, value))
        return variable

    def moment(stage: Any, node: int) -> Any:
        return count * stage + node

    # Variables.
    end = moment(count - 1, count - 1) + 1
    plain_stops = [moment(last, last) + 1 for last in simulate(graph, range(count)).last_use]
    last_stage = [min(stage, count - 1) for stage in last_stages(graph)]
    intervals: list[list[_Interval]] = []
    for node in range(count):
        stop = new(program.new_int_var(0, end, ""), plain_stops[node])
        own = [_Interval(program.new_constant(1), moment(node, node), stop)]
        while len(own) < copies and last_stage[node] > node:
            flag = new(program.new_bool_var(""), 0)
            stage = new(program.new_int_var(node + 1, last_stage[node], ""))
            own.append(_Interval(flag, moment(stage, node), new(program.new_int_var(0, end, ""))))
        intervals.append(own)

    # Order.
    for own in intervals:
        for before, after in pairwise(own):
            program.add_implication(after.flag, before.flag)
            program.add(after.start >= before.stop).only_enforce_if(after.flag)

    # Precedence.
    for producer, reader in graph.edges:
        if monitor.should_stop():
            return None
        early = int(nodes[reader].forward == producer)
        for reading in intervals[reader]:
            holders = []
            for place, held in enumerate(intervals[producer]):
                holder = new(program.new_bool_var(""), int(place == 0))
                program.add_implication(holder, held.flag)
                program.add(held.start < reading.start).only_enforce_if(holder)
                program.add(reading.start - early < held.stop).only_enforce_if(holder)
                holders.append(holder)
            program.add_bool_or(holders).only_enforce_if(reading.flag)

    # Memory.
    total = sum((node.bytes + node.workspace) * copies for node in nodes)
    unit = -(-total * end // _OVERFLOW) or 1
    spans, demands = [], []
    for spec, own in zip(nodes, intervals, strict=True):
        if monitor.should_stop():
            return None
        for interval in own:
            length = new(program.new_int_var(1, end, ""))
            open_for = (interval.start, length, interval.stop, interval.flag, "")
            spans.append(program.new_optional_interval_var(*open_for))
            demands.append(-(-spec.bytes // unit))
            if spec.workspace:
                runs_for = (interval.start, 1, interval.flag, "")
                spans.append(program.new_optional_fixed_size_interval_var(*runs_for))
                demands.append(-(-spec.workspace // unit))
    capacity = (problem.budget - graph.resident) // unit
    if problem.minimize == "cost":
        # In steps of 1 %, or the first phase would come down a byte at a time.
        step = max(1, capacity // 100)
        memory = capacity + step * new(program.new_int_var(0, sum(demands) // step + 1, ""))
    else:
        memory = new(program.new_int_var(0, capacity, ""))
    program.add_cumulative(spans, demands, memory)

    # Outputs.
    for node in graph.outputs:
        holders = []
        for held in intervals[node]:
            holder = new(program.new_bool_var(""))
            program.add_implication(holder, held.flag)
            program.add(held.stop == end).only_enforce_if(holder)
            holders.append(holder)
        program.add_bool_or(holders)

    # Objective.
    prices = [round(_COSTS * node.cost / (graph.cost or 1.0)) for node in nodes]
    cost = sum(
        price * interval.flag
        for price, own in zip(prices, intervals, strict=True)
        for interval in own
    )
    if problem.max_overhead is not None:
        slack = sum(map(len, intervals))  # each price is rounded
        program.add(cost <= int(_COSTS * (1 + problem.max_overhead)) + slack)
    return _Model(program, variables, start_from, intervals, memory, capacity, cost)


class _Search:
    """Runs CP-SAT on a model until it is done, or the monitor says stop.

    Attributes:
      values: (variable, value) of the last run's solution.
      memory: the most bytes open at once in the latest solution.
    """

    def __init__(
        self, cp_model: ModuleType, model: _Model, problem: Problem, monitor: Monitor, best: Best
    ) -> None:
        self.values: list[tuple[Any, int]] = []
        self.memory: float = math.inf
        self._cp_model, self._model = cp_model, model
        self._problem, self._monitor, self._best = problem, monitor, best

    def run(self) -> str:
        """Minimises the program's objective; returns CP-SAT's status."""
        solver = self._cp_model.CpSolver()
        solver.parameters.num_workers = self._problem.workers
        # Signals are the caller's: CP-SAT's own handler ends the process.
        solver.parameters.catch_sigint_signal = False
        solver.parameters.random_seed = self._problem.seed % 2**31
        if self._monitor.remaining() < math.inf:
            solver.parameters.max_time_in_seconds = self._monitor.remaining()
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(solver.solve, self._model.program, self._callback())
            while not wait([job], _TICK).done:
                if self._monitor.should_stop():
                    solver.stop_search()
        status = solver.status_name(job.result())
        if status in ("OPTIMAL", "FEASIBLE"):
            self.values = [(variable, solver.value(variable)) for variable in self._model.variables]
        return status

    def _callback(self) -> Any:
        base: Any = self._cp_model.CpSolverSolutionCallback
        take = self._take

        class Callback(base):
            def on_solution_callback(self) -> None:
                take(self.value)

        return Callback()

    def _take(self, value: Callable[[Any], int]) -> None:
        """Takes in a solution; ``value`` gives the values of expressions."""
        self.memory = value(self._model.memory)
        runs = [
            (value(interval.start), node)
            for node, own in enumerate(self._model.intervals)
            for interval in own
            if value(interval.flag)
        ]
        self._best.offer(tuple(node for _, node in sorted(runs)))
