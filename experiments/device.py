"""Everything there is to know about the device at hand, GPU or CPU, in one command.

    python -m experiments.device                             hours on 2 cores; it resumes
    python -m experiments.device --models SmallUNet --shares 0.6 --runs 1 --limits 100MiB

1  profile      measures what the operations of every network cost, and again: the
                second time everything is recorded.  The table is written to
                DIR/<device>.csv, ready to become profiles/<device>.csv
2  predictions  ``experiments.predictions`` on the same networks: peaks and seconds
                as predicted and as measured, plain against remat at each share of
                the plain peak
3  largest      ``experiments.largest_batch_measured``: the largest batch that trains,
                plain and by remat, under each limit of TensorFlow's allocator (on a
                GPU the logical device's memory limit), or "all" of the memory

Results that are there are not measured again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from remat.profiles.table import load_table, save_table
from remat.solvers.budget import parse_budget

from . import largest_batch_measured, predictions
from .models import CASES, FURTHER, TRAINED
from .process import Runner, Task
from .tables import begin, command, ended, positive_int, proper_share

PARTS = ("profile", "predictions", "largest")

_MIB = 2**20
_TIMEOUT = 1800.0  # seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts; the exit status is that of ``experiments.predictions``."""
    parser = command("device", __doc__)
    everything = (*TRAINED, *FURTHER)
    parser.add_argument("--models", nargs="+", choices=CASES, default=everything, metavar="NAME")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--shares", nargs="+", type=proper_share, default=(0.7, 0.5, 0.3), metavar="SHARE"
    )
    parser.add_argument(
        "--runs", type=positive_int, default=3, help="processes a budget (default: 3)"
    )
    parser.add_argument(
        "--limits",
        nargs="+",
        default=("16GB", "all"),
        help='memory for the largest batch (default: "16GB" and "all")',
    )
    asked = parser.parse_args(arguments)
    begin(asked.out)
    runner = Runner(asked.out, "experiments.predictions_child", _TIMEOUT)
    device = runner.result(Task("provenance", "device"))
    if device["status"] != "done":
        print(device["message"])
        return 1
    memory = device["memory"]
    limits = [memory if limit == "all" else parse_budget(limit, memory) for limit in asked.limits]
    print(f"{device['device']}, {device['driver']}: {device['memory_source']} is {memory} bytes\n")
    if "profile" in asked.parts:
        _profile(runner, asked.models, device, asked.out)
    models = ["--models", *asked.models]
    status = 0
    if "predictions" in asked.parts:
        chosen = [*models, "--shares", *map(str, asked.shares), "--runs", str(asked.runs)]
        status = predictions.main([*chosen, "--out", str(asked.out / "predictions")])
    if "largest" in asked.parts:
        for limit in limits:
            folder = asked.out / f"largest-{limit // _MIB}MiB"
            chosen = [*models, "--ways", "plain", "budgeted", "--limit", str(limit // _MIB)]
            largest_batch_measured.main([*chosen, "--accuracy", "0.05", "--out", str(folder)])
    return status


def _profile(runner: Runner, models: Iterable[str], device: dict[str, Any], out: Path) -> None:
    """Measures what is not recorded, twice, and writes the table."""
    print(f"{'':18}{'operations':>11}{'measured in':>14}{'again in':>11}{'a step':>11}")
    for model in models:
        first, second = (runner.result(Task("priced", model, repeat=n)) for n in range(2))
        problems = [found["message"] for found in (first, second) if found["status"] != "done"]
        if problems:
            print(f"{model:18} {problems[0]}")
            continue
        print(
            f"{model:18}{first['operations']:11}{first['pricing_seconds']:12.1f} s"
            f"{second['pricing_seconds']:9.1f} s{1000 * second['step_seconds']:8.1f} ms"
        )
    recorded = load_table(device["table"])
    name = re.sub(r"[^a-z0-9]+", "-", device["device"].lower()).strip("-")
    save_table(recorded, out / f"{name}.csv")
    print(f"table: {out / f'{name}.csv'} ({len(recorded)} operations)\n")


if __name__ == "__main__":
    raise SystemExit(ended(main))
