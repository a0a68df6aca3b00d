"""What every solving method takes and gives back.

A method is a function ``(Problem, Monitor) -> Outcome``.  It only proposes:
``solve`` in this package judges every proposed schedule with the simulator
before anyone sees it, and turns the outcome into a ``Result``.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from .floor import Precedence, first_run_bytes, memory_floor, precedence
from .graph import Graph
from .schedule import Schedule


@dataclass(frozen=True)
class Problem:
    """What is to be solved.

    Attributes:
      graph: the graph.
      budget: bytes that the peak may reach.
      minimize: "cost" (within ``budget``), or "peak" (within ``max_overhead``).
      max_overhead: largest allowed overhead as a fraction, or None.
      seed: of every random choice.
      workers: processors that may be used.
      start: a schedule to improve on, or None.
      options: settings of one method, by name.
    """

    graph: Graph
    budget: int
    minimize: Literal["cost", "peak"] = "cost"
    max_overhead: float | None = None
    seed: int = 0
    workers: int = 1
    start: Schedule | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def rank(self, cost: float, peak: float) -> tuple[float, float]:
        """What the better of two schedules has less of, first what is minimized."""
        return (peak, cost) if self.minimize == "peak" else (cost, peak)

    @cached_property
    def order(self) -> Precedence:
        """Which nodes run first before which, in every schedule."""
        return precedence(self.graph)

    @cached_property
    def first_run_bytes(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes that concern the first run of each node in every schedule."""
        return first_run_bytes(self.graph, self.order)

    @cached_property
    def floor(self) -> tuple[int, tuple[int, ...]]:
        """The proven floor in bytes, and the nodes that need them."""
        return memory_floor(self.graph, self.first_run_bytes[0])


ROUNDING = 1e-12
"""How far sums of costs may be off, relative to the cost of the graph."""


@dataclass(frozen=True)
class Outcome:
    """What a method found.

    Attributes:
      schedule: the best schedule found, or None.
      lower_bound: a proven least cost in seconds (None: no useful bound).
      infeasible: True if it is proven that no schedule fits the budget.
      message: one sentence for people.
    """

    schedule: Schedule | None
    lower_bound: float | None = None
    infeasible: bool = False
    message: str = ""


class StoppedError(Exception):
    """The monitor said stop in the middle of something: what it was making is not there."""


class Monitor:
    """Carries time, interruption and progress between ``solve`` and a method.

    Attributes:
      bound: the best that was reported to it, in seconds.
    """

    def __init__(
        self,
        time_limit: float | None = None,
        on_schedule: Callable[[Schedule], None] | None = None,
        on_bound: Callable[[float], None] | None = None,
        may_extend: Callable[[], bool] = lambda: False,
        patience: Sequence[tuple[float, float]] = (),
        max_gap: float = 0.0,
    ) -> None:
        self._max_gaps = [(0.0, max_gap)]  # (seconds from which on, gap)
        self._started = time.monotonic()
        self._time_limit = time_limit
        self._on_schedule = on_schedule
        self._on_bound = on_bound
        self.bound = -math.inf
        self._may_extend = may_extend
        self._patience = list(patience)
        self._stop = threading.Event()
        self._finish = threading.Event()

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def remaining(self) -> float:
        """Seconds left (infinite without a limit), never below 0."""
        if self._time_limit is None:
            return float("inf")
        return max(0.0, self._time_limit - self.elapsed())

    def extend(self, seconds: float) -> None:
        """Lets the solve take longer, for code that is compiled once for all solves, if it may."""
        if self._time_limit is not None and self._may_extend():
            self._time_limit += seconds

    def persist(self) -> float:
        """Lets the solve take longer, as a proof may be in reach, if it has patience left.

        Patience is seconds, and the gap that is small enough to end with in them.

        Returns:
          The seconds that were added.
        """
        if self._time_limit is None or not self._patience:
            return 0.0
        seconds, gap = self._patience.pop(0)
        self._max_gaps.append((self._time_limit, gap))
        self._time_limit += seconds
        return seconds

    def max_gap(self) -> float:
        """The gap (as a fraction) that is small enough by now to end with."""
        return max(gap for since, gap in self._max_gaps if since <= self.elapsed())

    def conclude(self, seconds: float) -> None:
        """Lets the solve take so many seconds more, at most."""
        self._time_limit = self.elapsed() + min(seconds, self.remaining())

    def part(self, seconds: float) -> Monitor:
        """This monitor for a part of the solve that may take so many seconds."""
        part = copy(self)
        part._time_limit = self.elapsed() + min(seconds, self.remaining())
        return part

    def stop(self) -> None:
        """Asks the method to return its best so far (Ctrl-C, SIGTERM)."""
        self._stop.set()

    def finish(self) -> None:
        """Tells the method that nothing better than what it found exists."""
        self._finish.set()

    def after_stop(self, seconds: float) -> Monitor:
        """This monitor for a last moment of so many seconds, after ``stop``."""
        part = copy(self)
        part._stop = threading.Event()
        part._time_limit = self.elapsed() + seconds
        return part

    def stage(self) -> Monitor:
        """This monitor for a stage of the solve, which ``finish`` ends without the rest."""
        part = copy(self)
        part._finish = threading.Event()
        return part

    def stopped(self) -> bool:
        """Whether the method was asked for its best so far."""
        return self._stop.is_set()

    def should_stop(self) -> bool:
        """Whether the method should return now."""
        return self._finish.is_set() or self.interrupted()

    def check(self) -> None:
        """Ends what is being made, if the method should return now.

        Raises:
          StoppedError: for who asked for it.
        """
        if self.should_stop():
            raise StoppedError

    def interrupted(self) -> bool:
        """Whether the method was stopped, or has no time left."""
        return self.stopped() or self.remaining() <= 0

    def found(self, schedule: Schedule) -> None:
        """Reports a schedule; the receiver judges it."""
        if self._on_schedule is not None:
            self._on_schedule(schedule)

    def bounded(self, lower_bound: float) -> None:
        """Reports a proven lower bound in seconds; inf if no schedule fits the budget."""
        self.bound = max(self.bound, lower_bound)
        if self._on_bound is not None:
            self._on_bound(lower_bound)


Method = Callable[[Problem, Monitor], Outcome]
