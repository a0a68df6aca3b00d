"""``remat sweep``: very many solves, on this machine or on a cluster.  No TensorFlow."""

from __future__ import annotations

import argparse
import glob
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .sweep import Job, Row, Source

_DESCRIPTION = """\
Solve every combination of graphs, budgets, solvers and seeds, and keep what
each gives in one SQLite file.  Each job runs in a process of its own, on one
processor; one that breaks down, or takes more than it may, is a row with the
reason.  A sweep that was stopped or killed goes on where it was when the same
command is given again: a job that has a row is not done again.

Jobs run on this machine, or, with --scheduler (extra remat-tf[cluster]), on a
Dask cluster whose machines have remat installed; graphs travel with the jobs.
"""

_EPILOG = """\
examples:
  remat sweep --graphs 'graphs/*.json' --budgets 70% 50% 30% --store sweep.sqlite
  remat sweep --graphs 'graphs/*.json' --budgets 50% --solvers auto openai:mode=speed \\
      --store sweep.sqlite --plans plans
  remat sweep --models keras.applications.ResNet50 keras.applications.VGG16 \\
      --batches 16 32 64 --input 224,224,3 --profile h200 --budgets 16GB \\
      --store sweep.sqlite --csv sweep.csv
  remat sweep --graphs 'graphs/*.json' --budgets 50% --store sweep.sqlite \\
      --scheduler tcp://10.0.0.1:8786

exit status: 0 every job has a row (the failed ones are counted), 2 bad input,
130 interrupted (what is done is kept).
"""


def register(commands: Any) -> None:
    """Adds ``sweep`` to the command line."""
    parser = commands.add_parser(
        "sweep",
        help="solve very many combinations",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--graphs", nargs="+", default=[], metavar="'DIR/*.json'", help="remat-graph/1 files"
    )
    parser.add_argument(
        "--models", nargs="+", default=[], metavar="NAME", help="of keras.applications, to trace"
    )
    parser.add_argument(
        "--batches", nargs="+", type=int, default=[32], help="of the models (default: 32)"
    )
    parser.add_argument("--input", metavar="H,W,C", help="shape of one input of the models")
    parser.add_argument(
        "--profile", default="auto", help="where the models' costs come from; see remat trace"
    )
    parser.add_argument(
        "--budgets", nargs="+", required=True, metavar="BUDGET", help="bytes, 4GiB, or 50%%"
    )
    parser.add_argument(
        "--solvers",
        nargs="+",
        default=["auto"],
        metavar="NAME[:OPTION=VALUE...]",
        help="default: auto; see remat solve",
    )
    parser.add_argument("--seeds", type=int, default=1, help="how many, from 0 (default 1)")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="of each solve")
    parser.add_argument(
        "--store", required=True, type=Path, metavar="FILE.sqlite", help="made if it is not there"
    )
    parser.add_argument(
        "--scheduler",
        metavar="ADDRESS",
        help="of a Dask cluster, or local for one on this machine while the sweep lasts",
    )
    parser.add_argument("--workers", type=int, help="jobs at once (default: all processors)")
    parser.add_argument("--memory", metavar="BYTES", help="that each job may take (default: any)")
    parser.add_argument(
        "--timeout", type=float, default=3600.0, metavar="SECONDS", help="of a job (default 3600)"
    )
    parser.add_argument("--retry", action="store_true", help="do failed jobs again")
    parser.add_argument("--plans", type=Path, metavar="DIR", help="write every plan to a file")
    parser.add_argument(
        "--csv", type=Path, metavar="FILE.csv", help="write the rows, without plans"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs ``remat sweep``; returns the exit status."""
    from .cli import DONE
    from .command import Limits
    from .progress import ProgressLine
    from .solvers.solving import available_processors
    from .sweep import Store, open_executor, sweep

    jobs = _jobs(arguments)
    memory = None
    if arguments.memory is not None:
        memory = _bytes(arguments.memory, "--memory")
        if memory < 1 or "%" in arguments.memory:
            raise ValueError(f"--memory {arguments.memory}: bytes above 0, such as 4GiB")
    workers = available_processors() if arguments.workers is None else arguments.workers
    if workers < 1 or not arguments.timeout > 0:
        raise ValueError("--workers and --timeout must be above 0")
    _check_outputs(arguments, jobs)
    wanted = {job.key for job in jobs}
    with closing(Store(arguments.store)) as store, _interrupted_by_sigterm():
        try:
            with ProgressLine(None) as say, open_executor(arguments.scheduler, workers) as executor:
                sweep(
                    jobs,
                    store,
                    executor,
                    Limits(memory, arguments.timeout),
                    lambda done, total: say.line(f"{done} of {total} jobs", done / total),
                    arguments.retry,
                )
        except KeyboardInterrupt:
            done = len(wanted & store.done())
            print(
                f"remat: stopped: {done} of {len(jobs)} jobs have a row in {arguments.store}; the "
                "same command goes on",
                file=sys.stderr,
            )
            raise
        rows = [row for row in store.rows() if row.key in wanted]
    if arguments.plans is not None:
        _write_plans(rows, arguments.plans)
    if arguments.csv is not None:
        _write_csv(rows, arguments.csv)
    print(_summary(rows, arguments.store))
    return DONE


def _check_outputs(arguments: argparse.Namespace, jobs: Sequence[Job]) -> None:
    """Nothing that is written may replace what is read, and it must be possible to write it.

    Raises:
      ValueError, OSError: naming the option.
    """
    from .solvers.files import check_writable
    from .sweep import SavedGraph

    if str(arguments.store) == ":memory:":
        raise ValueError("--store is a file, which keeps the rows")
    if arguments.csv is not None:
        read = {job.source.path for job in jobs if isinstance(job.source, SavedGraph)}
        if os.path.realpath(arguments.csv) in map(os.path.realpath, [arguments.store, *read]):
            raise ValueError(f"--csv {arguments.csv} is the store or a graph, and would replace it")
        check_writable(arguments.csv)
    if arguments.plans is not None:
        arguments.plans.mkdir(parents=True, exist_ok=True)


def _files(patterns: Sequence[str]) -> list[str]:
    """Those that the patterns match; a file's own name is one, whatever is in it.

    Raises:
      ValueError: if a pattern matches none.
    """
    files = []
    for pattern in patterns:
        found = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
        if not found:
            raise ValueError(f"--graphs {pattern!r} matches no file")
        files += sorted(found)
    return files


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """What batch queues say before they kill is taken as Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _jobs(arguments: argparse.Namespace) -> list[Job]:
    """What the command line asks for.

    Raises:
      ValueError: if a part of it is not valid.
    """
    from .profiles.price import load_pricer
    from .solvers.solving import load_method
    from .sweep import SavedGraph, TracedModel, grid

    sources: list[Source] = []
    sources += [SavedGraph.of(Path(path)) for path in _files(arguments.graphs)]
    if arguments.models and not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", arguments.input or ""):
        raise ValueError("--models needs the shape of one input: --input 224,224,3")
    if min(arguments.batches) < 1:
        raise ValueError("--batches must be 1 or more")
    if arguments.models and arguments.profile != "auto":
        load_pricer(arguments.profile)  # says what is wrong with it once, and not in every job
    for model in arguments.models:
        if model.endswith(".keras"):
            raise ValueError(f"{model}: trace a saved model with remat trace; sweep its graph")
        sources += [
            TracedModel(model, batch, arguments.input, arguments.profile)
            for batch in arguments.batches
        ]
    if not sources:
        raise ValueError("give --graphs, --models or both")
    names = Counter(name for name, _ in {(source.name, source.key) for source in sources})
    shared = [name for name, count in names.items() if count > 1]
    if shared:
        raise ValueError(f"different graphs are called {', '.join(shared)}; rename their files")
    for budget in arguments.budgets:
        if _bytes(budget, "--budgets") >= 2**63:
            raise ValueError(f"--budgets {budget}: more bytes than 64 bits can count")
    for solver in arguments.solvers:
        name, *options = solver.split(":")
        load_method(name)
        if not all(re.fullmatch(r"\w+=.+", option) for option in options):
            raise ValueError(f"--solvers {solver}: NAME[:OPTION=VALUE...], as openai:mode=speed")
    limit = arguments.time_limit
    if limit is not None and not 0 < limit < float("inf"):
        raise ValueError(f"--time-limit {limit}: seconds above 0")
    if arguments.seeds < 1:
        raise ValueError("--seeds must be 1 or more")
    return grid(
        sources, arguments.budgets, arguments.solvers, arguments.seeds, arguments.time_limit
    )


def _bytes(text: str, option: str) -> int:
    from .solvers.budget import parse_budget

    try:
        return parse_budget(text, 1)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def _write_plans(rows: list[Row], folder: Path) -> None:
    """A file for each plan, named after its job (and its key, where others have that name)."""
    import json

    from .solvers.files import write_json

    names = [
        re.sub(r"[^\w%.=-]", "_", f"{row.graph}-{row.budget}-{row.solver}-{row.seed}")
        for row in rows
    ]
    shared = {name for name, count in Counter(names).items() if count > 1}
    for name, row in zip(names, rows, strict=True):
        if row.plan is not None:
            own = f"{name}-{row.key[:8]}" if name in shared else name
            write_json(json.loads(row.plan), folder / f"{own}.plan.json")


def _write_csv(rows: list[Row], path: Path) -> None:
    import pandas

    from .solvers.files import written

    frame = pandas.DataFrame(rows).drop(columns="plan")
    with written(path) as file:
        frame.to_csv(file, index=False)


def _summary(rows: list[Row], store: Path) -> str:
    """How the jobs ended, and why some failed."""
    from .sweep import FAILED

    counts = Counter(row.status for row in rows)
    lines = [f"{len(rows)} jobs: " + ", ".join(f"{n} {status}" for status, n in counts.items())]
    reasons = Counter(row.reason for row in rows if row.status == FAILED)
    lines += [f"  {count} x {reason}" for reason, count in reasons.most_common(5)]
    lines.append(f"rows and plans are in {store}, table jobs")
    return "\n".join(lines)
