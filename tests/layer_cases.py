"""One small model for each kind of layer, loss, policy and optimizer that must be exact.

Run by ``test_exact_layers`` in processes of their own: ``train`` gives what
five steps of Keras give, plain or inside a budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, optimizers

import remat

BATCH = 32
STEPS = 5


@dataclass(frozen=True)
class Case:
    """A model, its data and how it is compiled.

    Attributes:
      build: makes the model.
      inputs, labels: nests of shapes of one sample.
      tokens: above 0, inputs are integers below that.
      compiled: makes the arguments of ``Model.compile``.
      weighted: whether there are sample weights.
      policy: Keras's dtype policy while building.
      share: of the plain peak, to try as a budget first.
      recomputes: whether it is large enough for a budget to matter.
    """

    build: Callable[[], keras.Model]
    inputs: Any = (16, 16, 8)
    labels: Any = (4,)
    tokens: int = 0
    compiled: Callable[[], dict[str, Any]] = field(
        default=lambda: {"optimizer": keras.optimizers.Adam(1e-2), "loss": "mse"}
    )
    weighted: bool = False
    policy: str = "float32"
    share: float = 0.55
    recomputes: bool = True

    def batches(self) -> Iterator[tuple[Any, ...]]:
        """The same batches each time."""
        generator = np.random.default_rng(0)

        def draw(shape: Any) -> np.ndarray:
            return generator.normal(size=(BATCH, *shape)).astype("float32")

        def tokens(shape: Any) -> np.ndarray:
            drawn = generator.integers(1, self.tokens, (BATCH, *shape)).astype("int32")
            drawn[: BATCH // 2, -shape[-1] // 3 :] = 0  # padding, for masks
            return drawn

        for _ in range(STEPS):
            x = _map(tokens if self.tokens else draw, self.inputs)
            y = _map(draw, self.labels)
            yield (x, y, generator.uniform(size=BATCH)) if self.weighted else (x, y)


def _map(draw: Callable[[Any], np.ndarray], shapes: Any) -> Any:
    if isinstance(shapes, dict):
        return {name: draw(shape) for name, shape in shapes.items()}
    return draw(shapes)


def train(case: Case, options: dict[str, Any] | None) -> tuple[list[np.ndarray], list[int]]:
    """Five steps.

    Returns:
      Logs of every step, then all that the training moved: weights, averages,
      seeds, metrics, slots; and how many nodes each plan runs again.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(case.policy)
    model = case.build()
    keras.config.set_dtype_policy("float32")
    if options is not None:
        model = remat.wrap(model, **options)
    model.compile(**{"jit_compile": False, **case.compiled()})
    keras.utils.set_random_seed(2)
    logs = [model.train_on_batch(*batch, return_dict=True) for batch in case.batches()]
    results = [np.asarray(value) for log in logs for _, value in sorted(log.items())]
    results += [np.array(v) for v in [*model.variables, *model.optimizer.variables]]
    plans = [] if options is None else [plan.schedule for plan in model.remat.plans]
    return results, [len(schedule) - len(set(schedule)) for schedule in plans]


def compare(name: str) -> dict[str, Any]:
    """Trains a case plain, and inside a budget, or the least one that its refusal names."""
    case = CASES[name]
    plain, _ = train(case, None)
    # Costs by a rule of thumb, and nothing measured: what runs is what matters here.
    options: dict[str, Any] = {"profile": {}, "check": False, "time_limit": 0.3}
    try:
        ours, recomputed = train(case, {**options, "budget": case.share})
    except remat.InfeasibleBudgetError as error:
        ours, recomputed = train(case, {**options, "budget": error.least_budget})
    pairs = list(zip(plain, ours, strict=True))
    return {
        "differing": [
            i for i, (a, b) in enumerate(pairs) if a.dtype != b.dtype or a.tobytes() != b.tobytes()
        ],
        "finite": all(np.isfinite(array).all() for array in plain if array.dtype.kind == "f"),
        "moved": len({array.tobytes() for array in plain[:STEPS]}) > 1,
        "recomputed": recomputed,
        "recomputes": case.recomputes,
    }


# Models


def stack(*middle: Callable[[], Any], width: int = 8) -> Callable[[], keras.Model]:
    """Convolutions on either side of the layers in question."""

    def build() -> keras.Model:
        x = inputs = keras.Input((16, 16, 8))
        x = layers.Conv2D(width, 3, padding="same", activation="tanh")(x)
        for make in middle:
            x = make()(x)
            x = layers.Conv2D(width, 1, activation="tanh")(x)
        x = layers.Conv2D(width, 3, padding="same", activation="softplus")(x)
        return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling2D()(x)))

    return build


def wide() -> layers.Layer:
    """What there is to compute again beside layers that are run once."""
    return layers.Dense(48, activation="gelu")


def sequence(*middle: Callable[[], Any], mask: bool = False) -> Callable[[], keras.Model]:
    """An embedding, the layers in question, and an average over time."""

    def build() -> keras.Model:
        x = inputs = keras.Input((12,), dtype="int32")
        x = layers.Embedding(50, 16, mask_zero=mask)(x)
        for make in middle:
            x = make()(x)
        x = layers.Dense(16, activation="tanh")(x)
        return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))

    return build


def attention() -> keras.Model:
    x = inputs = keras.Input((24, 32))
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(4, 8, dropout=0.1)(y, y, use_causal_mask=True)
        x = x + y
        y = layers.GroupQueryAttention(8, 4, 2)(x, x)
        x = x + layers.Dense(32)(layers.Dense(64, activation="gelu")(y))
    x = layers.Attention()([x, x])
    x = layers.AdditiveAttention()([x, x])
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))


class Positions(layers.Layer):
    """Reads a table at places that are a tensor made outside of the step."""

    def build(self, shape: tuple[int, ...]) -> None:
        self.places = tf.constant(np.arange(shape[1]))
        self.table = self.add_weight(shape=shape[1:])

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + tf.gather(self.table, self.places)


def captured() -> keras.Model:
    """What Grappler does to the sums in the normalization depends on the shapes."""
    x = inputs = keras.Input((24, 32))
    x = Positions()(x)
    for _ in range(4):
        y = layers.Dense(32)(layers.Dense(64, activation="gelu")(layers.LayerNormalization()(x)))
        x = layers.LayerNormalization()(x + y)
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))


def stochastic_depth() -> keras.Model:
    """As EfficientNet drops its blocks."""
    x = inputs = keras.Input((16, 16, 8))
    for _ in range(6):
        y = layers.Conv2D(8, 3, padding="same", activation="swish")(x)
        x = x + layers.Dropout(0.3, noise_shape=(None, 1, 1, 1))(y)
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling2D()(x)))


@keras.saving.register_keras_serializable("remat_tests")
class Noise(layers.Layer):
    """TensorFlow's own generators in a layer."""

    def call(self, x: Any, training: bool = False) -> Any:
        if not training:
            return x
        x = x + 0.1 * tf.random.normal(tf.shape(x))
        return x * tf.random.uniform(tf.shape(x), 0.9, 1.1)


class Counted(layers.Layer):
    """Values of which there are as many as others say."""

    def call(self, x: Any) -> Any:
        rows = tf.reshape(x, (-1, x.shape[-1]))
        side = tf.cast(rows[:, 0] > 0, tf.int32)
        kept = tf.boolean_mask(rows, side > 0)
        self.add_loss(tf.reduce_sum(kept**2) / tf.cast(1 + tf.shape(kept)[0], kept.dtype))
        levels = tf.clip_by_value(tf.cast(4 * rows[:, 1], tf.int32), 0, 7)
        levels = tf.cast(tf.math.bincount(levels, minlength=8), x.dtype)
        self.add_loss(tf.reduce_max(levels) / tf.reduce_sum(levels))
        places = tf.dynamic_partition(tf.range(tf.shape(rows)[0]), side, 2)
        low, high = tf.dynamic_partition(rows, side, 2)
        rows = tf.dynamic_stitch(places, [tf.tanh(low), high * 0.7])
        return tf.reshape(rows, tf.shape(x))


class Control(layers.Layer):
    """Branches and loops of TensorFlow."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x: Any) -> Any:
        x = tf.cond(tf.reduce_mean(x) > 0, lambda: tf.tanh(x @ self.kernel), lambda: x * 0.5)
        _, x = tf.while_loop(
            lambda i, _: i < 3,
            lambda i, x: (i + 1, tf.tanh(x @ self.kernel)),
            (tf.constant(0), x),
        )
        return tf.map_fn(lambda sample: sample * tf.reduce_mean(sample), x)


class Nested(Control):
    """Loops and branches in loops, which draw random numbers and count in a variable."""

    def build(self, shape: Any) -> None:
        super().build(shape)
        self.count = self.add_weight(shape=(), dtype="int32", trainable=False)

    def call(self, x: Any) -> Any:
        def inner(j: Any, x: Any) -> Any:
            return j + 1, 0.9 * x + 0.1 * tf.tanh(x * 0.5 * 2.0 @ self.kernel)

        def outer(i: Any, x: Any) -> Any:
            self.count.assign_add(1)
            _, x = tf.while_loop(lambda j, _: j < i + 1, inner, (0, x))
            x = tf.cond(i % 2 == 0, lambda: x + 0.1 * tf.random.normal(tf.shape(x)), lambda: -x)
            return i + 1, x

        # Turns of plain TensorFlow that run side by side draw in whichever order they come.
        return tf.while_loop(lambda i, _: i < 3, outer, (0, x), parallel_iterations=1)[1]


class Dropped(layers.Layer):
    """A block that is left out at random: averages and a seed move in the branch that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.2)]
        self.seed = keras.random.SeedGenerator(3)

    def build(self, shape: Any) -> None:
        for part in self.parts:
            part.build((*shape[:-1], 8))

    def block(self, x: Any) -> Any:
        y = x
        for part in self.parts:
            y = part(y, training=True) if part is not self.parts[0] else part(y)
        return x + tf.nn.gelu(y / 3.0)

    def call(self, x: Any, training: bool = False) -> Any:
        if not training:
            return x
        drawn = keras.random.uniform((), seed=self.seed)
        return tf.cond(drawn > 0.4, lambda: self.block(x), lambda: x * 0.5)


class Called(layers.Layer):
    """Functions that call functions, with a branch in the inner one."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    @tf.function
    def call(self, x: Any) -> Any:
        return tf.nn.gelu(self.inner(x / 3.0) @ self.kernel) + self.inner(x)

    @tf.function
    def inner(self, x: Any) -> Any:
        return tf.cond(tf.reduce_mean(x) > 0, lambda: tf.tanh(x / 7.0), lambda: x * 0.3)


class Python(layers.Layer):
    """A Python function, with a gradient of its own."""

    def call(self, x: Any) -> Any:
        @tf.custom_gradient
        def halved(x: Any) -> Any:
            y = tf.py_function(lambda x: x / 2, [x], x.dtype)
            y.set_shape(x.shape)
            return y, lambda upstream: upstream / 2

        return halved(x)


class Differentiated(layers.Layer):
    """A Python function that TensorFlow differentiates by running it."""

    def call(self, x: Any) -> Any:
        y = tf.py_function(tf.sin, [x], x.dtype)
        y.set_shape(x.shape)
        return y


class Penalised(layers.Layer):
    """Adds a loss of its own."""

    def call(self, x: Any) -> Any:
        self.add_loss(1e-2 * keras.ops.mean(keras.ops.square(x)))
        return x


def regularized() -> keras.Model:
    def convolution() -> Any:
        return layers.Conv2D(
            8, 3, padding="same", activation="tanh", kernel_regularizer="l2",
            bias_regularizer="l1", activity_regularizer=keras.regularizers.L2(1e-3),
        )  # fmt: skip

    return stack(convolution, Penalised, convolution)()


def shared_and_frozen() -> keras.Model:
    left, right = keras.Input((16, 16, 8), name="left"), keras.Input((16, 16, 8), name="right")
    first = layers.Conv2D(8, 3, padding="same", activation="tanh")
    frozen = layers.Conv2D(8, 3, padding="same", activation="tanh", trainable=False)
    still = layers.BatchNormalization(trainable=False)
    branches = [frozen(still(first(side))) for side in (left, right)]
    x = layers.Concatenate()(branches)
    x = layers.Conv2D(8, 3, padding="same", activation="tanh")(first(x[..., :8]) + x[..., 8:])
    x = layers.GlobalAveragePooling2D()(x)
    outputs = {"a": layers.Dense(3, name="a")(x), "b": layers.Dense(1, name="b")(x)}
    return keras.Model({"left": left, "right": right}, outputs)


class OwnStep(keras.Model):
    """A variational autoencoder that trains itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential(
            [layers.Conv2D(8, 3, padding="same", activation="tanh") for _ in range(3)]
        )
        self.decoder = keras.Sequential(
            [layers.Conv2D(8, 3, padding="same", activation="tanh") for _ in range(3)]
        )
        self.seed = keras.random.SeedGenerator(7)
        self.tracker = keras.metrics.Mean(name="total")

    def call(self, x: Any, training: bool = False) -> Any:
        code = self.encoder(x, training=training)
        code += 0.1 * keras.random.normal(keras.ops.shape(code), seed=self.seed)
        self.add_loss(1e-3 * keras.ops.mean(keras.ops.square(code)))
        return self.decoder(code, training=training)

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def train_step(self, data: Any) -> dict[str, Any]:
        x = data[0]
        with tf.GradientTape() as tape:
            rebuilt = self(x, training=True)
            loss = keras.ops.mean(keras.ops.square(rebuilt - x)) + sum(self.losses)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.tracker.update_state(loss)
        return {"total": self.tracker.result()}


def optimizer(make: Callable[[], Any], **more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"optimizer": make(), "loss": "mse", **more}


def metrics() -> dict[str, Any]:
    return {
        "optimizer": keras.optimizers.RMSprop(1e-2),
        "loss": keras.losses.Huber(),
        "metrics": ["mae", keras.metrics.CosineSimilarity()],
        "weighted_metrics": ["mse"],
    }


def two_losses() -> dict[str, Any]:
    return {
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
        "loss": {"a": "mse", "b": "mae"},
        "loss_weights": {"a": 1.0, "b": 0.3},
        "metrics": {"a": ["mae"], "b": ["mse"]},
    }


plain_stack = stack(lambda: layers.Conv2D(8, 3, padding="same", activation="gelu"))

CASES = {
    "dropout and noise": Case(
        stack(
            lambda: layers.Dropout(0.2),
            lambda: layers.SpatialDropout2D(0.2),
            lambda: layers.GaussianNoise(0.1),
            lambda: layers.GaussianDropout(0.1),
            lambda: layers.AlphaDropout(0.1),
        )
    ),
    "stochastic depth": Case(stochastic_depth, share=0.45),
    "augmentation": Case(
        stack(
            lambda: layers.RandomFlip(),
            lambda: layers.RandomTranslation(0.1, 0.1),
            lambda: layers.RandomRotation(0.1),
            lambda: layers.RandomZoom(0.1),
            lambda: layers.RandomContrast(0.1),
            lambda: layers.RandomCrop(12, 12),
        )
    ),
    "tf.random": Case(stack(Noise, Noise)),
    "batch normalization": Case(
        stack(
            layers.BatchNormalization,
            lambda: layers.BatchNormalization(axis=1),
            lambda: layers.BatchNormalization(synchronized=True),
        )
    ),
    "other normalization": Case(
        stack(
            layers.LayerNormalization,
            lambda: layers.GroupNormalization(4),
            layers.UnitNormalization,
            layers.RMSNormalization,
        )
    ),
    "spectral normalization": Case(
        stack(
            lambda: layers.SpectralNormalization(layers.Conv2D(8, 3, padding="same")),
            lambda: layers.SpectralNormalization(layers.Dense(8), power_iterations=2),
        )
    ),
    "LSTM and GRU": Case(
        sequence(
            lambda: layers.LSTM(16, return_sequences=True, dropout=0.1),
            lambda: layers.GRU(16, return_sequences=True),
        ),
        inputs=(12,), tokens=50, recomputes=False,
    ),
    "recurrent dropout": Case(
        sequence(lambda: layers.LSTM(16, return_sequences=True, recurrent_dropout=0.1)),
        inputs=(12,), tokens=50, recomputes=False,
    ),
    "bidirectional, masked": Case(
        recomputes=False,
        build=sequence(
            lambda: layers.Bidirectional(layers.LSTM(8, return_sequences=True)),
            lambda: layers.SimpleRNN(16, return_sequences=True, unroll=True),
            mask=True,
        ),
        inputs=(12,), tokens=50,
    ),
    "ConvLSTM": Case(
        recomputes=False,
        build=lambda: keras.Sequential(
            [
                keras.Input((4, 8, 8, 4)),
                layers.ConvLSTM2D(4, 3, padding="same", return_sequences=True),
                layers.Conv3D(8, 3, padding="same", activation="tanh"),
                layers.TimeDistributed(layers.Conv2D(4, 3, activation="tanh")),
                layers.GlobalAveragePooling3D(),
                layers.Dense(4),
            ]
        ),
        inputs=(4, 8, 8, 4),
    ),
    "sparse gradients": Case(
        recomputes=False,
        build=sequence(lambda: layers.Dense(64, activation="relu"), lambda: layers.Conv1D(64, 3)),
        inputs=(12,), tokens=50,
    ),
    "sparse gradients that grow": Case(
        recomputes=False,
        build=sequence(lambda: layers.Dense(64, activation="relu")),
        inputs=(12,), tokens=50, compiled=optimizer(lambda: optimizers.RMSprop(1e-2)),
    ),
    "attention": Case(attention, inputs=(24, 32)),
    "a captured tensor": Case(captured, inputs=(24, 32)),
    "convolutions": Case(
        stack(
            lambda: layers.Conv2DTranspose(8, 3, strides=2, padding="same"),
            lambda: layers.DepthwiseConv2D(3, depth_multiplier=2),
            lambda: layers.SeparableConv2D(8, 3, strides=2),
            layers.MaxPooling2D,
            layers.UpSampling2D,
            lambda: layers.Conv2D(8, 3, padding="same", groups=2, dilation_rate=2),
        )
    ),
    "Lambda": Case(stack(lambda: layers.Lambda(lambda x: tf.nn.l2_normalize(x, -1) * 2))),
    "gradients through py_function": Case(stack(Differentiated), recomputes=False),
    "py_function": Case(stack(Python), recomputes=False),
    "open sizes": Case(stack(Counted, wide, wide)),
    "categories": Case(
        recomputes=False,
        build=lambda: keras.Sequential(
            [
                keras.Input((12,), dtype="int32"),
                layers.CategoryEncoding(50, output_mode="count"),
                layers.Dense(16, activation="gelu"),
                layers.Dense(4),
            ]
        ),
        inputs=(12,), tokens=50,
    ),
    "cond, while_loop and map_fn": Case(stack(Control), recomputes=False),
    "loops in loops": Case(stack(Nested), recomputes=False),
    "functions": Case(stack(Called)),
    "blocks left out": Case(stack(Dropped, wide, wide, Dropped)),
    "regularizers and add_loss": Case(regularized),
    "shared and frozen layers, dicts": Case(
        shared_and_frozen,
        inputs={"left": (16, 16, 8), "right": (16, 16, 8)},
        labels={"a": (3,), "b": (1,)},
        compiled=two_losses,
    ),
    "a train_step of its own": Case(
        OwnStep, compiled=lambda: {"optimizer": optimizers.Adam(1e-2)}, recomputes=False
    ),
    "metrics and weights": Case(plain_stack, compiled=metrics, weighted=True),
    "mixed_float16": Case(
        share=0.4,
        build=stack(layers.BatchNormalization, lambda: layers.Dropout(0.1)),
        policy="mixed_float16",
        compiled=optimizer(lambda: optimizers.Adam(1e-2)),
    ),
    "mixed_float16, AdamW": Case(
        share=0.4,
        build=stack(lambda: layers.Dropout(0.1)),
        policy="mixed_float16",
        compiled=optimizer(lambda: optimizers.AdamW(1e-2, weight_decay=0.01)),
    ),
    "loss scaling, global_clipnorm": Case(
        plain_stack,
        compiled=optimizer(
            lambda: optimizers.LossScaleOptimizer(optimizers.SGD(1e-2, global_clipnorm=0.01))
        ),
    ),
    "mixed_bfloat16": Case(
        stack(layers.BatchNormalization, lambda: layers.Dropout(0.1)), policy="mixed_bfloat16"
    ),
    "clipnorm, weight decay": Case(
        plain_stack,
        compiled=optimizer(lambda: optimizers.AdamW(1e-2, weight_decay=0.1, clipnorm=0.1)),
    ),
    "global_clipnorm, EMA": Case(
        plain_stack,
        compiled=optimizer(
            lambda: optimizers.SGD(
                keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), global_clipnorm=0.1,
                use_ema=True, ema_overwrite_frequency=2,
            )
        ),
    ),
    "clipvalue, gradient accumulation": Case(
        plain_stack,
        compiled=optimizer(
            lambda: optimizers.Nadam(1e-2, clipvalue=0.01, gradient_accumulation_steps=2)
        ),
    ),
    "other optimizers": Case(plain_stack, compiled=optimizer(lambda: optimizers.Lion(1e-3))),
    "Muon": Case(plain_stack, compiled=optimizer(lambda: optimizers.Muon(1e-2))),
}  # fmt: skip
