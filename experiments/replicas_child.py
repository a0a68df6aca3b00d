"""What the processes of ``experiments.replicas`` do: ``fit`` on two logical devices.

``python -m experiments.replicas_child TASK RESULT.json``
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import remat

from .process import Task, serve
from .watched import Clock, digest

BATCH = 64  # over both replicas
_GROWTH = 12  # channels that a layer adds
_CLASSES = 10


def densenet(depth: int) -> keras.Model:
    """DenseNet-BC for images of 32 x 32 pixels (Huang et al., 2017): three dense blocks."""

    def convolution(x: Any, width: int, size: int) -> Any:
        x = layers.ReLU()(layers.BatchNormalization()(x))
        return layers.Conv2D(width, size, padding="same", use_bias=False)(x)

    x = inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(2 * _GROWTH, 3, padding="same", use_bias=False)(x)
    for block in range(3):
        if block:
            x = layers.AveragePooling2D(2)(convolution(x, x.shape[-1] // 2, 1))
        for _ in range((depth - 4) // 6):
            new = convolution(convolution(x, 4 * _GROWTH, 1), _GROWTH, 3)
            x = layers.Concatenate()([x, new])
    x = layers.GlobalAveragePooling2D()(layers.ReLU()(layers.BatchNormalization()(x)))
    return keras.Model(inputs, layers.Dense(_CLASSES)(x), name=f"densenet_bc_{depth}")


def train(task: Task) -> dict[str, Any]:
    """Trains some steps with momentum, within a share of the plain peak if there is one.

    Returns:
      ``peak`` (bytes of the whole process, both replicas), ``step_seconds``
      (the median without the first two), ``losses``, ``averages`` (a digest of
      the BatchNormalization statistics) and ``digest`` (of everything moved).
    """
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    keras.utils.set_random_seed(0)
    generator = np.random.default_rng(0)
    images = generator.normal(size=(BATCH * task.steps, 32, 32, 3)).astype("float32")
    labels = generator.integers(_CLASSES, size=len(images))
    with strategy.scope():
        model = densenet(int(task.model))
        if task.share is not None:
            model = remat.wrap(model, budget=task.share)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(BATCH, drop_remainder=True)
    clock = Clock("CPU:0")
    history = model.fit(data, verbose=0, callbacks=[clock])
    averages = [v for v in model.non_trainable_variables if "moving" in v.name]
    found = {
        "peak": clock.peak,
        "step_seconds": sorted(clock.seconds[2:])[(len(clock.seconds) - 2) // 2],
        "losses": history.history["loss"],
        "averages": digest(averages),
        "digest": digest([*model.variables, *model.optimizer.variables]),
    }
    if task.share is not None:
        plans = model.remat.plans
        found["overhead"] = max(plan.overhead for plan in plans)
        found["budgets"] = [plan.budget for plan in plans]
    return found


if __name__ == "__main__":
    serve({"train": train}, sys.argv[1:])
