"""What the processes of ``experiments.trainings`` do: a hundred steps of one training.

``python -m experiments.trainings_child TASK RESULT.json``

The data are real and ship with packages: handwritten digits (scikit-learn's)
and the text of this project's licence.  Each case is a function of a budget
(None for as TensorFlow trains) that trains and says what came of it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from sklearn.datasets import load_digits

import remat
from remat.step import CompiledStep

from .process import Task, serve
from .watched import digest

_DEVICE = "CPU:0"
_LICENCE = Path(__file__).parent.parent / "LICENSE"


@dataclass(frozen=True)
class Outcome:
    """What a training gives.

    Attributes:
      losses: of each step; several where several models train.
      peak: bytes that the allocator counted, over all steps.
      seconds: of each step, the first with tracing or compiling.
      variables: all that the training moved.
      steps: the planned steps, if there was a budget.
    """

    losses: list[list[float]]
    peak: int
    seconds: list[float]
    variables: Sequence[Any]
    steps: Sequence[CompiledStep] = ()


class Recorder(keras.callbacks.Callback):
    """The loss of every single step, its seconds, and the peak over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[list[float]] = []
        self.seconds: list[float] = []
        self.peak = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.reset_metrics()  # or the loss would be the mean so far
        self._started = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.record([float(logs["loss"])], time.perf_counter() - self._started)

    def record(self, losses: list[float], seconds: float) -> None:
        """Takes down one step."""
        self.losses.append(losses)
        self.seconds.append(seconds)
        self.peak = max(self.peak, tf.config.experimental.get_memory_info(_DEVICE)["peak"])


def _fit(
    model: keras.Model,
    compiled: dict[str, Any],
    data: tuple[Any, ...],
    batch: int,
    steps: int,
    budget: int | None,
) -> Outcome:
    """``compile`` and ``fit``, as a Keras user writes them."""
    if budget is not None:
        model = remat.wrap(model, budget=budget)
    model.compile(**compiled, jit_compile=False)
    recorder = Recorder()
    order = np.random.default_rng(0).permutation(len(data[1]))
    mixed = tf.nest.map_structure(lambda array: array[order], data)
    dataset = tf.data.Dataset.from_tensor_slices(mixed).repeat().batch(batch, drop_remainder=True)
    tf.config.experimental.reset_memory_stats(_DEVICE)
    model.fit(dataset, steps_per_epoch=steps, verbose=0, callbacks=[recorder])
    return Outcome(
        recorder.losses,
        recorder.peak,
        recorder.seconds,
        [*model.variables, *model.optimizer.variables],
        () if budget is None else model.remat.steps,
    )


def _loop(
    step: Callable[..., Sequence[tf.Tensor]],
    batches: Iterable[tf.Tensor],
    variables: Callable[[], Sequence[Any]],
    budget: int | None,
) -> Outcome:
    """A hand-written step in a hand-written loop."""
    if budget is None:
        run: Any = tf.function(step, jit_compile=False)
    else:
        run = remat.function(step, budget=budget)
    recorder = Recorder()
    tf.config.experimental.reset_memory_stats(_DEVICE)
    for batch in batches:
        started = time.perf_counter()
        losses = [float(loss) for loss in run(batch)]
        recorder.record(losses, time.perf_counter() - started)
    steps = () if budget is None else run.steps
    return Outcome(recorder.losses, recorder.peak, recorder.seconds, variables(), steps)


# Data


def _digits(zoom: int) -> tuple[np.ndarray, np.ndarray]:
    """1,797 images of 8 x 8 pixels in [0, 1], each pixel ``zoom`` times as large; classes."""
    digits = load_digits()
    images = (digits.images / 16).astype("float32").repeat(zoom, 1).repeat(zoom, 2)
    return images[..., None], digits.target


def _text(length: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Stretches of the licence as character numbers, and the same one further."""
    text = _LICENCE.read_text(encoding="utf-8")
    alphabet = sorted(set(text))
    numbers = np.array([alphabet.index(character) for character in text], "int32")
    starts = range(0, len(numbers) - length, 7)
    stretches = np.stack([numbers[start : start + length + 1] for start in starts])
    return stretches[:, :-1], stretches[:, 1:], len(alphabet)


# Trainings


def gan(steps: int, budget: int | None) -> Outcome:
    """A generator and a critic of digits, in a hand-written step (Goodfellow et al., 2014)."""
    convolution = {"strides": 2, "padding": "same"}
    generator = keras.Sequential([
        keras.Input((32,)),
        layers.Dense(4 * 4 * 64, activation="relu"),
        layers.Reshape((4, 4, 64)),
        layers.Conv2DTranspose(32, 4, activation="relu", **convolution),
        layers.BatchNormalization(),
        layers.Conv2DTranspose(1, 4, activation="sigmoid", **convolution),
    ])  # fmt: skip
    critic = keras.Sequential([
        keras.Input((16, 16, 1)),
        layers.Conv2D(32, 4, activation="leaky_relu", **convolution),
        layers.Dropout(0.2),
        layers.Conv2D(64, 4, activation="leaky_relu", **convolution),
        layers.Dropout(0.2),
        layers.Flatten(),
        layers.Dense(1),
    ])  # fmt: skip
    optimizers = [keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3)]
    entropy = keras.losses.BinaryCrossentropy(from_logits=True)
    seeds = keras.random.SeedGenerator(1)

    def step(real: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as one, tf.GradientTape() as two:
            noise = keras.random.normal((len(real), 32), seed=seeds)
            fake = generator(noise, training=True)
            yes, no = critic(real, training=True), critic(fake, training=True)
            made = entropy(tf.ones_like(no), no)
            told = entropy(tf.ones_like(yes), yes) + entropy(tf.zeros_like(no), no)
        for model, optimizer, tape, loss in (
            (generator, optimizers[0], one, made),
            (critic, optimizers[1], two, told),
        ):
            weights = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return made, told

    images, _ = _digits(2)
    draw = np.random.default_rng(0)
    batches = (tf.constant(images[draw.choice(len(images), 256)]) for _ in range(steps))
    parts = [generator, critic, *optimizers]
    return _loop(step, batches, lambda: [v for part in parts for v in part.variables], budget)


class _Sample(layers.Layer):
    """Draws from the code's distribution, and adds its divergence to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, code: Any) -> Any:
        mean, log_variance = ops.split(code, 2, axis=-1)
        divergence = ops.exp(log_variance) + ops.square(mean) - 1 - log_variance
        self.add_loss(0.5 * ops.mean(ops.sum(divergence, axis=-1)) / 256)
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        return mean + ops.exp(0.5 * log_variance) * noise


def vae(steps: int, budget: int | None) -> Outcome:
    """A variational autoencoder of digits, by ``add_loss`` (Kingma and Welling, 2014)."""
    convolution = {"padding": "same", "activation": "relu"}
    x = inputs = keras.Input((16, 16, 1))
    x = layers.Conv2D(32, 3, **convolution)(x)
    x = layers.Conv2D(64, 3, strides=2, **convolution)(x)
    x = layers.Conv2D(64, 3, strides=2, **convolution)(x)
    x = _Sample()(layers.Dense(2 * 8)(layers.Flatten()(x)))
    x = layers.Reshape((4, 4, 64))(layers.Dense(4 * 4 * 64, activation="relu")(x))
    x = layers.Conv2DTranspose(64, 3, strides=2, **convolution)(x)
    x = layers.Conv2DTranspose(32, 3, strides=2, **convolution)(x)
    model = keras.Model(inputs, layers.Conv2D(1, 3, padding="same")(x))
    images, _ = _digits(2)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return _fit(
        model, {"optimizer": keras.optimizers.Adam(), "loss": loss}, (images, images), 128, steps,
        budget,
    )  # fmt: skip


def siamese(steps: int, budget: int | None) -> Outcome:
    """Are two digits the same?  One network looks at both (Bromley et al., 1993)."""
    tower = keras.Sequential([keras.Input((16, 16, 1))])
    for width in (32, 32, 64):
        tower.add(layers.Conv2D(width, 3, padding="same"))
        tower.add(layers.BatchNormalization())
        tower.add(layers.ReLU())
    tower.add(layers.GlobalMaxPooling2D())
    tower.add(layers.Dense(32))
    left, right = keras.Input((16, 16, 1), name="left"), keras.Input((16, 16, 1), name="right")
    distance = ops.abs(tower(left) - tower(right))
    model = keras.Model({"left": left, "right": right}, layers.Dense(1)(distance))
    images, classes = _digits(2)
    draw = np.random.default_rng(0)
    first = draw.integers(len(images), size=4000)
    alike = np.array([draw.choice(np.flatnonzero(classes == classes[i])) for i in first])
    second = np.where(draw.random(len(first)) < 0.5, alike, draw.permutation(first))
    pairs = {"left": images[first], "right": images[second]}
    same = (classes[first] == classes[second]).astype("float32")[:, None]
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return _fit(
        model, {"optimizer": keras.optimizers.Adam(), "loss": loss}, (pairs, same), 64, steps,
        budget,
    )  # fmt: skip


def unet(steps: int, budget: int | None) -> Outcome:
    """Where is ink under the noise?  With skip connections (Ronneberger et al., 2015)."""

    def block(x: Any, width: int) -> Any:
        for _ in range(2):
            x = layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same")(x))
            x = layers.ReLU()(x)
        return x

    x = inputs = keras.Input((32, 32, 1))
    skips = []
    for width in (16, 32):
        x = block(x, width)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = block(x, 64)
    for width, skip in zip((32, 16), reversed(skips), strict=True):
        x = layers.Conv2DTranspose(width, 2, strides=2)(x)
        x = block(layers.Concatenate()([skip, x]), width)
    model = keras.Model(inputs, layers.Conv2D(1, 1)(x))
    images, _ = _digits(4)
    noise = np.random.default_rng(0).normal(scale=0.5, size=images.shape)
    data = ((images + noise).astype("float32"), (images > 0.5).astype("float32"))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return _fit(
        model, {"optimizer": keras.optimizers.Adam(), "loss": loss}, data, 32, steps, budget
    )


def transformer(steps: int, budget: int | None) -> Outcome:
    """The next character, with a causal mask, in float16 with loss scaling
    (Vaswani et al., 2017)."""
    length, width = 64, 64
    inputs, targets, characters = _text(length)
    keras.config.set_dtype_policy("mixed_float16")
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(characters, width)(tokens)
    x = x + layers.Embedding(length, width)(np.arange(length))
    for _ in range(3):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(4, width // 4, dropout=0.1)(y, y, use_causal_mask=True)
        x = x + y
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dropout(0.1)(layers.Dense(width)(y))
    model = keras.Model(tokens, layers.Dense(characters, dtype="float32")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compiled = {"optimizer": keras.optimizers.Adam(2e-3), "loss": loss}
    return _fit(model, compiled, (inputs, targets), 16, steps, budget)


def lstm(steps: int, budget: int | None) -> Outcome:
    """The next character, by two recurrent layers (Hochreiter and Schmidhuber, 1997)."""
    inputs, targets, characters = _text(32)
    model = keras.Sequential([
        keras.Input((32,), dtype="int32"),
        layers.Embedding(characters, 32),
        layers.LSTM(96, return_sequences=True, dropout=0.1),
        layers.LSTM(96, return_sequences=True),
        layers.LayerNormalization(),
        layers.Dense(256, activation="gelu"),
        layers.Dense(characters),
    ])  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compiled = {"optimizer": keras.optimizers.Adam(5e-3, global_clipnorm=1.0), "loss": loss}
    return _fit(model, compiled, (inputs, targets), 32, steps, budget)


TRAININGS = {
    function.__name__: function for function in (gan, vae, siamese, unet, transformer, lstm)
}


def train(task: Task) -> dict[str, Any]:
    """One of ``TRAININGS``, within a budget if there is one."""
    keras.utils.set_random_seed(0)
    outcome = TRAININGS[task.model](task.steps, task.budget)
    plans = [step.plan for step in outcome.steps]
    return {
        "losses": outcome.losses,
        "peak": outcome.peak,
        "seconds_first": outcome.seconds[0],
        "seconds_step": sorted(outcome.seconds)[len(outcome.seconds) // 2],
        "digest": digest(outcome.variables),
        "predicted": max((plan.peak for plan in plans), default=None),
        "recomputations": sum(len(p.schedule) - len(set(p.schedule)) for p in plans),
    }


if __name__ == "__main__":
    serve({"train": train}, sys.argv[1:])
