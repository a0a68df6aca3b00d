"""The user's door: a Keras model, a loss, an optimizer and a budget become a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from .function import Function
from .measured import Measured
from .options import Options
from .planning import StepPlan
from .price import Profile
from .solvers import Plan
from .solvers.method import Method
from .step import CompiledStep


class Step:
    """One training step of a Keras model inside a memory budget.

    Call it with a batch: ``predictions, loss = step(images, labels)``.

    Attributes:
      plan: the schedule and its figures (``summary()``, ``plot(path)``,
        ``save(path)``); a notebook shows it with a picture.
      budget: bytes of the whole allocator.
      measured_peak: peak bytes of the latest measured run, or None where the
        allocator does not count.
      plain_peak: predicted peak bytes of the step without rematerialization.
      seconds: how long each stage of compilation took.
    """

    def __init__(self, trainee: _Trainee, specs: tuple[Any, Any, Any], options: Options) -> None:
        self._trainee = trainee
        self._options = options
        self._input_spec, self._label_spec, weight_spec = specs
        self._functions: dict[bool, Function] = {}  # with sample weights, and without
        self._function(weight_spec)

    def __call__(self, inputs: Any, labels: Any, sample_weight: Any = None) -> Any:
        """Trains on one batch.

        Args:
          inputs, labels: tensors or arrays as the specs say.
          sample_weight: a weight for each sample, or None.  The first call
            with weights plans a second step, whose graph has them.

        Returns:
          The pair (predictions, loss), the loss a float32 scalar with the
          regularization losses of the model included.

        Raises:
          ValueError: if a shape is not the planned one.
        """
        if sample_weight is None:
            return self._function(None)(inputs, labels)
        weighted = self._function(_specs(sample_weight, "sample_weight"))
        return weighted(inputs, labels, sample_weight)

    def measure(self, *batch: Any, steps: int = 5) -> Measured:
        """Runs the step, and compares what it takes with what was predicted.

        Every variable is put back afterwards, bit for bit.

        Args:
          batch: inputs and labels; if they are not given, the last step's, where
            its caller still holds them, or else zeros.
          steps: runs that are timed.

        Returns:
          Peak, seconds and every operation, as predicted and as measured:
          ``summary()``, ``plot(path)``, ``to_frame()``, ``save(path)``;
          ``remat show --measured FILE`` prints what was saved.
        """
        return self.compiled.measure(*batch, steps=steps)

    @property
    def compiled(self) -> CompiledStep:
        """The machinery behind the step (the first, if there are both)."""
        return next(iter(self._functions.values())).compiled()

    @property
    def plan(self) -> StepPlan:
        return self.compiled.plan

    @property
    def budget(self) -> int:
        return self.compiled.budget

    @property
    def measured_peak(self) -> int | None:
        return self.compiled.measured_peak

    @property
    def plain_peak(self) -> int:
        return self.compiled.prepared.plain.peak

    @property
    def seconds(self) -> dict[str, float]:
        return self.compiled.seconds

    def _function(self, weight_spec: Any) -> Function:
        weighted = weight_spec is not None
        if weighted not in self._functions:
            signature = [self._input_spec, self._label_spec]
            if weighted:
                _check_weights(weight_spec, self._label_spec)
                signature.append(weight_spec)
            function = Function(
                self._trainee.one_step, signature, self._options, name=self._trainee.model.name
            )
            function.compiled()  # weights that cannot be planned for must not be in others' way
            self._functions[weighted] = function
        return self._functions[weighted]


def _check_weights(weight_spec: Any, label_spec: Any) -> None:
    """Raises ``ValueError`` where there is not a weight for each sample."""
    batches = {spec.shape[:1] for spec in tf.nest.flatten(label_spec)}
    for spec in tf.nest.flatten(weight_spec):
        if spec.shape.rank and spec.shape[:1] not in batches:
            raise ValueError(
                f"sample_weight has the shape {spec.shape}; a batch has "
                f"{' or '.join(str(batch[0]) for batch in batches)} samples"
            )


def compile(
    model: keras.Model,
    loss: Any,
    optimizer: Any,
    input_spec: Any,
    label_spec: Any,
    *,
    budget: int | float | str = "auto",
    solver: str | Method = "auto",
    time_limit: float | None = None,
    seed: int = 0,
    profile: Profile = "auto",
    plan: Plan | None = None,
    sample_weight_spec: Any = None,
    check: bool = True,
    quiet: bool = True,
    verbose: bool | None = None,
) -> Step:
    """Makes a training step that computes exactly what Keras would, inside a budget.

    The step runs the model with ``training=True``, adds its regularization
    and activity losses, clips gradients as the optimizer says, moves
    BatchNormalization averages once, and applies the optimizer's update.

    Args:
      model: a built Keras 3 model on the TensorFlow backend.
      loss: as ``Model.compile`` takes it.
      optimizer: as ``Model.compile`` takes it.
      input_spec, label_spec: ``tf.TensorSpec``, sample arrays or tensors, or
        nests of them, with every dimension given, the batch included.
      budget: bytes that TensorFlow's allocator may reach, weights and
        optimizer state included: an int, text ("4GiB", "50%"), a float in
        (0, 1] for a share of the plain step's predicted peak, or "auto" for
        the device's memory.
      solver: a name in ``remat.solvers.solving.METHODS``, or a method of your
        own (see ``remat.solvers.method``).
      time_limit: seconds for each solve.
      seed: of the solver's random choices.
      profile: where costs come from: "auto" (this device's recorded costs;
        what they lack is measured now and recorded, or computed from the
        roofline), the name of a device ("h200": to plan here for one that you
        do not have), a CSV table, or seconds by operation type or signature.
      plan: a saved plan, instead of solving; if no budget is given, its own.
      sample_weight_spec: spec of the weights, to plan for them at once.
      check: run the step once on zeros to measure its peak, and plan again if
        it is above the budget (variables are put back bit for bit; only where
        the allocator counts bytes).
      quiet: nothing else allocates on the device while a step runs, so that
        every tensor can be given a place.  Say False if something does: on the
        CPU, an input pipeline that prefetches.
      verbose: show progress; None for "on a terminal".

    Returns:
      The step.

    Raises:
      InfeasibleBudgetError: if no schedule within the budget is found; it
        names the least budget known to work and the proven floor.
      PlanError: if ``plan`` was made for another step.
      TraceError: if a shape is not static.
      ValueError, TypeError: if an argument is not what it should be.
    """
    trainee = _Trainee(model, loss, optimizer)
    specs = (
        _specs(input_spec, "input_spec"),
        _specs(label_spec, "label_spec"),
        None if sample_weight_spec is None else _specs(sample_weight_spec, "sample_weight_spec"),
    )
    options = Options(
        budget=budget,
        solver=solver,
        time_limit=time_limit,
        seed=seed,
        profile=profile,
        plan=plan,
        check=check,
        quiet=quiet,
        verbose=verbose,
    )
    return Step(trainee, specs, options)


def one_step_of(model: keras.Model, loss: Any, optimizer: Any) -> Callable[..., Any]:
    """The function ``(inputs, labels, sample_weight=None) -> (predictions, loss)``
    that ``compile`` traces."""
    return _Trainee(model, loss, optimizer).one_step


def require_tensorflow() -> None:
    """Raises ``ValueError`` where Keras runs on another backend."""
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            f"Keras runs on the {keras.backend.backend()!r} backend; remat needs "
            "KERAS_BACKEND=tensorflow"
        )


class _Trainee:
    """What Keras's own trainer would do in one step, without touching the model.

    A shell model around the user's is compiled instead of it, so that losses,
    loss scaling and optimizers mean what they mean in ``Model.compile`` and
    the user's own ``compile`` state stays as it is.
    """

    def __init__(self, model: keras.Model, loss: Any, optimizer: Any) -> None:
        require_tensorflow()
        if not isinstance(model, keras.Model):
            raise TypeError(f"model must be a keras.Model, not {type(model).__name__}")
        if not model.built:
            raise ValueError(
                f"the model {model.name!r} is not built, so it has no weights yet: give it a "
                "keras.Input, or call it once on a batch"
            )
        if loss is None:
            raise ValueError("loss is None; give a loss as Model.compile takes it")
        self.model = model
        self._shell = _Shell(model)
        self._shell.compile(optimizer=optimizer, loss=loss, jit_compile=False)
        self.optimizer = self._shell.optimizer
        self.optimizer.build(model.trainable_variables)

    def one_step(self, inputs: Any, labels: Any, sample_weight: Any = None) -> Any:
        with tf.GradientTape() as tape:
            predictions = self.model(inputs, training=True)
            loss = self._shell.compute_loss(
                x=inputs, y=labels, y_pred=predictions, sample_weight=sample_weight, training=True
            )
            scaled = self.optimizer.scale_loss(loss)
        weights = self.model.trainable_weights
        if weights:
            values = [weight.value for weight in weights]
            self.optimizer.apply_gradients(zip(tape.gradient(scaled, values), weights, strict=True))
        return predictions, loss


class _Shell(keras.Model):
    """A model that is another one, for ``compile`` and ``compute_loss``."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__(name=f"{model.name}_step")
        self.wrapped = model
        self.dtype_policy = model.dtype_policy
        if hasattr(model, "output_names"):
            self.output_names = model.output_names
        self.built = True

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return self.wrapped(inputs, training=training)


def _specs(value: Any, what: str) -> Any:
    """``tf.TensorSpec`` for each leaf of a nest of specs, arrays or tensors."""

    def spec(leaf: Any) -> tf.TensorSpec:
        if isinstance(leaf, tf.TensorSpec):
            return leaf
        if isinstance(leaf, keras.KerasTensor):
            return tf.TensorSpec(leaf.shape, leaf.dtype)
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            raise TypeError(f"{what}: {type(leaf).__name__} is not supported; use dense tensors")
        if isinstance(leaf, (int, float)):
            raise TypeError(
                f"{what} is {value!r}, numbers; a shape is given as tf.TensorSpec(shape, dtype)"
            )
        try:
            tensor = tf.convert_to_tensor(leaf)
        except (ValueError, TypeError) as error:
            raise TypeError(
                f"{what}: {leaf!r} is neither a tf.TensorSpec nor an array ({error})"
            ) from None
        return tf.TensorSpec(tensor.shape, tensor.dtype)

    if value is None:
        raise TypeError(f"{what} is None; give a tf.TensorSpec or a sample batch")
    specs = tf.nest.map_structure(spec, value)
    for leaf in tf.nest.flatten(specs):
        if not leaf.shape.is_fully_defined():
            raise ValueError(
                f"{what}: {leaf.name or 'a tensor'} has the shape {leaf.shape}; a plan is for "
                "fixed shapes, so give every dimension, the batch included"
            )
        if leaf.shape.num_elements() == 0:
            raise ValueError(f"{what}: {leaf.name or 'a tensor'} of shape {leaf.shape} is empty")
    return specs
