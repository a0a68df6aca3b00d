"""``solve`` as its users call it: arguments, time, signals, hostile input, files."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from dags import plain_peak, skip_training, unit_chain

from experiments.graphs import training_graph
from remat.solvers import (
    Graph,
    GraphError,
    Node,
    Plan,
    PlanError,
    Result,
    ScheduleError,
    Status,
    frontier,
    load_graph,
    mip,
    save_graph,
    simulate,
    solve,
)
from remat.solvers.budget import is_share, parse_budget
from remat.solvers.method import Monitor, Outcome, Problem
from remat.solvers.solving import METHODS, load_method

CHAIN = unit_chain(10, reads=2)
FAST = ("auto", "anneal", "checkpoint_all", "chen_greedy", "griewank", "feng_huang")


# No bound meets the best schedule at 40 %, so a solve takes all of its time.
HARD = training_graph(120)


# Arguments


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"solver": "magic"}, "there is no solver 'magic'; choose one of auto"),
        ({"time_limit": 0}, "time_limit is 0"),
        ({"time_limit": math.nan}, "time_limit is nan"),
        ({"time_limit": math.inf}, "time_limit is inf"),
        ({"max_overhead": -0.1}, "max_overhead is -0.1"),
        ({"minimize": "time"}, "minimize is 'time'"),
        ({"workers": 0}, "workers is 0"),
        ({"workers": 1.5}, "workers is 1.5; it must be a whole number"),
        ({"start": 5}, "start is 5; it must be a schedule"),
        ({"max_gap": "wide"}, "max_gap is 'wide'; it must be a number"),
        ({"lower_bound": math.inf}, "lower_bound is inf; it must be seconds"),
        ({"seed": "a"}, "seed is 'a'; it must be a whole number"),
        ({"time_limit": "3"}, "time_limit is '3'; it must be a number"),
        ({"solver": "anneal", "moves": True}, "moves is True"),
        ({"seed": -1}, "seed is -1"),
        ({"budget": -1}, "budget is -1 bytes"),
        ({"budget": 0.0}, r"not in \(0, 1\]"),
        ({"budget": "150%"}, r"not in \(0, 1\]"),
        ({"budget": math.nan}, "finite"),
        ({"budget": "4 bananas"}, "not an amount of memory"),
        ({"budget": "1,5GiB"}, "not an amount of memory"),
        ({"budget": None}, "a budget is a number of bytes"),
        ({"solver": "anneal", "moves": 0}, "moves is 0"),
        ({"solver": "anneal", "seconds": "1"}, "seconds is '1'"),
        ({"solver": "checkmate", "backend": "gurobi"}, "backend is one of cbc, highs"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], complaint: str) -> None:
    settings = {"budget": 10, **arguments}
    with pytest.raises(ValueError, match=complaint):
        solve(CHAIN, settings.pop("budget"), **settings)


@pytest.mark.parametrize("solver", METHODS)
def test_an_option_that_a_solver_does_not_have_is_named(solver: str) -> None:
    with pytest.raises(ValueError, match="no option 'tempo'"):
        solve(CHAIN, 12, solver=solver, tempo=3)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (123, 123),
        ("123", 123),
        ("1_000", 1000),
        ("1,000,000", 1_000_000),
        ("2KiB", 2048),
        ("1.5 GiB", 3 * 2**29),
        ("900MB", 900_000_000),
        (np.int64(4096), 4096),
        (np.float64(0.5), 5 * (2**60 + 1)),
        (0.7, 7 * (2**60 + 1)),
        ("70%", 7 * (2**60 + 1)),
        ("0.7", 7 * (2**60 + 1)),
        ("100%", 10 * (2**60 + 1)),
        (1.0, 10 * (2**60 + 1)),
    ],
)
def test_budgets_are_exact(budget: int | float | str, expected: int) -> None:
    assert parse_budget(budget, 10 * (2**60 + 1)) == expected
    assert is_share(budget) == (expected % (2**60 + 1) == 0)


def test_a_method_of_the_users_own_is_judged_like_any_other() -> None:
    best = solve(CHAIN, 12)
    seen: list[int] = []

    def mine(problem: Problem, monitor: Monitor) -> Outcome:
        seen.append(problem.options["depth"])
        monitor.found(tuple(range(len(problem.graph))))  # over the budget
        return Outcome(best.schedule)

    result = solve(CHAIN, 12, solver=mine, depth=3)
    assert (result.solver, result.cost, seen) == ("mine", best.cost, [3])

    def wrong(problem: Problem, monitor: Monitor) -> Outcome:
        return Outcome((0, 0))

    with pytest.raises(ScheduleError, match="never runs"):
        solve(CHAIN, 12, solver=wrong)


def test_a_start_is_checked_and_used() -> None:
    with pytest.raises(ScheduleError, match="reads node 0"):
        solve(CHAIN, 8, start=[1, 0])
    best = solve(CHAIN, 8, solver="anneal", moves=200_000)
    assert best.schedule is not None
    again = solve(CHAIN, 8, solver="anneal", moves=1, start=best.schedule)
    assert again.cost == best.cost


def test_budget_and_overhead_that_cannot_both_be_met() -> None:
    cheapest = solve(CHAIN, 8, time_limit=60)
    assert cheapest.status is Status.OPTIMAL
    assert cheapest.overhead is not None
    limits = {"max_overhead": cheapest.overhead / 2}
    refused = solve(CHAIN, 8, **limits, time_limit=20)  # type: ignore[arg-type]
    assert refused.status is Status.INFEASIBLE
    assert f"overhead of {100 * cheapest.overhead:.3f} % or more" in refused.message
    assert refused.least_budget > 8
    known = solve(CHAIN, refused.least_budget, **limits, time_limit=5)  # type: ignore[arg-type]
    assert known.schedule is not None
    below = solve(CHAIN, 1, **limits)  # type: ignore[arg-type]
    assert below.status is Status.INFEASIBLE
    assert solve(CHAIN, below.least_budget, **limits, time_limit=5).schedule is not None  # type: ignore[arg-type]


@pytest.mark.parametrize(("limits", "longest"), [({}, 30.0), ({"time_limit": 1.0}, 1.0)])
def test_only_the_default_time_limit_is_extended_for_a_proof(
    limits: dict[str, Any], longest: float
) -> None:
    left: list[float] = []

    def persistent(problem: Problem, monitor: Monitor) -> Outcome:
        while monitor.persist():
            pass
        left.append(monitor.elapsed() + monitor.remaining())
        monitor.conclude(0.0)
        return Outcome(None)

    solve(CHAIN, 8, solver=persistent, **limits)
    assert left == [pytest.approx(longest, abs=0.01)]


def test_progress_is_told_from_the_calling_thread_and_never_gets_worse() -> None:
    told: list[Result] = []
    threads = set()

    def progress(result: Result) -> None:
        told.append(result)
        threads.add(threading.current_thread())

    result = solve(HARD, 0.4, time_limit=1.5, progress=progress)
    assert threads == {threading.current_thread()}
    assert told[-1] == result
    overheads = [math.inf if r.overhead is None else r.overhead for r in told]
    assert overheads == sorted(overheads, reverse=True)
    bounds = [r.lower_bound for r in told]
    assert bounds == sorted(bounds)


def test_a_solver_that_breaks_down_leaves_annealing_its_time() -> None:
    def kill() -> None:
        while not done.wait(0.01):
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if any("mip_backends" in word for word in child.cmdline()):
                        child.kill()

    done = threading.Event()
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        result = solve(HARD, 0.4, time_limit=2)
    finally:
        done.set()
        killer.join()
    assert result.schedule is not None
    assert "broke down" in result.message


def test_a_solver_that_is_told_to_end_before_it_is_ready_answers() -> None:
    builder = mip.Builder()
    builder.variable(cost=1.0, lower=1.0)
    question = io.BytesIO()
    np.savez(question, deadline=time.time() + 60, relative_gap=0.0, **vars(builder.build()))
    child = mip._Child("cbc")
    try:
        child.tell()  # it has not even read its own code yet
        assert child.ask(question.getvalue()) is not None
    finally:
        child.end()


def test_sizes_that_solvers_refuse_prove_nothing() -> None:
    """HiGHS takes no coefficient of 1e15, and says no more than of an infeasible program."""
    huge = 10**15
    sizes = (huge + 1, 1, 1, 3, huge + 1, huge, 2, 2)
    edges = ((0, 1), (0, 4), (2, 3), (2, 4), (2, 6), (3, 5), (4, 5), (4, 6), (5, 6))
    graph = Graph("huge", tuple(Node(f"n{i}", 1.0, size) for i, size in enumerate(sizes)), edges)
    budget = solve(graph, "100%", minimize="peak", max_overhead=0.0).peak
    assert solve(graph, budget, solver="moments").schedule is not None


def test_where_all_schedules_are_looked_at_no_peak_is_proven_to_be_none() -> None:
    chain = unit_chain(4)
    assert solve(chain, 4, max_overhead=0.0).status is Status.INFEASIBLE
    assert solve(chain, 4, max_overhead=0.0, minimize="peak").status is Status.INFEASIBLE


def test_a_move_limit_is_not_cut_by_the_default_time_limit() -> None:
    limit = solve(HARD, 0.4, solver="anneal", time_limit=0.5, moves=10**9)
    assert limit.seconds < 1
    assert "time limit came before the last move" in limit.message
    whole = [solve(HARD, 0.6, solver="anneal", moves=100_000, seed=3) for _ in range(2)]
    assert whole[0].schedule == whole[1].schedule
    assert not whole[0].message


def test_an_error_in_progress_ends_the_solve_at_once() -> None:
    def progress(result: Result) -> None:
        raise OSError("disk full")

    before = time.monotonic()
    with pytest.raises(OSError, match="disk full"):
        solve(HARD, 0.4, time_limit=300, progress=progress)
    assert time.monotonic() - before < 200  # not a timing: far from the limit


def test_solving_in_a_thread_leaves_signals_alone() -> None:
    found: list[Result] = []
    thread = threading.Thread(
        target=lambda: found.append(solve(CHAIN, 8, solver="anneal", moves=50_000))
    )
    thread.start()
    thread.join()
    assert found[0].schedule is not None


@pytest.mark.parametrize("solver", ["auto", "anneal", "gap_cover"])  # hot still, for most of it
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_returns_the_best_so_far(number: int, solver: str) -> None:
    timer = threading.Timer(1.0, os.kill, (os.getpid(), number))
    handler = signal.getsignal(number)
    timer.start()
    result = solve(HARD, 0.4, solver=solver, time_limit=120)
    assert result.status is Status.INTERRUPTED
    assert result.schedule is not None
    assert result.seconds < 100
    assert signal.getsignal(number) is handler


def test_a_frontier_keeps_the_order_of_its_budgets_and_shares_what_it_finds() -> None:
    results = frontier(CHAIN, ["50%", 12, 0.8], solver="anneal", moves=20_000)
    peak = plain_peak(CHAIN)
    assert [result.budget for result in results] == [peak // 2, 12, int(0.8 * peak)]
    costs = {result.budget: result.cost or math.inf for result in results}
    assert [costs[b] for b in sorted(costs)] == sorted(costs.values(), reverse=True)


def test_a_frontier_of_peaks_is_optimal_only_at_the_floor() -> None:
    for result in frontier(CHAIN, ["100%", "60%"], solver="chen_sqrt", minimize="peak"):
        assert result.peak is not None
        assert (result.status is Status.OPTIMAL) == (result.peak <= result.floor)
        assert result.status in (Status.OPTIMAL, Status.FEASIBLE)


def test_a_misspelt_key_of_a_graph_is_named() -> None:
    document = unit_chain(2).to_json()
    document["nodes"][1]["recomputible"] = False
    with pytest.warns(UserWarning, match="node 1: 'recomputible' is not read; is it 'recomputa"):
        Graph.from_json(document)


def test_the_least_peak_comes_at_its_least_cost() -> None:
    graph = unit_chain(10)
    lean = solve(graph, "100%", minimize="peak")
    assert (lean.status, lean.peak) == (Status.OPTIMAL, lean.floor)
    assert "no schedule has a lower peak (proven)" in lean.message
    cheapest = solve(graph, lean.floor, time_limit=10)
    assert lean.cost == pytest.approx(cheapest.cost, rel=0.02)


def test_first_runs_beside_the_moments_are_proven_for() -> None:
    """At their peaks run gradients that the backward pass need not wait for."""
    for budget in ("70%", "60%"):
        result = solve(skip_training(2), budget, time_limit=30)
        assert result.status is Status.OPTIMAL


@pytest.mark.parametrize("solver", ["openai", "griewank", "chen_greedy", "feng_huang"])
def test_the_least_budget_is_that_of_every_schedule_tried(solver: str) -> None:
    lean = solve(CHAIN, plain_peak(CHAIN), solver=solver, minimize="peak")
    assert lean.peak is not None
    refused = solve(CHAIN, lean.peak - 1, solver=solver)
    assert refused.schedule is None
    assert refused.least_budget <= lean.peak


def test_a_method_needs_no_name() -> None:
    result = solve(CHAIN, "100%", solver=functools.partial(load_method("checkpoint_all")))
    assert result.overhead == 0


def test_a_frontier_ends_where_it_is_interrupted_whatever_is_proven() -> None:
    """No schedule fits any of the budgets, and the least peak is looked for meanwhile."""
    count = 400
    backward = tuple((index, count - 1 - index) for index in range(count // 2 - 1))
    edges = (*((index, index + 1) for index in range(count - 1)), *backward)
    graph = Graph("chain", tuple(Node(str(n), 1.0, 1 + n % 9) for n in range(count)), edges)
    seen = []

    def interrupt(result: Result) -> None:
        if not seen:
            os.kill(os.getpid(), signal.SIGINT)
        seen.append(result)

    (result,) = frontier(graph, [10, 9, 8], time_limit=3, workers=1, progress=interrupt)
    assert result.status is Status.INFEASIBLE
    assert result.stopped


def test_a_frontier_goes_down_to_what_is_infeasible() -> None:
    graph = unit_chain(5)
    results = frontier(graph, [1, 2, 5, 6], solver="anneal", moves=20_000)
    assert [result.status for result in results[:2]] == [Status.INFEASIBLE] * 2
    assert results[3].overhead == 0


def test_importing_is_light() -> None:
    heavy = ("tensorflow", "keras", "numpy", "scipy", "numba", "cylp", "ortools", "matplotlib")
    program = (
        "import sys, remat, remat.solvers, remat.cli\n"
        "from remat.solvers import solve, load_graph, Plan\n"
        "from remat.cli_solve import register\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("[]", "['numpy']")


def test_no_solver_imports_tensorflow() -> None:
    program = (
        "import sys\n"
        "from remat.solvers import Graph, Node, solve\n"
        "from remat.solvers.solving import METHODS\n"
        "nodes = tuple(Node(str(i), 1.0, 1) for i in range(4))\n"
        "graph = Graph('chain', nodes, ((0, 1), (1, 2), (2, 3)))\n"
        "for name in METHODS:\n"
        "    if name != 'moccasin':\n"
        "        assert solve(graph, 1.0, solver=name, time_limit=5).overhead == 0, name\n"
        "print('tensorflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


# Hostile graphs


def nodes(*sizes: int, cost: float = 1.0) -> tuple[Node, ...]:
    return tuple(Node(f"n{i}", cost, size) for i, size in enumerate(sizes))


@pytest.mark.parametrize("solver", FAST)
@pytest.mark.parametrize(
    "graph",
    [
        Graph("one", nodes(5), ()),
        Graph("apart", nodes(1, 2, 3, 4), ((0, 1), (2, 3))),
        Graph("no edges", nodes(1, 2, 3), ()),
        Graph("twice", nodes(1, 2, 3), ((0, 1), (0, 1), (1, 2), (0, 2), (0, 2))),
        Graph("free", nodes(1, 2, 3, 4, cost=0.0), ((0, 1), (1, 2), (2, 3), (0, 3))),
        Graph("empty values", nodes(0, 0, 0), ((0, 1), (1, 2))),
        Graph("huge", nodes(2**60, 2**60, 2**60, 2**60), ((0, 1), (1, 2), (2, 3), (0, 3))),
        Graph("vast", nodes(2**70, 1, 2**70, 2**69), ((0, 1), (1, 2), (2, 3), (0, 3))),
        Graph("resident", nodes(1, 2, 1), ((0, 1), (1, 2)), resident=2**62),
        Graph("tiny costs", nodes(1, 2, 3, cost=1e-300), ((0, 1), (1, 2))),
        Graph("great costs", nodes(1, 2, 3, cost=1e200), ((0, 1), (1, 2))),
    ],
    ids=lambda graph: graph.name,
)
def test_strange_graphs_are_solved(solver: str, graph: Graph) -> None:
    peak = plain_peak(graph)
    result = solve(graph, peak, solver=solver, time_limit=30)
    assert result.overhead == 0
    assert result.status is Status.OPTIMAL
    below = solve(graph, result.floor, solver=solver, time_limit=2)
    if below.schedule is not None:
        assert simulate(graph, below.schedule).peak <= result.floor
    if result.floor > 0:
        infeasible = solve(graph, result.floor - 1, solver=solver, time_limit=2)
        assert infeasible.status is Status.INFEASIBLE
        assert infeasible.least_budget >= result.floor
        assert graph.nodes[infeasible.floor_nodes[0]].name in infeasible.message
        with pytest.raises(ValueError, match="option 'seconds'"):  # below the floor, too
            solve(graph, infeasible.floor - 1, seconds=1)
        with pytest.raises(ValueError, match="backend is one of cbc, highs"):
            solve(graph, infeasible.floor - 1, solver="moments", backend="scip")


@pytest.mark.parametrize("size", [1, 2**40, 2**60])
def test_budgets_at_the_exact_edge(size: int) -> None:
    """The chain needs 4 values of its size for some recomputation, 3 never suffice."""
    graph = Graph(
        "chain",
        tuple(Node(node.name, node.cost, size) for node in unit_chain(4).nodes),
        unit_chain(4).edges,
    )
    exact = solve(graph, 4 * size, solver="auto", time_limit=10)
    assert exact.peak == 4 * size
    assert exact.cost == solve(unit_chain(4), 4, solver="auto", time_limit=10).cost
    less = solve(graph, 4 * size - 1, solver="auto", time_limit=2)
    assert less.schedule is None or less.cost > exact.cost  # type: ignore[operator]


@cache
def dense(count: int) -> Graph:
    rng = random.Random(0)
    edges: set[tuple[int, int]] = set()
    while len(edges) < 100_000:
        a, b = rng.randrange(count), rng.randrange(count)
        if a != b:
            edges.add((min(a, b), max(a, b)))
    return Graph("dense", nodes(*(rng.randint(1, 99) for _ in range(count))), tuple(sorted(edges)))


@pytest.mark.parametrize("solver", FAST)
@pytest.mark.parametrize("count", [500, 2000])
def test_a_hundred_thousand_edges(count: int, solver: str) -> None:
    graph = dense(count)
    result = solve(graph, 0.97, solver=solver, time_limit=3)
    if result.schedule is None:
        assert result.message
    else:
        assert simulate(graph, result.schedule).peak <= result.budget


@pytest.mark.parametrize("solver", ["auto", "feng_huang"])
def test_a_value_that_ten_thousand_nodes_read(solver: str) -> None:
    count = 10_000
    edges = tuple((0, i) for i in range(1, count)) + tuple((i, i + 1) for i in range(1, count - 1))
    graph = Graph("star", nodes(*[7] * count), edges)
    assert solve(graph, 1.0, solver=solver, time_limit=5).overhead == 0


def test_a_node_that_reads_thirty_thousand() -> None:
    count = 30_000
    graph = Graph(
        "fan",
        nodes(5, *[1] * count, 1, 1),
        (*((i, count + 1) for i in range(1, count + 1)), (0, count + 2), (count + 1, count + 2)),
    )
    # Within the budget only if what the last node reads comes late.
    result = solve(graph, count + 1, solver="anneal", time_limit=5)
    assert result.peak is None or result.peak <= count + 1
    assert result.status is not Status.INTERRUPTED


@pytest.mark.parametrize("solver", ["chen_sqrt", "griewank", "anneal"])
def test_an_overhead_that_a_result_has_is_one_to_ask_for(solver: str) -> None:
    chain = unit_chain(14, reads=2)
    priced = Graph(
        chain.name, tuple(Node(node.name, 0.1, node.bytes) for node in chain.nodes), chain.edges
    )
    found = solve(priced, 0.8, solver=solver, time_limit=1)
    assert found.overhead is not None
    again = solve(priced, 0.8, solver=solver, time_limit=1, max_overhead=found.overhead)
    assert again.overhead == pytest.approx(found.overhead)


@pytest.mark.parametrize("solver", ["auto", "gap_cover", "lp_rounding", "anneal"])
def test_a_budget_without_bounds(solver: str) -> None:
    assert solve(CHAIN, 10**30, solver=solver, time_limit=5).overhead == 0
    with pytest.raises(ValueError, match="a budget of 401 digits is more than any memory"):
        solve(CHAIN, 10**400, solver=solver)


# Files


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"nodes": []}, "the graph has no nodes"),
        ({"edges": [[0, 1], [1, 0]]}, "cyclic"),
        ({"edges": [[1, 1]]}, "cyclic"),
        ({"edges": [[0, 9]]}, "does not join two of the 2 nodes"),
        ({"edges": [[0]]}, "not a pair"),
        ({"edges": [[0, 1.0]]}, "does not join"),
        ({"edges": [[0, [1]]]}, "node indices"),
        ({"nodes": [{"cost": math.nan, "bytes": 1}]}, "cost is nan"),
        ({"nodes": [{"cost": math.inf, "bytes": 1}]}, "cost is inf"),
        ({"nodes": [{"cost": -1, "bytes": 1}]}, "cost is -1"),
        ({"nodes": [{"cost": 10**400, "bytes": 1}]}, "finite"),
        ({"nodes": [{"cost": "1", "bytes": 1}]}, "cost must be a number"),
        ({"nodes": [{"cost": 1, "bytes": 1.5}]}, "bytes must be a whole number"),
        ({"nodes": [{"cost": 1, "bytes": -1}]}, "bytes must be a whole number"),
        ({"nodes": [{"cost": 1}]}, "no 'bytes'"),
        ({"nodes": [3]}, "must be an object"),
        ({"nodes": {}}, "nodes must be a list"),
        ({"resident": -1}, "resident must be"),
        ({"outputs": [2]}, "2 is not a node"),
        ({"outputs": [[0]]}, "is not the index of a node"),
        ({"nodes": [{"cost": 1, "bytes": 10**400}]}, "too many"),
        ({"nodes": [{"cost": 1e-310, "bytes": 1}]}, "another unit"),
        ({"order": [[0, 1]]}, "cannot be recomputable"),
        ({"name": 3}, "name must be text"),
        ({"name": "\ud800"}, "half a character"),
        ({"format": "remat-graph/9"}, "this version reads"),
    ],
)
def test_a_wrong_graph_file_is_named(
    change: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    two = [{"name": "a", "cost": 1, "bytes": 1}, {"name": "b", "cost": 1, "bytes": 1}]
    document = {"name": "two", "nodes": two, "edges": [[0, 1]], **change}
    if "nodes" in change:
        document["edges"] = []
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(document))
    with pytest.raises(GraphError, match=complaint) as error:
        load_graph(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "damage", ["", "{", "[1, 2]", "\x00\x01", '{"name": "x"}', "null", "[" * 9999]
)
def test_a_damaged_file_is_named(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged.json"
    path.write_text(damage)
    with pytest.raises(GraphError, match=r"damaged\.json"):
        load_graph(path)
    with pytest.raises(PlanError, match=r"damaged\.json"):
        Plan.load(path)


def test_every_truncation_of_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    save_graph(unit_chain(3), path)
    text = path.read_text().rstrip()
    for stop in range(0, len(text), 7):
        path.write_text(text[:stop])
        with pytest.raises(GraphError):
            load_graph(path)


def test_a_graph_file_comes_back_as_it_was(tmp_path: Path) -> None:
    graph = Graph(
        "all",
        (
            Node("a", 0.1, 2**60),
            Node("b", 1 / 3, 2**60, workspace=2**50, forward=0),
            Node("c", 2, 0, recomputable=False, backward=True),
        ),
        ((0, 1), (1, 2)),
        resident=2**61,
        outputs=(1,),
        order=((0, 2),),
    )
    save_graph(graph, tmp_path / "graph.json")
    assert load_graph(tmp_path / "graph.json") == graph


def test_a_graph_in_another_order_is_the_same_graph() -> None:
    order = (0, 2, 1, 3)
    graph = Graph(
        "diamond",
        (Node("a", 1, 4), Node("b", 2, 4, forward=0), Node("c", 3, 1), Node("d", 4, 2)),
        ((0, 1), (0, 2), (1, 3), (2, 3)),
        resident=5,
        outputs=(3,),
    )
    other = graph.reordered(order)
    assert [node.name for node in other.nodes] == ["a", "c", "b", "d"]
    there = simulate(graph, order)
    here = simulate(other, range(4))
    assert (here.cost, here.memory) == (there.cost, there.memory)
    for wrong in ((0, 1, 2), (1, 0, 2, 3), (0, 1, 1, 3)):
        with pytest.raises(GraphError):
            graph.reordered(wrong)


def test_a_plan_is_for_its_graph_and_states_the_truth(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = solve(CHAIN, 9, solver="griewank").to_plan(CHAIN)
    plan.save(path)
    assert Plan.load(path, CHAIN) == plan
    with pytest.raises(PlanError, match="made for another graph"):
        Plan.load(path, unit_chain(11, reads=2))
    document = plan.to_json()
    for change, complaint in (
        ({"peak": plan.peak - 1}, "peak is stated as"),
        ({"cost": plan.cost / 2}, "cost is stated as"),
        ({"steps": list(plan.schedule[:-1])}, "steps: node .* never runs"),
        ({"steps": [99]}, "there is no node 99"),
        ({"steps": ["0"]}, "'0' is not a node index"),
        ({"lower_bound": "x"}, "lower_bound must be a finite number"),
        ({"lower_bound": plan.cost / 2, "gap": 0.0}, "gap is stated as 0.0, but is"),
        ({"gap": 0.5, "lower_bound": None}, "there is no lower_bound"),
        ({"budget": None}, "budget must be of type int"),
    ):
        path.write_text(json.dumps({**document, **change}))
        with pytest.raises(PlanError, match=complaint):
            Plan.load(path, CHAIN)
    claim = replace(plan, lower_bound=2 * plan.cost)
    with pytest.raises(PlanError, match="but the plan takes"):
        claim.bound_for(CHAIN, plan.budget)
    del document["steps"]
    path.write_text(json.dumps(document))
    with pytest.raises(PlanError, match="the plan has no 'steps'"):
        Plan.load(path)
