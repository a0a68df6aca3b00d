"""The door for Keras users: a model whose ``fit`` stays inside a memory budget."""

from __future__ import annotations

import functools
import itertools
import operator
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .allocator import device_at_hand
from .compile import require_tensorflow
from .function import Function, Signature
from .notices import warn
from .options import Options
from .planning import StepPlan
from .replicas import ReplicatedStep
from .step import CompiledStep
from .trace import Source


def wrap(
    model: keras.Model,
    budget: int | float | str = "auto",
    **options: Any,
) -> keras.Model:
    """Gives a Keras model a ``fit`` that stays inside a memory budget.

    The result and ``model`` are one model: the same weights, layers,
    optimizer, metrics and compile state, seen through two classes.  Everything
    works on either as before (``compile``, ``fit``, ``evaluate``, ``predict``,
    ``save``, callbacks, a ``train_step`` of the model's own); the only
    difference is that ``fit`` and ``train_on_batch`` of the result run each
    training step by a plan.  Saving the result gives the file that saving
    ``model`` gives, which loads as a plain model.

    There is one plan for each shape of a batch, found when the first such
    batch is there (another for ``train_on_batch``, which Keras traces apart).
    Calling ``compile``, changing ``trainable``, or building again makes them
    anew, the next time that ``fit`` is called.  Ctrl-C while one is looked for
    ends ``fit`` after that batch; the best found so far is kept.

    Example::

        model = remat.wrap(keras.applications.ResNet50(weights=None), budget="4GiB")
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        model.fit(images, labels, batch_size=32, epochs=10)
        print(model.remat.plan.summary())

    Args:
      model: a Keras 3 model on the TensorFlow backend, compiled or not.
      budget: bytes that TensorFlow's allocator may reach; see
        ``remat.compile``.  A share is one of the largest batch so far.
      options: ``solver``, ``time_limit``, ``seed``, ``profile``, ``check``,
        ``quiet`` (by default only on a GPU: ``fit`` prefetches batches on the
        CPU), ``verbose``; see ``remat.compile``.

    A model made in the scope of a ``tf.distribute.MirroredStrategy`` has a plan
    for each replica and shape, up to the optimizer's update; the budget is for
    what comes before it.

    Returns:
      A model of a subclass of ``type(model)`` with an attribute ``remat``, a
      ``Training``, which has the plans.

    Raises:
      TypeError, ValueError: if ``model`` is not such a model, or was made in
        the scope of a strategy under which Keras cannot ``fit``.
      InfeasibleBudgetError (from ``fit``): if no schedule within the budget
        is found for a batch.
      TraceError (from ``fit``): if a batch is ragged or sparse.
    """
    require_tensorflow()
    if not isinstance(model, keras.Model):
        raise TypeError(f"model must be a keras.Model, not {type(model).__name__}")
    if isinstance(model, _Budgeted):
        raise ValueError("the model is wrapped already; wrap the one that it was made of")
    if isinstance(model.distribute_strategy, tf.distribute.MultiWorkerMirroredStrategy):
        raise ValueError(
            "fit does not work under MultiWorkerMirroredStrategy in Keras 3, with or without a "
            "budget: train in a loop of your own, with remat.function"
        )
    if type(model).make_train_function is not keras.Model.make_train_function:
        raise ValueError(
            f"{type(model).__name__} has a make_train_function of its own, which a budget would "
            "replace; what it does to one batch belongs into train_step"
        )
    chosen = Options.given("remat.wrap", {"budget": budget, **options})
    if chosen.quiet is None:  # fit prefetches batches, on the CPU
        chosen = replace(chosen, quiet=not device_at_hand().name.startswith("CPU"))
    if chosen.plan is not None:
        raise ValueError("a plan is for one shape of a batch; fit may meet several")
    kind = type(model)
    members = {"__slots__": ("remat", "train_function"), "_plain": kind, "__doc__": kind.__doc__}
    budgeted = types.new_class(
        kind.__name__, (_Budgeted, kind), exec_body=lambda body: body.update(members)
    )
    wrapped: keras.Model = object.__new__(budgeted)
    # One model: what is set on either is set on both, except for the two slots.
    object.__setattr__(wrapped, "__dict__", vars(model))
    object.__setattr__(wrapped, "train_function", None)
    object.__setattr__(wrapped, "remat", Training(chosen))
    return wrapped


class Training:
    """What a wrapped model knows about its budget: its attribute ``remat``.

    Attributes:
      options: as given to ``remat.wrap``.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._function: Function | None = None

    @property
    def steps(self) -> tuple[CompiledStep, ...]:
        """The steps planned so far, one for each shape of a batch, oldest first."""
        return () if self._function is None else self._function.steps

    @property
    def plans(self) -> tuple[StepPlan, ...]:
        """Their plans."""
        return tuple(step.plan for step in self.steps)

    @property
    def plan(self) -> StepPlan:
        """The plan for the first shape.

        Raises:
          ValueError: if there is none yet.
        """
        if not self.steps:
            raise ValueError("there is no plan yet: call fit or train_on_batch")
        return self.plans[0]

    def start(self, step: Callable[[Any], Any], name: str) -> Function:
        """Forgets all plans, for a new ``train_step``."""
        self._function = Function(step, None, self.options, name=name)
        return self._function


class _Budgeted(keras.Model):
    """What ``wrap`` changes about a model's class."""

    _plain: type[keras.Model]
    remat: Training
    train_function: _TrainFunction | None

    def __new__(cls, *args: Any, **kwargs: Any) -> keras.Model:
        """Another model of the class is a plain one, as when it is cloned."""
        return cls._plain(*args, **kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Keras saves and clones a model as its ``__class__``."""
        return self._plain

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As the model's own; ``jit_compile=True`` is for evaluation and prediction only."""
        if kwargs.get("jit_compile") is True:
            warn(
                "jit_compile=True: training inside a budget does not use XLA, which would merge "
                "recomputations again; evaluate and predict use it",
            )
        super().compile(*args, **kwargs)

    def make_train_function(self, force: bool = False) -> Callable[[Iterator[Any]], Any]:
        """The function that ``fit`` calls for every ``steps_per_execution`` batches."""
        if self.run_eagerly:
            raise ValueError(
                "run_eagerly=True runs one operation after the other, without a plan; compile "
                "without it, or train the model that this one was made of"
            )
        current = self.train_function
        if force or current is None or not current.fresh:
            current = _TrainFunction(self)
            self.train_function = current
        return current


class _TrainFunction:
    """Takes batches from an iterator and trains on each by its plan.

    Keras's own train function takes them inside a graph, where the size of a
    batch may be unknown; a plan is for known sizes.  What Keras traces its step
    for matters all the same, for the last digits.
    """

    def __init__(self, model: _Budgeted) -> None:
        self._model = model
        self._signatures: defaultdict[str, _Signatures] = defaultdict(_Signatures)
        self._step: Callable[[Any, Signature | None, Source | None], Any]
        if model.distribute_strategy.num_replicas_in_sync > 1:
            self._step = ReplicatedStep(model, model.remat.start)
        else:
            function = model.remat.start(model.train_step, model.name)
            self._step = functools.partial(self._planned, function)
        self._traced: list[Any] | None = None
        self._latest: CompiledStep | None = None

    def _planned(
        self,
        function: Function,
        batch: Any,
        traced_for: Signature | None,
        taken_from: Source | None,
    ) -> Any:
        self._latest, tensors = function.traced_for(traced_for, taken_from).find((batch,), {})
        return self._latest(*tensors)

    def __call__(self, iterator: Iterator[Any]) -> Any:
        logs = None
        taken_from: Source | None = None  # train_on_batch hands its batch over
        if hasattr(iterator, "element_spec"):
            alone = self._model.steps_per_execution == 1
            taken_from = tf.data.IteratorSpec if alone else tf.OptionalSpec
        for batch in self._batches(iterator):
            batch = tf.nest.map_structure(_none_if_optional, batch)
            met = getattr(iterator, "element_spec", batch)
            known = self._signatures[_structure(met)]
            before = len(self._model.remat.steps)
            logs = self._step(batch, known.traced_for(_specs(met)), taken_from)
            if any(step.interrupted for step in self._model.remat.steps[before:]):
                raise KeyboardInterrupt  # planning kept the best so far, and the signal to itself
            if self._traced is None:  # now that everything is built
                self._traced = _traced(self._model)
        if logs is None:
            self._run_unfed()
            raise StopIteration
        return logs

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from itertools.islice(iterator, self._model.steps_per_execution)
        except tf.errors.OpError:  # the pipeline failed
            self._run_unfed()
            raise

    def _run_unfed(self) -> None:
        """Keras's graph has taken no batch, but has the effects that wait for none."""
        if self._latest is not None and self._model.steps_per_execution == 1:
            self._latest.run_unfed()

    @property
    def fresh(self) -> bool:
        """Whether the model is still as it was when its step was traced."""
        if self._traced is None:
            return True
        now = _traced(self._model)
        return len(now) == len(self._traced) and all(map(operator.is_, now, self._traced))


class _Signatures:
    """What Keras's ``tf.function`` is traced for (``reduce_retracing``).

    It takes a trace that is general enough if there is one; otherwise it
    relaxes what is new until it covers what was met before, too.
    """

    def __init__(self) -> None:
        self._known: list[Signature] = []

    def traced_for(self, met: Signature) -> Signature | None:
        """The signature for what is met; None if that leaves nothing open."""
        fitting = [known for known in self._known if _covers(known, met)]
        if fitting:
            found = functools.reduce(lambda a, b: b if _covers(a, b) else a, fitting)
        else:
            found = functools.reduce(_relaxed, self._known, met)
            self._known.append(found)
        return None if all(spec.shape.is_fully_defined() for spec in found) else found


def _covers(general: Signature, special: Signature) -> bool:
    return len(general) == len(special) and all(
        one.is_subtype_of(other) for one, other in zip(special, general, strict=True)
    )


def _relaxed(signature: Signature, other: Signature) -> Signature:
    """The least signature that covers both; the first if there is none."""
    if len(signature) != len(other):
        return signature
    pairs = zip(signature, other, strict=True)
    common = tuple(one.most_specific_common_supertype([two]) for one, two in pairs)
    return signature if None in common else common


def _structure(batch: Any) -> str:
    """What ``tf.function`` makes separate traces for, whatever the shapes."""
    return repr(tf.nest.map_structure(lambda leaf: leaf is None, batch))


def _specs(batch: Any) -> Signature:
    """Of each tensor of a batch (or spec of one), as one replica sees it."""
    found = []
    for leaf in tf.nest.flatten(batch):
        # Under several replicas there is a part for each; all are alike.
        for part in tf.nest.flatten(leaf, expand_composites=True)[:1]:
            if isinstance(part, (tf.Tensor, tf.TensorSpec, np.ndarray, np.generic)):
                found.append(tf.TensorSpec(part.shape, part.dtype))
    return tuple(found)


def _traced(model: keras.Model) -> list[Any]:
    """What a traced ``train_step`` depends on, to be compared by identity.

    ``compile`` makes a new loss tracker each time.
    """
    layers = model._flatten_layers()
    return [
        model._loss_tracker,
        model.optimizer,
        *(layer.trainable for layer in layers),
        *(part for weight in model.weights for part in (weight, weight.trainable)),
    ]


def _none_if_optional(leaf: Any) -> Any:
    """Datasets give None as an optional."""
    return None if isinstance(leaf, tf.experimental.Optional) else leaf
