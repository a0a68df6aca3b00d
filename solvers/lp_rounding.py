"""Checkmate's approximation: the linear relaxation, rounded in two phases.

Jain et al., "Checkmate: breaking the memory wall with optimal tensor
rematerialization", MLSys 2020, section 5.  Let R and S be as in ``checkmate``:
which nodes run, and which values are held, in each stage of the given order.

1. Solve the program with R and S anywhere in [0, 1], within (1 - epsilon)
   times the budget.
2. Round what is held, S: up where it is over 1/2 (deterministic), or up with
   the probability S (randomised; 20 draws).
3. Run what then must run, and no more: node t in stage t, what stage t + 1
   holds and stage t does not, and the inputs of all these that are not held.

Rounding breaks the budget, hence the allowance epsilon.  The paper fixes it at
0.1; here it is searched from 0 to 0.5, in ever finer steps while time lasts.
The cheapest rounding that fits the whole budget is returned.

The relaxation says next to nothing about the least cost (on a chain it drops a
little of everything), and holds for the given order only: no lower bound is
returned.

Complexity: O(n (n + e)) variables and rows, solved by Clp or HiGHS up to 14
times: 2 to 3 seconds each for 70 nodes, 100 seconds for 250.
"""

from __future__ import annotations

import numpy as np

from .best import Best, check_minimizes_cost
from .checkmate import TOO_LARGE, formulate, size
from .graph import Graph
from .method import Monitor, Outcome, Problem
from .mip import check_backend, solve_mip
from .order import last_stages
from .schedule import Schedule

_LARGEST = 2_000_000  # size of the graphs whose program is built: many times in a solve
_DRAWS = 20  # randomised roundings of one solution
# The paper's first, then from coarse to fine: time may run out.
_ALLOWANCES = (0.1, 0.0, 0.2, 0.3, 0.4, 0.5, 0.05, 0.15, 0.25, 0.35, 0.45, 0.025, 0.075, 0.125)


def lp_rounding(problem: Problem, monitor: Monitor) -> Outcome:
    """Rounds the relaxation of Checkmate's program.

    Options:
      backend: "cbc" or "highs"; by default as ``mip`` chooses.
    """
    check_backend(problem)
    check_minimizes_cost(problem, "lp_rounding")
    graph = problem.graph
    if size(graph) > _LARGEST:
        return Outcome(None, message=TOO_LARGE)
    best = Best(problem, monitor)
    random = np.random.default_rng(problem.seed)

    too_much = 1.0  # an allowance that leaves less than any schedule needs
    for allowance in _ALLOWANCES:
        if allowance >= too_much:
            continue
        program = formulate(graph, int((1 - allowance) * problem.budget), monitor)
        if program is None:
            break
        solution = solve_mip(
            program.formulation.relaxed(),
            time_limit=monitor.remaining(),
            backend=problem.options.get("backend"),
            should_stop=monitor.should_stop,
        )
        if solution.status == "infeasible":
            too_much = allowance
        elif solution.values is None:
            break
        else:
            held = np.where(program.held >= 0, solution.values[program.held], 0.0)
            best.offer(run_what_must(graph, held > 0.5))
            for draw in random.random((_DRAWS, *held.shape)):
                if monitor.should_stop():
                    break
                best.offer(run_what_must(graph, draw < held))
        if best.done:
            break
    if too_much == 0.0:
        return Outcome(None, message="no schedule that keeps the given order fits the budget")
    return best.outcome()


def run_what_must(graph: Graph, held: np.ndarray) -> Schedule:
    """The least that must run if ``held[t, i]``: value i stays from stage t - 1 to t.

    A value that must not run again is read where it is, whether held or not.
    """
    count = len(graph)
    last_stage = np.array(last_stages(graph))
    schedule: list[int] = []
    for stage, here in enumerate(held):  # stage n, if there is one, reads the outputs
        runs = np.zeros(len(held), bool)
        runs[stage] = True
        if stage + 1 < len(held):
            runs[:stage] = held[stage + 1, :stage] & ~here[:stage] & (stage <= last_stage[:stage])
        for node in range(stage, -1, -1):
            if runs[node]:
                for source in graph.predecessors[node] if node < count else graph.outputs:
                    runs[source] |= not here[source] and stage <= last_stage[source]
        schedule.extend(np.flatnonzero(runs[:count]).tolist())
    return tuple(schedule)
