"""Pictures of plans (matplotlib, without a display)."""

from __future__ import annotations

import os

from matplotlib.figure import Figure

from .solvers import Graph, Plan, simulate

_GIB = 2**30


def plot_memory(plan: Plan, graph: Graph, path: str | os.PathLike[str]) -> None:
    """Draws memory over time: plain, planned, the budget, the recomputations.

    Time is the sum of the costs of the runs so far.

    Args:
      plan: the plan.
      graph: the graph it was made for.
      path: file to write; its ending chooses the format (png, svg, pdf).
    """
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.add_subplot()
    plain = tuple(range(len(graph)))
    for schedule, label, color in (
        (plain, "every node once", "0.7"),
        (plan.schedule, f"plan ({100 * plan.overhead:.2f} % overhead)", "C0"),
    ):
        times = _times(graph, schedule)
        memory = [held / _GIB for held in simulate(graph, schedule).memory]
        axes.step(times[1:], memory, where="pre", color=color, label=label, linewidth=1.2)
    axes.axhline(plan.budget / _GIB, color="C3", linestyle="--", linewidth=1, label="budget")
    times, seen, again = _times(graph, plan.schedule), set(), []
    for event, index in enumerate(plan.schedule):
        if index in seen:
            again.append((times[event] + times[event + 1]) / 2)
        seen.add(index)
    if again:
        axes.plot(again, [0] * len(again), "|", color="C1", markersize=9, label="recomputation")
    axes.set_xlabel("time (cost of the runs so far)")
    axes.set_ylabel("memory (GiB)")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{plan.graph_name or graph.name}: {plan.solver}, {plan.status}")
    axes.legend(loc="upper right", fontsize="small")
    figure.savefig(path, dpi=150)


def _times(graph: Graph, schedule: tuple[int, ...]) -> list[float]:
    """When each run starts, and when the last ends."""
    times = [0.0]
    for index in schedule:
        times.append(times[-1] + graph.nodes[index].cost)
    return times
