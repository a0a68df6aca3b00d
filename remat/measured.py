"""What a step was predicted to take, beside what it took: to read, draw, save and load.

File format ``remat-measured/1`` (JSON): the fields of ``Measured``, with
``operations`` as one list for each field of ``Operation``.  TensorFlow is not
needed here; ``measure`` is what makes one.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from .plots import Curve
from .solvers.budget import format_bytes
from .solvers.files import read_json, write_json

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

FORMAT = "remat-measured/1"

_SHOWN = 8  # lines of each part of a table


class MeasuredError(ValueError):
    """A measurement, or a file that should hold one, is not valid."""


@dataclass(frozen=True)
class Operation:
    """One run of one operation.

    Attributes:
      name: of its node in the graph that runs.
      type: TensorFlow's operation type.
      again: whether it is a recomputation.
      seconds_predicted, seconds_measured: measured under the profiler; None
        where that did not see it.
      bytes_predicted, bytes_measured: that it asks the allocator for, scratch
        memory included, requests below 16 KiB left out; None where nobody counts, or
        where it runs functions, in which nobody does.
    """

    name: str
    type: str
    again: bool
    seconds_predicted: float
    seconds_measured: float | None
    bytes_predicted: int
    bytes_measured: int | None

    def __post_init__(self) -> None:
        names = ("seconds_predicted", "seconds_measured", "bytes_predicted", "bytes_measured")
        _check({f"{name} of {self.name}": getattr(self, name) for name in names})


@dataclass(frozen=True)
class Measured:
    """One step, as predicted and as measured.

    Attributes:
      name: of the step.
      device: that it ran on; priced_for: the one that its costs are for.
      budget: bytes.
      peak_predicted, peak_measured: bytes that the allocator counts at most;
        measured over all timed runs, None where it does not count.
      seconds_predicted: sum of the prices of all runs.
      seconds: of each timed run, without the profiler.
      seconds_profiled: of the run that ``operations`` is from.
      operations: those that compute, in the order in which they run.
      memory_predicted, memory_measured: memory held during one run.

    Raises:
      MeasuredError: if a figure cannot be one.
    """

    name: str
    device: str
    priced_for: str
    budget: int
    peak_predicted: int
    peak_measured: int | None
    seconds_predicted: float
    seconds: tuple[float, ...]
    seconds_profiled: float
    operations: tuple[Operation, ...]
    memory_predicted: Curve
    memory_measured: Curve | None

    def __post_init__(self) -> None:
        totals = ("budget", "peak_predicted", "peak_measured", "seconds_predicted")
        _check({name: getattr(self, name) for name in (*totals, "seconds_profiled")})
        _check({f"seconds[{number}]": value for number, value in enumerate(self.seconds)})
        if not self.seconds:
            raise MeasuredError("seconds is empty; a step is timed at least once")

    @property
    def seconds_measured(self) -> float:
        """The median of the timed runs."""
        return statistics.median(self.seconds)

    @property
    def overhead_predicted(self) -> float | None:
        """Predicted seconds of what is computed again, as a share of all others', of the
        operations that the profiler saw; None where it saw none."""
        return self._overhead(lambda op: op.seconds_predicted)

    @property
    def overhead_measured(self) -> float | None:
        """The same of the seconds that the profiler saw.

        The plain step's seconds are not in it, which beside a schedule are others in other
        ways too: it runs several operations at once, and its memory is another.
        """
        return self._overhead(lambda op: op.seconds_measured or 0.0)

    def to_frame(self) -> pd.DataFrame:
        """The operations, one a row, with the columns of ``Operation``."""
        import pandas as pd

        return pd.DataFrame(list(self.operations), columns=[key.name for key in fields(Operation)])

    def summary(self) -> str:
        """Peak and seconds, and where they differ from the prediction, as a text."""
        lines = [
            f"{self.name} on {self.device}, budget {format_bytes(self.budget)}"
            + ("" if self.priced_for == self.device else f"; priced for {self.priced_for}"),
            f"  {'':10}{'predicted':>14}{'measured':>14}",
            f"  {'peak':10}{format_bytes(self.peak_predicted):>14}"
            + (
                f"{'not counted':>14} (set TF_CPU_ALLOCATOR_USE_BFC=true before TensorFlow starts)"
                if self.peak_measured is None
                else f"{format_bytes(self.peak_measured):>14}"
                f"{_difference(self.peak_predicted, self.peak_measured)}"
            ),
            f"  {'a step':10}{self.seconds_predicted:12.4f} s{self.seconds_measured:12.4f} s"
            f"{_difference(self.seconds_predicted, self.seconds_measured)}"
            f" (median of {len(self.seconds)}, {min(self.seconds):.4f} to "
            f"{max(self.seconds):.4f} s)",
        ]
        predicted, measured = self.overhead_predicted, self.overhead_measured
        if predicted is not None and measured is not None:
            lines.append(
                f"  {'overhead':10}{100 * predicted:12.1f} %{100 * measured:12.1f} %{'':10}"
                " (what is computed again, of all other operations' seconds)"
            )
        return "\n".join([*lines, *self._seconds_by_type(), *self._bytes_that_differ()])

    def by_type(self) -> dict[str, tuple[int, float, float]]:
        """For each type of operation: how many ran, seconds predicted and measured.

        Those that the profiler did not see are left out; the type with the
        largest difference comes first.
        """
        found: dict[str, tuple[int, float, float]] = {}
        for op in self.operations:
            if op.seconds_measured is not None:
                count, predicted, measured = found.get(op.type, (0, 0.0, 0.0))
                found[op.type] = (
                    count + 1,
                    predicted + op.seconds_predicted,
                    measured + op.seconds_measured,
                )
        return dict(sorted(found.items(), key=lambda item: -abs(item[1][1] - item[1][2])))

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draws memory over time and seconds by type of operation, each as
        predicted and as measured.

        Args:
          path: file to write (png, svg, pdf), if any.
        """
        from .plots import plot_measured

        return plot_measured(self, path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a ``remat-measured/1`` file; an old one stays whole until it is there."""
        document = asdict(self)
        names = [key.name for key in fields(Operation)]
        document["operations"] = {
            name: [getattr(op, name) for op in self.operations] for name in names
        }
        write_json({"format": FORMAT, **document}, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Measured:
        """Reads a ``remat-measured/1`` file.

        Raises:
          MeasuredError: naming the file and what is wrong with it.
          OSError: if it cannot be read.
        """
        document = read_json(path, MeasuredError)
        try:
            return _of_document(document)
        except MeasuredError as error:
            raise MeasuredError(f"{path}: {error}") from None
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise MeasuredError(
                f"{path}: not what Measured.save wrote ({type(error).__name__}: {error})"
            ) from None

    def _overhead(self, seconds: Callable[[Operation], float]) -> float | None:
        seen = [op for op in self.operations if op.seconds_measured is not None]
        first = sum(seconds(op) for op in seen if not op.again)
        return sum(seconds(op) for op in seen if op.again) / first if first else None

    def _seconds_by_type(self) -> list[str]:
        found = self.by_type()
        if not found:
            return []
        seen = sum(measured for _, _, measured in found.values())
        lines = [
            f"  the profiler saw {seen:.4f} s of operations in a step of "
            f"{self.seconds_profiled:.4f} s; the types that differ the most:",
            f"    {'':28}{'runs':>6}{'predicted':>14}{'measured':>14}",
        ]
        for name, (count, predicted, measured) in list(found.items())[:_SHOWN]:
            lines.append(
                f"    {name:28.28}{count:6}{predicted:12.4f} s{measured:12.4f} s"
                f"{_difference(predicted, measured)}"
            )
        return lines

    def _bytes_that_differ(self) -> list[str]:
        counted = [op for op in self.operations if op.bytes_measured is not None]
        if not counted:
            return []
        apart = [
            (op.bytes_predicted, op.bytes_measured, op)
            for op in counted
            if op.bytes_measured is not None and op.bytes_predicted != op.bytes_measured
        ]
        apart.sort(key=lambda entry: -abs(entry[0] - entry[1]))
        lines = [
            f"  {len(counted) - len(apart)} of {len(counted)} operations asked for exactly the "
            "bytes predicted" + ("; the others:" if apart else "")
        ]
        if apart:
            lines.append(f"    {'predicted':>14}{'measured':>14}")
        for predicted, measured, op in apart[:_SHOWN]:
            lines.append(
                f"    {format_bytes(predicted):>14}{format_bytes(measured):>14}  "
                f"{op.type}, {op.name}"
            )
        if len(apart) > _SHOWN:
            lines.append(f"    ... and {len(apart) - _SHOWN} more")
        return lines


def _check(figures: Mapping[str, float | None]) -> None:
    for name, value in figures.items():
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise MeasuredError(f"{name} is {value}; it must be finite and not negative")


def _difference(predicted: float, measured: float) -> str:
    """How far a prediction is off, in percent of the measured."""
    return f"{100 * (predicted / measured - 1):+8.1f} %" if measured else f"{'':10}"


def _of_document(document: Any) -> Measured:
    if not isinstance(document, Mapping) or document.get("format") != FORMAT:
        stated = document.get("format") if isinstance(document, Mapping) else None
        raise MeasuredError(f"format is {stated!r}; this version reads {FORMAT!r}")
    values = {key.name: document[key.name] for key in fields(Measured)}
    columns: Sequence[Sequence[Any]] = [values["operations"][key.name] for key in fields(Operation)]
    for name, kind in (("name", str), ("type", str), ("again", bool)):
        strange = [value for value in values["operations"][name] if not isinstance(value, kind)]
        if strange:
            raise MeasuredError(f"{name} of an operation is {strange[0]!r}")
    measured = values["memory_measured"]
    for curve in filter(None, (values["memory_predicted"], measured)):
        for name in ("times", "held"):
            _check({f"{name}[{n}] of a curve": value for n, value in enumerate(curve[name])})
        if len(curve["times"]) != len(curve["held"]) + 1:
            raise MeasuredError(
                f"a curve of {len(curve['held'])} values has {len(curve['times'])} times, not one "
                "more"
            )
    return Measured(
        **{
            **values,
            "seconds": tuple(values["seconds"]),
            "operations": tuple(Operation(*row) for row in zip(*columns, strict=True)),
            "memory_predicted": Curve(**values["memory_predicted"]),
            "memory_measured": None if measured is None else Curve(**measured),
        }
    )
