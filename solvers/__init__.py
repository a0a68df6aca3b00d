"""Schedules for tensor rematerialization.  No TensorFlow in here.

Names load when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .graph import Graph, GraphError, Node, load_graph, save_graph
    from .plan import Plan, PlanError
    from .result import InfeasibleBudgetError, Result, Status
    from .schedule import ScheduleError, Simulation, simulate
    from .solving import frontier, solve

_HOME = {
    "Graph": "graph",
    "GraphError": "graph",
    "InfeasibleBudgetError": "result",
    "Node": "graph",
    "Plan": "plan",
    "PlanError": "plan",
    "Result": "result",
    "ScheduleError": "schedule",
    "Simulation": "schedule",
    "Status": "result",
    "frontier": "solving",
    "load_graph": "graph",
    "save_graph": "graph",
    "simulate": "schedule",
    "solve": "solving",
}

__all__ = [
    "Graph",
    "GraphError",
    "InfeasibleBudgetError",
    "Node",
    "Plan",
    "PlanError",
    "Result",
    "ScheduleError",
    "Simulation",
    "Status",
    "frontier",
    "load_graph",
    "save_graph",
    "simulate",
    "solve",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
