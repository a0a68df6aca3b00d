"""The experiment on six kinds of training: its table and picture, and one of them for real."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments import trainings
from experiments.trainings import Row, plot, table

_MIB = 2**20
_GOOD = Row(
    "lstm", "done", 3, budget=20 * _MIB, plain_peak=30 * _MIB, peak=19 * _MIB, recomputations=4,
    differing=0, same_state=True, first_loss=4.0, last_loss=3.5,
)  # fmt: skip


def test_nothing_is_hidden() -> None:
    assert _GOOD.good
    for bad in (
        replace(_GOOD, differing=1),
        replace(_GOOD, same_state=False),
        replace(_GOOD, peak=21 * _MIB),
    ):
        assert not bad.good
        assert "MISSED" in table([_GOOD, bad])
    assert "killed by SIGSEGV" in table([Row("gan", "failed", 3, message="killed by SIGSEGV")])


def test_plot(tmp_path: Path) -> None:
    two = [[1.0, 2.0], [0.5, 2.5]]
    plot({"gan": (two, two), "vae": ([[1.0], [0.5]], [[1.0], [0.5]])}, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").stat().st_size > 1000


@pytest.mark.long
def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    arguments = ["--models", "lstm", "--steps", "3", "--out", str(tmp_path)]
    assert trainings.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "lstm" in shown
    assert (tmp_path / "table.csv").read_text().startswith("model,status")
    assert (tmp_path / "losses.png").exists()
