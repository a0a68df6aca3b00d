"""Six kinds of training, a hundred steps on real data: is the loss the same curve?

    python -m experiments.trainings                  all of them (about ten minutes; it resumes)
    python -m experiments.trainings --models gan vae

A GAN in a hand-written step, a variational autoencoder with ``add_loss``, a
siamese network, a U-Net with skip connections, a Transformer with a causal
mask in mixed precision and an LSTM language model, on handwritten digits
(scikit-learn's, in the extra ``experiments``) and the text of the licence: plain,
and inside 60 % of the plain peak or the least budget found to work.  Each is a
process of its own, in the setting in which TensorFlow agrees with itself
(oneDNN off, deterministic operations, one inter-op thread).  "differing" counts
the steps whose loss is not that of the plain training to the last bit, and
"same state" says so of all weights, averages, slots and seeds at the end.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from .process import Runner, Task
from .tables import command, ended, positive_int, write_csv

MODELS = ("gan", "vae", "siamese", "unet", "transformer", "lstm")

_SHARE = 0.6  # of the plain peak
_STEPS = 100
_TIMEOUT = 900.0  # seconds
_MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One training.  Bytes and seconds; None where there is none.

    Attributes:
      status: of the training within the budget: "done", "infeasible" or "failed".
      differing: steps with another loss than without remat.
      same_state: whether everything that the training moved has the same bits.
      first_loss, last_loss: the (first) model's, within the budget.
      step_seconds: the median, within the budget; plain_seconds: without.
    """

    model: str
    status: str
    steps: int
    budget: int | None = None
    plain_peak: int | None = None
    peak: int | None = None
    predicted: int | None = None
    recomputations: int | None = None
    differing: int | None = None
    same_state: bool | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    plain_seconds: float | None = None
    step_seconds: float | None = None
    message: str = ""

    @property
    def good(self) -> bool:
        """Whether it is exact and within the budget."""
        if self.peak is None or self.budget is None:
            return False
        return self.differing == 0 and bool(self.same_state) and self.peak <= self.budget


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment; 1 if a training differed, went over its budget or broke down."""
    parser = command("trainings", __doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="NAME")
    parser.add_argument("--steps", type=positive_int, default=_STEPS)
    asked = parser.parse_args(arguments)
    if importlib.util.find_spec("sklearn") is None:
        parser.error("the digits are scikit-learn's: pip install '.[experiments]'")
    runner = Runner(asked.out, "experiments.trainings_child", _TIMEOUT)
    rows: list[Row] = []
    curves: dict[str, tuple[Any, Any]] = {}
    for model in asked.models:
        plain = runner.result(Task("train", model, steps=asked.steps, exact=True))
        budget, found = None, plain
        if plain["status"] == "done":
            task = Task(
                "train", model, steps=asked.steps, budget=int(_SHARE * plain["peak"]), exact=True
            )
            task, found = runner.within(task, plain["peak"])
            budget = task.budget
        rows.append(_row(model, asked.steps, budget, plain, found))
        if rows[-1].status == "done":
            curves[model] = (plain["losses"], found["losses"])
        write_csv([asdict(row) for row in rows], asked.out / "table.csv")
        if curves:
            plot(curves, asked.out / "losses.png")
    print(table(rows))
    print(f"saved: {asked.out / 'table.csv'}, {asked.out / 'losses.png'}")
    return 0 if all(row.good for row in rows) else 1


def _row(
    model: str,
    steps: int,
    budget: int | None,
    plain: Mapping[str, Any],
    found: Mapping[str, Any],
) -> Row:
    if found["status"] != "done":
        return Row(model, found["status"], steps, budget, message=found["message"])
    pairs = zip(plain["losses"], found["losses"], strict=True)
    return Row(
        model,
        found["status"],
        steps,
        budget,
        plain_peak=plain["peak"],
        peak=found["peak"],
        predicted=found["predicted"],
        recomputations=found["recomputations"],
        differing=sum(one != other for one, other in pairs),
        same_state=plain["digest"] == found["digest"],
        first_loss=found["losses"][0][0],
        last_loss=found["losses"][-1][0],
        plain_seconds=plain["seconds_step"],
        step_seconds=found["seconds_step"],
    )


def table(rows: Sequence[Row]) -> str:
    """The rows for people."""
    lines = [
        f"{'':12}{'plain':>9}{'budget':>9}{'peak':>9}{'recompu-':>10}{'loss,':>8}{'':>8}"
        f"{'steps':>10}{'same':>7}\n"
        f"{'':12}{'MiB':>9}{'MiB':>9}{'MiB':>9}{'tations':>10}{'first':>8}{'last':>8}"
        f"{'differing':>10}{'state':>7}"
    ]
    for row in rows:
        if row.status != "done":
            lines.append(f"{row.model:12}{row.status}: {row.message[:200]}")
            continue
        mebibytes = "".join(
            f"{(n or 0) / _MIB:9.1f}" for n in (row.plain_peak, row.budget, row.peak)
        )
        lines.append(
            f"{row.model:12}{mebibytes}{row.recomputations:10}{row.first_loss:8.3f}"
            f"{row.last_loss:8.3f}{row.differing:10}{'yes' if row.same_state else 'NO':>7}"
            f"{'' if row.good else '  MISSED'}"
        )
    return "\n".join(lines)


def plot(
    curves: Mapping[str, tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]]], path: Path
) -> None:
    """Draws each training's losses: plain as a broad line, remat's inside of it."""
    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(3.6 * columns, 2.6 * rows + 0.4), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (model, (plain, ours)) in zip(grid, curves.items(), strict=False):
        for number, (broad, narrow) in enumerate(
            zip(zip(*plain, strict=True), zip(*ours, strict=True), strict=True)
        ):
            label = {} if number else {"label": "plain"}
            axes.plot(broad, color="0.75", linewidth=5, solid_capstyle="round", **label)
            label = {} if number else {"label": "inside the budget"}
            axes.plot(narrow, color="#0072B2", linewidth=1, **label)
        axes.set(title=model, xlabel="step", ylabel="loss")
        axes.grid(alpha=0.25)
    for axes in grid[len(curves) :]:
        axes.remove()
    figure.legend(
        *grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False
    )
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    raise SystemExit(ended(main))
