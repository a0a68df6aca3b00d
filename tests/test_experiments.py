"""The experiments' processes and tables, on a network that trains in a moment."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dags import unit_chain

from experiments import measured_step, solver_quality
from experiments.measured_step import Row, table, targets
from experiments.models import CASES, Case
from experiments.process import Task, run
from remat.solvers import save_graph

SMALL = "SmallUNet"
MIB = 2**20
ROOT = Path(__file__).parents[1]
COMMANDS = sorted(
    file.stem
    for file in (ROOT / "experiments").glob("*.py")
    if '__name__ == "__main__"' in file.read_text(encoding="utf-8") and "child" not in file.stem
)


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_a_seed_gives_the_same_data(case: Case) -> None:
    inputs, labels = case.draw(case, np.random.default_rng(1))
    again, _ = case.draw(case, np.random.default_rng(1))
    assert inputs.shape == case.inputs
    assert labels.shape == case.labels
    assert set(np.unique(labels)) <= set(range(case.classes))
    np.testing.assert_array_equal(inputs, again)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches(command: str) -> None:
    asked = [sys.executable, "-m", f"experiments.{command}", "--help"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"experiments.{command}" in done.stdout


@pytest.mark.long
def test_measured_step_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--models", SMALL, "--budgets", "0.7", "--repeats", "1", "--exact"]
    arguments += ["--seconds", "1", "--out", str(tmp_path)]
    assert measured_step.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "within the budget: 1 of 1" in shown
    assert "arrays that differ, exact setting: largest of 1 is 0, target 0: met" in shown
    saved = (tmp_path / "table.csv").read_text()

    # What is there is not measured again.
    results = {file: file.stat().st_mtime_ns for file in (tmp_path / "results").iterdir()}
    assert measured_step.main(arguments) == 0
    assert (tmp_path / "table.csv").read_text() == saved
    assert {f: f.stat().st_mtime_ns for f in (tmp_path / "results").iterdir()} == results


def test_a_budget_must_be_a_share(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        measured_step.main(["--budgets", "1.5"])
    assert exit_.value.code == 2
    assert "'1.5' is neither in (0, 1] nor \"least\"" in capsys.readouterr().err


def test_a_process_that_runs_out_of_memory_is_a_failure(tmp_path: Path) -> None:
    log = tmp_path / "log"
    result = run(Task("plain", SMALL, steps=1, limit_mib=24), timeout=120, log=log)
    assert result["status"] == "failed"
    assert str(log) in result["message"]
    assert "ResourceExhaustedError" in result["message"]


def test_a_process_that_hangs_is_a_failure(tmp_path: Path) -> None:
    result = run(Task("plain", SMALL), timeout=0.2, log=tmp_path / "log")
    assert result["status"] == "failed"
    assert result["message"] == "still running after 0 s"


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    """Of graphs, budgets, folders, and results that were cut off."""
    for name, batch in (("a", 4), ("b", 8)):
        graph = unit_chain(batch, reads=2)
        save_graph(replace(graph, name="same"), tmp_path / f"{name}.json")
    one = [str(tmp_path / "a.json"), "--solvers", "griewank", "--out", str(tmp_path / "out")]

    def complaint(*words: str) -> str:
        command = [sys.executable, "-m", "experiments.solver_quality", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        return done.stderr

    assert "different graphs of the name 'same'" in complaint(str(tmp_path / "b.json"), *one)
    assert "nowhere.json" in complaint("nowhere.json", *one)
    assert "'much' is not an amount" in complaint(*one, "--budgets", "much")
    assert "0 is not above 0" in complaint(*one, "--time-limit", "0")
    assert "/dev/null" in complaint(*one[:-1], "/dev/null/out")
    assert "without graphs" in complaint(*one, "--scale")
    assert solver_quality.main([*one, "--budgets", "80%"]) is None
    (kept,) = (tmp_path / "out" / "cells").iterdir()
    kept.write_text(kept.read_text()[:20])
    assert f"{kept} is damaged" in complaint(*one, "--budgets", "80%")


def test_nothing_is_hidden() -> None:
    done = Row(
        SMALL, "1 x 2", "0.5", plain_peak=100 * MIB, budget=50 * MIB, budget_share=0.5,
        status="done", predicted=48 * MIB, measured=49 * MIB,
        overhead_predicted=0.08, overhead_measured=0.2, overhead_fastest=0.15, lowering=1.01,
        lowering_spread=0.04, lowering_fastest=1.03, compile_seconds=20.0,
    )  # fmt: skip
    rows = [
        done,
        replace(done, measured=51 * MIB),
        Row(SMALL, "1 x 2", "0.35", status="infeasible", message="needs more", floor=40 * MIB,
            budget=35 * MIB),
        Row(SMALL, "1 x 2", "0.7", message="killed by SIGSEGV"),
    ]  # fmt: skip
    text = table(rows)
    assert text.count("over budget") == 1
    for word in ("infeasible", "needs more", "failed", "killed by SIGSEGV"):
        assert word in text
    verdicts = targets(rows)
    assert "within the budget: 1 of 2; infeasible: 1, 1 of them proven; broken down: 1" in verdicts
    assert "overhead at 0.5: median of 2 is 0.2, target 0.1: MISSED" in verdicts
    assert "lowered / plain: largest of 1 is 1.01, target 1.02: met" in verdicts
    assert "of the fastest steps: largest is 1.03" in verdicts
    assert "between processes of one network: spread at most 0.04" in verdicts
