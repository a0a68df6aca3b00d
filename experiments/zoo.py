"""Every network of ``keras.applications`` through ``remat.wrap`` and ``fit``.

    python -m experiments.zoo                           all of them (hours; it resumes)
    python -m experiments.zoo --models MobileNetV2

Where ``keras-hub`` is installed (``pip install .[zoo]``), two of its transformers
too, three layers deep and as wide as GPT-2 and BERT.

Random weights, the smallest images that build, batch 8, two epochs of three
batches with Adam: plain, inside 60 % of the plain peak (or the least budget
found to work), and the ways that TensorFlow and Keras have of their own
(``keras.RematScope`` in three modes, ``tf.recompute_grad`` around blocks).  Each
is a process of its own, in the setting in which TensorFlow agrees with itself
(oneDNN off, deterministic operations, one inter-op thread); "exact" says that
all weights, averages, slots and seeds are those of the plain training, bit for
bit.  Results that are there are not measured again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from .process import Runner, Task
from .tables import command, ended, given, write_csv

MODELS = (
    "ConvNeXtTiny ConvNeXtSmall ConvNeXtBase ConvNeXtLarge ConvNeXtXLarge "
    "DenseNet121 DenseNet169 DenseNet201 "
    "EfficientNetB0 EfficientNetB1 EfficientNetB2 EfficientNetB3 EfficientNetB4 EfficientNetB5 "
    "EfficientNetB6 EfficientNetB7 EfficientNetV2B0 EfficientNetV2B1 EfficientNetV2B2 "
    "EfficientNetV2B3 EfficientNetV2S EfficientNetV2M EfficientNetV2L "
    "InceptionResNetV2 InceptionV3 MobileNet MobileNetV2 MobileNetV3Large MobileNetV3Small "
    "NASNetLarge NASNetMobile ResNet50 ResNet50V2 ResNet101 ResNet101V2 ResNet152 ResNet152V2 "
    "VGG16 VGG19 Xception"
).split()
HUB = ("GPT2Backbone", "BertBackbone")
"""Networks of ``keras_hub``."""
OTHERS = ("scope_full", "scope_activations", "scope_larger_than", "recompute_grad")

_SHARE = 0.6  # of the plain peak
_TIMEOUT = 3600.0  # seconds
_MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One network, one way.  Bytes and seconds; None where there is none.

    Attributes:
      way: "plain", "budgeted" or one of ``OTHERS``.
      side: pixels of an image, or tokens of a sequence.
      status: "done", "infeasible" or "failed".
      budget: where there is one; share: of the plain peak.
      overhead: of a step's time over the plain one's, as a fraction;
        overhead_predicted: as the plan has it.
      compile_seconds: of the first step over the plain first step.
    """

    model: str
    way: str
    status: str
    side: int | None = None
    budget: int | None = None
    share: float | None = None
    peak: int | None = None
    exact: bool | None = None
    overhead: float | None = None
    overhead_predicted: float | None = None
    compile_seconds: float | None = None
    recomputations: int | None = None
    message: str = ""

    @property
    def over(self) -> bool:
        """Whether it took more than its budget."""
        return self.budget is not None and self.peak is not None and self.peak > self.budget


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment; 1 if remat was wrong, over budget or broke down anywhere."""
    parser = command("zoo", __doc__)
    known = [*MODELS, *(HUB if find_spec("keras_hub") else ())]
    parser.add_argument("--models", nargs="+", choices=known, default=known, metavar="NAME")
    parser.add_argument(
        "--others", nargs="*", choices=OTHERS, default=OTHERS, help="what to compare with"
    )
    asked = parser.parse_args(arguments)
    runner = Runner(asked.out, "experiments.zoo_child", _TIMEOUT)
    rows: list[Row] = []
    for model in asked.models:
        rows += _rows(model, asked.others, runner)
        write_csv([asdict(row) for row in rows], asked.out / "table.csv")
        print(table(rows[-2 - len(asked.others) :]), flush=True)
    ours = [row for row in rows if row.way == "budgeted"]
    wrong = sum(row.exact is False for row in ours)
    over = sum(row.over for row in ours)
    broken = sum(row.status != "done" for row in ours)
    print(f"{len(ours)} networks: {wrong} wrong, {over} over budget, {broken} not trained")
    print(f"saved: {asked.out / 'table.csv'}")
    return 1 if wrong or over or broken else 0


def _rows(model: str, others: Sequence[str], runner: Runner) -> list[Row]:
    plain = runner.result(Task("plain", model, exact=True))
    rows = [_row(model, "plain", plain, plain, None)]
    if plain["status"] != "done":
        return rows
    task, found = runner.within(
        Task("budgeted", model, budget=int(_SHARE * plain["peak"]), exact=True), plain["peak"]
    )
    rows.append(_row(model, "budgeted", found, plain, task.budget))
    for way in others:
        rows.append(_row(model, way, runner.result(Task(way, model, exact=True)), plain, None))
    return rows


def _row(
    model: str, way: str, found: Mapping[str, Any], plain: Mapping[str, Any], budget: int | None
) -> Row:
    row = Row(model, way, found["status"], budget=budget, message=found.get("message", ""))
    if row.status != "done":
        return row
    return Row(
        model,
        way,
        row.status,
        side=found["side"],
        budget=budget,
        share=found["peak"] / plain["peak"],
        peak=found["peak"],
        exact=found["digest"] == plain["digest"],
        overhead=found["step_seconds"] / plain["step_seconds"] - 1,
        overhead_predicted=found.get("overhead"),
        compile_seconds=found["first_seconds"] - plain["first_seconds"],
        recomputations=found.get("recomputations"),
    )


def table(rows: Sequence[Row]) -> str:
    """The rows for people."""
    lines = [
        f"{'':38}{'budget':>8}{'peak':>8}{'% of':>7}{'':>7}{'overhead %':>19}{'compile':>9}\n"
        f"{'':38}{'MiB':>8}{'MiB':>8}{'plain':>7}{'exact':>7}"
        f"{'predicted':>11}{'measd':>8}{'s':>9}"
    ]
    for row in rows:
        lines.append(
            f"{row.model:20}{row.way:18}{given(row.budget, '8.1f', _MIB)}"
            f"{given(row.peak, '8.1f', _MIB)}"
            f"{given(row.share, '7.1f', 0.01)}{'-' if row.exact is None else str(row.exact):>7}"
            f"{given(row.overhead_predicted, '11.1f', 0.01)}{given(row.overhead, '8.1f', 0.01)}"
            f"{given(row.compile_seconds, '9.1f')}"
            f"{'' if row.status == 'done' else '  ' + row.status}{'  OVER' if row.over else ''}"
        )
        if row.message:
            lines.append(f"    {row.message[:200]}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(ended(main))
