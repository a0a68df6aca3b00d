"""What the pictures show is what was measured or simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from remat.plots import Curve, of_allocations, of_runs, of_schedule, plot_memory, plot_plan
from remat.solvers import Graph, Plan, simulate, solve
from remat.solvers.graph import Node
from remat.timeline import Allocation

MIB = 2**20


@pytest.fixture
def chain() -> Graph:
    """a -> b -> c -> d, where d reads a again."""
    nodes = tuple(Node(name, 1.0, MIB) for name in "abcd")
    return Graph("chain", nodes, ((0, 1), (1, 2), (2, 3), (0, 3)))


@pytest.fixture
def plan(chain: Graph) -> Plan:
    return solve(chain, 3 * MIB).to_plan(chain)


def test_runs_follow_one_another() -> None:
    curve = of_runs("", [5, 7, 6], [1.0, 2.0, 4.0], [False, True, False])
    assert curve.times == [0.0, 1.0, 3.0, 7.0]
    assert curve.recomputations == [(1.0, 3.0)]
    assert curve.peak == 7


def test_a_schedule_is_drawn_as_simulated(chain: Graph) -> None:
    schedule = (0, 1, 2, 0, 3)
    curve = of_schedule("", chain, schedule)
    assert curve.held == simulate(chain, schedule).memory
    assert curve.recomputations == [(3.0, 4.0)]


def test_recorded_allocations_add_up() -> None:
    events = [
        Allocation(10.0, 100, 256, 0, "conv"),
        Allocation(11.0, 100, 512, 0, "relu/copy_1"),
        Allocation(12.0, -100, -256, 0, ""),
        Allocation(13.0, 100, 256, 0, "conv/copy_2"),
        Allocation(15.0, 100, 256, 0, "add"),
        Allocation(16.0, -100, -256, 0, ""),
    ]
    curve = of_allocations("", events, before=1000)
    assert curve.times == [0.0, 1.0, 2.0, 3.0, 5.0, 6.0]
    assert curve.held == [1256, 1768, 1512, 1768, 2024]
    assert curve.recomputations == [(1.0, 5.0)]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_is_written(tmp_path: Path, chain: Graph, plan: Plan, ending: str) -> None:
    path = tmp_path / f"memory.{ending}"
    plot_plan(plan, chain, path)
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if ending == "png" else b"<?xml" in start


def test_the_picture_is_to_scale() -> None:
    curves = [
        Curve("plain", [0.0, 1.0, 2.0], [3 * MIB, 6 * MIB]),
        Curve("plan", [0.0, 1.0, 3.0], [2 * MIB, 4 * MIB], [(1.0, 2.5)]),
    ]
    figure = plot_memory(curves, budget=5 * MIB, title="a step")
    axes, strip = figure.axes
    assert axes.get_ylabel() == "memory (MiB)"
    assert axes.get_title() == "a step"
    plain, inside, budget = axes.get_lines()
    assert list(plain.get_ydata()) == [3.0, 6.0, 6.0]
    assert list(inside.get_xdata()) == [0.0, 1.0, 3.0]
    assert list(budget.get_ydata()) == [5.0, 5.0]
    assert axes.get_xlim() == (0.0, 3.0)
    (bars,) = strip.collections
    (box,) = bars.get_paths()
    assert (box.vertices[:, 0].min(), box.vertices[:, 0].max()) == (1.0, 2.5)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "plain: peak 6 MiB",
        "plan: peak 4 MiB",
        "budget: 5 MiB",
    ]


def test_no_strip_without_recomputations() -> None:
    figure = plot_memory([Curve("plain", [0.0, 1.0], [512])], budget=1000)
    (axes,) = figure.axes
    assert axes.get_ylabel() == "memory (bytes)"
    assert axes.get_xlabel() == "time (s)"
