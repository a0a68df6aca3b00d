"""Warnings that name a line of the user's own code."""

from __future__ import annotations

import sys
import warnings

_INSIDE = {"remat", "keras", "tensorflow"}


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the nearest line of what calls this package, directly or through Keras.

    Python shows a warning once for each line: that of one training does not hide another's.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
