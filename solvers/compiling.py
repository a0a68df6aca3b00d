"""The compiled code of annealing: loaded when needed, compiled once after an install.

numba keeps what it compiled beside the sources (or in ``NUMBA_CACHE_DIR``).
Where it is not there yet, another process compiles it, some ten seconds long,
so that proofs and heuristics go on meanwhile, and a solve that ends without
annealing does not wait for it.  Loading it takes a quarter of a second, in a
thread of its own for the same reason.  A time limit that the user gave is kept
all the same; the default limit is extended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path

import numpy as np

from .graph import Graph, Node
from .method import Monitor

# Half the time to compile, and the compiled loops are as fast.
_SETTINGS = {"NUMBA_OPT": "1"}
_TICK = 0.02  # seconds between looks at the other process or thread

_loading = threading.Lock()
_loaded = threading.Event()


def load(monitor: Monitor) -> Callable[..., None] | None:
    """``moves.anneal_at``, ready to run; None if the monitor said stop before it was."""
    while not _loaded.is_set():
        if monitor.should_stop():
            return None
        if not _loading.acquire(timeout=_TICK):
            continue
        try:
            if not _loaded.is_set():
                cached = _aside(_cached, monitor)
                if cached is None or not (cached or _compile_aside(monitor)):
                    return None
                if not _aside(_call, monitor):
                    return None
                _loaded.set()
        finally:
            _loading.release()
    from .moves import anneal_at  # numba takes a while to import, too

    return anneal_at


def ready() -> None:
    """Waits until annealing can start at once: some ten seconds, once after an install."""
    load(Monitor())


def excuse(monitor: Monitor) -> str:
    """Why there was no annealing, if time ran out before it could start."""
    if _loaded.is_set() or monitor.remaining() > 0:
        return ""
    return (
        "annealing, which is compiled once after an install (ten seconds) and loaded once a "
        "process (a quarter of one), was not ready in time: solve again, or with more time"
    )


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "loading")


def _aside(work: Callable[[], bool], monitor: Monitor) -> bool | None:
    """What some work returns; None if the monitor says stop before.

    It goes on then, and whoever solves next finds it done.
    """
    future = _thread().submit(work)
    while not wait([future], _TICK).done:
        if monitor.should_stop():
            return None
    return future.result()


def _compile_aside(monitor: Monitor) -> bool:
    """Lets another process compile; False if the monitor said stop before it was done."""
    process = subprocess.Popen(
        [sys.executable, "-m", __spec__.name],
        stdin=subprocess.DEVNULL,
        # It may outlive this process, whose output others may wait for.
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **_SETTINGS, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )
    while True:
        try:
            process.wait(_TICK)
        except subprocess.TimeoutExpired:
            monitor.extend(_TICK)
        else:
            return True
        if monitor.should_stop():
            # Out of time: whoever solves next finds it compiled.
            if monitor.remaining() > 0:
                process.kill()
                process.wait()
            return False


def _cached() -> bool:
    """Whether compiled code is kept that is newer than its sources."""
    sources = (Path(__file__).with_name(name) for name in ("moves.py", "sequence.py"))
    newest = max(source.stat().st_mtime for source in sources)
    return any(index.stat().st_mtime > newest for index in _indexes())


def _indexes() -> list[Path]:
    """What numba keeps of ``anneal_at`` for this version of Python; one file each time it moved."""
    from .moves import anneal_at

    version = f"py{sys.version_info.major}{sys.version_info.minor}"
    return list(Path(anneal_at.stats.cache_path).glob(f"*.anneal_at-*.{version}*.nbi"))


def _call() -> bool:
    """Calls the code once, which compiles or loads it; True when that is done."""
    from .moves import anneal_at
    from .sequence import make_state, make_tables

    graph = Graph("one node", (Node("node", 1.0, 1),), ())
    tables = make_tables(graph, 1)
    state = make_state(graph, tables, (0,), 1, 1)
    random, best = np.ones(1, np.uint64), np.empty(len(state.at), np.int64)
    anneal_at(tables, state, random, best, np.zeros(2), np.ones(5), 1.0, 1)
    return True


if __name__ == "__main__":
    for index in _indexes():
        # numba would look at one of the two sources only, and take this for the latest.
        index.unlink(missing_ok=True)
    _call()
