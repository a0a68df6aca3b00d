"""Repeated values are written out late: the same bits, less to compute and to hold."""

from __future__ import annotations

import pytest
from child import EXACT, run

_PRELUDE = """
exact()
SIZE = 64, 128, 32
INPUTS = tuple(tf.TensorSpec(s) for s in (SIZE, (1, 1, 32), (64, 1, 1), (2, 128, 32), ()))

def values(dtype):
    '''Also what arithmetic treats apart: denormal, infinite, signed zero, not a number.'''
    rng = np.random.default_rng(0)
    found = []
    for spec in INPUTS:
        array = rng.normal(size=spec.shape) * 10.0 ** rng.uniform(-42, 3, spec.shape)
        special = array.reshape(-1)[::8]
        special[:] = np.resize([0.0, -0.0, np.inf, -np.inf, np.nan], special.shape)
        found.append(tf.constant(array, dtype))
    return found

def compare(step, dtype=tf.float32):
    inputs = values(dtype)
    plain = tf.function(step, jit_compile=False)(*inputs)
    ours = remat.function(step, budget="1GiB", profile={}, check=False)
    results = ours(*inputs)
    bits = [[np.array(r).tobytes() for r in tf.nest.flatten(nest)] for nest in (plain, results)]
    (one,) = ours.steps
    return bits[0] == bits[1], len(bits[0]), one.prepared.program.ops

def large(ops, *types):
    '''How many operations write a value as large as the largest input.'''
    return sum(op.type in types and SIZE in op.shapes for op in ops)
"""


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_whatever_reads_a_repeated_value_has_the_same_bits(dtype: str) -> None:
    found = run(
        _PRELUDE
        + """
def step(x, row, column, two, one):
    repeated = {
        "tile": tf.tile(row, (64, 128, 1)),
        "broadcast": tf.broadcast_to(column, SIZE),
        "fill": tf.fill(SIZE, one),
        # These are no repetition that an operation could do itself.
        "parts": tf.tile(two, (32, 1, 1)),
        "same": tf.broadcast_to(x, SIZE),
    }
    results = {}
    for name, r in repeated.items():
        scaled = tf.cast(tf.cast(-r, tf.float32) / 3.0, r.dtype) * 0.7
        results[name] = {
            "left": r * x, "right": x - r, "divided": (x / r, r / x),
            "chain": (scaled + x, tf.math.squared_difference(scaled, x)),
            "two": tf.add_n([x, scaled]), "three": tf.add_n([scaled, r, x]),
            # What cannot repeat a value itself, or need not have the same bits.
            "whole": (tf.exp(scaled), tf.reduce_sum(r * 2.0, axis=2)),
            "returned": (r, scaled),
            "both": r * repeated["broadcast"] + repeated["tile"],
        }
    return results
"""
        + f"""
same, count, ops = compare(step, tf.{dtype})
answer(same=same, count=count, gone=large(ops, "Tile", "BroadcastTo", "Fill"))
""",
        EXACT,
    )
    assert found["count"] == 65
    assert found["same"]
    assert found["gone"] > 0  # results are returned whole


def test_nothing_is_written_out_that_need_not_be() -> None:
    found = run(
        _PRELUDE
        + """
def step(x, row, column, two, one):
    repeated = tf.tile(row, (64, 128, 1)) * (1 / 3)
    return x * repeated, tf.add_n([x, tf.tile(column, (1, 128, 32))])

def some(x, row, column, two, one):
    '''One of three readers needs the whole.'''
    repeated = -tf.tile(row, (64, 128, 1))
    return x * repeated, x - repeated, tf.tanh(repeated)

kinds = "Tile", "BroadcastTo", "Mul", "AddN", "AddV2", "Neg", "Sub"
found = {}
for function in (step, some):
    same, count, ops = compare(function)
    found[function.__name__] = same, {kind: large(ops, kind) for kind in kinds}
answer(**found)
""",
        EXACT,
    )
    same, counts = found["step"]
    assert same
    assert {kind for kind, count in counts.items() if count} == {"Mul", "AddV2"}
    same, counts = found["some"]
    assert same
    assert counts["Tile"] + counts["BroadcastTo"] == 1
    assert counts["Neg"] == 0


def test_training_with_normalizations_repeats_nothing() -> None:
    found = run(
        """
exact()
from remat.compile import one_step_of
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
specs = tf.TensorSpec((32, 32, 32, 3)), tf.TensorSpec((32,), tf.int32)
data = batches(specs, 3)

def network(policy):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    layers = keras.layers
    return keras.Sequential([
        keras.Input((32, 32, 3)), layers.Conv2D(32, 3, padding="same"),
        layers.BatchNormalization(), layers.Activation("relu"),
        layers.Conv2D(32, 3, padding="same"), layers.GroupNormalization(8),
        layers.LayerNormalization(axis=(1, 2, 3)), layers.Activation("gelu"),
        layers.GlobalAveragePooling2D(), layers.Dense(10, dtype="float32"),
    ])

found = {}
for policy in ("float32", "mixed_float16", "mixed_bfloat16"):
    results = []
    for ours in (False, True):
        model, optimizer = network(policy), keras.optimizers.Adam(1e-2)
        if ours:
            step = remat.compile(model, loss, optimizer, *specs, budget="1GiB", profile={})
        else:
            step = tf.function(one_step_of(model, loss, optimizer), jit_compile=False)
        train(step, [tf.nest.map_structure(tf.constant, batch) for batch in data])
        results.append([value.tobytes() for value in state(model, optimizer)])
    found[policy] = dict(
        same=results[0] == results[1],
        repeated=sum(
            op.type in ("Tile", "BroadcastTo") and (32, 32, 32, 32) in op.shapes
            for op in step.compiled.prepared.program.ops
        ),
    )
answer(**found)
""",
        EXACT,
    )
    assert len(found) == 3
    for result in found.values():
        assert result == {"same": True, "repeated": 0}


def test_dimensions_of_one_element_stay() -> None:
    found = run(
        _PRELUDE
        + """
def step(x, row, column, two, one):
    vector = row[0, 0]
    product = tf.fill((1, 32), one) * vector
    return product, tf.matmul(product, x[0], transpose_b=True), product + 1.0

inputs = values(tf.float32)
results = remat.function(step, budget="1GiB", profile={}, check=False)(*inputs)
answer(same=compare(step)[0], shapes=[list(np.array(r).shape) for r in results])
""",
        EXACT,
    )
    assert found["same"]
    assert found["shapes"] == [[1, 32], [1, 64 * 2], [1, 32]]
