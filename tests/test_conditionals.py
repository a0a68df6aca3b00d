"""Steps with conditionals are exact: TensorFlow breaks those to pieces, remat makes them whole."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from child import EXACT, run

_UNCOUNTED = {name: value for name, value in EXACT.items() if "ALLOCATOR" not in name}

# Of ``x`` (8 x 16), the weights ``w`` and an ``even`` or odd ``count``: one more 8 x 16.
_VALUES = {
    "both branches differentiated": """
tf.cond(tf.reduce_sum(x @ w[0]) > 0, lambda: tf.nn.gelu(x @ w[1]) / 3.0, lambda: x @ w[2] / 7.0)
""",
    "inside each other": """
tf.cond(even, lambda: tf.cond(
    count % 4 < 2,
    lambda: log(x @ w[1] / 3.0),
    lambda: tf.cond(count % 3 == 0, lambda: tf.nn.gelu(x @ w[2] / 5.0), lambda: -x),
), lambda: log(tf.tanh(x @ w[0] / 9.0)))
""",
    "one test for several": """
again(lambda x: tf.cond(even, lambda: x @ w[0] / 3.0, lambda: tf.tanh(x @ w[1] / 3.0)), x)
""",
    "one of several": """
tf.switch_case(tf.cast(count % 3, tf.int32), [
    lambda: x @ w[0] / 3.0, lambda: log(tf.tanh(x @ w[1])), lambda: tf.nn.gelu(x @ w[2] / 3.0),
])
""",
    "random numbers": """
tf.cond(even, lambda: tf.nn.dropout(x @ w[0], 0.5) / 3.0, lambda: x + tf.random.normal([8, 16]))
""",
    "rows of a variable, by what asks for its shape": """
tf.cond(even, lambda: rows(x), lambda: again(lambda x: tf.tanh(rows(x)), x))
""",
    "a loop in a branch": """
tf.cond(even, lambda: again(lambda x: tf.tanh(x @ w[0] / 3.0), x), lambda: log(x @ w[1] / 3.0))
""",
    "a branch in a loop, one after it": """
tf.cond(even, lambda x=again(
    lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: tf.tanh(x @ w[0] / 3.0), lambda: x / 3.0), x
): x / 3.0, lambda: x @ w[2])
""",
    "Python in a branch": """
tf.cond(even, lambda: tf.ensure_shape(
    tf.py_function(lambda x: x * 2, [x @ w[0]], tf.float32), (8, 16)
), lambda: x @ w[1] / 3.0)
""",
    "in a function that is called": """
called(x @ w[0]) @ w[1]
""",
    "variables assigned in a branch": """
tf.cond(even, lambda: swap(x @ w[0] / 9.0), lambda: clear(x @ w[1]))
""",
    "variables assigned in a loop": """
again(lambda x: tf.cond(even, lambda: clear(swap(x @ w[0] / 9.0)), lambda: swap(x / 3.0)), x)
""",
    "numbers only": """
x * tf.cond(even, lambda: 0.5, lambda: 2.0) / tf.cond(tf.constant(True), lambda: 3.0, lambda: 1.0)
""",
}


@functools.cache
def _found() -> dict[str, Any]:
    return run(
        f"""
exact()

@tf.function(experimental_attributes={{"_noinline": True}})
def called(x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: x / 3.0, lambda: tf.tanh(x / 7.0))

def again(function, x):
    return tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, function(x)), (0, x))[1]

def trained(value, wrapped):
    tf.random.set_seed(7)
    rng = np.random.default_rng(0)
    w = [tf.Variable(rng.normal(size=(16, 16)) / 4, dtype=tf.float32) for _ in range(4)]
    count, logged, other = tf.Variable(0), *(tf.Variable(tf.ones((8, 16))) for _ in range(2))

    def log(x):
        logged.assign_add(x / 3.0)
        return x

    def swap(x):  # what is read is what was there before
        one, two = logged.read_value(), other.read_value()
        logged.assign(two)
        other.assign(one / 3.0)
        logged.assign(logged + x)
        return x + one

    def rows(x):
        logged.scatter_nd_add([[1], [3]], x[2:4] / 3.0)
        other.scatter_nd_update([[0], [5]], logged[1:3])
        return x + other / 7.0

    def clear(x):
        before = tf.reduce_sum(other)
        other.assign(tf.zeros((8, 16)))
        return x * before

    def step(x):
        count.assign_add(1)
        names = dict(
            x=x, w=w, count=count, even=count % 2 == 0, log=log, swap=swap, clear=clear, rows=rows
        )
        with tf.GradientTape() as tape:
            y = eval(value, globals() | names)
            loss = tf.reduce_mean(tf.square(tf.nn.gelu(y @ w[3] / 5.0)))
        gradients = tape.gradient(loss, w)
        def update():
            for weight, gradient in zip(w, gradients):
                if gradient is not None:
                    weight.assign_sub(0.1 * gradient)
        tf.cond(tf.math.is_finite(loss) & (count != 3), update, lambda: None)
        return loss

    run = wrapped(step)
    x = tf.constant(rng.normal(size=(8, 16)), tf.float32)
    return [run(x).numpy() for _ in range(6)] + [v.numpy() for v in [*w, count, logged, other]]

def compare(value):
    plain = trained(value, tf.function)
    ours = trained(value, remat.function(budget="64MiB", profile={{}}, check=False))
    return {{"same": same(plain, ours), "moved": len(set(map(float, plain[:6]))) > 2}}

answer(**{{name: compare(value.replace("\\n", " ").strip())
          for name, value in {_VALUES!r}.items()}})
""",
        _UNCOUNTED,
    )


@pytest.mark.parametrize("name", _VALUES)
def test_same_bits_as_tf_function(name: str) -> None:
    found = _found()[name]
    assert found["moved"]
    assert found["same"]
