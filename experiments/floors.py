"""What sets the least budget, and how much lower it is with updates in blocks.

    python -m experiments.floors                     two minutes on 2 cores; nothing is trained

For each network: the peak of the plain step as predicted; the proven floor, below
which no schedule exists, with the update of each variable as a whole and with
those of large variables in blocks of rows (``remat/split.py``); and the operation
that needs it.  Scratch memory of kernels is not in it: nothing is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from remat.solvers.floor import memory_floor

from .models import CASES, FURTHER, TRAINED
from .tables import begin, command, ended, machine, write_csv

_MIB = 2**20
_PROFILE = "h200"  # roofline prices: floors do not depend on them


@dataclass(frozen=True)
class Row:
    """One network.  Bytes.

    Attributes:
      resident: weights, optimizer slots, batch.
      floor_whole, floor: without and with updates in blocks.
      setter: name of the node that needs the floor.
    """

    model: str
    size: str
    plain_peak: int
    resident: int
    floor_whole: int
    floor: int
    setter: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table and saves it."""
    parser = command("floors", __doc__)
    everything = (*TRAINED, *FURTHER, "VGG16Full")
    parser.add_argument("--models", nargs="+", choices=CASES, default=everything, metavar="NAME")
    asked = parser.parse_args(arguments)
    begin(asked.out)
    print(f"{'':18}{'plain, MiB':>11}{'resident':>10}{'floor, whole':>17}{'in blocks':>17}  set by")
    rows = []
    for model in asked.models:
        row = floors(model)
        rows.append(row)
        write_csv([{**asdict(row), **machine()} for row in rows], asked.out / "table.csv")
        shown = [
            f"{floor / _MIB:8.0f} ({100 * floor / row.plain_peak:4.1f} %)"
            for floor in (row.floor_whole, row.floor)
        ]
        print(
            f"{model:18}{row.plain_peak / _MIB:11.0f}{row.resident / _MIB:10.0f}"
            f"{shown[0]:>17}{shown[1]:>17}  {row.setter}",
            flush=True,
        )
    print(f"saved: {asked.out / 'table.csv'}")
    return 0


def floors(model: str) -> Row:
    """Traces a network's step and asks for the floor, both ways."""
    from remat.compile import one_step_of
    from remat.planning import prepare, read

    case = CASES[model]
    function = one_step_of(case.model(), case.loss(), case.optimizer())
    traced, program = read(function, case.specs())
    whole, blocks = (
        prepare(traced, program, profile=_PROFILE, split=split) for split in (False, True)
    )
    floor_whole, _ = memory_floor(whole.extraction.graph)
    floor, setters = memory_floor(blocks.extraction.graph)
    graph = blocks.extraction.graph
    return Row(
        model,
        case.size,
        whole.plain.peak,
        graph.resident,
        floor_whole,
        floor,
        graph.nodes[setters[0]].name if setters else "",
    )


if __name__ == "__main__":
    raise SystemExit(ended(main))
