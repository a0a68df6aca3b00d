"""What every experiment's table is written with."""

from __future__ import annotations

import csv
import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from remat.solvers.solving import available_processors


def machine() -> dict[str, str | int]:
    """What the figures depend on: processor, cores and versions."""
    names = ("remat-tf", "numpy", "scipy", "numba", "cylp", "ortools")
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
    }


def write_csv(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes a table; the old file stays whole until the new one is."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, lines[0])
        table.writeheader()
        table.writerows(lines)
    os.replace(temporary, path)
