"""Runs one measurement in a fresh process: ``experiments.child`` is what runs there.

TensorFlow reads how memory is pooled, and how much there is, when it is first
imported; and near a hard limit its kernels can abort.  So every measurement
has a process of its own, whose end is part of the result.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from remat.solvers import InfeasibleBudgetError
from remat.solvers.files import write_json

from .tables import read_result

_SEARCHES = 6  # budgets tried above an infeasible one, at most
_STEP = 1.02  # upwards
_MIB = 2**20
_REPOSITORY = Path(__file__).parent.parent


@dataclass(frozen=True)
class Task:
    """What a process is to do.

    Attributes:
      kind: name of a function in the module's ``KINDS``.
      model: name of a case in ``experiments.models.CASES`` (or of what the
        module at hand has instead, such as ``keras.applications``).
      batch: its size, where it is not the case's own.
      steps: training steps.
      budget: bytes, where there is a budget.
      share: of the plain peak as predicted, where the budget is one.
      limit_mib: hard limit of TensorFlow's allocator in MiB, if any.
      plan: file of the plan to write or to read.
      weights: file (npz) for the weights at the end.
      exact: run with oneDNN off, deterministic operations and one inter-op
        thread: TensorFlow differs from itself without.
      repeat: number of this repetition.
      seconds: of steps that are timed, once there are enough of them.
      plain_first: where plain steps are made beside, the process that makes them is the first
        to use its memory.
    """

    kind: str
    model: str
    _: KW_ONLY
    batch: int | None = None
    steps: int = 3
    budget: int | None = None
    share: float | None = None
    limit_mib: int | None = None
    plan: str | None = None
    weights: str | None = None
    exact: bool = False
    repeat: int = 0
    seconds: float = 80.0
    plain_first: bool = False


def by_turns(result: Callable[[Task], Mapping[str, Any]], task: Task) -> Mapping[str, Any]:
    """Seconds of plain steps and of a plan's, by turns in two processes.

    Of two processes with the same steps the first to use its memory is slower on a machine
    that has run others: what it gets lies in more pieces, it seems.  So this is done twice,
    each of the two being the first once.

    Args:
      result: gives what comes of a task.
      task: the plan, its budget, and the seconds for both times together.

    Returns:
      What ``experiments.child.timed`` gives, of both, ``ratio`` being the geometric mean;
      or what came of the one that failed.
    """
    half = replace(task, kind="timed", seconds=task.seconds / 2)
    first, second = (result(replace(half, plain_first=plain)) for plain in (False, True))
    for found in (first, second):
        if found["status"] != "done":
            return found
    series = {key: first[key] + second[key] for key in ("plain_seconds", "lowered_seconds")}
    return {**first, **series, "ratio": math.sqrt(first["ratio"] * second["ratio"])}


@dataclass(frozen=True)
class Runner:
    """Runs tasks, or reads what they gave when they ran before.

    Attributes:
      folder: where results and logs are kept; delete one to have it again.
      module: what runs the tasks; see ``run``.
      timeout: seconds for each.
    """

    folder: Path
    module: str
    timeout: float

    def result(self, task: Task) -> dict[str, Any]:
        """What ``run`` gives, or gave."""
        for name in ("results", "logs", "plans"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        name = _name(task)
        file = self.folder / "results" / f"{name}.json"
        if not file.exists():
            print(f"  {name} ...", end=" ", flush=True)
            log = self.folder / "logs" / f"{name}.log"
            found = run(task, timeout=self.timeout, log=log, module=self.module)
            print(f"{found['status']}, {found['seconds']:.0f} s", flush=True)
            date = datetime.date.today().isoformat()
            write_json({**found, "task": asdict(task), "date": date}, file)
        return read_result(file)

    def budgeted(self, plain: Task, budget: float) -> Task:
        """To train as plainly, but within a budget, as hard limit, and save the plan.

        Args:
          plain: the model, its batch and the steps.
          budget: bytes; of it whole MiB.
        """
        mebibytes = int(budget / _MIB)
        task = replace(plain, kind="budgeted", budget=mebibytes * _MIB, limit_mib=mebibytes)
        return replace(task, plan=self._plan(task))

    def within(self, task: Task, ceiling: int) -> tuple[Task, dict[str, Any]]:
        """The result within the task's budget, or the least found to work above it.

        Args:
          task: says ``least_budget`` (bytes) where its budget is "infeasible".
            Its hard limit, if it has one, is always the budget.
          ceiling: bytes above which that is not believed.

        Returns:
          The task with that budget, and what it gave.
        """
        assert task.budget is not None
        found = self.result(task)
        for _ in range(_SEARCHES):
            if found["status"] != "infeasible":
                break
            budget = max(int(task.budget * _STEP), min(found["least_budget"], ceiling))
            budget = -(-budget // _MIB) * _MIB
            limit = None if task.limit_mib is None else budget // _MIB
            task = replace(task, budget=budget, limit_mib=limit)
            task = replace(task, plan=None if task.plan is None else self._plan(task))
            found = self.result(task)
        return task, found

    def _plan(self, task: Task) -> str:
        assert task.budget is not None
        batch = "" if task.batch is None else f"-{task.batch}"
        name = f"{task.model}{batch}-{task.budget // _MIB}MiB.json"
        return str((self.folder / "plans" / name).resolve())


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
        process = start(task, module, answer, stdout=output, stderr=output)
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


def start(task: Task, module: str, answer: Path, **streams: Any) -> subprocess.Popen[Any]:
    """Starts the process of a task.

    Args:
      task: what to do.
      module: what runs it.
      answer: file for what comes of it.
      **streams: as ``subprocess.Popen`` takes them.
    """
    command = [sys.executable, "-X", "faulthandler", "-m", module]
    command += [json.dumps(asdict(task)), str(answer)]
    return subprocess.Popen(command, env=_environment(task), cwd=_REPOSITORY, **streams)


def _name(task: Task) -> str:
    """The task, as far as it says more than a task must, for the name of a file."""
    parts = [task.model, task.kind]
    for field in fields(Task):
        value = getattr(task, field.name)
        if field.default not in (MISSING, value):
            parts.append(f"{field.name}={Path(value).stem if isinstance(value, str) else value}")
    return "-".join(parts)


def serve(kinds: Mapping[str, Callable[[Task], Mapping[str, Any]]], arguments: list[str]) -> None:
    """What a module that runs tasks does: ``MODULE TASK RESULT.json``.

    Args:
      kinds: what a task's kind does.
      arguments: of the command line: the task, and the file for what came of it.
    """
    import tensorflow as tf

    from remat import claim_memory

    task = Task(**json.loads(arguments[0]))
    if task.limit_mib is not None:
        # Of a CPU's allocator the environment says it.
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=task.limit_mib)
        for gpu in tf.config.list_physical_devices("GPU")[:1]:
            tf.config.set_logical_device_configuration(gpu, [limit])
    if task.exact:
        tf.config.experimental.enable_op_determinism()
    claim_memory()  # a CPU's is one piece then, as a GPU's is
    try:
        result = kinds[task.kind](task)
    except InfeasibleBudgetError as error:
        result = {
            "status": "infeasible",
            "message": str(error),
            "proven": error.proven,
            "floor": error.floor,
            "floor_nodes": list(error.floor_nodes),
            "least_budget": error.least_budget,
        }
    write_json(result, Path(arguments[1]))


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
    said = lines[-1] if lines else "nothing written"
    for number, line in enumerate(lines):
        if line.startswith("Traceback"):  # the exception follows its indented frames
            said = next((text for text in lines[number + 1 :] if not text.startswith(" ")), said)
    return f"exit status {code}: {said[:300]}; see {log}"
