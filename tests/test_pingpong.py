"""Parts that train by turns keep their own values, bit for bit."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import remat
from remat import allocator

BATCHES = [tf.random.stateless_normal((4, 3), (number, 0)) for number in range(4)]


def trainer() -> tuple[list[keras.Variable], tf.types.experimental.PolymorphicFunction]:
    """All that a small model's training moves, and its step."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(batch: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(batch, training=True) - batch) ** 2)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    return [*model.variables, *optimizer.variables], step


def test_parts_train_as_if_alone() -> None:
    variables, step = trainer()
    start = [variable.numpy().copy() for variable in variables]
    parts = remat.PingPong(variables, parts=2)
    for number, batch in enumerate(BATCHES):
        parts.switch(number % 2)
        step(batch if parts.part == 0 else 10 * batch)

    alone, step = trainer()
    for batch in BATCHES[::2]:
        step(batch)
    for value, expected in zip(parts.values(0), alone, strict=True):
        np.testing.assert_array_equal(value, expected.numpy())
    parts.switch(0)
    for variable, expected in zip(variables, alone, strict=True):
        np.testing.assert_array_equal(variable.numpy(), expected.numpy())
    assert any((mine != first).any() for mine, first in zip(parts.values(1), start, strict=True))


def test_variables_stay_where_plans_expect_them() -> None:
    def addresses() -> list[int]:
        reads = (
            tf.raw_ops.ReadVariableOp(resource=variable.value.handle, dtype=variable.dtype)
            for variable in large
        )
        return [allocator.address(tensor) for tensor in reads]

    variables, step = trainer()
    large = [variable for variable in variables if variable.shape.rank]
    parts = remat.PingPong(variables)
    step(BATCHES[0])
    before = addresses()
    parts.switch(1)
    assert addresses() == before


def test_what_cannot_be_switched_is_refused() -> None:
    variables, _ = trainer()
    with pytest.raises(ValueError, match="no variables"):
        remat.PingPong([])
    with pytest.raises(ValueError, match="parts is 1"):
        remat.PingPong(variables, parts=1)
    with pytest.raises(IndexError, match="no part 2; there are 2"):
        remat.PingPong(variables).switch(2)
