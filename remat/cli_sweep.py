"""``remat sweep``: very many solves, on this machine or on a cluster.  No TensorFlow."""

from __future__ import annotations

import argparse
import glob
import re
import signal
from collections import Counter
from collections.abc import Iterator
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
    memory = None if arguments.memory is None else _bytes(arguments.memory, "--memory")
    workers = available_processors() if arguments.workers is None else arguments.workers
    if workers < 1 or not arguments.timeout > 0:
        raise ValueError("--workers and --timeout must be above 0")
    with closing(Store(arguments.store)) as store, _interrupted_by_sigterm():
        if arguments.retry:
            store.forget_failed(jobs)
        with ProgressLine(None) as say, open_executor(arguments.scheduler, workers) as executor:
            sweep(
                jobs,
                store,
                executor,
                Limits(memory, arguments.timeout),
                lambda done, total: say.line(f"{done} of {total} jobs", done / total),
            )
        rows = store.rows()
    wanted = {job.key for job in jobs}
    rows = [row for row in rows if row.key in wanted]
    if arguments.plans is not None:
        _write_plans(rows, arguments.plans)
    if arguments.csv is not None:
        _write_csv(rows, arguments.csv)
    print(_summary(rows, arguments.store))
    return DONE


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
    from .solvers.solving import load_method
    from .sweep import SavedGraph, TracedModel, grid

    sources: list[Source] = []
    for pattern in arguments.graphs:
        found = sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise ValueError(f"--graphs {pattern!r} matches no file")
        sources += [SavedGraph.of(Path(path)) for path in found]
    if arguments.models and arguments.input is None:
        raise ValueError("--models needs the shape of one input: --input 224,224,3")
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
        _bytes(budget, "--budgets")
    for solver in arguments.solvers:
        load_method(solver.partition(":")[0])
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
    """A file for each plan, named after its job."""
    import json

    from .solvers.files import write_json

    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        if row.plan is not None:
            name = f"{row.graph}-{row.budget}-{row.solver}-{row.seed}.plan.json"
            write_json(json.loads(row.plan), folder / re.sub(r"[^\w%.=-]", "_", name))


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
