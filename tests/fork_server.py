"""Imports TensorFlow once, and remat's compiled code, and forks for each program that it is sent.

Importing takes longer than most tests do.  TensorFlow starts nothing before its first
operation, so that a fork made before that is as good as a process of its own, and
reads most of its settings then, too; what it reads while it is imported is in the
environment of the server.

A request is a line of JSON on standard input: ``program``, ``environment``, and
``output`` and ``errors``, files for the two streams.  Answers are lines on standard
output: the number of the process, and, when it has ended, its exit code.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

from remat.solvers.compiling import ready

IMPORTED = ("numpy", "tensorflow", "keras", "remat")


def main() -> None:
    """Serves until standard input ends; a fork leaves by running its program."""
    for name in IMPORTED:
        importlib.import_module(name)
    ready()
    # Not an iteration: that would read ahead, and a fork has a copy of what was read.
    while line := sys.stdin.buffer.raw.readline():
        request = json.loads(line)
        process = os.fork()
        if process == 0:
            _become(**request)
            return
        print(process, flush=True)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(program: str, environment: dict[str, str], output: str, errors: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for stream, file in ((0, os.devnull), (1, output), (2, errors)):
        number = os.open(file, os.O_RDWR)
        os.dup2(number, stream)
        os.close(number)
    sys.argv = ["-c"]
    names = sys.modules["__main__"].__dict__
    exec(compile(program, "<string>", "exec"), names)


if __name__ == "__main__":
    main()
