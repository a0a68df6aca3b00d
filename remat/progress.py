"""Progress of long work: one line on a terminal, a bar in a notebook, nothing elsewhere."""

from __future__ import annotations

import html
import sys
from typing import Any

from .solvers import Result, Status

_WIDTH = 100  # characters of a line


class ProgressLine:
    """What is being done now; the next line takes its place, and the end clears it.

    Attributes:
      interrupted: whether a signal has ended a solve, which kept the best so far.
    """

    def __init__(self, verbose: bool | None) -> None:
        """Opens no display yet.

        Args:
          verbose: whether to show anything; None for "on a terminal or in a notebook".
        """
        self._notebook = _in_notebook()
        self.shown = self._notebook or sys.stderr.isatty() if verbose is None else verbose
        self.interrupted = False
        self._width = 0
        self._display: Any = None  # the notebook's handle, once something was shown

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._display is not None:
            self._bar("", "")
        elif self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")

    def line(self, text: str, share: float | None = None) -> None:
        """Shows what is being done.

        Args:
          text: for people.
          share: how much of the work is done, from 0 to 1, where that is known.
        """
        if not self.shown:
            return
        text = f"remat: {text}"[:_WIDTH]
        if self._notebook:
            value = "" if share is None else f" value='{share:.3f}'"
            self._bar(text, f"<progress{value}></progress> <code>{html.escape(text)}</code>")
            return
        sys.stderr.write("\r" + text.ljust(self._width))
        sys.stderr.flush()
        self._width = len(text)

    def result(self, result: Result) -> None:
        """Shows the best schedule so far."""
        self.interrupted |= result.status is Status.INTERRUPTED
        best = "nothing yet" if result.overhead is None else f"{100 * result.overhead:.2f} %"
        gap = "" if result.gap is None else f", gap {100 * result.gap:.2f} points"
        self.line(f"solving: overhead {best}{gap}, {result.seconds:.0f} s")

    def _bar(self, plain: str, markup: str) -> None:
        from IPython.display import display

        content = {"text/plain": plain, "text/html": markup}
        if self._display is None:
            self._display = display(content, raw=True, display_id=True)
        else:
            self._display.update(content, raw=True)


def _in_notebook() -> bool:
    """Whether a notebook's kernel runs this: only then is IPython worth importing."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return hasattr(shell, "kernel")
