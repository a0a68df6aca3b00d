"""What holds for every method on every graph: legal, within the budget, never below the bound.

On graphs small enough to search, the optimum over all schedules is known, and
the exact methods must meet it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from dags import any_schedule, graphs, optimum, plain_peak, unit_chain
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remat.solvers import Graph, Node, Result, Status, frontier, simulate, solve
from remat.solvers.floor import precedence
from remat.solvers.method import Monitor, Problem
from remat.solvers.mip import BACKENDS, Builder, solve_mip
from remat.solvers.moments import decode, formulate, refine_order
from remat.solvers.solving import METHODS, OPTIMAL_GAP
from remat.solvers.tidy import in_given_order

# OR-tools cannot share a process with TensorFlow: "moccasin" is in test_published_methods.
AVAILABLE = [name for name in METHODS if name != "moccasin"]
COST_ONLY = {"checkmate", "lp_rounding", "moments"}
PARTS = st.sampled_from([1.0, 0.9, 0.75, 0.6, 0.45])


def few(examples: int) -> settings:
    return settings(
        deadline=None,
        max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def run(graph: Graph, budget: int, solver: str, **arguments: object) -> Result:
    """A solve, checked for all that a result promises."""
    # These two go on until the time is over, or the gap is closed.
    seconds = 0.5 if solver in ("auto", "gap_cover") else 5.0
    settings: dict[str, object] = {"time_limit": seconds, "workers": 1, **arguments}
    if solver == "anneal" and "moves" not in settings:
        settings["moves"] = 20_000
    result = solve(graph, budget, solver=solver, **settings)  # type: ignore[arg-type]
    assert result.seconds >= 0
    assert result.lower_bound >= graph.cost * (1 - 1e-12)
    if result.schedule is None:
        assert result.message
        assert result.status in (Status.NOTHING_FOUND, Status.INFEASIBLE)
        assert result.cost is result.peak is result.overhead is result.gap is None
        assert budget < plain_peak(graph)
        assert result.least_budget > budget
    else:
        truth = simulate(graph, result.schedule)
        assert (truth.peak, truth.cost) == (result.peak, result.cost)
        assert truth.peak <= budget
        assert truth.cost >= result.lower_bound * (1 - 1e-12)
        assert result.status in (Status.OPTIMAL, Status.FEASIBLE)
        assert result.least_budget <= truth.peak
    return result


@pytest.mark.parametrize("solver", AVAILABLE)
def test_legal_and_within_budget_or_why_not(solver: str) -> None:
    @few(4 if solver in ("lp_rounding", "checkmate", "auto") else 12)
    @given(graphs(most=10), PARTS)
    def check(graph: Graph, part: float) -> None:
        run(graph, int(plain_peak(graph) * part), solver)

    check()


@few(12)
@given(graphs(most=6), PARTS)
@pytest.mark.parametrize("backend", ["cbc", "highs"])
def test_checkmate_is_optimal_for_the_given_order(backend: str, graph: Graph, part: float) -> None:
    if backend == "cbc":
        pytest.importorskip("cylp")
    budget = int(plain_peak(graph) * part)
    result = run(graph, budget, "checkmate", backend=backend)
    least = optimum(graph, budget, in_stages=True)
    if result.cost is None:
        assert least == math.inf
    else:
        assert result.cost == pytest.approx(least)


@few(12)
@given(graphs(most=7), PARTS)
def test_auto_and_anneal_reach_the_optimum_of_all_orders(graph: Graph, part: float) -> None:
    budget = int(plain_peak(graph) * part)
    least = optimum(graph, budget)
    annealed = run(graph, budget, "anneal", moves=100_000)
    result = run(graph, budget, "auto", time_limit=2.0)
    if least == math.inf:
        assert annealed.schedule is result.schedule is None
    else:
        assert result.cost == pytest.approx(least)
        assert annealed.cost == pytest.approx(least)


@pytest.mark.parametrize("seed", range(3))
def test_annealing_finds_what_two_dear_changes_lead_to(seed: int) -> None:
    """Two nodes must run again here, one of them at the whole graph's cost."""
    sizes = [(0, 3, None), (1, 1, None), (0, 1, 1), (0, 0, None), (0, 3, 0), (0, 0, None)]
    nodes = tuple(
        Node(f"node{index}", cost, size, recomputable=index > 0, forward=forward)
        for index, (cost, size, forward) in enumerate(sizes)
    )
    graph = Graph("in place", nodes, ((0, 1), (1, 2), (0, 3), (2, 3), (0, 4), (1, 5), (2, 5)))
    result = run(graph, 4, "anneal", seed=seed, moves=100_000)
    assert result.cost == optimum(graph, 4) == 2.0


@pytest.mark.parametrize("seed", range(5))
def test_annealing_goes_on_after_the_first_that_fits(seed: int) -> None:
    """The first schedule within this budget runs both nodes that cost anything again."""
    sizes = [(1, 3, None), (1, 1, None), (0, 0, None), (0, 1, 1), (0, 0, None), (0, 3, 0)]
    nodes = tuple(
        Node(f"node{index}", cost, size, forward=forward)
        for index, (cost, size, forward) in enumerate([*sizes, (0, 0, None)])
    )
    edges = ((0, 1), (1, 3), (0, 4), (2, 4), (3, 4), (0, 5), (1, 6), (3, 6), (4, 6))
    graph = Graph("in place", nodes, edges)
    result = run(graph, 4, "anneal", seed=seed, moves=100_000)
    assert result.cost == optimum(graph, 4) == 3.0


@few(60)
@given(graphs(most=7), PARTS)
def test_auto_looks_at_all_schedules_of_a_few_nodes(graph: Graph, part: float) -> None:
    budget = int(plain_peak(graph) * part)
    result = run(graph, budget, "auto", time_limit=20.0)
    least = optimum(graph, budget)
    if least < math.inf:
        assert result.status is Status.OPTIMAL
        assert result.cost == result.lower_bound == pytest.approx(least)
    else:
        assert result.status is Status.INFEASIBLE
        if result.floor <= budget:  # the least budget is known exactly, too
            assert optimum(graph, result.least_budget - 1) == math.inf


@few(40)
@given(graphs(most=6), st.sampled_from([None, 0.0, 0.2, 0.5]))
def test_auto_finds_the_least_peak_of_a_few_nodes(graph: Graph, allowed: float | None) -> None:
    most = math.inf if allowed is None else graph.cost * (1 + allowed + 1e-9)
    peak = plain_peak(graph)
    result = run(graph, peak, "auto", minimize="peak", max_overhead=allowed, time_limit=20.0)
    assert result.peak is not None
    assert result.cost is not None
    assert result.cost <= most
    lower = optimum(graph, result.peak - 1)
    assert lower == math.inf or lower > most
    assert result.cost == result.lower_bound == pytest.approx(optimum(graph, result.peak))


@pytest.mark.parametrize("solver", ["gap_cover", "moments"])
def test_the_bound_is_below_the_optimum_of_all_orders(solver: str) -> None:
    @few(40)
    @given(graphs(most=7), PARTS)
    def check(graph: Graph, part: float) -> None:
        budget = int(plain_peak(graph) * part)
        result = run(graph, budget, solver, time_limit=0.5)
        assert result.lower_bound <= optimum(graph, budget) * (1 + 1e-9)
        if result.status is Status.INFEASIBLE:
            assert optimum(graph, budget) == math.inf

    check()


@few(150)
@given(graphs(most=7), PARTS, st.data())
def test_any_program_over_moments_is_a_bound(
    graph: Graph, part: float, data: st.DataObject
) -> None:
    """Whichever nodes are looked at: where they are chosen badly, the bound is low."""
    budget = int(plain_peak(graph) * part)
    order = precedence(graph)
    chain: list[int] = []
    for index in sorted(data.draw(st.sets(st.integers(0, len(graph) - 1), max_size=3))):
        if all(order.ancestors[index] >> other & 1 for other in chain):
            chain.append(index)
    beside = [index for index in range(len(graph)) if index not in chain]
    once = [index for index in beside if not graph.nodes[index].recomputable]
    floats = data.draw(st.lists(st.sampled_from(once), unique=True)) if once else []
    inner = data.draw(st.lists(st.sampled_from(beside), unique=True)) if beside else []
    program = formulate(graph, order, budget, chain, inner, floats)
    solution = solve_mip(program.formulation, time_limit=20, backend="highs")
    least = optimum(graph, budget)
    if solution.values is None:
        assert solution.status == "infeasible"
        assert least == math.inf
    else:
        assert graph.cost * solution.bound / 100 <= least * (1 + 1e-6)
        simulate(graph, decode(graph, program, solution.values))  # legal


@few(60)
@given(graphs(most=9), PARTS)
def test_the_best_of_an_order_is_no_dearer_than_what_the_order_is_from(
    graph: Graph, part: float
) -> None:
    budget = int(plain_peak(graph) * part)
    schedule = run(graph, budget, "anneal", moves=300).schedule
    if schedule is None:
        return
    found = refine_order(Problem(graph, budget), Monitor(20), schedule, 20)
    assert found is not None
    assert simulate(graph, found).cost <= simulate(graph, schedule).cost * (1 + 1e-3)


def test_a_node_that_floats_may_become_a_moment() -> None:
    # Node 8, which runs once and before which 5 must run, gets a cut of its own first.
    costs = (0, 0, 3, 0, 0, 2, 1, 2, 2, 0, 3)
    sizes = (4, 1, 0, 3, 0, 3, 3, 3, 3, 1, 4)
    workspaces = (2, 2, 1, 0, 0, 2, 1, 2, 2, 0, 1)
    nodes = tuple(
        Node(f"node{i}", cost, size, workspace=workspace, recomputable=i not in (1, 8))
        for i, (cost, size, workspace) in enumerate(zip(costs, sizes, workspaces, strict=True))
    )
    edges = ((0, 1), (0, 2), (0, 3), (0, 4), (3, 4), (3, 5))
    edges += ((4, 6), (6, 7), (6, 8), (6, 10), (7, 9), (8, 9))
    graph = Graph("float", nodes, edges, outputs=(10,), order=((0, 8), (5, 8)))
    run(graph, 10, "moments", time_limit=2)  # legal, or says why not


def test_what_a_writer_overwrites_may_be_written_itself() -> None:
    # "read" runs again before "update", which must come before "slot".
    nodes = (
        Node("read", 0, 2),
        Node("other", 0.3, 3),
        Node("gradient", 8, 1),
        Node("update", 0.5, 0, recomputable=False),
        Node("slot", 0.3, 1, recomputable=False),
    )
    graph = Graph("writers", nodes, ((0, 2),), order=((3, 4), (0, 3)))
    result = run(graph, 3, "moments", time_limit=20)
    assert result.status is Status.OPTIMAL
    assert result.cost == optimum(graph, 3)


def test_what_is_returned_may_be_computed_again_before_its_weights_change() -> None:
    # "scores" are returned, and too large to be kept while "backward" runs; "update"
    # overwrites what they are computed from.
    nodes = (
        Node("x", 1, 2),
        Node("scores", 3, 10),
        Node("gradient", 1, 4),
        Node("update", 1, 1, recomputable=False),
        Node("backward", 1, 12),
        Node("end", 1, 1, recomputable=False),
    )
    edges = ((0, 1), (1, 2), (0, 3), (2, 3), (2, 4), (4, 5))
    graph = Graph("returned", nodes, edges, outputs=(1,), order=((1, 3),))
    result = solve(graph, 20, solver="moments", time_limit=20)
    assert result.status is Status.OPTIMAL
    assert result.cost == optimum(graph, 20) == graph.cost + 3


@pytest.mark.parametrize("cost", [1, 0])
@pytest.mark.parametrize("solver", ["moments", "auto"])
def test_a_budget_above_the_floor_is_proven_infeasible(solver: str, cost: float) -> None:
    # While m2 runs, p or q is held, too; no node alone says so.
    once = {"recomputable": False}
    nodes = (
        Node("p", cost, 10, **once),  # type: ignore[arg-type]
        Node("q", cost, 10, **once),  # type: ignore[arg-type]
        Node("m1", cost, 5),
        Node("m2", cost, 20),
        Node("end", cost, 1),
    )
    graph = Graph("either", nodes, ((0, 1), (0, 2), (2, 3), (3, 4), (1, 4)))
    result = solve(graph, 33, solver=solver, time_limit=20)
    assert result.floor <= 33
    assert optimum(graph, 33) == math.inf
    assert result.status is Status.INFEASIBLE
    assert math.isfinite(result.lower_bound)
    assert solve(graph, result.least_budget, solver="checkpoint_all").overhead == 0


@few(60)
@given(graphs(most=7))
def test_no_schedule_is_below_the_proven_floor(graph: Graph) -> None:
    result = solve(graph, 0, solver="checkpoint_all", time_limit=1e-3)
    if result.floor > 0:
        assert result.status is Status.INFEASIBLE
        assert optimum(graph, result.floor - 1) == math.inf
        assert result.least_budget >= result.floor


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_solver_gives_what_it_has_found_when_time_is_up(backend: str) -> None:
    """A knapsack of 100 things and 5 limits: easy to fill, hard to prove full."""
    random = np.random.default_rng(0)
    sizes = random.integers(1, 1000, (5, 100))
    builder = Builder()
    things = [builder.variable(-float(worth)) for worth in sizes.mean(0)]
    for row in sizes:
        builder.constraint(list(zip(map(float, row), things, strict=True)), upper=row.sum() / 2)
    monitor = Monitor(10.0)
    solution = solve_mip(
        builder.build(),
        time_limit=monitor.remaining(),
        backend=backend,
        should_stop=monitor.should_stop,
    )
    assert solution.status == "feasible"
    assert solution.objective is not None
    assert -np.inf < solution.bound < solution.objective < 0


@pytest.mark.parametrize("budget", range(4, 9))
def test_exact_methods_agree_on_a_chain(budget: int) -> None:
    graph = unit_chain(4, reads=2)
    least = optimum(graph, budget)
    for solver in ("checkmate", "auto", "anneal"):
        result = run(graph, budget, solver)
        assert result.cost == (None if least == math.inf else least)
    proof = solve(graph, budget, solver="auto", workers=2, time_limit=60)
    if proof.schedule is not None:
        assert proof.status is Status.OPTIMAL
        assert proof.gap is not None
        assert proof.gap <= OPTIMAL_GAP


def full(**changes: object) -> Graph:
    """Everything that a graph can ask for, small enough to know the answer.

    a -> b -> c -> d -> e(reads a too); ``once`` reads b and must run once,
    ``writer`` overwrites what b reads.
    """
    nodes = (
        Node("a", 1, 4),
        Node("b", 2, 4, workspace=3),
        Node("once", 1, 2, recomputable=False),
        Node("c", 3, 6),
        Node("in_place", 1, 6, forward=3),
        Node("writer", 1, 0, recomputable=False, backward=True),
        Node("d", 1, 3, backward=True),
        Node("e", 1, 2, backward=True),
    )
    edges = ((0, 1), (1, 2), (1, 3), (3, 4), (4, 5), (4, 6), (2, 6), (1, 6), (6, 7), (0, 7))
    settings: dict[str, object] = {
        "resident": 10, "outputs": (2, 7), "order": ((1, 5),), **changes,
    }  # fmt: skip
    return Graph("full", nodes, edges, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("solver", AVAILABLE)
def test_every_property_of_a_graph_is_honoured(solver: str) -> None:
    graph = full()
    for budget in range(plain_peak(graph), 20, -1):
        result = run(graph, budget, solver)
        assert (result.cost or math.inf) >= optimum(graph, budget)
        if result.schedule is None:
            break
        runs = [result.schedule.count(index) for index in range(len(graph))]
        assert runs[2] == runs[5] == 1
        assert 1 not in result.schedule[result.schedule.index(5) :]


@pytest.mark.parametrize("solver", sorted(COST_ONLY))
@pytest.mark.parametrize("budget", ["1%", "100%"])
def test_who_cannot_minimize_the_peak_says_so(solver: str, budget: str) -> None:
    with pytest.raises(ValueError, match=f'{solver} minimizes the cost only.* choose "auto"'):
        solve(unit_chain(8, reads=2), budget, solver=solver, minimize="peak")


@pytest.mark.parametrize("solver", [name for name in AVAILABLE if name not in COST_ONLY])
def test_least_peak_within_an_overhead(solver: str) -> None:
    graph = unit_chain(8, reads=2)
    budget = plain_peak(graph)
    for allowed in (0.0, 0.25, 0.5):
        result = run(graph, budget, solver, minimize="peak", max_overhead=allowed)
        if result.overhead is not None:
            assert result.overhead <= allowed + 1e-12
    assert result.peak is not None
    if solver in ("auto", "anneal"):
        least = min(b for b in range(4, budget) if optimum(unit_chain(8, reads=2), b) <= 24)
        assert result.peak == least


def test_a_lower_peak_is_never_promised_beyond_the_overhead() -> None:
    graph = unit_chain(12, reads=2)
    plain = run(graph, plain_peak(graph), "anneal", minimize="peak", max_overhead=0.0)
    half = run(graph, plain_peak(graph), "anneal", minimize="peak", max_overhead=0.5)
    assert plain.peak is not None
    assert half.peak is not None
    assert half.peak < plain.peak


@few(6)
@given(graphs(most=8))
def test_a_frontier_never_rises(graph: Graph) -> None:
    peak = plain_peak(graph)
    budgets = [peak, int(0.8 * peak), int(0.6 * peak), int(0.7 * peak)]
    results = frontier(graph, budgets, solver="anneal", moves=10_000, workers=1)
    assert [result.budget for result in results] == budgets
    by_budget = sorted(results, key=lambda result: result.budget)
    costs = [math.inf if result.cost is None else result.cost for result in by_budget]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == graph.cost
    for result in results:
        if result.schedule is not None:
            assert simulate(graph, result.schedule).peak <= result.budget
            assert result.status in (Status.OPTIMAL, Status.FEASIBLE)


@few(10)
@given(graphs(most=12), st.integers(0, 2**32))
def test_the_same_seed_and_moves_give_the_same_schedule(graph: Graph, seed: int) -> None:
    budget = int(plain_peak(graph) * 0.7)
    first, second = (
        run(graph, budget, "anneal", moves=5000, seed=seed, workers=2) for _ in range(2)
    )
    assert first.schedule == second.schedule
    assert first.least_budget == second.least_budget


@few(300)
@given(graphs(), st.integers(0, 2**32 - 1))
def test_putting_runs_in_the_given_order_costs_nothing(graph: Graph, seed: int) -> None:
    schedule = any_schedule(graph, seed)
    ordered = in_given_order(graph, schedule)
    assert sorted(ordered) == sorted(schedule)
    assert simulate(graph, ordered).peak <= simulate(graph, schedule).peak  # and it is legal
    assert copies_read(graph, ordered) == copies_read(graph, schedule)


def copies_read(graph: Graph, schedule: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """(node, which run of it, node that it reads, which copy of that), sorted."""
    runs = [0] * len(graph)
    found = []
    for index in schedule:
        found += [
            (index, runs[index], source, runs[source]) for source in graph.predecessors[index]
        ]
        runs[index] += 1
    return sorted(found)


def test_what_was_left_for_later_runs_where_it_was_given() -> None:
    # Two gradients of weights, 3 and 5, that the next gradients do not wait for.
    edges = ((0, 1), (0, 2), (1, 3), (2, 3), (2, 4), (0, 4), (0, 5), (4, 5))
    graph = Graph("step", tuple(Node(str(i), 1, 1) for i in range(6)), edges)
    assert in_given_order(graph, (0, 1, 2, 4, 5, 3)) == (0, 1, 2, 3, 4, 5)
    # It stays where it is if it would be in the way of what is larger.
    sizes = (1, 1, 1, 4, 1, 4)
    nodes = tuple(Node(str(i), 1, size) for i, size in enumerate(sizes))
    large = Graph("step", nodes, edges, outputs=(3,))
    assert in_given_order(large, (0, 1, 2, 4, 5, 3)) == (0, 1, 2, 4, 5, 3)
    # What runs again does so when it is needed.
    assert in_given_order(graph, (0, 1, 0, 2, 3, 4, 5)) == (0, 1, 0, 2, 3, 4, 5)
    assert in_given_order(graph, (0, 1, 2, 0, 3, 4, 5)) == (0, 1, 2, 3, 0, 4, 5)
