"""Mixed-integer programs: one solver-neutral formulation, solved in a child process.

The formulation never knows the solver.  The adapters (``mip_backends``) run
in a process of their own, because both hold Python's interpreter lock while
they work and CBC writes to the terminal: so a solve can be stopped at any
moment, keeps to its time limit whatever the solver does, and stays silent.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import io
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from typing import IO

import numpy as np

from .best import check_options
from .method import Monitor, Problem

BACKENDS = ("cbc", "highs")

# A solver that is ended loses what it has found, so it is to end by itself before that:
# with a share of its time left, at most so many seconds.
_EARLY, _MOST_EARLY = 0.1, 1.0
_TICK = 0.02  # seconds between looks at it
_START = 1.0  # seconds that one takes to start, at most, where nothing is in its way


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
        # Not lists: a program has millions of numbers, and is made while time runs.
        self._cost, self._lower, self._upper = array("d"), array("d"), array("d")
        self._integer = array("b")
        self._row, self._column, self._value = array("i"), array("i"), array("d")
        self._row_lower, self._row_upper = array("d"), array("d")

    def variable(
        self, cost: float = 0.0, lower: float = 0.0, upper: float = 1.0, integer: bool = True
    ) -> int:
        """Adds a variable (binary unless told); returns its column."""
        self._cost.append(cost)
        self._lower.append(lower)
        self._upper.append(upper)
        self._integer.append(integer)
        return len(self._cost) - 1

    def constraint(
        self,
        terms: Sequence[tuple[float, int]],
        lower: float = -np.inf,
        upper: float = np.inf,
    ) -> None:
        """Adds ``lower <= sum of coefficient x variable <= upper``."""
        row = len(self._row_lower)
        for coefficient, column in terms:
            self._row.append(row)
            self._column.append(column)
            self._value.append(coefficient)
        self._row_lower.append(lower)
        self._row_upper.append(upper)

    def build(self) -> Formulation:
        """The formulation."""
        return Formulation(
            cost=np.array(self._cost),
            lower=np.array(self._lower),
            upper=np.array(self._upper),
            integer=np.array(self._integer, bool),
            row=np.array(self._row, np.int32),
            column=np.array(self._column, np.int32),
            value=np.array(self._value),
            row_lower=np.array(self._row_lower),
            row_upper=np.array(self._row_upper),
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


class BrokenSolverError(ChildProcessError):
    """The process of a solver ended before it gave an answer."""


def write_message(stream: IO[bytes], message: bytes) -> None:
    """Writes bytes so that ``read_message`` knows where they end."""
    stream.write(len(message).to_bytes(8, "little"))
    stream.write(message)
    stream.flush()


def read_message(stream: IO[bytes]) -> bytes | None:
    """What ``write_message`` wrote; None at the end of the stream."""
    length = stream.read(8)
    if len(length) < 8:
        return None
    return stream.read(int.from_bytes(length, "little"))


@cache
def default_backend() -> str:
    """ "cbc", or "highs" with one warning where CyLP is not installed."""
    if importlib.util.find_spec("cylp") is not None:
        return "cbc"
    warnings.warn("CyLP (CBC) is not installed; HiGHS from scipy stands in for it", stacklevel=3)
    return "highs"


def check_backend(problem: Problem) -> None:
    """Refuses options other than ``backend``, and backends that there are not.

    Raises:
      ValueError: naming what there is.
    """
    check_options(problem, "backend")
    if problem.options.get("backend") is not None:
        _check(problem.options["backend"])


def _check(backend: object) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend is one of {', '.join(BACKENDS)}; not {backend!r}")


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
      time_limit: seconds, from now on; then the solver is ended, as by ``should_stop``.
        It is told to end a little earlier.
      backend: "cbc" or "highs"; None for ``default_backend()``.
      relative_gap: between objective and bound at which to stop.
      should_stop: asked often; once true, the solver is ended and what it had
        found is lost.

    Raises:
      BrokenSolverError: if the solver broke down.
      ValueError: if there is no such backend.
    """
    backend = backend or default_backend()
    _check(backend)
    until = time.monotonic() + time_limit
    early = min(_EARLY * time_limit, _MOST_EARLY)
    deadline = time.time() + time_limit - early  # on a clock that all processes share
    question = io.BytesIO()
    np.savez(question, deadline=deadline, relative_gap=relative_gap, **vars(formulation))
    child = _waiting(backend)
    with ThreadPoolExecutor(1, "remat-mip") as pool:
        job = pool.submit(child.ask, question.getvalue())
        told = backend != "cbc"
        while not wait([job], _TICK).done:
            if not told and time.monotonic() > until - early:
                told = True
                child.tell()
            if should_stop() or time.monotonic() > until:
                child.end()
                return Solution("stopped", None, None, -np.inf)
        raw = job.result()
    if raw is None:
        raise BrokenSolverError(f"the solver {backend} broke down: {child.complaint()}")
    _idle[backend].append(child)
    with np.load(io.BytesIO(raw), allow_pickle=False) as answer:
        found = bool(answer["found"])
        return Solution(
            status=str(answer["status"]),
            values=answer["values"] if found else None,
            objective=float(answer["objective"]) if found else None,
            bound=float(answer["bound"]),
        )


def _waiting(backend: str) -> _Child:
    """A process that waits for a program: one that is there and has not ended, or a new one."""
    idle = _idle.setdefault(backend, [])
    while True:
        try:
            child = idle.pop()
        except IndexError:  # another thread may have the one that was there
            return _Child(backend)
        if child.alive():
            return child
        child.end()


def start(backend: str, count: int = 1) -> None:
    """Starts solvers that will be needed: starting takes longer than most programs do.

    Args:
      backend: "cbc" or "highs".
      count: programs that will be solved at the same time.
    """
    idle = _idle.setdefault(backend, [])
    idle += [_Child(backend) for _ in range(count - len(idle))]


def wait_for(backend: str, monitor: Monitor) -> float:
    """Waits until the solver that is asked next has started, or the monitor says stop.

    On a busy machine or from a cold disk it takes seconds, which are not to be taken for
    those of a proof: the solve is extended, if it may, by what is beyond one second.

    Returns:
      The seconds that it took.
    """
    began = monitor.elapsed()
    child = _waiting(backend)
    while not child.ready(_TICK) and not monitor.should_stop():
        if monitor.elapsed() > began + _START:
            monitor.extend(_TICK)
    _idle[backend].append(child)
    return monitor.elapsed() - began


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """A process started meanwhile is interrupted when it is ready for it, and not before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Child:
    """A process that solves one program after the other; see ``mip_backends``."""

    def __init__(self, backend: str) -> None:
        self._ready = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by end)
        with _interrupts_held_back() if backend == "cbc" else contextlib.nullcontext():
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.mip_backends", backend],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                # Ctrl-C in a terminal goes to the whole group; the parent decides.
                start_new_session=True,
            )

    def ready(self, seconds: float | None) -> bool:
        """Whether it has started (or failed to) within so many seconds; None: waits for it."""
        stream = self._process.stdout
        assert stream is not None
        if not self._ready and select.select([stream], [], [], seconds)[0]:
            read_message(stream)
            self._ready = True
        return self._ready

    def ask(self, question: bytes) -> bytes | None:
        """The answer to a program; None if the process ended before it gave one."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        self.ready(None)
        try:
            write_message(process.stdin, question)
        except BrokenPipeError:
            return None
        return read_message(process.stdout)

    def tell(self) -> None:
        """Tells CBC to end: its own limit is in seconds of the processor, which it may share."""
        self._process.send_signal(signal.SIGINT)

    def alive(self) -> bool:
        """Whether the process is there; another may have ended it while it was idle."""
        return self._process.poll() is None

    def complaint(self) -> str:
        """What an ended process wrote to standard error, the end of it."""
        self._process.wait()
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()[-500:]

    def end(self) -> None:
        """Ends the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # of a question that was not sent whole
                stream.close()


_idle: dict[str, list[_Child]] = {}  # started once, and used again


@atexit.register
def _end_idle() -> None:
    for children in _idle.values():
        for child in children:
            child.end()


if hasattr(os, "register_at_fork"):  # a child process of the user's must not talk to ours
    os.register_at_fork(after_in_child=_idle.clear)
