"""The tables of ``experiments.predictions`` hide nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments import predictions
from experiments.predictions import Row, errors_of_prices, table, verdicts

MIB = 2**20
DONE = Row(
    "UNet", "8 x 8", 0.5, status="done", plain_peak=100 * MIB, budget=50 * MIB, budget_share=0.5,
    predicted=49 * MIB, measured=50 * MIB, error=-0.005, lowest=-0.02, runs=3,
    squeezed="out of memory", overhead_predicted=0.05, overhead_measured=0.08,
    overhead_profiled=0.06, lowering=1.01, share_measured=0.9, share_fitted=0.02,
    share_roofline=0.08,
)  # fmt: skip


def test_what_missed_is_said() -> None:
    rows = [
        DONE,
        replace(
            DONE,
            model="ViT",
            lowest=0.0,
            overhead_measured=0.2,
            overhead_profiled=0.12,
            lowering=1.2,
            broken=1,
        ),
        Row("Decoder", "8 x 8", 0.35, status="infeasible", message="needs more"),
    ]
    text = table(rows)
    for part in ("infeasible", "needs more", "3/4", "out of memory", "1.200"):
        assert part in text
    said = verdicts(rows)
    assert "budgets: 2 of 3 met" in said
    assert "ran out of memory: 1 of 7; under a limit 3 % lower: 2 of 2" in said
    assert (
        "median 0.50 %, target 3: met; below the measured by more than 1 %: 1, target 0: MISSED"
        in said
    )
    assert "overhead: within 5 points of the predicted: 1 of 2, median 9.0: MISSED" in said
    assert "measured: within 5 points of the predicted: 1 of 2, median 4.0: MISSED" in said
    assert "by operation: within 5 points of the predicted: 1 of 2, median 4.0: MISSED" in said
    assert "at most 1.200 (ViT), median 1.105, target 1.02: MISSED" in said
    assert "this step: measured 90.0 %, fitted 2.0 %, roofline 8.0 %" in said
    assert verdicts(rows[2:]) == "budgets: 0 of 1 met"


def test_errors_of_prices_are_those_of_each_kind() -> None:
    errors = {"kind": "fitted", "rows": 3, "median_error": 0.1, "largest_tenth_error": 0.5}
    found = {"status": "done", "rows": 9, "errors": [{**errors, "total_ratio": 1.25}]}
    said = errors_of_prices(found)
    assert (
        "fitted        3 of them: error 10 % (median), 50 % (90th percentile), sum 1.25 x" in said
    )
    assert "no table" in errors_of_prices({"status": "failed", "message": "no table"})


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--shares", "1.5"], "--shares: 1.5 is above 1"),
        (["--shares", "0"], "--shares: 0 is not above 0"),
        (["--runs", "0"], "--runs: 0 is not above 0"),
    ],
)
def test_arguments_are_checked_first(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        predictions.main(arguments)
    assert complaint in capsys.readouterr().err
