"""Mixed-integer programs: one solver-neutral formulation, solved in a child process.

The formulation never knows the solver.  The adapters (``mip_backends``) run
in a process of their own, because both hold Python's interpreter lock while
they work and CBC writes to the terminal: so a solve can be stopped at any
moment, keeps to its time limit whatever the solver does, and stays silent.
"""

from __future__ import annotations

import importlib.util
import io
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import IO

import numpy as np

_GRACE = 0.5  # seconds past its limit after which a solver is ended
_TICK = 0.02  # seconds between looks at it


@dataclass(frozen=True)
class Formulation:
    """Minimise ``cost @ x`` with ``row_lower <= A @ x <= row_upper``, ``lower <= x <= upper``.

    A is sparse: ``value[k]`` stands in row ``row[k]`` and column ``column[k]``.
    ``integer`` marks the variables that must be whole.
    """

    cost: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    integer: np.ndarray
    row: np.ndarray
    column: np.ndarray
    value: np.ndarray
    row_lower: np.ndarray
    row_upper: np.ndarray

    def relaxed(self) -> Formulation:
        """The linear relaxation."""
        return Formulation(**{**vars(self), "integer": np.zeros_like(self.integer)})


class Builder:
    """Collects variables and rows, then makes a ``Formulation`` of them."""

    def __init__(self) -> None:
        self._variables: list[tuple[float, float, float, bool]] = []
        self._row: list[int] = []
        self._column: list[int] = []
        self._value: list[float] = []
        self._bounds: list[tuple[float, float]] = []

    def variable(
        self, cost: float = 0.0, lower: float = 0.0, upper: float = 1.0, integer: bool = True
    ) -> int:
        """Adds a variable (binary unless told); returns its column."""
        self._variables.append((cost, lower, upper, integer))
        return len(self._variables) - 1

    def constraint(
        self,
        terms: Sequence[tuple[float, int]],
        lower: float = -np.inf,
        upper: float = np.inf,
    ) -> None:
        """Adds ``lower <= sum of coefficient x variable <= upper``."""
        row = len(self._bounds)
        for coefficient, column in terms:
            self._row.append(row)
            self._column.append(column)
            self._value.append(coefficient)
        self._bounds.append((lower, upper))

    def build(self) -> Formulation:
        """The formulation."""
        cost, lower, upper, integer = zip(*self._variables, strict=True)
        bounds = np.array(self._bounds, float).reshape(-1, 2)
        return Formulation(
            cost=np.array(cost, float),
            lower=np.array(lower, float),
            upper=np.array(upper, float),
            integer=np.array(integer, bool),
            row=np.array(self._row, np.int32),
            column=np.array(self._column, np.int32),
            value=np.array(self._value, float),
            row_lower=bounds[:, 0],
            row_upper=bounds[:, 1],
        )


@dataclass(frozen=True)
class Solution:
    """What a solver said.

    Attributes:
      status: "optimal", "feasible" (stopped early, with values), "infeasible"
        or "stopped" (early, without values).
      values: of the variables, or None.
      objective: of the values, or None.
      bound: proven least objective (-inf if nothing is proven).
    """

    status: str
    values: np.ndarray | None
    objective: float | None
    bound: float


@cache
def default_backend() -> str:
    """ "cbc", or "highs" with one warning where CyLP is not installed."""
    if importlib.util.find_spec("cylp") is not None:
        return "cbc"
    warnings.warn("CyLP (CBC) is not installed; HiGHS from scipy stands in for it", stacklevel=3)
    return "highs"


def solve_mip(
    formulation: Formulation,
    *,
    time_limit: float,
    backend: str | None = None,
    relative_gap: float = 0.0,
    should_stop: Callable[[], bool] = lambda: False,
) -> Solution:
    """Solves a mixed-integer (or, if nothing is integer, a linear) program.

    Args:
      formulation: the program.
      time_limit: seconds.
      backend: "cbc" or "highs"; None for ``default_backend()``.
      relative_gap: between objective and bound at which to stop.
      should_stop: asked often; once true, the solver is ended and what it had
        found is lost.

    Raises:
      RuntimeError: if the solver broke down.
    """
    backend = backend or default_backend()
    message = io.BytesIO()
    np.savez(message, time_limit=time_limit, relative_gap=relative_gap, **vars(formulation))
    # Files, not pipes: neither side ever waits for the other to read.
    with tempfile.TemporaryFile() as questions, tempfile.TemporaryFile() as answers:
        with tempfile.TemporaryFile() as errors:
            questions.write(message.getvalue())
            questions.seek(0)
            outcome = _run(backend, questions, answers, errors, time_limit + _GRACE, should_stop)
            if outcome is None:
                return Solution("stopped", None, None, -np.inf)
            if outcome != 0:
                errors.seek(0)
                raise RuntimeError(
                    f"the solver {backend} ended with status {outcome}: "
                    + errors.read().decode(errors="replace").strip()[-500:]
                )
        answers.seek(0)
        with np.load(io.BytesIO(answers.read()), allow_pickle=False) as answer:
            found = bool(answer["found"])
            return Solution(
                status=str(answer["status"]),
                values=answer["values"] if found else None,
                objective=float(answer["objective"]) if found else None,
                bound=float(answer["bound"]),
            )


def _run(
    backend: str,
    questions: IO[bytes],
    answers: IO[bytes],
    errors: IO[bytes],
    seconds: float,
    should_stop: Callable[[], bool],
) -> int | None:
    """Runs a backend; its exit status, or None if it had to be ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.mip_backends", backend],
        stdin=questions,
        stdout=answers,
        stderr=errors,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        # Ctrl-C in a terminal goes to the whole group; the parent decides.
        start_new_session=True,
    )
    try:
        waited = 0.0
        while True:
            try:
                return process.wait(_TICK)
            except subprocess.TimeoutExpired:
                waited += _TICK
            if should_stop() or waited > seconds:
                return None
    finally:
        process.kill()
        process.wait()
