"""remat: train neural networks that do not fit in memory.

Names load when first used: ``import remat`` does not import TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compile import Step, compile
    from .solvers import InfeasibleBudgetError, Plan, PlanError
    from .trace import TraceError

__version__ = "0.1.0"

_HOME = {
    "InfeasibleBudgetError": ".solvers",
    "Plan": ".solvers",
    "PlanError": ".solvers",
    "Step": ".compile",
    "TraceError": ".trace",
    "compile": ".compile",
}

__all__ = ["InfeasibleBudgetError", "Plan", "PlanError", "Step", "TraceError", "compile"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name], __name__), name)
    globals()[name] = value  # a module called compile must not hide the function
    return value
