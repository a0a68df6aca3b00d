"""DenseNet-BC on two logical devices, by ``MirroredStrategy`` and ``fit``.

    python -m experiments.replicas
    python -m experiments.replicas --depth 100 --shares 0.6

In the columns of the pytorch-checkpoint project's table, which says of
DenseNet on two GPUs: memory -43 %, time +15 %, and BatchNormalization
statistics that are accumulated once.  Plain, and within shares of a replica's
plain peak as predicted; each in a process of its own: as users run (memory and
time), and in the setting in which TensorFlow agrees with itself (same bits:
the statistics alone, and everything that the training moved).  Both devices
share the allocator of the CPU, so the memory is that of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .process import Runner, Task
from .tables import command, ended, positive_int, proper_share, write_csv

_TIMEOUT = 1800.0  # seconds
_MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One way to train.  Bytes and seconds, of both replicas together.

    Attributes:
      memory_change, time_change: to the plain training, as fractions.
      overhead: as predicted, the larger of both plans'.
      same_statistics: whether BatchNormalization's averages have the same bits.
      same_state: whether everything has.
    """

    way: str
    status: str
    peak: int | None = None
    step_seconds: float | None = None
    memory_change: float | None = None
    time_change: float | None = None
    overhead: float | None = None
    same_statistics: bool | None = None
    same_state: bool | None = None
    message: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment; 1 if a training differed or broke down."""
    parser = command("replicas", __doc__)
    parser.add_argument("--depth", type=positive_int, default=40, help="layers (default: 40)")
    parser.add_argument("--shares", type=proper_share, nargs="+", default=[0.5])
    parser.add_argument("--steps", type=positive_int, default=8)
    asked = parser.parse_args(arguments)
    if (asked.depth - 4) % 6 or asked.depth < 10:
        parser.error("--depth must be 10, 16, 22, ...: three blocks of pairs, and four more")
    if asked.steps < 3:
        parser.error("--steps must be at least 3: the first two are not timed")
    runner = Runner(asked.out, "experiments.replicas_child", _TIMEOUT)

    def results(share: float | None) -> list[dict[str, Any]]:
        return [
            runner.result(
                Task("train", str(asked.depth), steps=asked.steps, share=share, exact=exact)
            )
            for exact in (False, True)
        ]

    plain = results(None)
    rows = [_row("plain", plain, plain)]
    for share in asked.shares:
        rows.append(_row(f"remat, {share:.0%} a replica", results(share), plain))
    write_csv([asdict(row) for row in rows], asked.out / "table.csv")
    print(table(rows))
    print(f"saved: {asked.out / 'table.csv'}")
    return 0 if all(row.same_state for row in rows) else 1


def _row(way: str, found: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]]) -> Row:
    for result in (*plain, *found):
        if result["status"] != "done":
            return Row(way, result["status"], message=result["message"])
    (users, exact), (users_plain, exact_plain) = found, plain
    return Row(
        way,
        "done",
        peak=users["peak"],
        step_seconds=users["step_seconds"],
        memory_change=users["peak"] / users_plain["peak"] - 1,
        time_change=users["step_seconds"] / users_plain["step_seconds"] - 1,
        overhead=users.get("overhead"),
        same_statistics=exact["averages"] == exact_plain["averages"],
        same_state=exact["digest"] == exact_plain["digest"],
    )


def table(rows: Sequence[Row]) -> str:
    """The rows for people, below what was published."""
    lines = [
        f"{'':24}{'memory':>10}{'memory':>9}{'time':>9}{'time':>9}{'':>4}statistics\n"
        f"{'':24}{'MiB':>10}{'change':>9}{'s a step':>9}{'change':>9}",
        f"{'published (2 GPUs)':24}{'':>10}{'-43 %':>9}{'':>9}{'+15 %':>9}{'':>4}accumulated once",
    ]
    for row in rows:
        if row.peak is None or row.memory_change is None or row.time_change is None:
            lines.append(f"{row.way:24}{row.status}: {row.message[:200]}")
            continue
        bits = "same bits as plain" if row.same_statistics else "NOT those of plain"
        lines.append(
            f"{row.way:24}{row.peak / _MIB:10.1f}{100 * row.memory_change:+7.0f} %"
            f"{row.step_seconds:9.2f}{100 * row.time_change:+7.0f} %{'':>4}{bits}"
            f"{'' if row.same_state else '; the rest DIFFERS'}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(ended(main))
