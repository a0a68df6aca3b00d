"""Measuring operations on the device at hand."""

from __future__ import annotations

import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import types_pb2

from remat import profile
from remat.bodies import inside
from remat.cli import main
from remat.device import table_path
from remat.planning import read
from remat.price import price, signatures_of
from remat.profiles import roofline
from remat.profiles.signature import OpSignature, TensorType
from remat.profiles.table import TableError, load_table

F32 = "float32"
IMAGE = (2, 16, 16, 8)


def signature(op: str, inputs: list[tuple], outputs: list[tuple], **attrs: str) -> OpSignature:
    return OpSignature(
        op,
        tuple(TensorType(*tensor) for tensor in inputs),
        tuple(TensorType(*tensor) for tensor in outputs),
        tuple(sorted(attrs.items())),
    )


def relu(*shape: int) -> OpSignature:
    return signature("Relu", [(F32, shape)], [(F32, shape)], T=F32)


CONV = {"T": F32, "strides": "1,1,1,1", "padding": "SAME"}
POOL = {"T": F32, "ksize": "1,2,2,1", "strides": "1,2,2,1", "padding": "VALID"}
KINDS = {
    "grappler's fused convolution": signature(
        "_FusedConv2D",
        [(F32, IMAGE), (F32, (3, 3, 8, 8)), (F32, (8,))],
        [(F32, IMAGE)],
        TArgs=F32,
        num_args="1",
        fused_ops="BiasAdd,Relu",
        **CONV,
    ),
    "filter gradient": signature(
        "Conv2DBackpropFilter",
        [(F32, IMAGE), ("int32", (4,), (3, 3, 8, 8)), (F32, IMAGE)],
        [(F32, (3, 3, 8, 8))],
        **CONV,
    ),
    "transposed convolution": signature(
        "Conv2DBackpropInput",
        [("int32", (4,), IMAGE), (F32, (3, 3, 8, 8)), (F32, IMAGE)],
        [(F32, IMAGE)],
        **CONV,
    ),
    "depthwise convolution": signature(
        "DepthwiseConv2dNative", [(F32, IMAGE), (F32, (3, 3, 8, 1))], [(F32, IMAGE)], **CONV
    ),
    "pooling gradient": signature(
        "MaxPoolGrad",
        [(F32, IMAGE), (F32, (2, 8, 8, 8)), (F32, (2, 8, 8, 8))],
        [(F32, IMAGE)],
        **POOL,
    ),
    "normalisation": signature(
        "FusedBatchNormV3",
        [(F32, IMAGE), (F32, (8,)), (F32, (8,)), (F32, (0,)), (F32, (0,))],
        [(F32, IMAGE), (F32, (8,)), (F32, (8,)), (F32, (8,)), (F32, (8,)), (F32, ())],
        T=F32,
        U=F32,
        is_training="true",
    ),
    "optimizer's update": signature(
        "ResourceApplyAdam",
        [("resource", (64, 64))] * 3 + [(F32, ())] * 6 + [(F32, (64, 64))],
        [],
        T=F32,
    ),
    "variable's update": signature(
        "AssignSubVariableOp", [("resource", (64, 64)), (F32, (64, 64))], [], dtype=F32
    ),
    "embedding": signature(
        "ResourceGather",
        [("resource", (100, 16)), ("int64", (32,))],
        [(F32, (32, 16))],
        Tindices="int64",
        dtype=F32,
        batch_dims="0",
    ),
    "einsum": signature(
        "Einsum",
        [(F32, (4, 8, 16)), (F32, (4, 8, 16))],
        [(F32, (4, 8, 8))],
        T=F32,
        N="2",
        equation="bqd,bkd->bqk",
    ),
    "random numbers": signature(
        "StatelessRandomUniformV2",
        [("int32", (2,), (64, 64)), ("uint64", (1,)), ("uint64", (2,)), ("int32", (), (1,))],
        [(F32, (64, 64))],
        Tshape="int32",
        dtype=F32,
    ),
    "choice": signature(
        "SelectV2", [("bool", (64, 64)), (F32, (64, 64)), (F32, ())], [(F32, (64, 64))], T=F32
    ),
    "loss": signature(
        "SparseSoftmaxCrossEntropyWithLogits",
        [(F32, (32, 10)), ("int64", (32,))],
        [(F32, (32,)), (F32, (32, 10))],
        T=F32,
        Tlabels="int64",
    ),
    "half precision": signature(
        "MatMul", [("bfloat16", (64, 64))] * 2, [("bfloat16", (64, 64))], T="bfloat16"
    ),
    "concatenation": signature(
        "ConcatV2",
        [(F32, (8, 64)), (F32, (8, 64)), ("int32", (), (1,))],
        [(F32, (8, 128))],
        N="2",
        T=F32,
        Tidx="int32",
    ),
}
UNMEASURABLE = {
    "runs Python code": signature(
        "EagerPyFunc", [(F32, (64, 64))], [(F32, (64, 64))], token="t", Tin=F32, Tout=F32
    ),
    "runs another function": signature(
        "StatelessWhile", [(F32, (64, 64))], [(F32, (64, 64))], T=F32, cond="c", body="b"
    ),
    "its reduction_indices is not a constant": signature(
        "Sum", [(F32, (64, 64)), ("int32", (1,))], [(F32, (64,))], T=F32, Tidx="int32"
    ),
    "a shape is not static": relu(-1, 64),
    "Unheard is not an operation": signature("Unheard", [(F32, (8,))], [(F32, (8,))]),
    "computes nothing": signature("Identity", [(F32, (64, 64))], [(F32, (64, 64))], T=F32),
    "Matrix size-incompatible": signature(
        "MatMul", [(F32, (64, 64)), (F32, (63, 64))], [(F32, (64, 64))], T=F32
    ),
    "attribute T cannot be 'float99'": signature("Relu", [(F32, (8,))], [(F32, (8,))], T="float99"),
}


def measure(wanted, **options):
    options = {"share": 1.0, "least_bytes": 0, "seconds_each": 0.0, **options}
    return profile.measure_operations(wanted, device="CPU:0", **options)


def signatures(step: Callable, *specs: tf.TensorSpec) -> list[OpSignature]:
    """Those of all operations of a step that compute."""
    _, program = read(step, specs)
    return list(signatures_of(program).values())


def test_every_kind_of_operation_is_measured_and_nothing_else_stops_it():
    found = measure([*UNMEASURABLE.values(), *KINDS.values()])
    assert {row.signature for row in found.rows} == set(KINDS.values()), found.reasons
    for row in found.rows:
        # Less those of an empty function, which may be all that there are.
        assert 0 <= row.seconds < 1, row.signature.op
        assert row.repeats >= 3
        assert row.workspace_bytes is None or row.workspace_bytes >= 0
        assert row.tensorflow == tf.__version__
    assert sum(row.seconds > 0 for row in found.rows) > len(KINDS) / 2
    assert set(found.reasons) == {each.text for each in UNMEASURABLE.values()}
    for reason, each in UNMEASURABLE.items():
        assert reason in found.reasons[each.text]


def test_what_disturbed_an_operation_for_a_moment_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    undisturbed = profile.Bench.measure_undisturbed
    measured: list[str] = []

    def disturbed_at_first(self, signature, *arguments):
        timing = undisturbed(self, signature, *arguments)
        measured.append(signature.text)
        if measured.count(signature.text) > 1:
            return timing
        time.sleep(slept)
        return replace(timing, seconds=timing.seconds + 100, spread=0.9)

    monkeypatch.setattr(profile.Bench, "measure_undisturbed", disturbed_at_first)
    wanted, slept = [relu(512, 512), relu(256, 512)], 0.0
    found = measure(wanted, path=tmp_path / "table.csv")
    assert sorted(measured) == sorted(2 * [each.text for each in wanted])
    assert len(found.rows) == 2
    assert found.rows == load_table(tmp_path / "table.csv").rows
    assert all(row.seconds < 100 and row.spread != 0.9 for row in found.rows)
    # Where half of the time is over, a rough figure is better than none for another.
    slept = 2.1
    (rough,) = measure([relu(128, 512)], deadline=4.0).rows
    assert rough.seconds > 100


def test_workspace_is_what_an_operation_asks_for_beside_its_output():
    # The loss holds the largest logit of each row while it runs; elementwise operations
    # hold nothing.
    rows, classes = 65536, 8
    logits, of_rows = (F32, (rows, classes)), (F32, (rows,))
    loss = signature(
        "SparseSoftmaxCrossEntropyWithLogits",
        [logits, ("int32", (rows,))],
        [of_rows, logits],
        T=F32,
        Tlabels="int32",
    )
    found = measure([loss, relu(512, 512)])
    workspace = {row.signature.op: row.workspace_bytes for row in found.rows}
    if workspace["Relu"] is None:
        pytest.skip("this CPU's allocator does not count")
    assert workspace["Relu"] == 0
    assert workspace[loss.op] == 4 * rows


def test_half_precision_without_arithmetic_for_it_takes_workspace():
    """Both inputs and the result of a product are converted to float32."""
    if "avx512_fp16" in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has half-precision arithmetic, and scratch memory of its own")
    half = ("float16", (512, 512))
    found = measure([signature("MatMul", [half, half], [half], T="float16")])
    (workspace,) = (row.workspace_bytes for row in found.rows)
    if workspace is None:
        pytest.skip("this CPU's allocator does not count")
    assert workspace in (0, 3 * 4 * 512 * 512)


def test_operations_too_small_to_matter_are_left_to_the_launch_overhead():
    found = measure([relu(64), relu(512, 512)], least_bytes=64 * 1024)
    assert [row.signature for row in found.rows] == [relu(512, 512)]
    assert "launch overhead" in found.reasons[relu(64).text]


def test_the_small_remainder_of_the_work_is_left_out():
    found = measure([relu(512, 512)] * 99 + [relu(512, 511)], share=0.9)
    assert [row.signature for row in found.rows] == [relu(512, 512)]
    assert "remainder" in found.reasons[relu(512, 511).text]


def test_ctrl_c_keeps_what_was_measured_and_the_next_run_goes_on_from_there(tmp_path: Path):
    everything = [relu(64, size) for size in range(64, 72)]

    def interrupt(done: int, total: int, following: OpSignature) -> None:
        if done == 3:
            raise KeyboardInterrupt

    path = tmp_path / "table.csv"
    first = measure(everything, path=path, progress=interrupt)
    assert first.interrupted
    assert len(load_table(path)) == 3
    second = measure(everything, path=path, known=load_table(path))
    assert not second.interrupted
    assert len(second.rows) == len(everything) - 3
    assert set(load_table(path)) == {each.text for each in everything}


def test_a_deadline_leaves_the_rest_without_rows():
    found = measure([relu(64, 64), relu(64, 65)], deadline=0.0)
    assert not found.rows
    assert set(found.reasons.values()) == {"time was up before its turn"}


def test_signatures_of_a_graph_know_variables_and_constants():
    variable = tf.Variable(tf.ones([4, 3]))

    def step(x: tf.Tensor) -> tf.Tensor:
        y = tf.reduce_sum(x @ variable, axis=1)
        variable.assign_sub(tf.ones([4, 3]))
        return tf.broadcast_to(y, [2, 5])

    found = {each.op: each for each in signatures(step, tf.TensorSpec([5, 4]))}
    assert found["AssignSubVariableOp"].inputs[0] == TensorType("resource", (4, 3))
    assert found["Sum"].inputs[1].value == (1,)
    assert found["BroadcastTo"].inputs[1].value == (2, 5)
    assert found["MatMul"].outputs == (TensorType(F32, (5, 3)),)
    assert all(OpSignature.from_text(each.text) == each for each in found.values())


def test_every_type_of_tensorflow_is_known_with_its_size():
    types = [value for value in types_pb2.DataType.values() if 0 < value < 100]
    for dtype in map(tf.as_dtype, types):
        text = f"Relu({dtype.name}[4]) -> ({dtype.name}[4])"
        assert OpSignature.from_text(text).output_bytes == 4 * dtype.size


def test_names_devices_and_seeds_are_no_part_of_a_signature():
    def step(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        with tf.device("CPU:0"):
            one = tf.raw_ops.Relu(features=x, name="one")
        two = tf.raw_ops.Relu(features=y, name="two")
        three = tf.raw_ops.RandomUniform(shape=[8], dtype=tf.float32, seed=1, seed2=2)
        four = tf.raw_ops.RandomUniform(shape=[8], dtype=tf.float32, seed=3, seed2=4)
        return [one, two, three, four]

    found = Counter(signatures(step, tf.TensorSpec([8]), tf.TensorSpec([8])))
    counts = {each.op: count for each, count in found.items()}
    assert counts["Relu"] == 2
    assert counts["RandomUniform"] == 2


def test_a_training_step_is_covered_and_priced_from_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    model = keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            keras.layers.Conv2D(8, 3, padding="same", activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)

    def step(images: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(images, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    found = signatures(step, tf.TensorSpec([8, 16, 16, 3]))
    pricer = profile.measured_pricer(found, device="CPU:0")
    kinds = {each: pricer.price(each).kind for each in set(found)}
    for op in ("_FusedConv2D", "Conv2DBackpropFilter", "MaxPoolGrad"):
        # With oneDNN, the filter's gradient is one operation with the bias's.
        assert {kind for each, kind in kinds.items() if op in each.op} == {"measured"}
    assert all(np.isfinite(pricer.price(each).seconds) for each in found)

    def measured_again(done: int, total: int, following: OpSignature) -> None:
        raise AssertionError(f"{following.text} is measured a second time")

    again = profile.measured_pricer(found, device="CPU:0", progress=measured_again)
    assert again.table == pricer.table


def tiny() -> keras.Model:
    return keras.Sequential([keras.Input((64, 64)), keras.layers.Dense(64)])


def test_the_command_says_what_was_not_measured_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    assert main(["profile", f"{__name__}:tiny"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"measured .* %  .*MatMul", told)
    assert re.search(r"not measured: \d+ operations, .*so small that it costs", told)


def test_the_command_measures_nothing_for_a_device_that_is_named(
    capsys: pytest.CaptureFixture[str],
):
    asked = ["profile", f"{__name__}:tiny", "--profile", "h200"]
    assert main(asked) == 0
    told = capsys.readouterr().out
    assert "nothing was measured" in told
    assert "without --profile" in told
    for option in (["--validate"], ["-o", "t.csv"]):
        assert main([*asked, *option]) == 2
        assert f"{option[0]} is for what was measured" in capsys.readouterr().err


def test_loops_are_priced_by_the_turns_that_they_take():
    weights = tf.Variable(tf.ones((256, 256)))

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            y = x
            for _ in tf.range(3, 17, 2):
                y = tf.tanh(y @ weights)
            loss = tf.reduce_sum(y)
        weights.assign_sub(tape.gradient(loss, weights))

    _, program = read(step, [tf.TensorSpec([64, 256])], autograph=True)
    found = inside(program)
    assert [(each.turns, each.complete) for each in found.values()] == [(7, True), (7, True)]
    prices = {"MatMul": 1.0, "Tanh": 0.0}
    (priced,) = price([program], prices)
    seconds = [priced.seconds[index] for index in found]
    assert seconds == pytest.approx([7, 14], rel=0.01)  # forward, and two products backward
    assert priced.coverage.seconds["given"] == pytest.approx(21)


def test_the_layers_of_a_recurrent_network_take_their_turns():
    layer = keras.layers.LSTM(16)
    layer.build((8, 5, 4))

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x))
        for variable, gradient in zip(
            layer.trainable_variables, tape.gradient(loss, layer.trainable_variables), strict=True
        ):
            variable.assign_sub(gradient)

    _, program = read(step, [tf.TensorSpec([8, 5, 4])])
    assert {(each.turns, each.complete) for each in inside(program).values()} == {(5, True)}


def test_what_nothing_says_the_price_of_is_named():
    def step(x: tf.Tensor) -> tf.Tensor:
        x = tf.while_loop(lambda x: tf.reduce_sum(x) < 100.0, lambda x: (x + 1.0,), (x,))[0]
        return tf.linalg.svd(x, compute_uv=False)

    _, program = read(step, [tf.TensorSpec([200, 200])])
    with pytest.warns(UserWarning, match=r"how long these take: \w*While, Svd\."):
        (priced,) = price([program], "h200")
    assert priced.coverage.operations["unknown"] >= 2
    # It is measured here, however few bytes it moves.
    found = measure(signatures_of(program).values(), least_bytes=2**20)
    assert [row.signature.op for row in found.rows] == ["Svd"]


def test_a_price_that_nothing_asks_for_is_named():
    _, program = read(lambda x: x @ x, [tf.TensorSpec([64, 64])])
    with pytest.warns(UserWarning, match="no operation Conv2D"):
        price([program], {"Conv2D": 1.0, "MatMul": np.float32(2.0)})


def test_ctrl_c_while_a_device_is_measured_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    measure_operations = profile.measure_operations

    def interrupted(*arguments, **options):
        def progress(done: int, *_) -> None:
            if done == 2:
                signal.raise_signal(signal.SIGINT)

        return measure_operations(*arguments, **options, progress=progress)

    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    monkeypatch.setattr(profile, "measure_operations", interrupted)
    with pytest.raises(KeyboardInterrupt):
        profile.measure_device("CPU:0")


def test_a_table_of_another_device_in_the_cache_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    profile.measured_pricer([relu(512, 512)], device="CPU:0")
    path = table_path("CPU:0")
    here = load_table(path).device
    assert here is not None
    path.write_text(path.read_text().replace(here, "Foreign CPU"))
    with pytest.raises(TableError, match=rf"{path.name}.*Foreign CPU"):
        profile.measured_pricer([relu(256, 512)], device="CPU:0")


def test_a_damaged_table_in_the_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    table_path("CPU:0").write_text("signature,seconds\n")
    with pytest.raises(TableError, match=tmp_path.name):
        profile.measured_pricer([relu(512, 512)], device="CPU:0")


def test_where_nothing_can_be_recorded_costs_are_measured_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="not recorded.*REMAT_CACHE"):
        pricer = profile.measured_pricer([relu(512, 512)], device="CPU:0")
    assert pricer.price(relu(512, 512)).kind == "measured"
    # Where recording is what was asked for, it fails before it measures.
    assert main(["profile", f"{__name__}:tiny"]) == 2
    assert "REMAT_CACHE" in capsys.readouterr().err


def test_what_had_no_room_is_known_to_need_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))

    def without_room(self: object, signature: OpSignature, *_: object) -> None:
        raise tf.errors.ResourceExhaustedError(
            None, None, "OOM when allocating tensor with shape[6,4096,288] and type float on CPU:0"
        )

    monkeypatch.setattr(profile.Bench, "measure_undisturbed", without_room)
    spec = profile.find_device("t4")
    monkeypatch.setattr(profile, "spec_at_hand", lambda _: spec)
    pricer = profile.measured_pricer([relu(512, 512)], device="CPU:0")
    price = pricer.price(relu(512, 512))
    assert price.workspace == 6 * 4096 * 288 * 4
    assert price.kind == "roofline"


def test_a_shape_that_no_image_has_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["profile", "MobileNetV2", "--shape", "96", "--profile", "h200"]) == 2
    assert "ROWS,COLUMNS,CHANNELS" in capsys.readouterr().err


def test_the_cpu_at_hand_has_a_sane_specification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    spec = profile.measure_device("CPU:0")
    assert spec.peak_flops(F32, matrix=True) > spec.peak_flops(F32, matrix=False) > 1e8
    assert 1e8 < spec.bandwidth < 1e13
    assert spec.memory is not None
    assert 0 < spec.launch_seconds < 1e-3
    assert roofline.seconds(relu(512, 512), spec) > spec.launch_seconds
