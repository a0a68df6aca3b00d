"""Plans: a schedule with its figures, as people save, read and load it.

File format ``remat-plan/1`` (JSON)::

    {"format": "remat-plan/1", "graph": "<fingerprint>", "graph_name": "vgg16",
     "steps": [0, 1, 2, 1, 3], "budget": 8192, "peak": 8000,
     "cost": 0.5, "overhead": 0.02, "lower_bound": 0.49, "gap": 0.001,
     "bound_budget": 8192, "priced": "<digest>",
     "solver": "auto", "status": "feasible", "seconds": 3.1,
     "message": "...", "details": {}}

``steps`` is the schedule.  ``graph_name``, ``message`` and ``details`` may be
left out; ``lower_bound`` and ``gap`` may be null.  ``priced`` (a digest of the
graph with its costs) and ``bound_budget`` say what ``lower_bound`` holds for;
without them, as in older files, it is for people only.
"""

from __future__ import annotations

import contextlib
import html
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .budget import format_bytes
from .files import read_json, write_json
from .graph import Graph
from .schedule import Schedule, ScheduleError, simulate

FORMAT = "remat-plan/1"


class PlanError(ValueError):
    """A plan, or a file that should hold one, is not valid or not for this graph."""


@dataclass(frozen=True)
class Plan:
    """A schedule for one graph, with its figures and how it was found.

    Attributes:
      graph: fingerprint of the graph it was made for.
      schedule: node indices in execution order.
      budget: bytes that the peak was allowed to reach.
      peak: the most bytes held at once.
      cost: seconds of all runs.
      overhead: ``cost`` / cost of running every node once, minus 1.
      lower_bound: proven least seconds within the budget, or None.
      gap: overhead above that of ``lower_bound``, as a fraction, or None.
      solver: the method that found it.
      status: how the solve ended, as a ``Status`` value.
      seconds: that the solve took.
      message: one sentence for people.
      graph_name: for people.
      details: JSON values that a user of the plan wants kept with it.
      bound_budget: bytes within which every schedule takes ``lower_bound``, or None.
      priced: priced fingerprint of the graph that ``lower_bound`` was proven for, or "".
    """

    graph: str
    schedule: Schedule
    budget: int
    peak: int
    cost: float
    overhead: float
    lower_bound: float | None
    gap: float | None
    solver: str
    status: str
    seconds: float
    message: str = ""
    graph_name: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    bound_budget: int | None = None
    priced: str = ""

    def bound_for(self, graph: Graph, budget: int) -> float:
        """Seconds that every schedule of a graph within a budget takes, as far as it was
        proven with this plan: 0 if it was not, or for other costs or a smaller budget.

        Raises:
          PlanError: if the plan's own schedule takes less.
        """
        if self.lower_bound is None or self.bound_budget is None:
            return 0.0
        if self.lower_bound > self.cost * (1 + _ROUNDING) and self.peak <= self.bound_budget:
            raise PlanError(
                f"lower_bound is stated as {self.lower_bound}, but the plan takes {self.cost}"
            )
        same = self.priced == graph.priced_fingerprint
        return self.lower_bound if same and budget <= self.bound_budget else 0.0

    def summary(self) -> str:
        """The figures, as a short text."""
        count = len(set(self.schedule))
        gap = "no bound known"
        if self.gap is not None:
            gap = "proven optimal" if self.gap == 0 else f"gap {100 * self.gap:.3f} points"
        lines = [
            f"plan for {self.graph_name or self.graph[:12]}",
            f"  peak      {format_bytes(self.peak)} of a budget of {format_bytes(self.budget)}",
            f"  overhead  {100 * self.overhead:.3f} % ({gap})",
            f"  schedule  {len(self.schedule)} runs of {count} nodes "
            f"({len(self.schedule) - count} recomputations)",
            f"  found by  {self.solver} in {self.seconds:.1f} s ({self.status})",
        ]
        if self.message:
            lines.append(f"  {self.message}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return f"<pre>{html.escape(self.summary())}</pre>"

    def check(self, graph: Graph) -> None:
        """Runs the schedule on paper and compares it with what the plan states.

        Raises:
          PlanError: if the plan was made for another graph, its schedule is
            not legal, or a stated figure is not what the schedule takes.
        """
        if graph.fingerprint != self.graph:
            raise PlanError(
                f"the plan was made for another graph ({self.graph_name or self.graph[:12]}), "
                f"not for {graph.name}; solve this graph to get a plan for it"
            )
        try:
            truth = simulate(graph, self.schedule)
        except ScheduleError as error:
            raise PlanError(f"steps: {error}") from None
        if truth.peak != self.peak:
            raise PlanError(f"peak is stated as {self.peak} bytes, but is {truth.peak}")
        if not math.isclose(truth.cost, self.cost, rel_tol=1e-9, abs_tol=1e-300):
            raise PlanError(f"cost is stated as {self.cost} seconds, but is {truth.cost}")
        if self.peak > self.budget:
            raise PlanError(f"the peak, {self.peak} bytes, is above the budget, {self.budget}")
        overhead = truth.cost / graph.cost - 1 if graph.cost > 0 else 0.0
        if not math.isclose(overhead, self.overhead, rel_tol=1e-6, abs_tol=1e-9):
            raise PlanError(f"overhead is stated as {self.overhead}, but is {overhead}")
        if self.lower_bound is not None and self.lower_bound > self.cost * (1 + 1e-9):
            raise PlanError(f"lower_bound, {self.lower_bound}, is above the cost, {self.cost}")
        if self.gap is None:
            return
        if self.lower_bound is None:
            raise PlanError(f"gap is stated as {self.gap}, but there is no lower_bound")
        gap = (self.cost - self.lower_bound) / graph.cost if graph.cost > 0 else 0.0
        if not math.isclose(gap, self.gap, rel_tol=1e-6, abs_tol=1e-8):
            raise PlanError(f"gap is stated as {self.gap}, but is {gap}")

    def to_json(self) -> dict[str, Any]:
        """The plan as a ``remat-plan/1`` document."""
        return {
            "format": FORMAT,
            "graph": self.graph,
            "graph_name": self.graph_name,
            "steps": list(self.schedule),
            "budget": self.budget,
            "peak": self.peak,
            "cost": self.cost,
            "overhead": self.overhead,
            "lower_bound": self.lower_bound,
            "gap": self.gap,
            "bound_budget": self.bound_budget,
            "priced": self.priced,
            "solver": self.solver,
            "status": self.status,
            "seconds": self.seconds,
            "message": self.message,
            "details": dict(self.details),
        }

    @staticmethod
    def from_json(document: Any) -> Plan:
        """Reads a ``remat-plan/1`` document.

        Raises:
          PlanError: if it is not one; the message says where.
        """
        if not isinstance(document, Mapping):
            raise PlanError(f"a plan is a JSON object, not {type(document).__name__}")
        if document.get("format") != FORMAT:
            raise PlanError(f"format is {document.get('format')!r}; this version reads {FORMAT!r}")
        steps = _field(document, "steps", list)
        for step in steps:
            if not isinstance(step, int) or isinstance(step, bool) or step < 0:
                raise PlanError(f"steps: {step!r} is not a node index")
        return Plan(
            graph=_field(document, "graph", str),
            schedule=tuple(steps),
            budget=_field(document, "budget", int),
            peak=_field(document, "peak", int),
            cost=_number(document, "cost"),
            overhead=_number(document, "overhead"),
            lower_bound=_number_or_none(document, "lower_bound"),
            gap=_number_or_none(document, "gap"),
            solver=_field(document, "solver", str),
            status=_field(document, "status", str),
            seconds=_number(document, "seconds"),
            message=_field(document, "message", str, ""),
            graph_name=_field(document, "graph_name", str, ""),
            details=_field(document, "details", dict, {}),
            bound_budget=(
                None
                if document.get("bound_budget") is None
                else _field(document, "bound_budget", int)
            ),
            priced=_field(document, "priced", str, ""),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan; an old file stays whole until the new one is."""
        write_json(self.to_json(), path)

    @staticmethod
    def load(path: str | os.PathLike[str], graph: Graph | None = None) -> Plan:
        """Reads a plan file.

        Args:
          path: the file.
          graph: the graph it must have been made for.  Without it only the
            form of the file is checked.

        Raises:
          PlanError: naming the file and what is wrong with it.
          OSError: if it cannot be read.
        """
        document = read_json(path, PlanError)
        try:
            plan = Plan.from_json(document)
            if graph is not None:
                plan.check(graph)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None
        return plan


_REQUIRED: Any = object()
_ROUNDING = 1e-9  # by which an overhead or a gap of nothing may be below 0


def _field(document: Mapping[str, Any], key: str, kind: type, default: Any = _REQUIRED) -> Any:
    value = document.get(key, default)
    if value is _REQUIRED:
        raise PlanError(f"the plan has no {key!r}")
    if not isinstance(value, kind) or isinstance(value, bool):
        raise PlanError(f"{key} must be of type {kind.__name__}, not {value!r}")
    if isinstance(value, int) and value < 0:
        raise PlanError(f"{key} must not be negative, as {value} is")
    return value


def _number(document: Mapping[str, Any], key: str) -> float:
    value = document.get(key)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # of an integer that no float holds
            if math.isfinite(value) and value > -_ROUNDING:
                return value
    raise PlanError(f"{key} must be a finite number, not below 0, not {value!r:.40}")


def _number_or_none(document: Mapping[str, Any], key: str) -> float | None:
    return None if document.get(key) is None else _number(document, key)
