"""The published methods: legal schedules on any graph, and the optima the papers promise."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np
import pytest
from dags import graphs, optimum, plain_peak, unit_chain
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remat.solvers import griewank as griewank_module
from remat.solvers.checkpoint_all import checkpoint_all
from remat.solvers.chen import articulation_points, chen_greedy, chen_sqrt
from remat.solvers.feng_huang import cheapest_to_keep, divide, feng_huang
from remat.solvers.graph import Graph, Node
from remat.solvers.griewank import griewank
from remat.solvers.keep import keep, training
from remat.solvers.lp_rounding import lp_rounding, run_what_must
from remat.solvers.method import Method, Monitor, Problem
from remat.solvers.moccasin import moccasin
from remat.solvers.openai_modes import openai
from remat.solvers.order import memory_order
from remat.solvers.schedule import Schedule, simulate

UNTIMED = settings(deadline=None)
FEW = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
HEURISTICS: list[Method] = [checkpoint_all, chen_sqrt, chen_greedy, griewank, openai, feng_huang]
# May choose to recompute nothing, so they cannot fail where that fits.
ALWAYS_FEASIBLE = {checkpoint_all, chen_greedy, griewank, feng_huang}


def run(method: Method, graph: Graph, budget: int, **options: Any) -> Schedule | None:
    """What a method finds, checked by the simulator."""
    problem = Problem(graph, budget, workers=2, options=options)
    outcome = method(problem, Monitor(20.0))
    assert outcome.message
    if outcome.schedule is None:
        return None
    assert simulate(graph, outcome.schedule).peak <= budget
    return outcome.schedule


def overhead(graph: Graph, schedule: Schedule | None) -> float:
    assert schedule is not None
    return simulate(graph, schedule).cost / graph.cost - 1


@UNTIMED
@given(graphs(), st.sampled_from([1.0, 0.85, 0.7, 0.5]))
def test_heuristics_are_legal_and_within_budget_on_any_graph(graph: Graph, part: float) -> None:
    budget = int(plain_peak(graph) * part)
    for method in HEURISTICS:
        schedule = run(method, graph, budget)
        if part == 1.0 and method in ALWAYS_FEASIBLE:
            assert schedule is not None
            assert simulate(graph, schedule).cost == graph.cost


@FEW
@given(graphs(most=9), st.sampled_from([1.0, 0.8, 0.6]))
def test_moccasin_is_legal_and_within_budget_on_any_graph(graph: Graph, part: float) -> None:
    pytest.importorskip("ortools")
    schedule = run(moccasin, graph, int(plain_peak(graph) * part))
    assert schedule is not None or part < 1.0


@UNTIMED
@given(graphs(), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_any_rounding_gives_a_legal_schedule(graph: Graph, seed: int, part: float) -> None:
    stages = len(graph) + bool(graph.outputs)
    held = np.random.default_rng(seed).random((stages, len(graph))) < part
    schedule = run_what_must(graph, held)
    assert simulate(graph, schedule).cost >= graph.cost


@pytest.mark.parametrize("part", [1.0, 0.8])
def test_lp_rounding_keeps_the_budget_and_recomputes_nothing_where_all_fits(part: float) -> None:
    graph = small_network()
    schedule = run(lp_rounding, graph, int(plain_peak(graph) * part))
    if part == 1.0:
        assert overhead(graph, schedule) == 0
    else:
        assert 0 < overhead(graph, schedule) < 0.5


@FEW
@given(graphs(), st.sampled_from([0.0, 0.25, 1.0]))
def test_least_peak_within_an_overhead(graph: Graph, allowed: float) -> None:
    for method in HEURISTICS:
        problem = Problem(graph, plain_peak(graph), minimize="peak", max_overhead=allowed)
        schedule = method(problem, Monitor()).schedule
        if method in ALWAYS_FEASIBLE:
            assert schedule is not None
        if schedule is not None:
            result = simulate(graph, schedule)
            assert result.peak <= plain_peak(graph)
            assert result.cost <= (1 + allowed) * graph.cost


@pytest.mark.parametrize("method", [*HEURISTICS, moccasin])
@pytest.mark.parametrize("budget", [3, 4, 5, 7])
def test_no_method_beats_the_optimum(method: Method, budget: int) -> None:
    graph = unit_chain(6)
    schedule = run(method, graph, budget)
    if schedule is not None:
        assert simulate(graph, schedule).cost >= optimum(graph, budget)


@pytest.mark.parametrize("length", [1, 2, 5, 13, 40])
def test_revolve_meets_the_closed_form_on_unit_chains(length: int) -> None:
    graph = unit_chain(length)
    passes = training(graph, tuple(range(len(graph))))
    for stores in range(length + 1):
        schedule = griewank_module.reverse(passes, stores, hold=0)
        if schedule is None:  # more than 20 runs a node
            continue
        recomputed = len(schedule) - len(graph)
        assert recomputed == griewank_module.recomputations(length, stores)
        assert simulate(graph, schedule).peak <= stores + 3


@pytest.mark.parametrize(("reads", "least"), [(1, 4), (2, 6)])
@pytest.mark.parametrize("length", [4, 6, 8])
def test_griewank_is_optimal_on_unit_chains(length: int, reads: int, least: int) -> None:
    graph = unit_chain(length, reads)
    for budget in range(least, length + 3):
        schedule = run(griewank, graph, budget)
        assert schedule is not None
        assert simulate(graph, schedule).cost == optimum(graph, budget)


def test_moccasin_is_optimal_on_a_chain_with_copies_enough() -> None:
    pytest.importorskip("ortools")
    graph = unit_chain(5, reads=2)
    for budget in (4, 5, 6):
        schedule = run(moccasin, graph, budget, copies=4)
        assert schedule is not None
        assert simulate(graph, schedule).cost == optimum(graph, budget)


@pytest.mark.parametrize("generalisation", ["articulation", "linearised"])
def test_chen_sqrt_takes_the_memory_of_the_root_for_one_more_forward_pass(
    generalisation: str,
) -> None:
    graph = unit_chain(100, reads=2)
    schedule = run(chen_sqrt, graph, 26, generalisation=generalisation)
    assert overhead(graph, schedule) <= 0.5


def test_chen_greedy_is_between_no_recomputation_and_one_more_forward_pass() -> None:
    graph = unit_chain(100, reads=2)
    costs = [overhead(graph, run(chen_greedy, graph, budget)) for budget in (101, 70, 40, 26)]
    assert costs == sorted(costs)
    assert costs[0] == 0
    assert costs[1] > 0
    assert costs[-1] <= 0.5


def test_articulation_points_of_two_diamonds() -> None:
    #   0 - 1,2 - 3 - 4,5 - 6
    edges = ((0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5), (4, 6), (5, 6), (6, 7))
    nodes = (*(Node(str(i), 1, 1) for i in range(7)), Node("loss", 1, 1, backward=True))
    graph = Graph("diamonds", nodes, edges)
    assert articulation_points(training(graph, tuple(range(8)))) == (3,)


@UNTIMED
@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(0, 30))
def test_feng_huang_keeps_the_least_bytes_on_a_chain(sizes: list[int], bound: int) -> None:
    count = len(sizes)
    nodes = [Node(str(i), 1, size) for i, size in enumerate(sizes)]
    nodes.append(Node("loss", 1, 1, backward=True))
    graph = Graph("chain", tuple(nodes), tuple(itertools.pairwise(range(count + 1))))
    kept = cheapest_to_keep(divide(training(graph, tuple(range(count + 1)))), bound)

    def segments_fit(chosen: tuple[int, ...]) -> bool:
        ends = (-1, *chosen, count)
        return all(sum(sizes[a + 1 : b]) <= bound for a, b in itertools.pairwise(ends))

    assert segments_fit(tuple(sorted(kept)))
    assert sum(sizes[i] for i in kept) == min(
        sum(sizes[i] for i in chosen)
        for size in range(count + 1)
        for chosen in itertools.combinations(range(count), size)
        if segments_fit(chosen)
    )


@UNTIMED
@given(graphs())
def test_feng_huang_divides_every_graph_into_closed_sets(graph: Graph) -> None:
    passes = training(graph, tuple(range(len(graph))))
    tree = divide(passes)
    stops = [stop for closed in tree for stop in closed.stops]
    assert sorted(stops) == sorted(passes.forward)
    for closed in tree:
        parts = [tree[part] for part in closed.parts if part is not None]
        assert closed.size == sum(closed.stop_bytes) + sum(part.size for part in parts)
    assert cheapest_to_keep(tree, -1) == frozenset(passes.forward)


def small_network() -> Graph:
    """conv, bn, relu three times, and their gradients."""
    names = [f"{kind}{block}" for block in range(3) for kind in ("conv", "bn", "relu")]
    nodes = [Node(name, 9 if name.startswith("conv") else 1, 10) for name in names]
    nodes += [Node(f"{name}_backward", 2, 10, backward=True) for name in reversed(names)]
    edges = list(itertools.pairwise(range(18)))
    edges += [(i, 17 - i) for i in range(8)] + [(i, 16 - i) for i in range(8)]
    return Graph("net", tuple(nodes), tuple(edges))


def test_openai_modes_keep_what_they_say() -> None:
    graph = small_network()
    budget = plain_peak(graph)
    passes = training(graph, tuple(range(18)))
    by_name = run(openai, graph, budget, mode="collection", names=["conv0", "conv1", "conv2"])
    assert by_name == keep(passes, {0, 3, 6})
    assert run(openai, graph, budget, mode="collection", names="conv0,conv1,conv2") == by_name
    assert run(openai, graph, budget, mode=[0, 3, 6]) == by_name
    assert run(openai, graph, budget, mode="speed") == by_name
    assert by_name is not None
    assert [node for node in {*by_name} if by_name.count(node) > 1] == [1, 2, 4, 5]
    assert run(openai, graph, budget, mode="memory") == run(openai, graph, budget)


@pytest.mark.parametrize(
    ("method", "options", "complaint"),
    [
        (openai, {"mode": "fast"}, "mode is"),
        (openai, {"mode": [3, 99]}, "99 is not the index of a node"),
        (openai, {"mode": "collection"}, "needs names"),
        (openai, {"mode": "collection", "names": ["conv7"]}, "no node 'conv7'"),
        (openai, {"mode": "collection", "names": 5}, "names is 5"),
        (openai, {"mode": "collection", "names": [[1]]}, "list of nodes' names"),
        (openai, {"names": ["conv1"]}, 'names are for mode="collection"'),
        (chen_greedy, {"generalisation": "best"}, "generalisation is one of"),
        (chen_greedy, {"generalisation": [1]}, "generalisation is one of"),
        (chen_sqrt, {"segments": 3}, "no option 'segments'"),
        (griewank, {"stores": 3}, "it has none"),
        (moccasin, {"copies": 0}, "copies is 0"),
        (moccasin, {"copies": 1000}, "copies is 1000"),
    ],
)
def test_wrong_options_are_named(method: Method, options: dict[str, Any], complaint: str) -> None:
    graph = small_network()
    with pytest.raises(ValueError, match=complaint):
        method(Problem(graph, plain_peak(graph), options=options), Monitor())


def test_moccasin_allows_the_overhead_that_a_schedule_has() -> None:
    # Seven runs of equal cost, each rounded up, are above seven sixths of the whole.
    nodes = tuple(Node(str(number), 1.0, size) for number, size in enumerate((1, 2, 2, 2, 2, 1)))
    chain = Graph("chain", nodes, ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (0, 5)))
    outcome = moccasin(Problem(chain, 4, workers=2, max_overhead=1 / 6), Monitor(20.0))
    assert overhead(chain, outcome.schedule) == pytest.approx(1 / 6)


def test_moccasin_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ortools", "ortools.sat.python"):
        monkeypatch.setitem(sys.modules, name, None)
    graph = unit_chain(3)
    with pytest.raises(ModuleNotFoundError, match=r"pip install \"remat-tf\[moccasin\]\""):
        moccasin(Problem(graph, plain_peak(graph)), Monitor())


def test_what_a_writer_overwrites_is_not_read_again() -> None:
    """The weight's update runs before the gradients of the layer's input: no recomputation then."""
    nodes = (
        Node("weight_read", 1, 1),
        Node("layer", 1, 10),
        Node("loss", 1, 10),
        Node("update", 1, 0, recomputable=False, backward=True),
        Node("gradient", 1, 1, backward=True),
    )
    edges = ((0, 1), (1, 2), (2, 3), (1, 4), (3, 4))
    graph = Graph("step", nodes, edges, order=((0, 3), (1, 3)))
    schedule = keep(training(graph, tuple(range(5))), frozenset())
    assert schedule == (0, 1, 2, 3, 4)


@UNTIMED
@given(graphs())
def test_memory_order_is_never_worse_than_the_given_order(graph: Graph) -> None:
    order = memory_order(graph)
    assert sorted(order) == list(range(len(graph)))
    assert simulate(graph, order).peak <= plain_peak(graph)


def test_memory_order_applies_each_gradient_at_once() -> None:
    """Updates listed at the end hold all gradients; run at once they hold one."""
    layers = 10
    nodes = [Node(f"gradient{i}", 1, 100) for i in range(layers)]
    nodes += [Node(f"update{i}", 1, 0, recomputable=False) for i in range(layers)]
    graph = Graph("updates", tuple(nodes), tuple((i, layers + i) for i in range(layers)))
    assert plain_peak(graph) == 1000
    assert simulate(graph, memory_order(graph)).peak == 100


def test_thousands_of_nodes() -> None:
    graph = unit_chain(1500, reads=2)
    budget = plain_peak(graph) // 2
    for method in HEURISTICS[1:]:
        assert overhead(graph, run(method, graph, budget)) <= 0.5


@pytest.mark.parametrize("method", HEURISTICS)
def test_a_stop_does_not_wait_for_the_schedule_that_is_being_made(method: Method) -> None:
    class Stopping(Monitor):
        looks = 0

        def should_stop(self) -> bool:
            self.looks += 1
            return self.looks > 900

    graph = unit_chain(400, reads=2)
    proposed: list[Schedule] = []
    monitor = Stopping(on_schedule=proposed.append)
    method(Problem(graph, plain_peak(graph) // 2), monitor)
    assert 900 < monitor.looks < 910
    assert len(proposed) <= 3
