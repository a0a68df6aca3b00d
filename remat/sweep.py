"""Sweeps: very many independent solves, here or on a cluster, in one store that survives kills.

A job is a graph, a budget, a solver and a seed.  Jobs are handed to a
``concurrent.futures`` executor, so that none knows where it runs; each is a
``remat`` command in a process of its own (``command``).  What it gives becomes
a row of an SQLite file as soon as it is there, whether it is a plan or the
reason why there is none.  A job that has a row is not done again, so a sweep
that was killed goes on where it stopped.

Only the process that runs the sweep writes the store.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields, replace
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from . import command
from .command import INPUT, OUTPUT, Ended, Limits

FAILED = "failed"
"""Status of a job that broke down; the others are those of a solve (``solvers.Status``)."""

_SUBMITTED = 1024  # jobs handed over and not done, at most: their graphs are in memory
_PATIENCE = 60.0  # seconds that another process may hold the store
_VERSION = 1  # of the store, in SQLite's own field for it

_Task = TypeVar("_Task")


@dataclass(frozen=True)
class SavedGraph:
    """A graph file.

    Attributes:
      name: for people.
      path: of the file.
      key: digest of what it holds.
    """

    name: str
    path: Path
    key: str
    batch: None = None

    @staticmethod
    def of(path: Path) -> SavedGraph:
        """The file's name without its ending names the graph."""
        return SavedGraph(path.stem, path, _sha256(path.read_bytes()))

    def content(self) -> bytes:
        """What the file holds.

        Raises:
          ValueError: if that is no longer what ``key`` is of.
        """
        content = self.path.read_bytes()
        if _sha256(content) != self.key:
            raise ValueError(
                f"{self.path} has changed since the sweep began; what is done is kept; start "
                "it again to go on with what it holds now"
            )
        return content


@dataclass(frozen=True)
class TracedModel:
    """The training step of a Keras model, traced by the sweep itself.

    Attributes:
      model: a name such as "keras.applications.ResNet50".
      batch: size of the batch.
      shape: of one input: "224,224,3".
      profile: where costs come from; see ``remat trace``.
    """

    model: str
    batch: int
    shape: str
    profile: str

    @property
    def name(self) -> str:
        return f"{self.model.rpartition('.')[2]}-b{self.batch}"

    @property
    def key(self) -> str:
        return _digest(self.arguments)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of the command that writes the graph."""
        shape = f"{self.batch},{self.shape}"
        return ("trace", self.model, "--input", shape, "--profile", self.profile, "-o", OUTPUT)


Source = SavedGraph | TracedModel
"""Where a graph comes from."""


@dataclass(frozen=True)
class Job:
    """One solve.

    Attributes:
      source: of the graph.
      budget: as ``remat solve`` takes it.
      solver: a name, and its options if any: "openai:mode=speed".
      seed: of every random choice.
      time_limit: seconds, or None for the solver's own.
    """

    source: Source
    budget: str
    solver: str
    seed: int
    time_limit: float | None

    @property
    def key(self) -> str:
        """What makes it the same job, whatever the file is called."""
        return _digest([self.source.key, *self.arguments])

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of the command that does it.  The jobs beside it have the other processors."""
        name, *options = self.solver.split(":")
        limit = () if self.time_limit is None else ("--time-limit", str(self.time_limit))
        return (
            *("solve", INPUT, "--budget", self.budget, "--solver", name, "--seed", str(self.seed)),
            *(word for option in options for word in ("--option", option)),
            *limit,
            *("--workers", "1", "--log", "json", "-o", OUTPUT),
        )


@dataclass(frozen=True)
class Row:
    """What one job gave: a row of the store's table ``jobs``.

    Attributes:
      key: of the job.
      graph, batch, budget, solver, seed, time_limit: the job; ``batch`` is
        None for graph files.
      status: as of a solve, or "failed".
      reason: why there is no plan.
      budget_bytes, peak, least_budget, floor: bytes, as of a solve.
      cost, lower_bound: seconds of the step.
      overhead, gap: fractions.
      seconds: that the solve took.
      job_seconds: that the job took, start and end of its process included.
      host: the machine that it ran on.
      finished: when, in UTC.
      plan: a remat-plan/1 document.
    """

    key: str
    graph: str
    batch: int | None
    budget: str
    solver: str
    seed: int
    time_limit: float | None
    status: str
    reason: str
    job_seconds: float
    host: str
    finished: str
    budget_bytes: int | None = None
    peak: int | None = None
    least_budget: int | None = None
    floor: int | None = None
    cost: float | None = None
    lower_bound: float | None = None
    overhead: float | None = None
    gap: float | None = None
    seconds: float | None = None
    plan: str | None = None


_FIGURES = (
    "peak", "least_budget", "floor", "cost", "lower_bound", "overhead", "gap", "seconds",
)  # fmt: skip
_COLUMNS = ", ".join(field.name for field in fields(Row))


class Store:
    """The rows of a sweep and the graphs that it traced, in an SQLite file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens a store, or makes one.

        Raises:
          ValueError: if the file is something else, or cannot be written.
        """
        self.path = path
        try:
            self._database = sqlite3.connect(path, timeout=_PATIENCE)
            with self._database as database:
                # Another process may make the store at the same time.
                database.execute("BEGIN IMMEDIATE")
                (version,) = database.execute("PRAGMA user_version").fetchone()
                fresh = not database.execute("SELECT * FROM sqlite_master").fetchall()
                if fresh:
                    database.execute(f"PRAGMA user_version = {_VERSION}")
                elif version != _VERSION:
                    raise ValueError(f"{path} is not a store of this version of remat sweep")
                jobs = f"jobs ({_COLUMNS}, PRIMARY KEY (key))"
                for table in (jobs, "graphs (key PRIMARY KEY, name, document)"):
                    database.execute(f"CREATE TABLE IF NOT EXISTS {table}")
        except sqlite3.OperationalError as error:  # no folder, a folder, another's lock
            raise ValueError(f"the store {path} cannot be opened: {error}") from None
        except sqlite3.Error as error:
            raise ValueError(f"{path} is not a store of remat sweep: {error}") from None

    def close(self) -> None:
        """Closes the file."""
        self._database.close()

    def done(self, retry: bool = False) -> set[str]:
        """Keys of the jobs that have a row; with ``retry``, one that is not a failure."""
        found = self._database.execute("SELECT key, status FROM jobs")
        return {key for key, status in found if not (retry and status == FAILED)}

    def rows(self) -> list[Row]:
        """All rows, in the order in which they came."""
        return [Row(*row) for row in self._database.execute(f"SELECT {_COLUMNS} FROM jobs")]

    def add(self, row: Row) -> None:
        """Adds a row for good, unless the job has one that is not a failure."""
        marks = ", ".join("?" * len(fields(Row)))
        with self._writing() as database:
            database.execute("DELETE FROM jobs WHERE key = ? AND status = ?", [row.key, FAILED])
            database.execute(f"INSERT OR IGNORE INTO jobs VALUES ({marks})", astuple(row))

    def graph(self, source: Source) -> bytes | None:
        """The graph that was traced for a source, if it was."""
        found = self._database.execute("SELECT document FROM graphs WHERE key = ?", [source.key])
        row = found.fetchone()
        return None if row is None else row[0]

    def add_graph(self, source: Source, document: bytes) -> None:
        """Keeps a traced graph."""
        with self._writing() as database:
            database.execute(
                "INSERT OR IGNORE INTO graphs VALUES (?, ?, ?)",
                [source.key, source.name, document],
            )

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """All or nothing is written."""
        try:
            with self._database as database:
                yield database
        except sqlite3.Error as error:  # the disk is full, another program holds the file
            raise OSError(
                f"{self.path} cannot be written: {error}; what is there is kept"
            ) from None


def grid(
    sources: Iterable[Source],
    budgets: Sequence[str],
    solvers: Sequence[str],
    seeds: int,
    time_limit: float | None,
) -> list[Job]:
    """Every combination; two files that hold the same graph count as one."""
    jobs = [
        Job(source, budget, solver, seed, time_limit)
        for source in sources
        for budget in budgets
        for solver in solvers
        for seed in range(seeds)
    ]
    return list({job.key: job for job in jobs}.values())


def sweep(
    jobs: Sequence[Job],
    store: Store,
    executor: Executor,
    limits: Limits,
    progress: Callable[[int, int], None] | None = None,
    retry: bool = False,
) -> None:
    """Does the jobs that have no row in a store yet.

    Args:
      jobs: what to do; the keys are distinct.
      store: what is there, and where rows go.
      executor: where jobs run.
      limits: what each job may take.
      progress: called with (jobs done, of how many) as they end.
      retry: does those again, too, whose row is a failure; it stays until then.

    Raises:
      ConnectionError: if a cluster drops jobs.
    """
    done = store.done(retry)
    missing = [job for job in jobs if job.key not in done]
    finished = len(jobs) - len(missing)

    def add(job: Job, ended: Ended) -> None:
        nonlocal finished
        store.add(_row(job, ended))
        finished += 1
        if progress is not None:
            progress(finished, len(jobs))

    if progress is not None:
        progress(finished, len(jobs))
    models = {job.source for job in missing if isinstance(job.source, TracedModel)}
    untraced = [model for model in models if store.graph(model) is None]
    tracing = ((model, (model.arguments, None, limits)) for model in untraced)
    for model, ended in _outcomes(executor, tracing):
        if ended.output is not None and not ended.reason:
            store.add_graph(model, ended.output)
            continue
        ended = replace(ended, reason=f"tracing failed: {ended.reason}")
        for job in [job for job in missing if job.source == model]:
            missing.remove(job)
            add(job, ended)
    solving = ((job, (job.arguments, _document(job.source, store), limits)) for job in missing)
    for job, ended in _outcomes(executor, solving):
        add(job, ended)


@contextmanager
def open_executor(scheduler: str | None, workers: int) -> Iterator[Executor]:
    """Where jobs run.

    Args:
      scheduler: None for this machine, without a cluster; "local" for a Dask
        cluster on this machine, for as long as the context lasts; or the
        address of the scheduler of a Dask cluster: "tcp://10.0.0.1:8786".
      workers: jobs at once on this machine (a cluster at an address has as
        many as it has threads).

    Raises:
      ModuleNotFoundError: if Dask is asked for and not installed.
      ValueError: if the address is none.
      OSError: if the cluster does not answer, or has no workers.
    """
    if scheduler is None:
        command.stop.clear()
        pool = ThreadPoolExecutor(workers)  # of threads that wait for a process each
        try:
            yield pool
        finally:
            command.stop.set()
            pool.shutdown(cancel_futures=True)
        return
    try:
        from distributed import Client, LocalCluster
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"a cluster needs Dask: pip install 'remat-tf[cluster]' ({error})"
        ) from None
    if scheduler != "local":
        if not re.fullmatch(r"(tcp|tls|ucx|ws|wss)://.+:\d+", scheduler):
            raise ValueError(
                f"--scheduler {scheduler!r} is no address of a Dask scheduler, such as "
                "tcp://10.0.0.1:8786"
            )
        with Client(scheduler, set_as_default=False) as client:
            try:
                client.wait_for_workers(1, timeout=_PATIENCE)
            except asyncio.TimeoutError:
                raise ConnectionError(
                    f"{scheduler} has no workers ({_PATIENCE:.0f} s waited): start some with "
                    f"dask worker {scheduler}"
                ) from None
            yield client.get_executor(pure=False)
        return
    with (
        LocalCluster(
            n_workers=workers, threads_per_worker=1, host="127.0.0.1", dashboard_address=None
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client.get_executor(pure=False)


def _outcomes(
    executor: Executor, tasks: Iterable[tuple[_Task, tuple[Any, ...]]]
) -> Iterator[tuple[_Task, Ended]]:
    """How the commands of some tasks ended, in the order in which they do."""
    waiting: dict[Future[Ended], _Task] = {}
    left = iter(tasks)
    while True:
        for task, arguments in islice(left, _SUBMITTED - len(waiting)):
            waiting[executor.submit(command.run, *arguments)] = task
        if not waiting:
            return
        for future in wait(waiting, return_when=FIRST_COMPLETED).done:
            if future.cancelled():
                raise ConnectionError(
                    "the cluster dropped a job: is its scheduler still there? What is done is "
                    "kept; start the sweep again to go on"
                )
            error = future.exception()
            if error is None:
                yield waiting.pop(future), future.result()
            else:  # the worker's, not the command's
                reason = f"{type(error).__name__}: {error}"
                yield waiting.pop(future), Ended(reason, "", None, 0.0, "")


def _document(source: Source, store: Store) -> bytes:
    if isinstance(source, SavedGraph):
        return source.content()
    document = store.graph(source)
    assert document is not None
    return document


def _row(job: Job, ended: Ended) -> Row:
    """What a job's command gave, or why it gave nothing."""
    found: dict[str, Any] = {}
    reason, plan = _named(ended.reason, job.source), ended.output
    if not reason:
        found = json.loads(ended.printed.splitlines()[-1])
        beyond = [n for n, value in found.items() if isinstance(value, int) and value >= 2**63]
        if beyond:
            reason = f"{', '.join(beyond)} of {job.source.name} cannot be stored: beyond 64 bits"
            found, plan = {}, None
        elif plan is None:
            reason = found["message"]
    return Row(
        key=job.key,
        graph=job.source.name,
        batch=job.source.batch,
        budget=job.budget,
        solver=job.solver,
        seed=job.seed,
        time_limit=job.time_limit,
        status=found.get("status", FAILED),
        reason=reason,
        job_seconds=ended.seconds,
        host=ended.host,
        finished=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        budget_bytes=found.get("budget"),
        plan=None if plan is None else plan.decode(),
        **{name: found.get(name) for name in _FIGURES},
    )


def _named(reason: str, source: Source) -> str:
    """A reason that speaks of the graph's own file, not of the job's copy of it."""
    return reason.replace(
        INPUT, str(source.path) if isinstance(source, SavedGraph) else source.name
    )


def _digest(content: Any) -> str:
    return _sha256(json.dumps(content).encode())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
