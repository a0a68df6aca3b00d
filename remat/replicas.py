"""A Keras training step for several replicas (``tf.distribute.MirroredStrategy``).

Replicas meet where the optimizer adds up their gradients, and TensorFlow
traces nothing beyond that for one replica alone.  So what comes before it
(forward, backward, losses, metrics) is planned for each replica, and the
update runs outside of the plans, for all of them.  Where they meet before it,
see ``collectives``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from .function import Function, Signature
from .trace import Source


class ReplicatedStep:
    """``train_step`` of a Keras model, on a batch with a part for each replica."""

    def __init__(
        self, model: keras.Model, make: Callable[[Callable[[Any], Any], str], Function]
    ) -> None:
        """Makes the step; plans are made when the first batch is there.

        Args:
          model: made in the scope of its strategy.
          make: gives the planned function of a step and a name.

        Raises:
          ValueError: if the step is the model's own.
        """
        if type(model).train_step is not keras.Model.train_step:
            raise ValueError(
                f"{model.name}: fit under several replicas is for Keras's own train_step; put "
                "forward and backward of yours into a remat.function, in a loop of your own, and "
                "apply the gradients outside of it"
            )
        self._model = model
        self._strategy = model.distribute_strategy
        self._weights: list[Any] = []
        self._planned = make(self._up_to_the_update, model.name)
        self._runs: dict[
            tuple[Signature | None, Source | None], Callable[[Any], dict[str, tf.Tensor]]
        ] = {}
        self._plain = tf.function(self._all_without_a_plan, autograph=False, jit_compile=False)

    def __call__(
        self, batch: Any, traced_for: Signature | None, taken_from: Source | None
    ) -> dict[str, tf.Tensor]:
        """Trains on one batch; logs are means over replicas, as Keras takes them.

        Args:
          batch: with a part for each replica.
          traced_for, taken_from: see ``Function.traced_for``.
        """
        if any(
            0 in part.shape[:1] for leaf in tf.nest.flatten(batch) for part in self._parts(leaf)
        ):
            return self._without_a_plan(batch, traced_for)
        planned = self._planned.traced_for(traced_for, taken_from)

        def plan(batch: Any) -> None:
            planned.compiled(batch)

        self._strategy.run(plan, args=(batch,))  # inside a tf.function it would be too late
        if (traced_for, taken_from) not in self._runs:
            run = functools.partial(self._all_replicas, planned)
            self._runs[traced_for, taken_from] = tf.function(
                run, autograph=False, jit_compile=False
            )
        return self._runs[traced_for, taken_from](batch)

    def _all_replicas(self, planned: Function, batch: Any) -> dict[str, tf.Tensor]:
        def one_replica(batch: Any) -> dict[str, tf.Tensor]:
            logs, gradients = planned(batch)
            if self._weights:
                pairs = zip(gradients, self._weights, strict=True)
                self._model.optimizer.apply_gradients(pairs)
            return logs

        return self._mean(self._strategy.run(one_replica, args=(batch,)))

    def _without_a_plan(self, batch: Any, traced_for: Signature | None) -> dict[str, tf.Tensor]:
        """Trains as plain Keras does on a batch of fewer samples than there are replicas.

        Its memory is nothing beside that of the batches that are planned for, and
        where there is nothing to compute on, there is nothing to plan.
        """
        specs = iter(traced_for or ())

        def spec(leaf: Any) -> Any:
            parts = self._parts(leaf)
            if not parts:
                return leaf
            met = tf.type_spec_from_value(leaf)
            # The same of every replica.
            return met if traced_for is None else type(met)(*[next(specs)] * len(parts))

        signature = tf.nest.map_structure(spec, batch)
        result: dict[str, tf.Tensor] = self._plain.get_concrete_function(signature)(batch)
        return result

    def _all_without_a_plan(self, batch: Any) -> dict[str, tf.Tensor]:
        return self._mean(self._strategy.run(self._model.train_step, args=(batch,)))

    def _parts(self, leaf: Any) -> list[tf.Tensor]:
        """The replicas' parts of a leaf of a batch; none if it is no tensor."""
        parts = self._strategy.experimental_local_results(leaf)
        return [part for part in parts if tf.is_tensor(part)]

    def _mean(self, logs: Any) -> dict[str, tf.Tensor]:
        """Of all replicas."""
        return tf.nest.map_structure(
            lambda value: tf.reduce_mean(self._strategy.experimental_local_results(value), axis=0),
            logs,
        )

    def _up_to_the_update(self, batch: Any) -> tuple[dict[str, tf.Tensor], list[tf.Tensor]]:
        """Logs and gradients."""
        with _update_put_off(self._model.optimizer) as pairs:
            logs = self._model.train_step(batch)
        self._weights = [weight for _, weight in pairs]
        return logs, [gradient for gradient, _ in pairs]


@contextmanager
def _update_put_off(optimizer: keras.Optimizer) -> Iterator[list[tuple[tf.Tensor, Any]]]:
    """Collects what is given to ``apply_gradients``, which does nothing meanwhile."""
    pairs: list[tuple[tf.Tensor, Any]] = []
    optimizer.apply_gradients = pairs.extend
    try:
        yield pairs
    finally:
        del optimizer.apply_gradients
