"""What a solve gives back, whichever method did it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .budget import format_bytes
from .graph import Graph
from .plan import Plan
from .schedule import Schedule


class Status(str, Enum):
    """How a solve ended."""

    OPTIMAL = "optimal"  # a schedule, and the proof that none is better
    FEASIBLE = "feasible"  # a schedule within the budget
    INFEASIBLE = "infeasible"  # the proof that no schedule fits the budget (and max_overhead)
    NOTHING_FOUND = "nothing_found"  # neither a schedule nor a proof
    INTERRUPTED = "interrupted"  # stopped by Ctrl-C or SIGTERM; best so far, if any

    def __str__(self) -> str:
        return self.value


class InfeasibleBudgetError(ValueError):
    """No schedule within the budget is known.

    Attributes:
      budget: bytes asked for.
      floor: bytes below which it is proven that no schedule exists.
      floor_nodes: names of the nodes whose run needs those bytes.
      least_budget: least bytes for which a schedule is known, or which may be enough.
      known: whether it is known.
      proven: whether the budget is below the floor.
      resident: bytes that are held throughout.
    """

    def __init__(
        self,
        budget: int,
        floor: int,
        floor_nodes: tuple[str, ...],
        least_budget: int,
        resident: int = 0,
        *,
        known: bool = True,
        remark: str = "",
    ) -> None:
        """The error; ``remark``: what else is to be said."""
        self.budget = budget
        self.floor = floor
        self.floor_nodes = floor_nodes
        self.least_budget = least_budget
        self.known = known
        self.resident = resident
        self.proven = budget < floor
        names = ", ".join(floor_nodes[:3]) + (", ..." if len(floor_nodes) > 3 else "")
        held = f"; {_amount(resident)} are held throughout" if resident else ""
        verdict = (
            "cannot be met by any schedule" if self.proven else "was not met by any schedule found"
        )
        enough = _amount(least_budget)
        enough = f"the least budget known to work is {enough}" if known else f"{enough} may do"
        super().__init__(
            f"a budget of {_amount(budget)} {verdict}: every schedule needs {_amount(floor)} "
            f"for {names}, the proven floor{held}, and {enough}" + (f"; {remark}" if remark else "")
        )


def _amount(count: int) -> str:
    """Bytes to copy and to read."""
    return f"{count:,} bytes" + (f" ({format_bytes(count)})" if count >= 1024 else "")


@dataclass(frozen=True)
class Result:
    """What a solve found.

    Attributes:
      status: how it ended.
      schedule: the best schedule within the budget, or None; then ``cost``,
        ``peak``, ``overhead`` and ``gap`` are None too.
      cost: seconds of all its runs.
      peak: the most bytes it holds at once.
      overhead: ``cost`` / cost of running every node once, minus 1.
      lower_bound: seconds that every schedule within the budget takes, proven; where the
        peak was minimized, that every schedule of that peak takes.
      gap: how far ``overhead`` is above that of ``lower_bound``
        (0.001 is a tenth of a percentage point).
      bound_budget: bytes that the peak of these schedules may reach.
      budget: bytes that the peak may reach.
      floor: bytes below which no schedule exists, proven.
      floor_nodes: indices of the nodes whose run needs those bytes.
      least_budget: least peak in bytes of any schedule seen on the way that
        keeps ``max_overhead``.
      solver: name of the method.
      seconds: that the solve took.
      message: one sentence for people.
      stopped: whether Ctrl-C or SIGTERM came meanwhile, whatever was proven by then.
    """

    status: Status
    schedule: Schedule | None
    cost: float | None
    peak: int | None
    overhead: float | None
    lower_bound: float
    bound_budget: int
    gap: float | None
    budget: int
    floor: int
    floor_nodes: tuple[int, ...]
    least_budget: int
    solver: str
    seconds: float
    message: str
    stopped: bool = False

    def to_plan(self, graph: Graph, details: Mapping[str, Any] | None = None) -> Plan:
        """The schedule and its figures as a plan that can be saved.

        Args:
          graph: the graph that was solved.
          details: JSON values to keep with the plan.

        Raises:
          InfeasibleBudgetError: if no schedule was found.
        """
        # These are None together.
        if self.schedule is None or self.cost is None or self.peak is None or self.overhead is None:
            raise InfeasibleBudgetError(
                self.budget,
                self.floor,
                tuple(graph.nodes[index].name for index in self.floor_nodes),
                self.least_budget,
                graph.resident,
            )
        return Plan(
            graph=graph.fingerprint,
            graph_name=graph.name,
            schedule=self.schedule,
            budget=self.budget,
            peak=self.peak,
            cost=self.cost,
            overhead=self.overhead,
            lower_bound=self.lower_bound,
            bound_budget=self.bound_budget,
            priced=graph.priced_fingerprint,
            gap=self.gap,
            solver=self.solver,
            status=str(self.status),
            seconds=self.seconds,
            message=self.message,
            details=dict(details or {}),
        )
