"""What the processes of ``experiments.zoo`` do: ``fit`` of one network, one way.

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
from .zoo import HUB

BATCH, BATCHES, EPOCHS, CLASSES = 8, 3, 2, 10
_SIDES = (32, 64, 75, 96, 128, 224)  # pixels; the smallest that builds is taken
_TOKENS, _VOCABULARY = 128, 5000
_LAYERS = 3  # of transformers; their width is that of the published ones


def network(name: str) -> keras.Model:
    """One of the networks of ``experiments.zoo``, with random weights."""
    return backbone(name) if name in HUB else application(name)


def backbone(name: str) -> keras.Model:
    """A transformer of ``keras_hub``, a few layers deep, that classifies sequences."""
    import keras_hub  # an extra

    keras.utils.set_random_seed(0)
    body = getattr(keras_hub.models, name)(
        vocabulary_size=_VOCABULARY,
        num_layers=_LAYERS,
        num_heads=12,
        hidden_dim=768,
        intermediate_dim=3072,
        max_sequence_length=_TOKENS,
    )
    inputs = {key: keras.Input((_TOKENS,), dtype="int32", name=key) for key in body.input}
    found = body(inputs)
    # BERT says what the sequence is about; of GPT-2's output the last token does.
    summary = found["pooled_output"] if isinstance(found, dict) else found[:, -1]
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(summary))


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
    count = BATCH * BATCHES

    def draw(name: str, tensor: keras.KerasTensor) -> np.ndarray:
        shape = (count, *tensor.shape[1:])
        if tensor.dtype == "float32":
            return generator.uniform(0, 255, shape).astype("float32")
        # A mask says what is there, and only token ids are above 1.
        most = _VOCABULARY if name == "token_ids" else 2
        return np.ones(shape, "int32") if "mask" in name else generator.integers(most, size=shape)

    inputs = model.input
    if isinstance(inputs, dict):
        inputs = {name: draw(name, tensor) for name, tensor in inputs.items()}
    else:
        inputs = draw("image", inputs)
    labels = generator.integers(CLASSES, size=count)
    data = tf.data.Dataset.from_tensor_slices((inputs, labels))
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
        "side": tf.nest.flatten(model.input)[0].shape[1],
        "peak": clock.peak,
        "first_seconds": clock.seconds[0],
        "step_seconds": sorted(clock.seconds[BATCHES:])[BATCHES // 2],
        "losses": history.history["loss"],
        "digest": digest([*model.variables, *model.optimizer.variables]),
    }


def plain(task: Task) -> dict[str, Any]:
    """As Keras trains."""
    return fit(network(task.model))


def budgeted(task: Task) -> dict[str, Any]:
    """Inside a budget, by ``remat.wrap``."""
    assert task.budget is not None
    model = remat.wrap(network(task.model), budget=task.budget)
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
        return fit(network(task.model))


def scope_activations(task: Task) -> dict[str, Any]:
    """Under ``keras.RematScope("activations")``."""
    with keras.RematScope(mode="activations"):
        return fit(network(task.model))


def scope_larger_than(task: Task) -> dict[str, Any]:
    """Under ``keras.RematScope("larger_than")``, for values above 1 MiB."""
    with keras.RematScope(mode="larger_than", output_size_threshold=2**18):
        return fit(network(task.model))


def recompute_grad(task: Task) -> dict[str, Any]:
    """With ``tf.recompute_grad`` around about sqrt(n) blocks of layers."""
    return fit(Blocks(network(task.model)))


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
