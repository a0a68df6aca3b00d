"""One ``remat`` command in a process of its own: how a sweep does a job, wherever it runs.

A job that crashes, or takes more memory than it may, then ends alone, and how
it ended is its result.  Run as a program, this module is that process.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from .cli import DONE, INFEASIBLE, main
from .solvers.budget import format_bytes

INPUT, OUTPUT = "input.json", "output.json"
"""What stands for the files of a command in its arguments."""

stop = threading.Event()
"""When set, the commands that run in threads of this process are killed."""

_TICK = 0.1  # seconds between looks at the process
_LONGEST = 300  # characters of a complaint that are kept


@dataclass(frozen=True)
class Limits:
    """What one command may take.

    Attributes:
      memory: bytes of main memory, that of its child processes included; None
        for no limit.
      seconds: on the clock.
    """

    memory: int | None = None
    seconds: float = 3600.0


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
      reason: why it has no result, in one line; empty if it ended with one of
        the exit statuses that mean an answer (0 done, 3 infeasible).
      printed: what it wrote to standard output.
      output: the file that it wrote, or None.
      seconds: on the clock.
      host: name of the machine.
    """

    reason: str
    printed: str
    output: bytes | None
    seconds: float
    host: str


def run(arguments: Sequence[str], given: bytes | None, limits: Limits) -> Ended:
    """Runs ``remat`` with some arguments, and waits for it.

    Args:
      arguments: of the command; ``INPUT`` and ``OUTPUT`` stand for the files
        that it reads and writes.
      given: what ``INPUT`` holds.
      limits: what it may take; it is killed when it takes more.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="remat-") as name:
        folder = Path(name)
        if given is not None:
            (folder / INPUT).write_bytes(given)
        files = {file: str(folder / file) for file in (INPUT, OUTPUT)}
        command = [sys.executable, "-m", __name__, *(files.get(a, a) for a in arguments)]
        with open(folder / "printed", "wb") as printed, open(folder / "said", "wb") as said:
            process = subprocess.Popen(
                command,
                # Never written to: it ends with this process, and so does the command.
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=said,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                # Ctrl-C in a terminal goes to the whole group; the parent decides.
                start_new_session=True,
            )
            with process:
                reason = _watch(process, limits, started)
        output = folder / OUTPUT
        return Ended(
            reason=reason
            or _complaint(process.returncode, _text(folder / "said").replace(f"{folder}/", "")),
            printed=_text(folder / "printed"),
            output=output.read_bytes() if output.exists() else None,
            seconds=time.monotonic() - started,
            host=socket.gethostname(),
        )


def _watch(process: subprocess.Popen[bytes], limits: Limits, started: float) -> str:
    """Waits for a process; returns why it was killed, if it was."""
    while True:
        try:
            process.wait(_TICK)
            return ""
        except subprocess.TimeoutExpired:
            pass
        reason = ""
        if stop.is_set():
            reason = "stopped"
        elif time.monotonic() - started > limits.seconds:
            reason = f"still running after {limits.seconds:.0f} s"
        elif limits.memory is not None and (taken := _resident(process.pid)) > limits.memory:
            reason = (
                f"out of memory: it took {format_bytes(taken)} of the "
                f"{format_bytes(limits.memory)} that a job may take"
            )
        if reason:
            _kill(process.pid)
            process.wait()
            return reason


def _complaint(code: int, said: str) -> str:
    """Why a process that ended has no answer; empty if it has one."""
    if code in (DONE, INFEASIBLE):
        return ""
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (the machine may have run out of memory)" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    lines = [line for line in said.splitlines() if line.strip()]
    last = lines[-1].removeprefix("remat: error: ") if lines else "nothing said"
    return f"exit status {code}: {last[:_LONGEST]}"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _resident(pid: int) -> int:
    """Bytes of main memory that a process and those it started hold."""
    total = 0
    for process in _family(pid):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue  # it has just ended
    return total


def _kill(pid: int) -> None:
    for process in _family(pid):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _end_with_parent() -> None:
    """Waits until standard input ends, which it does when the parent does."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(main(sys.argv[1:]))
