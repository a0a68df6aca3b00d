"""The command ``remat``.

Each group of subcommands has a module of its own with a function ``register``
that adds their parsers; a parser's default ``run`` is a function that takes
the parsed arguments and returns the exit status.  Those modules import what
is slow (TensorFlow above all) only when a subcommand runs.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence

from . import __version__, cli_profile, cli_solve, cli_sweep, cli_trace

DONE, BAD_INPUT, INFEASIBLE, INTERRUPTED = 0, 2, 3, 130  # see __main__ for Ctrl-C

_DESCRIPTION = """\
Train networks that do not fit in memory: find the cheapest order of
computations and recomputations within a budget of bytes, and run it.

  remat trace ResNet50 --input 16,224,224,3 -o GRAPH.json    write a step's graph
  remat solve GRAPH.json --budget 50% -o PLAN.json    find a schedule
  remat show PLAN.json GRAPH.json --plot MEMORY.png   look at it
  remat sweep --graphs 'DIR/*.json' --budgets 50% --store FILE.sqlite   solve many
"""

_EPILOG = """\
exit status: 0 done, 2 bad input, 3 infeasible budget, 130 interrupted (the best
so far is written).  "remat COMMAND --help" explains a command.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns its exit status."""
    parser = argparse.ArgumentParser(
        "remat",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"remat {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in (cli_trace, cli_profile, cli_solve, cli_sweep):
        module.register(commands)
    parsed = parser.parse_args(arguments)
    warnings.formatwarning = lambda message, *_, **__: f"remat: warning: {message}\n"
    try:
        return parsed.run(parsed)
    # Every error of this package is a ValueError; a method may need an extra.
    except (ValueError, OSError, ModuleNotFoundError) as error:
        reason = str(error)
        if isinstance(error, OSError) and error.filename:
            reason = f"{error.filename}: {error.strerror}"
        print(f"remat: error: {reason}", file=sys.stderr)
        return BAD_INPUT
