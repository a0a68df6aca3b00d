"""Pictures of memory over time, predicted or measured (matplotlib, no display needed).

matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .solvers import Graph, Plan, simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

    from .measured import Measured
    from .timeline import Allocation

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))
# Okabe and Ito's colours; the first curve is what the others are compared with.
_REFERENCE = "0.6"
_COLOURS = ("#0072B2", "#009E73", "#CC79A7")
_RECOMPUTATION = "#D55E00"
_SECONDS = "time (s)"
_PAIR = (_REFERENCE, _COLOURS[0])  # predicted, measured
_TYPES_SHOWN = 12
_HEADROOM = 3.0  # a budget of more times the highest peak is not drawn: the curves would be flat


@dataclass(frozen=True)
class Curve:
    """Memory held over time, in one run of a step.

    Attributes:
      label: for the legend.
      times: when each amount begins to be held, ascending; and the end.
      held: bytes from each moment to the next, one fewer than ``times``.
      recomputations: (start, end) of what was computed again.
    """

    label: str
    times: Sequence[float]
    held: Sequence[int]
    recomputations: Sequence[tuple[float, float]] = ()

    @property
    def peak(self) -> int:
        """The most bytes held."""
        return max(self.held)


def of_runs(
    label: str, held: Sequence[int], costs: Iterable[float], again: Iterable[bool]
) -> Curve:
    """The curve of runs one after the other.

    Args:
      label: for the legend.
      held: bytes while each run runs.
      costs: of each run.
      again: whether the run is a recomputation.
    """
    times = [0.0, *itertools.accumulate(costs)]
    spans = itertools.pairwise(times)
    return Curve(
        label, times, held, [span for span, repeated in zip(spans, again, strict=True) if repeated]
    )


def of_schedule(label: str, graph: Graph, schedule: Sequence[int]) -> Curve:
    """The curve of a schedule as simulated; time is the cost of the runs so far."""
    first = {index: event for event, index in reversed(list(enumerate(schedule)))}
    again = [first[index] < event for event, index in enumerate(schedule)]
    costs = [graph.nodes[index].cost for index in schedule]
    return of_runs(label, simulate(graph, schedule).memory, costs, again)


def of_allocations(label: str, allocations: Sequence[Allocation], before: int) -> Curve:
    """The curve of a recorded run (see ``timeline.record``).

    A recomputation is taken to last from the first allocation of an operation
    that was copied to the next one of an operation that was not.

    Args:
      label: for the legend.
      allocations: in order of time; at least one.
      before: bytes in use when the recording began.
    """
    start = allocations[0].seconds
    times = [allocation.seconds - start for allocation in allocations]
    held = list(itertools.accumulate((a.chunk for a in allocations[:-1]), initial=before))[1:]
    spans: list[tuple[float, float]] = []
    began: float | None = None
    for time, allocation in zip(times, allocations, strict=True):
        if not allocation.op:
            continue  # given back, by nobody in particular
        copied = "/copy_" in allocation.op
        if copied and began is None:
            began = time
        elif not copied and began is not None:
            spans.append((began, time))
            began = None
    return Curve(label, times, held, spans)


def plot_memory(
    curves: Sequence[Curve],
    *,
    budget: int,
    title: str = "",
    time_label: str = _SECONDS,
    path: str | os.PathLike[str] | None = None,
) -> Figure:
    """Draws memory over time: the curves, the budget, the recomputations.

    Args:
      curves: the first is what the others are compared with.
      budget: bytes.
      title: of the picture.
      time_label: what the curves' times are.
      path: file to write; its ending chooses the format (png, svg, pdf).

    Returns:
      The figure (a notebook shows it).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    _draw_memory(figure, curves, budget, title, time_label)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _draw_memory(
    figure: Figure | SubFigure, curves: Sequence[Curve], budget: int, title: str, time_label: str
) -> None:
    top = max(curve.peak for curve in curves)
    beyond = budget > _HEADROOM * top
    top = top if beyond else max(top, budget)
    unit, size = next((name, size) for name, size in _UNITS if top >= size or size == 1)
    repeated = [curve for curve in curves if curve.recomputations]
    if repeated:
        axes, strip = figure.subplots(
            2, 1, sharex=True, gridspec_kw={"height_ratios": (12, 0.6 * len(repeated))}
        )
    else:
        axes = strip = figure.subplots()
    for number, curve in enumerate(curves):
        colour = _COLOURS[(number - 1) % len(_COLOURS)] if number else _REFERENCE
        heights = [held / size for held in (*curve.held, curve.held[-1])]
        label = f"{curve.label}: peak {curve.peak / size:.4g} {unit}"
        style = {"step": "post", "color": colour, "linewidth": 0}
        axes.fill_between(curve.times, heights, alpha=0.2, **style)
        axes.step(curve.times, heights, where="post", color=colour, linewidth=1.3, label=label)
    axes.axhline(
        budget / size,
        color="black",
        linestyle=(0, (5, 3)),
        linewidth=1.2,
        label=f"budget: {budget / size:.4g} {unit}" + " (not in the picture)" * beyond,
    )
    for row, curve in enumerate(repeated):
        bars = [(start, end - start) for start, end in curve.recomputations]
        strip.broken_barh(bars, (row + 0.1, 0.8), color=_RECOMPUTATION)
    if repeated:
        strip.set(ylim=(0, len(repeated)), yticks=[row + 0.5 for row in range(len(repeated))])
        names = ["recomputations"] if len(repeated) == 1 else [c.label for c in repeated]
        strip.set_yticklabels(names, color=_RECOMPUTATION)
        strip.tick_params(axis="y", length=0)
    axes.set(ylabel=f"memory ({unit})", ylim=(0, 1.05 * top / size), title=title)
    axes.set_xlim(0, max(curve.times[-1] for curve in curves))
    strip.set_xlabel(time_label)
    axes.grid(alpha=0.25)
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        handlelength=3,
        frameon=False,
        fontsize="small",
    )


def plot_plan(plan: Plan, graph: Graph, path: str | os.PathLike[str] | None = None) -> Figure:
    """Draws a plan as simulated on its graph, beside every node run once.

    Args:
      plan: the plan.
      graph: the graph it was made for.
      path: file to write, if any.
    """
    return plot_memory(
        [
            of_schedule("every node once", graph, range(len(graph))),
            of_schedule(f"plan ({100 * plan.overhead:.2f} % overhead)", graph, plan.schedule),
        ],
        budget=plan.budget,
        title=f"{plan.graph_name or graph.name} ({plan.solver}, {plan.status})",
        time_label="time (cost of the runs so far)",
        path=path,
    )


def plot_measured(measured: Measured, path: str | os.PathLike[str] | None = None) -> Figure:
    """Draws a step as predicted and as measured: memory over time, and seconds by type.

    Args:
      measured: the step.
      path: file to write, if any.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.8), layout="constrained")
    ((left, right),) = figure.subfigures(1, 2, squeeze=False, width_ratios=(3, 2))
    curves = [measured.memory_predicted]
    if measured.memory_measured is not None:
        curves.append(measured.memory_measured)
    _draw_memory(left, curves, measured.budget, f"{measured.name} on {measured.device}", _SECONDS)
    axes = right.subplots()
    types = sorted(measured.by_type().items(), key=lambda item: -item[1][2])[:_TYPES_SHOWN]
    for number, (label, colour) in enumerate(zip(("predicted", "measured"), _PAIR, strict=True)):
        axes.barh(
            [row + 0.4 * number for row in range(len(types))],
            [figures[1 + number] for _, figures in types],
            height=0.4,
            color=colour,
            label=label,
        )
    axes.set_yticks([row + 0.2 for row in range(len(types))], [name for name, _ in types])
    axes.invert_yaxis()
    axes.set(xlabel="time in a step (s)", title="by type of operation")
    axes.grid(axis="x", alpha=0.25)
    axes.legend(frameon=False, fontsize="small", loc="lower right")
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
