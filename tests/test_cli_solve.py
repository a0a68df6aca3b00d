"""``remat solve`` and ``remat show`` as commands: files, exit status, signals, kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from dags import plain_peak, unit_chain
from test_solve import HARD

from remat.solvers import Plan, load_graph, save_graph

REMAT = [sys.executable, "-m", "remat"]


def remat(
    *arguments: object, status: int = 0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command and checks its exit status."""
    command = [*REMAT, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **(env or {})}
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    path = tmp_path / "chain.json"
    save_graph(unit_chain(10, reads=2), path)
    return path


@pytest.fixture
def hard(tmp_path: Path) -> Path:
    path = tmp_path / "hard.json"
    save_graph(HARD, path)
    return path


def test_where_a_plan_cannot_be_written_is_told_before_it_is_solved(
    chain: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "no" / "plan.json")
    for output, reason in ((link, "there is no folder"), (tmp_path / ("n" * 300), "too long")):
        refused = remat("solve", chain, "--budget", "60%", "-o", output, status=2)
        assert reason in refused.stderr
        assert "overhead" not in refused.stdout
    long = tmp_path / ("n" * 240)  # as long as a name may be: its temporary one is no longer
    remat("solve", chain, "--budget", "60%", "-o", long)
    assert Plan.load(long).budget > 0


def test_a_key_that_a_file_has_twice_is_refused(chain: Path) -> None:
    text = chain.read_text()
    chain.write_text(text.replace('"name":', '"name": "other", "name":', 1))
    assert "'name' is there twice" in remat("solve", chain, "--budget", "60%", status=2).stderr


def test_a_plan_is_written_shown_and_drawn(chain: Path, tmp_path: Path) -> None:
    plan, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    printed = remat("solve", chain, "--budget", "60%", "-o", plan).stdout
    assert "overhead" in printed
    loaded = Plan.load(plan, load_graph(chain))
    assert loaded.peak <= loaded.budget
    shown = remat("show", plan, chain, "--plot", picture).stdout
    assert "computed again" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.glob("*.tmp")] == []


def test_a_plan_goes_into_a_file_that_is_open_already(chain: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("before\n")
    command = [*REMAT, "solve", str(chain), "--budget", "60%", "-o", "/dev/stdout"]
    with log.open("a") as file:
        subprocess.run(command, stdout=file, check=True)
    before, plan = log.read_text().splitlines()
    assert before == "before"
    assert json.loads(plan)["format"] == "remat-plan/1"
    assert {path.name for path in tmp_path.iterdir()} == {"chain.json", "log.txt"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["missing.json", "--budget", "50%"], "missing.json"),
        (["{chain}", "--budget", "much"], "not an amount of memory"),
        (["{chain}", "--budget", "50%", "--time-limit", "-1"], "time_limit is -1"),
        (["{chain}", "--budget", "50%", "--warm-start", "{chain}"], "format is"),
        (["{chain}", "--budget", "50%", "-o", "no/such/folder/plan.json"], "no/such/folder"),
        (["{chain}", "--budget", "50%", "--solver", "magic"], "invalid choice"),
        (["{chain}", "--budget", "50%", "--option", "moves"], "NAME=VALUE"),
        (["{chain}", "--budget", "50%", "--option", "seed=3"], "--option seed"),
        (["{chain}", "--budget", "50%", "--option", "budget=3"], "--option budget"),
        (["{chain}", "--budget", "50%", "--option", "max_gap=abc"], "--option max_gap"),
        (["{chain}", "--budget", "50%", "-o", "{chain}"], "is the graph"),
        (["{chain}", "--budget", "50%", "--option", "tempo=3"], "no option 'tempo'"),
    ],
)
def test_bad_input_is_named_and_ends_with_2(
    arguments: list[str], complaint: str, chain: Path
) -> None:
    done = remat("solve", *(a.format(chain=chain) for a in arguments), status=2)
    assert complaint in done.stderr


def test_a_damaged_plan_to_start_from_is_named(chain: Path, tmp_path: Path) -> None:
    plan, damaged = tmp_path / "plan.json", tmp_path / "damaged.json"
    remat("solve", chain, "--budget", "50%", "-o", plan)
    document = json.loads(plan.read_text())
    damaged.write_text(json.dumps({**document, "steps": document["steps"][:-1]}))
    done = remat("solve", chain, "--budget", "50%", "--warm-start", damaged, status=2)
    assert "damaged.json: steps: node" in done.stderr


def test_links_and_pipes_stay_what_they_are(chain: Path, tmp_path: Path) -> None:
    link, plan = tmp_path / "link.json", tmp_path / "plan.json"
    link.symlink_to(plan)
    remat("solve", chain, "--budget", "50%", "-o", link)
    assert link.is_symlink()
    assert Plan.load(plan, load_graph(chain)) == Plan.load(link)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)  # so that nobody waits for the other end
    remat("solve", chain, "--budget", "50%", "-o", pipe)
    assert pipe.is_fifo()
    assert os.read(reader, 1 << 16).startswith(b'{"format": "remat-plan/1"')
    os.close(reader)


def test_a_pipe_without_a_reader_is_waited_for_and_that_is_said(
    chain: Path, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = [*REMAT, "solve", str(chain), "--budget", "50%", "-o", str(pipe)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "pipe is a pipe that nobody reads yet" in process.stderr.readline()
        assert Plan.load(pipe, load_graph(chain)).budget > 0
        assert process.wait() == 0


@pytest.mark.parametrize(
    ("field", "value"), [("budget", 1), ("overhead", 0.001), ("lower_bound", 1e9)]
)
def test_false_figures_of_a_plan_are_found(
    field: str, value: float, chain: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    remat("solve", chain, "--budget", "50%", "-o", plan)
    remat("show", plan, chain)
    plan.write_text(json.dumps({**json.loads(plan.read_text()), field: value}))
    assert field in remat("show", plan, chain, status=2).stderr


def test_options_reach_the_solver(chain: Path) -> None:
    openai = ("solve", chain, "--budget", "100%", "--solver", "openai")
    listed = remat(*openai, "--option", "mode=[0, 4, 8]").stdout
    named = remat(*openai, "--option", "mode=collection", "--option", "names=x0,x4,x8").stdout
    assert listed.splitlines()[:4] == named.splitlines()[:4]
    assert "recomputations" in listed
    assert "node 'x99'" in remat(
        *openai, "--option", "mode=collection", "--option", "names=x99", status=2
    ).stderr  # fmt: skip


def test_an_infeasible_budget_ends_with_3_and_names_what_works(chain: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    done = remat("solve", chain, "--budget", "3", "-o", plan, status=3)
    graph = load_graph(chain)
    assert "the proven floor" in done.stderr
    least = int(done.stderr.split("known to work is")[1].split()[0].replace(",", ""))
    assert not plan.exists()
    remat("solve", chain, "--budget", least, "-o", plan)
    assert Plan.load(plan, graph).peak == least


def test_the_log_is_one_json_object_a_line(hard: Path, tmp_path: Path) -> None:
    done = remat("solve", hard, "--budget", "40%", "--time-limit", "2.5", "--log", "json",
                 "-o", tmp_path / "plan.json")  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) >= 2
    for line in lines:
        assert {"seconds", "status", "overhead", "gap", "cost", "lower_bound", "peak", "budget",
                "least_budget", "floor", "message"} == set(line)  # fmt: skip
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    plan = Plan.load(tmp_path / "plan.json", load_graph(hard))
    assert lines[-1]["overhead"] == plan.overhead


def test_least_peak_within_an_overhead(chain: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    remat("solve", chain, "--budget", "100%", "--minimize", "peak", "--max-overhead", "25",
          "--time-limit", "2", "-o", plan)  # fmt: skip
    loaded = Plan.load(plan, load_graph(chain))
    assert loaded.overhead <= 0.25
    assert loaded.peak < plain_peak(load_graph(chain))


def test_a_first_solve_does_not_wait_for_what_it_can_do_without(
    chain: Path, hard: Path, tmp_path: Path
) -> None:
    compiled = tmp_path / "compiled"
    fresh = {"NUMBA_CACHE_DIR": str(compiled)}
    assert "proven optimal" in remat("solve", chain, "--budget", "60%", env=fresh).stdout
    assert not list(compiled.rglob("*.nbi"))
    # A limit is kept where there is a plan: heuristics find one.  Compiling goes on.
    leanest = ("solve", hard, "--budget", "100%", "--minimize", "peak", "--max-overhead", "10",
               "-o", tmp_path / "plan.json", "--time-limit")  # fmt: skip
    assert "compiled once after an install" in remat(*leanest, "2", env=fresh).stdout
    left = Plan.load(tmp_path / "plan.json", load_graph(hard))
    while not list(compiled.rglob("*.nbc")):  # the code, which is written after its index
        time.sleep(0.1)
    # Loading it may take two seconds, where other tests run.
    assert "compiled once" not in remat(*leanest, "10", env=fresh).stdout
    assert Plan.load(tmp_path / "plan.json", load_graph(hard)).peak < left.peak


_SLOW_START = """
import sys, time
if any("mip_backends" in argument for argument in sys.orig_argv):
    time.sleep(2)
"""


def test_proofs_are_made_where_solvers_take_long_to_start(chain: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_SLOW_START)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    solved = remat("solve", chain, "--budget", "60%", env={"PYTHONPATH": path})
    assert "proven optimal" in solved.stdout


_SAVE_A_NETWORK = """
import sys, keras
layers = [keras.layers.Conv2D(8, 3, activation="relu") for _ in range(8)]
layers.insert(4, keras.layers.BatchNormalization())  # whose gradient is computed otherwise
keras.Sequential([keras.Input((48, 48, 3)), *layers, keras.layers.GlobalMaxPooling2D(),
                  keras.layers.Dense(10, activation="softmax")]).save(sys.argv[1])
"""


@pytest.mark.long
def test_a_traced_step_can_be_solved_grouped_and_operation_by_operation(tmp_path: Path) -> None:
    network = tmp_path / "network.keras"
    subprocess.run([sys.executable, "-c", _SAVE_A_NETWORK, network], check=True)
    graphs = []
    for name, options in (("grouped", ()), ("ungrouped", ("--ungrouped",))):
        path = tmp_path / f"{name}.json"
        remat("trace", network, "--input", "16,48,48,3", "--profile", "h200", *options, "-o", path)
        graphs.append(load_graph(path))
        remat("solve", path, "--budget", "80%", "-o", tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json", graphs[-1]).overhead > 0
    grouped, ungrouped = graphs
    assert len(ungrouped) > 2 * len(grouped)
    assert ungrouped.cost == pytest.approx(grouped.cost)
    assert plain_peak(ungrouped) == pytest.approx(plain_peak(grouped), rel=0.05)


def start(hard: Path, plan: Path) -> subprocess.Popen[str]:
    """A long solve that has written a plan by now."""
    command = [
        *REMAT,
        "solve",
        str(hard),
        "--budget",
        "40%",
        "--time-limit",
        "99",
        "-o",
        str(plan),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not plan.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_the_best_and_ends_with_130(number: int, hard: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    process = start(hard, plan)
    process.send_signal(number)
    printed, complaint = process.communicate(timeout=100)
    assert process.returncode == 130, complaint
    assert "interrupted" in printed
    loaded = Plan.load(plan, load_graph(hard))
    assert loaded.status == "interrupted"
    assert loaded.peak <= loaded.budget


@pytest.mark.parametrize("moment", ["argparse", "numpy", "remat.solvers.graph"])
def test_an_interrupt_of_the_imports_is_one_line(moment: str, chain: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "remat", "solve", chain, "--budget", "50%"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while f" {moment}" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        said = [line for line in process.stderr if not line.startswith("import time:")]
        assert process.wait() == 130
    assert said == ["remat: interrupted\n"]


def test_a_killed_solve_leaves_a_plan_that_a_later_one_goes_on_from(
    hard: Path, tmp_path: Path
) -> None:
    plan, better = tmp_path / "plan.json", tmp_path / "better.json"
    process = start(hard, plan)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    graph = load_graph(hard)
    left = Plan.load(plan, graph)
    remat("solve", hard, "--budget", "40%", "--warm-start", plan, "--solver", "anneal",
          "--option", "moves=1", "--workers", 1, "-o", better)  # fmt: skip
    assert Plan.load(better, graph).cost <= left.cost


def test_a_plan_is_a_start_for_the_graph_priced_anew(hard: Path, tmp_path: Path) -> None:
    plan, better, priced = (tmp_path / f"{name}.json" for name in ("plan", "better", "priced"))
    once = ("--budget", "60%", "--solver", "anneal", "--option", "moves=1", "--workers", 1)
    remat("solve", hard, "--budget", "60%", "--solver", "griewank", "-o", plan)
    graph = load_graph(hard)
    nodes = tuple(replace(node, cost=1.5 * node.cost) for node in graph.nodes)
    save_graph(replace(graph, nodes=nodes, resident=1), priced)
    remat("solve", priced, *once, "--warm-start", plan, "-o", better)
    assert Plan.load(better, load_graph(priced)).overhead <= Plan.load(plan, graph).overhead + 1e-9


def test_a_plan_brings_its_bound_to_a_solve_of_the_same_graph_and_no_other(
    chain: Path, tmp_path: Path
) -> None:
    plan, again, priced = (tmp_path / f"{name}.json" for name in ("plan", "again", "priced"))
    once = ("--solver", "anneal", "--option", "moves=1", "--workers", 1, "-o", again)
    remat("solve", chain, "--budget", "60%", "-o", plan)
    proven = Plan.load(plan).lower_bound
    graph = load_graph(chain)
    assert proven is not None
    assert proven > graph.cost
    remat("solve", chain, "--budget", "60%", "--warm-start", plan, *once)
    assert Plan.load(again, graph).lower_bound == proven
    remat("solve", chain, "--budget", "70%", "--warm-start", plan, *once)
    assert Plan.load(again, graph).lower_bound == graph.cost
    save_graph(replace(graph, resident=1), priced)
    remat("solve", priced, "--budget", "60%", "--warm-start", plan, *once)
    assert Plan.load(again).lower_bound == graph.cost
    old = json.loads(plan.read_text())
    del old["priced"], old["bound_budget"]
    plan.write_text(json.dumps(old))
    remat("solve", chain, "--budget", "60%", "--warm-start", plan, *once)
    assert Plan.load(again, graph).lower_bound == graph.cost


@pytest.mark.skipif(os.name == "nt", reason="process groups")
def test_a_second_signal_ends_the_command(hard: Path, tmp_path: Path) -> None:
    process = start(hard, tmp_path / "plan.json")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=100)
    assert process.returncode in (130, -signal.SIGINT)
