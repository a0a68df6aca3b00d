"""What a user says about how a step is planned."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .price import Profile
from .solvers import Plan
from .solvers.budget import parse_budget
from .solvers.method import Method
from .solvers.solving import check_method

_MOST = 1 << 60  # bytes of a budget


@dataclass(frozen=True)
class Options:
    """How a step is planned; see ``remat.compile``.

    Raises:
      ValueError, TypeError: if an option is not what it should be.
    """

    budget: int | float | str = "auto"
    solver: str | Method = "auto"
    time_limit: float | None = None
    seed: int = 0
    profile: Profile = "auto"
    plan: Plan | None = None
    check: bool = True
    quiet: bool | None = None
    verbose: bool | None = None

    @classmethod
    def given(cls, to: str, options: Mapping[str, Any]) -> Options:
        """The options that somebody has given to a function.

        Raises:
          TypeError: naming one that there is not.
        """
        known = [option.name for option in fields(cls)]
        for name in options:
            if name not in known:
                raise TypeError(f"{to} has no option {name!r}; it takes {', '.join(known)}")
        return cls(**options)

    def __post_init__(self) -> None:
        if not isinstance(self.budget, str) or self.budget != "auto":
            bytes_of(self.budget, _MOST)
        for name in ("check", "quiet", "verbose"):
            value = getattr(self, name)
            if not (isinstance(value, bool) or (value is None and name != "check")):
                raise TypeError(f"{name} is {value!r}; it is True or False")
        check_method(self.solver)
        limit = self.time_limit
        if limit is not None and not (isinstance(limit, numbers.Real) and 0 < limit < math.inf):
            raise ValueError(f"time_limit is {limit!r}; it is a number of seconds above 0")
        if isinstance(self.seed, bool) or not isinstance(self.seed, numbers.Integral):
            raise ValueError(f"seed is {self.seed!r}; it is a whole number")
        if not (self.plan is None or isinstance(self.plan, Plan)):
            raise TypeError(f"plan is a remat.Plan: remat.Plan.load(...), not {self.plan!r}")


def bytes_of(budget: int | float | str, plain_peak: int) -> int:
    """A budget in bytes.

    Raises:
      ValueError: if it is not what a budget may be.
    """
    count = parse_budget(budget, plain_peak)
    if count <= 0:
        raise ValueError(f"the budget is {budget!r}; it must be above 0")
    if count > _MOST:
        raise ValueError(f"the budget is {budget!r}, more than any memory holds")
    return count
