"""remat: train neural networks that do not fit in memory.

Names load when first used: ``import remat`` does not import TensorFlow.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .allocator import claim_memory
    from .compile import Step, compile
    from .function import Function, function
    from .pingpong import PingPong
    from .solvers import InfeasibleBudgetError, Plan, PlanError
    from .trace import TraceError
    from .wrap import wrap

__version__ = "0.1.0"

_HOME = {
    "Function": ".function",
    "InfeasibleBudgetError": ".solvers",
    "PingPong": ".pingpong",
    "Plan": ".solvers",
    "PlanError": ".solvers",
    "Step": ".compile",
    "TraceError": ".trace",
    "claim_memory": ".allocator",
    "compile": ".compile",
    "function": ".function",
    "wrap": ".wrap",
}

__all__ = [
    "Function",
    "InfeasibleBudgetError",
    "PingPong",
    "Plan",
    "PlanError",
    "Step",
    "TraceError",
    "claim_memory",
    "compile",
    "function",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Importing the module ``remat.compile`` must not hide the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
