"""Imports TensorFlow and remat once, loads what is compiled, and forks for each program.

Importing takes longer than most tests do.  TensorFlow starts nothing before its
first operation, and until then has read none of its settings but those that are in
the environment of the server; so a fork is as good as a process of its own.

A request is a line of JSON on standard input: ``program``, ``environment``, ``output``
and ``errors`` (files for the two streams) and ``timeout`` in seconds, after which the
program is ended.  The answer is a line on standard output: the exit code, negative for
the signal that ended it.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import sys

from remat.solvers.compiling import ready

IMPORTED = ("numpy", "tensorflow", "keras", "remat", "remat.compile")


def main() -> None:
    """Serves until standard input ends; a fork leaves by running its program."""
    for name in IMPORTED:
        importlib.import_module(name)
    ready()
    gc.freeze()  # what is there already is no garbage, however often a program collects
    # Not an iteration: that would read ahead, and a fork would have a copy of it.
    while line := sys.stdin.buffer.raw.readline():
        request = json.loads(line)
        process = os.fork()
        if process == 0:
            _become(**request)
            return
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(
    program: str, environment: dict[str, str], output: str, errors: str, timeout: float
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for stream, file in ((0, os.devnull), (1, output), (2, errors)):
        number = os.open(file, os.O_RDWR)
        os.dup2(number, stream)
        os.close(number)
    faulthandler.dump_traceback_later(timeout, exit=True, file=2)  # says where it is stuck
    sys.argv = ["-c"]
    exec(compile(program, "<string>", "exec"), sys.modules["__main__"].__dict__)


if __name__ == "__main__":
    main()
