"""What the processes of ``experiments.zoo`` do: ``fit`` of one application, one way.

``python -m experiments.zoo_child TASK RESULT.json``
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import remat
from remat.device import default_device

from .blocks import Blocks
from .process import Task, serve
from .watched import Clock, digest

BATCH, BATCHES, EPOCHS, CLASSES = 8, 3, 2, 10
_SIDES = (32, 64, 75, 96, 128, 224)  # pixels; the smallest that builds is taken


def application(name: str) -> keras.Model:
    """The network with random weights, at the smallest size that builds."""
    problem: Exception | None = None
    for side in _SIDES:
        keras.utils.set_random_seed(0)
        try:
            return getattr(keras.applications, name)(
                weights=None,
                input_shape=(side, side, 3),
                classes=CLASSES,
                classifier_activation=None,
            )
        except ValueError as error:  # a dimension would be below one
            problem = error
    raise ValueError(f"{name} builds at none of {_SIDES}: {problem}")


def fit(model: keras.Model) -> dict[str, Any]:
    """Trains with Adam, and says what came of it.

    Returns:
      ``peak`` (bytes), ``step_seconds`` (the median of the last epoch),
      ``first_seconds`` (of the first step, tracing or compiling included),
      ``losses``, and ``digest`` of all that the training moved.
    """
    generator = np.random.default_rng(0)
    shape = (BATCH * BATCHES, *model.input_shape[1:])
    images = generator.uniform(0, 255, shape).astype("float32")
    labels = generator.integers(CLASSES, size=len(images))
    data = tf.data.Dataset.from_tensor_slices((images, labels))
    # Sizes are known: of an unknown one TensorFlow makes another graph.
    data = data.batch(BATCH, drop_remainder=True)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=False)
    device = default_device()
    clock = Clock(device)
    keras.utils.set_random_seed(1)
    tf.config.experimental.reset_memory_stats(device)
    history = model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[clock])
    return {
        "side": model.input_shape[1],
        "peak": clock.peak,
        "first_seconds": clock.seconds[0],
        "step_seconds": sorted(clock.seconds[BATCHES:])[BATCHES // 2],
        "losses": history.history["loss"],
        "digest": digest([*model.variables, *model.optimizer.variables]),
    }


def plain(task: Task) -> dict[str, Any]:
    """As Keras trains."""
    return fit(application(task.model))


def budgeted(task: Task) -> dict[str, Any]:
    """Inside a budget, by ``remat.wrap``."""
    assert task.budget is not None
    model = remat.wrap(application(task.model), budget=task.budget)
    result = fit(model)
    (step,) = model.remat.steps
    return {
        **result,
        "predicted": step.plan.peak,
        "overhead": step.plan.overhead,
        "stage_seconds": step.seconds,
        "recomputations": len(step.plan.schedule) - len(set(step.plan.schedule)),
    }


def scope_full(task: Task) -> dict[str, Any]:
    """Under ``keras.RematScope("full")``."""
    with keras.RematScope(mode="full"):
        return fit(application(task.model))


def scope_activations(task: Task) -> dict[str, Any]:
    """Under ``keras.RematScope("activations")``."""
    with keras.RematScope(mode="activations"):
        return fit(application(task.model))


def scope_larger_than(task: Task) -> dict[str, Any]:
    """Under ``keras.RematScope("larger_than")``, for values above 1 MiB."""
    with keras.RematScope(mode="larger_than", output_size_threshold=2**18):
        return fit(application(task.model))


def recompute_grad(task: Task) -> dict[str, Any]:
    """With ``tf.recompute_grad`` around about sqrt(n) blocks of layers."""
    return fit(Blocks(application(task.model)))


KINDS: dict[str, Callable[[Task], dict[str, Any]]] = {
    function.__name__: function
    for function in (
        plain,
        budgeted,
        scope_full,
        scope_activations,
        scope_larger_than,
        recompute_grad,
    )
}


if __name__ == "__main__":
    serve(KINDS, sys.argv[1:])
