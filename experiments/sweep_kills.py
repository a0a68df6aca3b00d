"""Does a sweep lose anything?  A worker and the sweep itself are killed midway.

    python -m experiments.sweep_kills --jobs 300

A Dask cluster on the loopback of this machine, one scheduler and two workers
without nannies, does a sweep of generated graphs.  After a quarter of the jobs
one worker is killed (SIGKILL), after half of them the sweep, which is then
started again, and after that once more.  What the store holds is compared with
what was asked for, every plan is checked against its graph, and the rows that
were there when the sweep was killed must be there unchanged.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from remat.solvers import Plan, load_graph, save_graph
from remat.sweep import FAILED, Row, Store

from .graphs import generate
from .tables import command, ended, machine, write_csv

_BUDGETS = ("90%", "80%", "70%")
_SOLVERS = ("moments", "chen_greedy", "griewank", "feng_huang")
_SMALLEST, _STEP = 62, 4  # nodes of the graphs
_TIMEOUT = 900.0  # seconds that anything here may take
_SAID = 2000  # characters of a log to show


@dataclass(frozen=True)
class Outcome:
    """What became of a sweep.

    Attributes:
      jobs: how many were asked for.
      rows: how many are in the store at the end.
      distinct: different jobs among them.
      failed: rows without an answer.
      plans: rows with a plan, each checked against its graph.
      rows_at_worker_kill, rows_at_sweep_kill: how many were there then.
      changed: of the rows at that time, those that are no longer as they were.
      added_by_third_start: rows that one more start added.
      seconds: of the killed and the second start together.
    """

    jobs: int
    rows: int
    distinct: int
    failed: int
    plans: int
    rows_at_worker_kill: int
    rows_at_sweep_kill: int
    changed: int
    added_by_third_start: int
    seconds: float

    @property
    def nothing_lost(self) -> bool:
        """Whether every job has its row, once."""
        clean = not (self.failed or self.changed or self.added_by_third_start)
        return clean and self.rows == self.distinct == self.jobs


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment; returns 1 if anything was lost."""
    parser = command("sweep_kills", __doc__)
    per_graph = len(_BUDGETS) * len(_SOLVERS)
    parser.add_argument("--jobs", type=int, default=300, help=f"a multiple of {per_graph}")
    asked = parser.parse_args(arguments)
    if asked.jobs < per_graph or asked.jobs % per_graph:
        parser.error(f"--jobs must be a multiple of {per_graph}")
    shutil.rmtree(asked.out, ignore_errors=True)
    (asked.out / "graphs").mkdir(parents=True)
    for number in range(asked.jobs // per_graph):
        graph = generate(f"training-{_SMALLEST + _STEP * number}")
        save_graph(graph, asked.out / "graphs" / f"{graph.name}.json")
    outcome = _sweep_with_kills(asked.out, asked.jobs)
    write_csv([{**asdict(outcome), **machine()}], asked.out / "outcome.csv")
    for key, value in {**asdict(outcome), **machine()}.items():
        print(f"{key}: {value}")
    print("every job has its row, once" if outcome.nothing_lost else "SOMETHING WAS LOST")
    return 0 if outcome.nothing_lost else 1


def _sweep_with_kills(folder: Path, jobs: int) -> Outcome:
    store = folder / "sweep.sqlite"
    started = time.monotonic()
    with _cluster(folder) as (address, worker):
        command = [sys.executable, "-m", "remat", "sweep", "--store", str(store)]
        command += ["--graphs", f"{folder}/graphs/*.json", "--scheduler", address]
        command += ["--budgets", *_BUDGETS, "--solvers", *_SOLVERS]
        log = folder / "sweep.log"
        with _process(command, log) as sweep:
            _wait_for(lambda: len(_rows(store)) >= jobs // 4, sweep, log)
            at_worker_kill = len(_rows(store))
            worker.kill()
            _wait_for(lambda: len(_rows(store)) >= jobs // 2, sweep, log)
            sweep.kill()
            sweep.wait()
        before = _rows(store)
        subprocess.run(command, check=True, timeout=_TIMEOUT)
        seconds = time.monotonic() - started
        after = _rows(store)
        subprocess.run(command, check=True, timeout=_TIMEOUT)
    keys = {row.key for row in after}
    for row in after:
        if row.plan is not None:
            plan = Plan.from_json(json.loads(row.plan))
            plan.check(load_graph(folder / "graphs" / f"{row.graph}.json"))
    return Outcome(
        jobs=jobs,
        rows=len(after),
        distinct=len(keys),
        failed=sum(row.status == FAILED for row in after),
        plans=sum(row.plan is not None for row in after),
        rows_at_worker_kill=at_worker_kill,
        rows_at_sweep_kill=len(before),
        changed=len(set(before) - set(after)),
        added_by_third_start=len(_rows(store)) - len(after),
        seconds=seconds,
    )


@contextlib.contextmanager
def _cluster(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A scheduler and two workers: its address, and the worker that may be killed."""
    file = folder / "scheduler.json"
    dask = [sys.executable, "-m", "dask"]
    local = ["--host", "127.0.0.1", "--no-dashboard"]
    scheduler = [*dask, "scheduler", *local, "--port", "0", "--scheduler-file", str(file)]
    worker = [*dask, "worker", *local, "--nthreads", "1", "--no-nanny"]
    worker += ["--local-directory", str(folder / "workers"), "--scheduler-file", str(file)]
    log = folder / "scheduler.log"
    with _process(scheduler, log) as process:
        _wait_for(file.exists, process, log)
        address = json.loads(file.read_text())["address"]
        with (
            _process(worker, folder / "worker1.log") as first,
            _process(worker, folder / "worker2.log"),
        ):
            yield address, first


@contextlib.contextmanager
def _process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the context."""
    with (
        open(log, "wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits for something that a process does.

    Raises:
      RuntimeError: if the process ends without it; with the end of its log.
      TimeoutError: if it does not do it.
    """
    give_up = time.monotonic() + _TIMEOUT
    while not condition():
        if process.poll() is not None:
            said = log.read_text(encoding="utf-8")[-_SAID:]
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}: {said}")
        if time.monotonic() > give_up:
            raise TimeoutError(f"{process.args!r} took more than {_TIMEOUT:.0f} s")
        time.sleep(0.1)


def _rows(path: Path) -> list[Row]:
    """What the store holds now."""
    if not path.exists():
        return []
    with contextlib.closing(Store(path)) as store:
        return store.rows()


if __name__ == "__main__":
    raise SystemExit(ended(main))
