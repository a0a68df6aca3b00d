"""Runs one measurement in a fresh process: ``experiments.child`` is what runs there.

TensorFlow reads how memory is pooled, and how much there is, when it is first
imported; and near a hard limit its kernels can abort.  So every measurement
has a process of its own, whose end is part of the result.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_REPOSITORY = Path(__file__).parent.parent


@dataclass(frozen=True)
class Task:
    """What a process is to do.

    Attributes:
      kind: name of a function in the module's ``KINDS``.
      model: name of a case in ``experiments.models.CASES`` (or in
        ``keras.applications``, for ``experiments.zoo_child``).
      steps: training steps.
      budget: bytes, where there is a budget.
      limit_mib: hard limit of TensorFlow's allocator in MiB, if any.
      plan: file of the plan to write or to read.
      weights: file (npz) for the weights at the end.
      exact: run with oneDNN off, deterministic operations and one inter-op
        thread: TensorFlow differs from itself without.
      repeat: number of this repetition.
    """

    kind: str
    model: str
    steps: int = 3
    budget: int | None = None
    limit_mib: int | None = None
    plan: str | None = None
    weights: str | None = None
    exact: bool = False
    repeat: int = 0


def run(
    task: Task, *, timeout: float, log: Path, module: str = "experiments.child"
) -> dict[str, Any]:
    """Runs a task in a process of its own.

    Args:
      task: what to do.
      module: what runs it.
      timeout: seconds after which the process is killed.
      log: file for what the process writes.

    Returns:
      What the task's function returned, with ``status`` "done", or what that
      says; or ``status`` "failed" with ``message`` saying how the process
      ended.  With it ``seconds``, how long the process ran.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, open(log, "w", encoding="utf-8") as output:
        answer = Path(folder) / "result.json"
        command = [
            sys.executable,
            "-X",
            "faulthandler",
            "-m",
            module,
            json.dumps(asdict(task)),
            str(answer),
        ]
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=_environment(task), cwd=_REPOSITORY
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            process.kill()
            process.wait()
        if code == 0:
            result = {"status": "done", **json.loads(answer.read_text())}
        else:
            result = {"status": "failed", "message": _ending(code, timeout, log)}
    return {**result, "seconds": time.monotonic() - started}


def _environment(task: Task) -> dict[str, str]:
    environment = {
        **os.environ,
        "TF_CPU_ALLOCATOR_USE_BFC": "true",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "KERAS_BACKEND": "tensorflow",
    }
    environment.pop("TF_CPU_BFC_MEM_LIMIT_IN_MB", None)
    if task.limit_mib is not None:
        environment["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(task.limit_mib)
    if task.exact:
        environment["TF_ENABLE_ONEDNN_OPTS"] = "0"
        environment["TF_NUM_INTEROP_THREADS"] = "1"
    return environment


def _ending(code: int | None, timeout: float, log: Path) -> str:
    """How a process that broke down ended, in one line."""
    if code is None:
        return f"still running after {timeout:.0f} s"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}; see {log}"
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
    return f"exit status {code}: {lines[-1][:300] if lines else 'nothing written'}; see {log}"
