"""Runs a test's body in a process of its own, where TensorFlow's settings are its own.

Memory settings must be in the environment before TensorFlow's first operation, and
near a hard limit TensorFlow can abort instead of raising; a test must survive
that and say so.  ``fork_server`` has imported TensorFlow already.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COUNTED = {"TF_CPU_ALLOCATOR_USE_BFC": "true"}
# Plain TensorFlow repeats itself bit for bit only with all three of these
# (the third, op determinism, is a call: ``exact()`` in the prelude).
REPEATABLE = {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_NUM_INTEROP_THREADS": "1"}
EXACT = {**COUNTED, **REPEATABLE}

_PRELUDE = """
import json, os
import numpy as np
import keras, tensorflow as tf
import remat

def exact():
    tf.config.experimental.enable_op_determinism()

def answer(**values):
    print("ANSWER " + json.dumps(values))

def batches(spec, count, seed=0):
    rng = np.random.default_rng(seed)
    def sample(leaf):
        if leaf.dtype.is_integer:
            return rng.integers(0, 10, leaf.shape).astype(leaf.dtype.as_numpy_dtype)
        return rng.normal(size=leaf.shape).astype(leaf.dtype.as_numpy_dtype)
    return [tf.nest.map_structure(sample, spec) for _ in range(count)]

def state(model, optimizer):
    return [np.array(v) for v in [*model.variables, *optimizer.variables]]

def put_back(model, optimizer, values):
    for variable, value in zip([*model.variables, *optimizer.variables], values):
        variable.assign(value)

def train(step, data):
    # Results are copied at once, so that they do not hold device memory.
    return [[np.array(r) for r in tf.nest.flatten(step(*batch))] for batch in data]

def same(a, b):
    a, b = tf.nest.flatten(a), tf.nest.flatten(b)
    return len(a) == len(b) and all(
        x.dtype == y.dtype and np.array_equal(x, y, equal_nan=True) for x, y in zip(a, b)
    )

def peak_of(run):
    tf.config.experimental.reset_memory_stats("CPU:0")
    run()
    return tf.config.experimental.get_memory_info("CPU:0")["peak"]
"""


# What TensorFlow reads while it is imported.
_AT_IMPORT = ("TF_ENABLE_ONEDNN_OPTS",)
# Servers that run no program, by what they were started with; tests that need two
# processes at once take two.
_idle: defaultdict[tuple[tuple[str, str], ...], list[subprocess.Popen[str]]] = defaultdict(list)


def run(body: str, environment: dict[str, str], timeout: float = 300) -> dict[str, Any]:
    """Runs ``body`` after the prelude and returns what it passed to ``answer``."""
    program = _PRELUDE + textwrap.dedent(body)
    settings = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment}
    at_import = tuple((name, settings[name]) for name in _AT_IMPORT if name in settings)
    server = _idle[at_import].pop() if _idle[at_import] else _start(at_import)
    with tempfile.NamedTemporaryFile("r") as output, tempfile.NamedTemporaryFile("r") as errors:
        request = {
            "program": program,
            "environment": settings,
            "output": output.name,
            "errors": errors.name,
            "timeout": timeout,
        }
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            print(json.dumps(request), file=server.stdin, flush=True)
            ended = int(server.stdout.readline())
        except BaseException:  # pytest's time limit, Ctrl-C: an answer is still to come
            server.kill()
            raise
        _idle[at_import].append(server)
        said = output.read()
        assert ended == 0, f"the process ended with {ended}\n{said}\n{errors.read()[-4000:]}"
    (line,) = [s for s in said.splitlines() if s.startswith("ANSWER ")]
    return json.loads(line.removeprefix("ANSWER "))


def _start(at_import: tuple[tuple[str, str], ...]) -> subprocess.Popen[str]:
    """A process that forks for each program; see ``fork_server``."""
    server = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("fork_server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **dict(at_import)},
        cwd=ROOT,
    )
    atexit.register(server.kill)
    return server
