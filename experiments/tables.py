"""What every experiment's table is written with."""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.metadata
import platform
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from remat.solvers.files import read_json, write_json, written
from remat.solvers.solving import available_processors


def machine() -> dict[str, str | int]:
    """What the figures depend on: processor, cores, versions and day."""
    names = ("remat-tf", "tensorflow", "keras", "numpy", "scipy", "numba", "cylp", "ortools")
    versions = [f"Python {platform.python_version()}"]
    for name in names:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*:\s*(.*)", info.read_text()) if info.exists() else []
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": available_processors(),
        "versions": ", ".join(versions),
        "date": datetime.date.today().isoformat(),
    }


def command(name: str, description: str | None) -> argparse.ArgumentParser:
    """The command line of an experiment, whose results go to ``--out``.

    Args:
      name: of the experiment's module.
      description: its docstring.
    """
    parser = argparse.ArgumentParser(
        f"python -m experiments.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("out") / name, metavar="DIR")
    return parser


def ended(main: Callable[[], int | None]) -> int:
    """Runs an experiment; its exit status.

    Bad input (2) is one line.  On Ctrl-C it is 130, and the results that are written
    by then stay; a signal to end means the same, so that no process is left behind.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, signal.default_int_handler)
    try:
        return main() or 0
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


def begin(out: Path) -> None:
    """Makes the folder of results, and says what machine they are from."""
    out.mkdir(parents=True, exist_ok=True)
    print("\n".join(f"{key}: {value}" for key, value in machine().items()), end="\n\n")


def write_csv(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes a table; the old file stays whole until the new one is."""
    with written(path) as file:
        table = csv.DictWriter(file, lines[0])
        table.writeheader()
        table.writerows(lines)


def remembered(path: Path, find: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """What ``find`` gives, or gave when the file was written: delete it to have it again.

    So an experiment that was killed goes on where it stopped.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(find(), path)
    return read_result(path)


def read_result(path: Path) -> dict[str, Any]:
    """A result that was kept.

    Raises:
      ValueError: naming the file, if it is damaged.
    """
    try:
        found = read_json(path, ValueError)
    except ValueError as error:
        raise ValueError(f"{path} is damaged; delete it to measure again ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a result; delete it to measure again")
    return found


def positive(text: str) -> float:
    """A number above 0 on the command line."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def positive_int(text: str) -> int:
    """A whole number above 0 on the command line; 16e9 is one."""
    number = positive(text)
    if number != int(number):
        raise argparse.ArgumentTypeError(f"{text} is not whole")
    return int(number)


def proper_share(text: str) -> float:
    """A share on the command line: above 0, and 1 at most."""
    number = positive(text)
    if number > 1:
        raise argparse.ArgumentTypeError(f"{text} is above 1")
    return number


def given(value: float | None, form: str, unit: float = 1.0) -> str:
    """A figure in its unit; "-", as wide as the format says, if there is none."""
    if value is None:
        return f"{'-':>{re.sub('[^0-9].*', '', form.lstrip('+'))}}"
    return format(value / unit, form)


def show(lines: Sequence[Mapping[str, Any]]) -> str:
    """A table in Markdown; None is "-"."""
    head = list(lines[0])
    rows = [head, ["---"] * len(head)]
    rows += [["-" if value is None else str(value) for value in line.values()] for line in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
