"""``step.measure()``: what it says is what happened, and nothing else has happened."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from child import COUNTED, run

from remat.cli import main
from remat.measured import Measured, MeasuredError, Operation
from remat.plots import Curve

MIB = 2**20


@pytest.fixture
def measured() -> Measured:
    """Two operations as predicted, one that was slower and asked for more."""
    return Measured(
        name="net",
        device="a device",
        priced_for="a device",
        budget=8 * MIB,
        peak_predicted=6 * MIB,
        peak_measured=7 * MIB,
        seconds_predicted=0.5,
        seconds=(0.6, 0.4, 0.7),
        seconds_profiled=0.65,
        operations=(
            Operation("a", "Relu", False, 0.1, 0.1, MIB, MIB),
            Operation("b", "Conv2D", False, 0.3, 0.45, 2 * MIB, 3 * MIB),
            Operation("a/copy_1", "Relu", True, 0.1, None, MIB, MIB),
        ),
        memory_predicted=Curve("predicted", [0.0, 0.1, 0.4, 0.5], [MIB, 6 * MIB, MIB]),
        memory_measured=Curve("measured", [0.0, 0.2, 0.6], [MIB, 7 * MIB], [(0.4, 0.5)]),
    )


def test_a_step_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    found = run(
        f"""
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((32, 32, 3))] + [
    layer for _ in range(4)
    for layer in (keras.layers.Dense(32, activation="relu"), keras.layers.Dropout(0.3))
] + [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)])
optimizer = keras.optimizers.Adam()
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
specs = tf.TensorSpec((16, 32, 32, 3)), tf.TensorSpec((16,), tf.int32)
step = remat.compile(model, loss, optimizer, *specs, budget=0.7)
data = batches(specs, 2)
start = state(model, optimizer)
zeros = step.measure(steps=2)
unchanged = same(start, state(model, optimizer))
train(step, data[:1])
between = state(model, optimizer)
real = step.measure(*data[0], steps=2)
unchanged &= same(between, state(model, optimizer))
real.save({str(tmp_path / "measured.json")!r})
train(step, data[1:])
try:
    step.measure(*data[0], steps=0)
except ValueError as error:
    refused = str(error)
answer(
    unchanged=unchanged, refused=refused, summary=real.summary(),
    budget=step.budget, peaks=[[m.peak_predicted, m.peak_measured] for m in (zeros, real)],
    timed=len(real.seconds), operations=len(real.operations),
    seen=sum(op.seconds_measured is not None for op in real.operations),
    again=sum(op.again for op in real.operations),
    exact=sum(op.bytes_predicted == op.bytes_measured for op in real.operations),
    still_within=step.measured_peak <= step.budget,
)
""",
        COUNTED,
    )
    assert found["unchanged"]
    assert found["still_within"]
    for predicted, peak in found["peaks"]:
        assert 0.97 * peak <= predicted <= 1.03 * peak
        assert peak <= found["budget"]
    assert found["timed"] == 2
    assert found["again"] > 0
    assert found["seen"] == found["operations"]
    assert found["exact"] >= 0.98 * found["operations"]
    assert found["refused"] == "steps is 0; at least one step is timed"
    assert Measured.load(tmp_path / "measured.json").summary() == found["summary"]


@pytest.mark.parametrize("held", ["the last batch", "other batches"])
def test_a_step_is_measured_at_a_hard_limit_beside_what_its_caller_holds(held: str) -> None:
    found = run(
        f"""
import remat
remat.claim_memory()
keras.utils.set_random_seed(0)
inputs = x = keras.Input((160, 160, 3))
for width in (8, 12, 8, 12):
    x = keras.layers.Conv2D(width, 3, padding="same")(x)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
model = keras.Model(inputs, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x)))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
specs = tf.TensorSpec((32, 160, 160, 3)), tf.TensorSpec((32,), tf.int32)
step = remat.compile(model, loss, "adam", *specs, budget=190 << 20, profile={{}})

def new_batch():
    return [tf.zeros_like(value) for value in batches(specs, 1)[0]]

batch = new_batch()
for _ in range(3):
    step(*batch)
trained = step.measured_peak
if {held == "other batches"}:
    others, batch = [new_batch(), new_batch()], None
found = step.measure(steps=1)
answer(trained=trained, peak=found.peak_measured, predicted=found.peak_predicted)
""",
        {**COUNTED, "TF_CPU_BFC_MEM_LIMIT_IN_MB": "190"},
    )
    assert max(found["trained"], found["peak"]) <= 190 * MIB
    assert found["peak"] == pytest.approx(found["predicted"], rel=0.01)


def test_the_summary_names_what_differs(measured: Measured) -> None:
    lines = measured.summary().splitlines()
    assert lines[0] == "net on a device, budget 8.00 MiB"
    assert lines[2].split() == "peak 6.00 MiB 7.00 MiB -14.3 %".split()
    assert "0.5000 s      0.6000 s   -16.7 %" in lines[3]
    assert lines[4].split()[:5] == "overhead 0.0 % 0.0 %".split()  # the copy was not seen
    assert lines[7].split() == "Conv2D 1 0.3000 s 0.4500 s -33.3 %".split()
    assert lines[9].startswith("  2 of 3 operations asked for exactly the bytes predicted")
    assert lines[10].split() == ["predicted", "measured"]
    assert lines[11].split() == "2.00 MiB 3.00 MiB Conv2D, b".split()
    seen = replace(measured.operations[2], seconds_measured=0.11)
    again = replace(measured, operations=(*measured.operations[:2], seen))
    assert again.overhead_predicted == pytest.approx(0.1 / 0.4)
    assert again.overhead_measured == pytest.approx(0.11 / 0.55)
    assert again.summary().splitlines()[4].split()[:5] == "overhead 25.0 % 20.0 %".split()
    elsewhere = replace(measured, priced_for="h200", peak_measured=None)
    assert "; priced for h200" in elsewhere.summary()
    assert "not counted" in elsewhere.summary()


def test_what_is_saved_is_loaded_and_shown(
    measured: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, picture = tmp_path / "measured.json", tmp_path / "measured.png"
    measured.save(path)
    loaded = Measured.load(path)
    assert loaded.operations == measured.operations
    assert list(loaded.to_frame()["seconds_predicted"]) == [0.1, 0.3, 0.1]
    assert main(["show", "--measured", str(path), "--plot", str(picture)]) == 0
    assert capsys.readouterr().out == measured.summary() + "\n"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_picture_is_to_scale(measured: Measured) -> None:
    figure = measured.plot()
    memory, _, seconds = figure.axes
    predicted, seen, budget = memory.get_lines()
    assert (max(predicted.get_ydata()), max(seen.get_ydata())) == (6.0, 7.0)
    assert budget.get_ydata()[0] == 8.0
    assert [text.get_text() for text in seconds.get_yticklabels()] == ["Conv2D", "Relu"]
    assert [bar.get_width() for bar in seconds.patches] == [0.3, 0.1, 0.45, 0.1]
    assert seconds.get_xlabel() == "time in a step (s)"


_ONE_OPERATION = {
    "name": ["a"],
    "type": ["Relu"],
    "again": [False],
    "seconds_predicted": [0.1],
    "seconds_measured": [0.1],
    "bytes_predicted": [1],
    "bytes_measured": [1],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "remat-plan/1"}, "format is 'remat-plan/1'"),
        ({"seconds": []}, "a step is timed at least once"),
        ({"peak_measured": -1}, "peak_measured is -1; it must be finite and not negative"),
        ({"budget": "much"}, "not what Measured.save wrote"),
        ({"operations": {}}, "not what Measured.save wrote (KeyError"),
        ({"memory_predicted": None}, "not what Measured.save wrote"),
        ({"budget": 10**400}, "not what Measured.save wrote (OverflowError"),
        (
            {"memory_predicted": {"label": "predicted", "times": ["soon", 1.0], "held": [1]}},
            "not what Measured.save wrote (TypeError",
        ),
        (
            {"memory_predicted": {"label": "predicted", "times": [0.0], "held": [1]}},
            "a curve of 1 values has 1 times, not one more",
        ),
        ({"operations": {**_ONE_OPERATION, "type": [5]}}, "type of an operation is 5"),
    ],
)
def test_a_foreign_file_is_one_clear_error(
    measured: Measured,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, object],
    message: str,
) -> None:
    path = tmp_path / "measured.json"
    measured.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(MeasuredError) as error:
        Measured.load(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)
    assert main(["show", "--measured", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_truncated_file_and_a_missing_one_are_named(
    measured: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "measured.json"
    measured.save(path)
    path.write_text(path.read_text()[:100])
    with pytest.raises(MeasuredError, match="is the file truncated"):
        Measured.load(path)
    assert main(["show", "--measured", str(tmp_path / "none.json")]) == 2
    assert main(["show"]) == 2
    assert main(["show", "plan.json", "--measured", str(path)]) == 2
    assert "nothing to show" in capsys.readouterr().err


def test_showing_needs_neither_tensorflow_nor_matplotlib(
    measured: Measured, tmp_path: Path
) -> None:
    path = tmp_path / "measured.json"
    measured.save(path)
    program = (
        "import sys; from remat.cli import main; "
        f"assert main(['show', '--measured', {str(path)!r}]) == 0; "
        "assert not {'tensorflow', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
