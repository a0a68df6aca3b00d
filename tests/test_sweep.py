"""Sweeps: what is kept through failures, signals and kills; on this machine and on a cluster."""

from __future__ import annotations

import contextlib
import csv
import json
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from dags import unit_chain
from test_cli_solve import REMAT, remat
from test_solve import HARD
from test_solver_quality import run

from remat.cli import BAD_INPUT, main
from remat.solvers import Plan, load_graph, save_graph
from remat.sweep import Row, Store


def rows(store: Path) -> list[Row]:
    with contextlib.closing(Store(store)) as opened:
        return opened.rows()


@pytest.fixture
def graphs(tmp_path: Path) -> Path:
    """A folder of two graphs."""
    folder = tmp_path / "graphs"
    folder.mkdir()
    for length in (6, 8):
        save_graph(unit_chain(length, reads=2), folder / f"chain{length}.json")
    return folder


def test_a_sweep_of_graph_files(graphs: Path, tmp_path: Path) -> None:
    (graphs / "broken.json").write_text('{"name": 3')
    store, table, plans = tmp_path / "s.sqlite", tmp_path / "s.csv", tmp_path / "plans"
    arguments = ["sweep", "--graphs", f"{graphs}/*.json", "--budgets", "60%", "3", "--store", store]
    arguments += ["--solvers", "moments", "openai:mode=speed", "--csv", table, "--plans", plans]
    arguments += ["--time-limit", 60]  # until it is proven, however busy the machine is
    printed = remat(*arguments).stdout
    assert printed.startswith("12 jobs:")
    assert "4 failed" in printed
    assert f"4 x exit status 2: {graphs}/broken.json: not valid JSON" in printed

    found = {(row.graph, row.budget, row.solver): row for row in rows(store)}
    assert len(found) == 12
    for (name, budget, solver), row in found.items():
        if name == "broken":
            assert (row.status, row.plan) == ("failed", None)
        elif budget == "3":
            assert (row.status, row.plan) == ("infeasible", None)
            assert row.reason
            assert row.floor > 3
        elif solver == "moments":
            file = plans / f"{name}-60%-moments-0.plan.json"
            plan = Plan.load(file, load_graph(graphs / f"{name}.json"))
            assert (row.status, row.overhead, row.peak) == ("optimal", plan.overhead, plan.peak)
            assert plan.peak <= plan.budget == row.budget_bytes
    with open(table, newline="", encoding="utf-8") as file:
        assert [row["status"] for row in csv.DictReader(file)] == [r.status for r in rows(store)]

    # What has a row is not done again; another graph under a known name is.
    before = rows(store)
    save_graph(unit_chain(7), graphs / "broken.json")
    assert "failed" not in remat(*arguments).stdout
    assert rows(store)[:12] == before
    assert [row.graph for row in rows(store)[12:]] == ["broken"] * 4


def test_a_job_that_takes_too_much_is_a_row_that_says_so(graphs: Path, tmp_path: Path) -> None:
    store = tmp_path / "s.sqlite"
    arguments = ["sweep", "--graphs", graphs / "chain6.json", "--budgets", "60%", "--store", store]
    arguments += ["--solvers", "moments", "--time-limit", 60]
    remat(*arguments, "--memory", "1MiB")
    (row,) = rows(store)
    assert row.status == "failed"
    assert row.reason.startswith("out of memory")
    remat(*arguments, "--retry", "--timeout", 0.01)
    (row,) = rows(store)
    assert row.reason == "still running after 0 s"
    remat(*arguments, "--retry")
    (row,) = rows(store)
    assert row.status == "optimal"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"--graphs": "nowhere/*.json"}, "'nowhere/*.json' matches no file"),
        ({"--budgets": "much"}, "--budgets: budget 'much' is not an amount of memory"),
        ({"--solvers": "magic"}, "no solver 'magic'"),
        ({"--graphs": "{graphs}/**/*.json"}, "different graphs are called chain6; rename"),
        ({"--seeds": "0"}, "--seeds must be 1 or more"),
        ({"--workers": "0"}, "must be above 0"),
        ({"--store": "{graphs}/chain6.json"}, "is not a store of remat sweep"),
        ({"--models": "ResNet50"}, "--models needs the shape"),
        ({"--models": "ResNet50", "--input": "x"}, "--models needs the shape"),
        (
            {"--models": "ResNet50", "--input": "32,32,3", "--profile": "not-t4"},
            "no specification of a device 'not-t4'",
        ),
        ({"--batches": "0"}, "--batches must be 1 or more"),
        ({"--csv": "{graphs}/s.sqlite"}, "is the store or a graph"),
        ({"--csv": "{graphs}/chain6.json"}, "is the store or a graph"),
        ({"--csv": "{graphs}/no/s.csv"}, "there is no folder"),
        ({"--budgets": "9999999999TiB"}, "64 bits"),
        ({"--memory": "5%"}, "--memory 5%"),
        ({"--time-limit": "nan"}, "--time-limit nan"),
        ({"--solvers": "openai:mode"}, "NAME[:OPTION=VALUE...]"),
        ({"--scheduler": "nonsense"}, "no address of a Dask scheduler"),
        ({"--store": ":memory:"}, "--store is a file"),
        ({"--store": "{graphs}"}, "cannot be opened"),
    ],
)
def test_bad_input_is_named(
    changes: dict[str, str],
    complaint: str,
    graphs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (graphs / "more").mkdir()
    save_graph(unit_chain(5), graphs / "more" / "chain6.json")
    settings = {"--graphs": "{graphs}/*.json", "--budgets": "50%", "--store": "{graphs}/s.sqlite"}
    pairs = ({**settings, **changes}).items()
    arguments = [word.format(graphs=graphs) for pair in pairs for word in pair]
    assert main(["sweep", *arguments]) == BAD_INPUT
    assert complaint in capsys.readouterr().err


def test_what_failed_stays_until_it_is_done_again(graphs: Path, tmp_path: Path) -> None:
    store, graph = tmp_path / "s.sqlite", graphs / "chain6.json"
    arguments = ["sweep", "--graphs", graph, "--budgets", "60%", "--store", store, "--retry"]
    remat(*arguments, "--memory", "1MiB")
    failed = rows(store)
    with contextlib.closing(Store(store)) as opened:
        assert opened.done() == {failed[0].key}
        assert opened.done(retry=True) == set()
    assert rows(store) == failed
    remat(*arguments, "--time-limit", 60)
    assert [row.status for row in rows(store)] == ["failed", "optimal"]  # another time limit
    remat(*arguments)
    assert [row.status for row in rows(store)] == ["optimal", "optimal"]


def test_plans_of_alike_names_are_kept_apart(graphs: Path, tmp_path: Path) -> None:
    for length, name in ((9, "a b"), (10, "a_b"), (11, "w[1]")):
        save_graph(unit_chain(length, reads=2), graphs / f"{name}.json")
    files = [graphs / f"{name}.json" for name in ("a b", "a_b", "w[1]")]
    arguments = ["--budgets", "60%", "--store", tmp_path / "s.sqlite", "--plans", tmp_path / "p"]
    remat("sweep", "--graphs", *files, *arguments, "--solvers", "moments")
    assert len(list((tmp_path / "p").iterdir())) == 3


def test_a_figure_beyond_64_bits_is_one_failed_row(tmp_path: Path) -> None:
    graph = unit_chain(6, reads=2)
    nodes = (replace(graph.nodes[0], bytes=10**30), *graph.nodes[1:])
    save_graph(replace(graph, nodes=nodes), tmp_path / "huge.json")
    save_graph(unit_chain(6, reads=2), tmp_path / "good.json")
    arguments = ["--budgets", "60%", "--store", tmp_path / "s.sqlite", "--solvers", "moments"]
    remat("sweep", "--graphs", tmp_path / "*.json", *arguments)
    found = {row.graph: row for row in rows(tmp_path / "s.sqlite")}
    assert found["good"].status == "optimal"
    assert found["huge"].status == "failed"
    assert "64 bits" in found["huge"].reason


def test_another_database_is_left_alone(graphs: Path, tmp_path: Path) -> None:
    store = tmp_path / "other.sqlite"
    with contextlib.closing(sqlite3.connect(store)) as database:
        database.execute("CREATE TABLE mine (text)")
    content = store.read_bytes()
    with pytest.raises(ValueError, match="not a store of this version"):
        Store(store)
    assert store.read_bytes() == content


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise TimeoutError


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_killed_jobs_and_interrupted_sweeps(number: int, tmp_path: Path) -> None:
    graph, store = tmp_path / "hard.json", tmp_path / "s.sqlite"
    save_graph(HARD, graph)
    command = [*REMAT, "sweep", "--graphs", str(graph), "--budgets", "40%", "--store", str(store)]
    command += ["--seeds", "4", "--workers", "2", "--time-limit", "99", "--solvers", "anneal"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as sweep:
        family = psutil.Process(sweep.pid)
        wait_for(lambda: len(family.children()) == 2)
        family.children()[0].kill()
        wait_for(lambda: store.exists() and len(rows(store)) == 1)
        wait_for(lambda: len(family.children()) == 2)
        jobs = family.children()
        sweep.send_signal(number)
        _, complaint = sweep.communicate(timeout=20)
    assert sweep.returncode == 130, complaint
    assert not any(job.is_running() for job in jobs)
    (row,) = rows(store)
    assert (row.status, row.reason.split(" (")[0]) == ("failed", "killed by SIGKILL")

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as sweep:
        family = psutil.Process(sweep.pid)
        wait_for(lambda: len(family.children()) == 2)
        jobs = family.children()
        sweep.kill()
        sweep.communicate()
    wait_for(lambda: not any(job.is_running() for job in jobs))  # they end with the sweep


@pytest.mark.long
def test_models_are_traced_once_for_all_their_jobs(tmp_path: Path) -> None:
    store = tmp_path / "s.sqlite"
    remat("sweep", "--models", "MobileNet", "MobileNot", "--batches", 2, "--input", "32,32,3",
          "--profile", "h200", "--budgets", "50%", "80%", "--solvers", "chen_greedy",
          "--store", store)  # fmt: skip
    found = {(row.graph, row.budget): row for row in rows(store)}
    assert len(found) == 4
    for budget in ("50%", "80%"):
        failed = found["MobileNot-b2", budget]
        assert failed.reason.startswith("tracing failed: exit status 2: 'MobileNot'")
        row = found["MobileNet-b2", budget]
        assert (row.batch, row.status) == (2, "infeasible")
        assert row.floor > row.budget_bytes > 0
    with contextlib.closing(sqlite3.connect(store)) as database:
        ((document,),) = database.execute("SELECT document FROM graphs").fetchall()
    assert len(json.loads(document)["nodes"]) > 50


@pytest.mark.long
def test_nothing_is_lost_on_a_cluster_whose_worker_and_sweep_are_killed(tmp_path: Path) -> None:
    printed = run("sweep_kills", "--jobs", 24, "--out", tmp_path / "kills")
    figures = dict(line.split(": ", 1) for line in printed.splitlines() if ": " in line)
    assert int(figures["rows_at_worker_kill"]) < int(figures["rows_at_sweep_kill"]) < 24
    kept = rows(tmp_path / "kills" / "sweep.sqlite")
    combinations = {(row.graph, row.budget, row.solver) for row in kept}
    assert len(kept) == len(combinations) == 24
    assert "failed" not in {row.status for row in kept}


def test_a_cluster_on_this_machine(graphs: Path, tmp_path: Path) -> None:
    store = tmp_path / "s.sqlite"
    remat("sweep", "--graphs", f"{graphs}/*.json", "--budgets", "60%", "--solvers", "moments",
          "--time-limit", 60, "--scheduler", "local", "--workers", 1,
          "--store", store)  # fmt: skip
    assert [row.status for row in rows(store)] == ["optimal", "optimal"]


def test_a_cluster_that_is_not_there(graphs: Path, tmp_path: Path) -> None:
    environment = {"DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "1s"}
    done = remat("sweep", "--graphs", f"{graphs}/*.json", "--budgets", "60%", "--store",
                 tmp_path / "s.sqlite", "--scheduler", "tcp://127.0.0.1:9",
                 status=BAD_INPUT, env=environment)  # fmt: skip
    assert "tcp://127.0.0.1:9" in done.stderr
