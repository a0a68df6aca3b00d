"""Runs a test's body in a fresh process, where TensorFlow's settings are its own.

Memory settings must be in the environment before TensorFlow is imported, and
near a hard limit TensorFlow can abort instead of raising; a test must survive
that and say so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
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


def run(body: str, environment: dict[str, str], timeout: float = 300) -> dict[str, Any]:
    """Runs ``body`` after the prelude and returns what it passed to ``answer``."""
    program = _PRELUDE + textwrap.dedent(body)
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert finished.returncode == 0, (
        f"the process ended with {finished.returncode}\n{finished.stdout}\n"
        f"{finished.stderr[-4000:]}"
    )
    (line,) = [s for s in finished.stdout.splitlines() if s.startswith("ANSWER ")]
    return json.loads(line.removeprefix("ANSWER "))
