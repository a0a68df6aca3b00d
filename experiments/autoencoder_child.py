"""What the processes of ``experiments.autoencoder`` do: some steps, one way.

``python -m experiments.autoencoder_child TASK RESULT.json``; the task's model
is the loss.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import remat

from .autoencoder_model import IMAGE, LOSSES, adam, build, train_side
from .process import Task, serve

WIDTH, BATCH = 64, 32
_TURN = 5  # steps of one side before it is the other's turn
_DEVICE = "CPU:0"


class Training:
    """The shared encoder, both decoders and an optimizer for each side."""

    def __init__(self, task: Task, sides: int) -> None:
        self.steps, self.loss = task.steps, LOSSES[task.model]
        tf.keras.utils.set_random_seed(0)
        parts = build(WIDTH)
        self.encoder, self.decoders = parts.encoder, parts.decoders[:sides]
        self.optimizers = [adam() for _ in self.decoders]
        for decoder, optimizer in zip(self.decoders, self.optimizers, strict=True):
            optimizer.build([*self.encoder.trainable_variables, *decoder.trainable_variables])
        generator = np.random.default_rng(0)
        images = generator.uniform(size=(2, 2, BATCH, *IMAGE)).astype("float32")
        self.batches = tf.constant(images)  # of each side: warped, targets

    def both(self, batches: tf.Tensor) -> list[tf.Tensor]:
        """One update of each side, one after the other, as the seed's trainer does."""
        return [
            train_side(self.encoder, decoder, optimizer, self.loss, *tf.unstack(batches[number]))
            for number, (decoder, optimizer) in enumerate(
                zip(self.decoders, self.optimizers, strict=True)
            )
        ]

    def one(self, batches: tf.Tensor) -> tf.Tensor:
        """One update of the side whose turn it is."""
        return train_side(
            self.encoder, self.decoders[0], self.optimizers[0], self.loss, *tf.unstack(batches)
        )


def both(task: Task) -> dict[str, Any]:
    """Both sides in each step, within a budget if there is one."""
    training = Training(task, sides=2)
    step = _made(training.both, training.batches, task.budget)
    return _timed(task.steps, lambda number: step(training.batches))


def ping_pong(task: Task) -> dict[str, Any]:
    """One side at a time; the other's decoder and slots on the host."""
    training = Training(task, sides=1)
    variables = [*training.decoders[0].variables, *training.optimizers[0].variables]
    sides = remat.PingPong(variables)
    batches = [training.batches[0], training.batches[1]]
    step = _made(training.one, batches[0], task.budget)
    switching: list[float] = []

    def run(number: int) -> Any:
        started = time.perf_counter()
        turn = number // _TURN % 2
        if turn != sides.part:
            sides.switch(turn)
            switching.append(time.perf_counter() - started)
        return step(batches[sides.part])

    return {**_timed(task.steps, run), "switch_seconds": switching, "turn": _TURN}


def _made(step: Callable[..., Any], batches: tf.Tensor, budget: int | None) -> Callable[..., Any]:
    signature = [tf.TensorSpec(batches.shape, batches.dtype)]
    if budget is None:
        return tf.function(step, input_signature=signature, jit_compile=False)
    return remat.function(step, budget=budget, input_signature=signature)


def _timed(steps: int, run: Callable[[int], Any]) -> dict[str, Any]:
    """The peak in bytes over some steps, and the median of their seconds after the first."""
    peak, seconds = 0, []
    tf.config.experimental.reset_memory_stats(_DEVICE)
    for number in range(steps):
        started = time.perf_counter()
        losses = np.array(run(number))
        seconds.append(time.perf_counter() - started)
        # remat's own check resets the counter; the highest reading counts.
        peak = max(peak, tf.config.experimental.get_memory_info(_DEVICE)["peak"])
    if not np.isfinite(losses).all():
        raise ValueError(f"the loss is {losses}")
    return {"peak": peak, "step_seconds": statistics.median(seconds[1:])}


KINDS: dict[str, Callable[[Task], dict[str, Any]]] = {
    function.__name__: function for function in (both, ping_pong)
}


if __name__ == "__main__":
    serve(KINDS, sys.argv[1:])
