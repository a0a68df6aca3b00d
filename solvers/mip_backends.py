"""The adapters of ``mip``: CBC through CyLP, and HiGHS through scipy.

``python -m remat.solvers.mip_backends cbc|highs`` reads formulations from
standard input and writes a solution to each to standard output, as messages
(``mip.write_message``) that hold ``.npz`` files; an empty one says first that it is ready.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping

import numpy as np
from scipy.sparse import csc_matrix

from .mip import read_message, write_message

Answer = tuple[str, np.ndarray | None, float]
"""Status, values and bound, as in ``mip.Solution``."""

# Native conditions -> status, where values were found and where they were not.
_CBC = {
    "solution": ("optimal", "optimal"),
    "stopped on gap": ("optimal", "stopped"),
    "search completed": ("optimal", "infeasible"),
    "stopped on nodes": ("feasible", "stopped"),
    "stopped on time": ("feasible", "stopped"),
    "stopped on user event": ("feasible", "stopped"),
    "stopped on solutions": ("feasible", "stopped"),
    "relaxation infeasible": ("infeasible", "infeasible"),
    "problem proven infeasible": ("infeasible", "infeasible"),
}
_CLP = {0: "optimal", 1: "infeasible", 3: "stopped"}
_NOT_FEASIBLE = 2  # HiGHS's status, of programs that it refuses, too
_HIGHS = {
    0: ("optimal", "optimal"),
    1: ("feasible", "stopped"),
    _NOT_FEASIBLE: ("infeasible", "infeasible"),
}
_NO_INCUMBENT = 1e49  # CBC's objective is 1e50 while it has no solution


def cbc(problem: Mapping[str, np.ndarray]) -> Answer:
    """Solves with CBC, or with Clp where nothing is integer."""
    from cylp.cy import CyClpSimplex
    from cylp.py.modeling.CyLPModel import CyLPArray, CyLPModel

    model = CyLPModel()
    x = model.addVariable("x", len(problem["cost"]))
    model += x >= CyLPArray(problem["lower"])
    model += x <= CyLPArray(problem["upper"])
    lower, upper = problem["row_lower"], problem["row_upper"]
    model += CyLPArray(lower) <= _matrix(problem) * x <= CyLPArray(upper)
    simplex = CyClpSimplex(model)
    # Not as an expression: CyLP would turn one variable's cost into a scalar.
    simplex.setObjectiveArray(problem["cost"])
    simplex.logLevel = 0
    if not problem["integer"].any():
        simplex.dual()
        status = _CLP.get(simplex.getStatusCode(), "stopped")
        if status != "optimal":
            return status, None, np.inf if status == "infeasible" else -np.inf
        return status, np.array(simplex.primalVariableSolution["x"]), simplex.objectiveValue
    simplex.copyInIntegerInformation(problem["integer"].astype(np.uint8))
    search = simplex.getCbcModel()
    search.logLevel = 0
    search.maximumSeconds = _seconds_left(problem)
    search.allowableFractionGap = float(problem["relative_gap"])
    search.solve()
    # What its preprocessing alone solves is not counted among the solutions.
    found = search.solutionCount > 0 or search.status == "solution"
    found = found and abs(search.objectiveValue) < _NO_INCUMBENT
    status = _CBC.get(search.status, ("feasible", "stopped"))[not found]
    if status == "infeasible":
        return status, None, np.inf
    values = np.array(search.primalVariableSolution["x"]) if found else None
    return status, values, search.bestPossibleObjValue


def highs(problem: Mapping[str, np.ndarray]) -> Answer:
    """Solves with HiGHS."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    result = milp(
        problem["cost"],
        integrality=problem["integer"].astype(int),
        bounds=Bounds(problem["lower"], problem["upper"]),
        constraints=LinearConstraint(_matrix(problem), problem["row_lower"], problem["row_upper"]),
        options={
            "time_limit": _seconds_left(problem),
            "mip_rel_gap": float(problem["relative_gap"]),
        },
    )
    if result.status == _NOT_FEASIBLE and "Infeasible" not in result.message:
        raise RuntimeError(f"HiGHS cannot solve this program: {result.message}")
    status = _HIGHS.get(result.status, ("feasible", "stopped"))[result.x is None]
    if status == "infeasible":
        return status, None, np.inf
    if not problem["integer"].any():
        bound = result.fun if status == "optimal" else -np.inf
    else:
        bound = -np.inf if result.mip_dual_bound is None else result.mip_dual_bound
    return status, result.x, bound


# By name: the adapter, and the module that it imports, of a package that may not be there.
_SOLVERS: dict[str, tuple[Callable[[Mapping[str, np.ndarray]], Answer], str]] = {
    "cbc": (cbc, "cylp.py.modeling.CyLPModel"),
    "highs": (highs, "scipy.optimize"),
}


def _seconds_left(problem: Mapping[str, np.ndarray]) -> float:
    """Seconds to the deadline: starting, reading and setting up have taken some."""
    return max(0.0, float(problem["deadline"]) - time.time())


def _matrix(problem: Mapping[str, np.ndarray]) -> csc_matrix:
    shape = (len(problem["row_lower"]), len(problem["cost"]))
    return csc_matrix((problem["value"], (problem["row"], problem["column"])), shape)


def main() -> None:
    """Solves the formulations on standard input, until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    if sys.argv[1] == "cbc":  # which heeds interrupts while it works; held back until here
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    # CBC writes to standard output from C.
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    solver, module = _SOLVERS[sys.argv[1]]
    importlib.import_module(module)  # which takes a while, before it is ready
    write_message(answers, b"")
    while (question := read_message(sys.stdin.buffer)) is not None:
        with np.load(io.BytesIO(question), allow_pickle=False) as problem:
            status, values, bound = solver(problem)
            objective = np.nan if values is None else float(problem["cost"] @ values)
        answer = io.BytesIO()
        np.savez(
            answer,
            status=status,
            found=values is not None,
            values=np.empty(0) if values is None else values,
            objective=objective,
            bound=bound,
        )
        write_message(answers, answer.getvalue())


if __name__ == "__main__":
    main()
