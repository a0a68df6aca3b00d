"""The door for hand-written training steps: a decorator like ``tf.function``.

Each signature of shapes and dtypes is planned once, when it is first met; the
other doors (``remat.compile``, ``remat.wrap``) are this one with Keras's
conventions around it.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from . import collectives
from .generators import Generators
from .notices import warn
from .options import Options
from .planning import StepPlan
from .solvers import InfeasibleBudgetError, PlanError
from .solvers.budget import format_bytes, is_share
from .step import CompiledStep
from .trace import Source, TraceError, tracing
from .trial import draws

Signature = tuple[tf.TensorSpec, ...]

_ATTEMPTS = 3  # at a plan for another signature, with a share of the plain peak
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), tf.DType)


def function(
    step: Callable[..., Any] | None = None,
    *,
    budget: int | float | str = "auto",
    input_signature: Sequence[Any] | None = None,
    autograph: bool = True,
    **options: Any,
) -> Any:
    """Makes a hand-written training step run inside a memory budget, exactly as it would.

    The step is traced like a ``tf.function``: several models and optimizers,
    several losses, nested or persistent ``tf.GradientTape``, custom gradients,
    nests of arguments and results are all as there, and so are the pitfalls
    (Python code runs only while tracing).  Put the whole step inside, with the
    optimizer's update: what is outside is not planned.

    Example::

        @remat.function(budget="4GiB")
        def train_step(images, labels):
            with tf.GradientTape() as tape:
                loss = loss_function(labels, model(images, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss

    Args:
      step: the function, where the decorator is used without arguments.
      budget: bytes that TensorFlow's allocator may reach; see ``remat.compile``.
        A share of the plain step's peak is one of the largest signature so far.
      input_signature: nests of ``tf.TensorSpec``, one for each argument.  Where
        it leaves dimensions open there is a plan for each shape that is met,
        of the step as ``tf.function`` traces it for this signature.  Without
        an ``input_signature`` there is one plan for each signature that is
        met: the shapes and dtypes of tensors and arrays, the values of Python
        numbers and texts, the identity of other objects.
      autograph: whether Python's ``if``, ``while`` and ``for`` over tensors
        work, as in ``tf.function``.
      options: ``solver``, ``time_limit``, ``seed``, ``profile``, ``plan``
        (with an ``input_signature``), ``check``, ``quiet``, ``verbose``; see
        ``remat.compile``.

    Returns:
      A ``Function``, or a decorator that makes one.

    Raises (when a signature is first met):
      InfeasibleBudgetError: if no schedule within the budget is found.
      TraceError: if a shape is not static, or an argument is not dense.
    """
    chosen = Options.given("remat.function", {"budget": budget, **options})
    if step is not None and not callable(step):
        raise TypeError(f"{step!r} is no function; a budget is given as budget={step!r}")
    if chosen.plan is not None and input_signature is None:
        raise ValueError("a plan is for one signature: give input_signature with it")

    def decorate(step: Callable[..., Any]) -> Function:
        return Function(step, input_signature, chosen, autograph=autograph)

    return decorate if step is None else decorate(step)


class Function:
    """A training step that is planned for each signature it is called with.

    Made by ``remat.function``.  Call it like the function that it wraps.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        input_signature: Sequence[Any] | None,
        options: Options,
        *,
        autograph: bool = False,
        name: str | None = None,
    ) -> None:
        functools.update_wrapper(self, step)
        self._step = step
        self._input_signature = None if input_signature is None else list(input_signature)
        self._options = options
        self._autograph = autograph
        self._name = str(name or getattr(step, "__name__", "step"))
        self._parameters = inspect.signature(step)
        self._traced_for: Signature | None = None
        self._taken_from: Source | None = None
        # By replica, what the arguments are taken from, and signature.
        self._compiled: dict[tuple[int, Source | None, Hashable], CompiledStep] = {}
        self._generators: defaultdict[Any, Generators] = defaultdict(dict)  # by what is traced
        self._drawn: dict[str, int] = {}  # see collectives
        self._number = next(_numbers)  # the same in all workers, which make the same functions
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step; the first call with a signature plans it.

        Called by a step that is planned itself, it is a part of that step's plan.
        """
        if tracing():
            return tf.function(self._step, autograph=self._autograph)(*args, **kwargs)
        step, tensors = self.find(args, kwargs)
        if not tf.inside_function():
            collectives.check_side_by_side(step.prepared.program, self._name)
        return step(*tensors)

    def traced_for(self, signature: Signature | None, taken_from: Source | None) -> Function:
        """This function, with the plans it has, as a training loop has it traced.

        Args:
          signature: for each tensor among the arguments a shape that may leave
            dimensions open; None for the shapes that are met.
          taken_from: what the loop takes the arguments from, inside its graph; None
            if it calls the function with them.  Each has a trace of its own.
        """
        other = copy.copy(self)
        other._traced_for = signature
        other._taken_from = taken_from
        return other

    def compiled(self, *args: Any, **kwargs: Any) -> CompiledStep:
        """The step for a signature, planned now if it was not.

        Args:
          args, kwargs: as the step takes them; ``tf.TensorSpec`` may stand for
            tensors.  None are needed where there is an ``input_signature``.
        """
        if self._input_signature is not None and not (args or kwargs):
            args = tuple(self._input_signature)
        return self.find(args, kwargs)[0]

    @property
    def steps(self) -> tuple[CompiledStep, ...]:
        """The steps planned so far, one a signature, oldest first."""
        return tuple(dict.fromkeys(self._compiled.values()))

    @property
    def plan(self) -> StepPlan:
        """The plan of the first signature; made now, if an ``input_signature`` says all.

        Raises:
          PlanError: if nothing is planned yet.
        """
        specs = tf.nest.flatten(self._input_signature or ())
        if specs and all(spec.shape.is_fully_defined() for spec in specs):
            return self.compiled().plan
        if not self._compiled:
            raise PlanError(
                f"{self._name} has no plan yet: call it once, or compiled(...) on specs"
            )
        return self.steps[0].plan

    def __get__(self, instance: Any, owner: type) -> Function:
        """A method: each object has plans of its own, which live as long as it does.

        Raises:
          TypeError: if the object has no place for them.
        """
        if instance is None:
            return self
        if not hasattr(instance, "__dict__"):
            raise TypeError(
                f"{type(instance).__name__} has __slots__ only, so its {self._name} has no place "
                'for its plans: add "__dict__" to them'
            )
        key = f"_remat_function_{self._number}"  # a class may have several of one name
        with self._lock:
            bound = vars(instance).get(key)
            # A copy of an object has all that the object had.
            if bound is None or bound._step.__self__ is not instance:
                bound = Function(
                    types.MethodType(self._step, instance),
                    self._input_signature,
                    self._options,
                    autograph=self._autograph,
                )
                if isinstance(instance, type):
                    setattr(instance, key, bound)
                else:  # nothing that watches over attributes is to see it
                    vars(instance)[key] = bound
        return bound

    def __deepcopy__(self, memo: dict[int, Any]) -> Function:
        """Itself, as of any function; a copied object makes plans of its own."""
        return self

    def find(self, args: Any, kwargs: Any) -> tuple[CompiledStep, list[Any]]:
        """The compiled step for some arguments, and the tensors to call it with."""
        bound = self._parameters.bind(*args, **kwargs)
        if self._input_signature is not None and bound.kwargs:
            raise TypeError(
                f"{self._name} has an input_signature, which is of positional arguments; it does "
                f"not say what {', '.join(bound.kwargs)} may be"
            )
        key: Hashable = None
        trace: Hashable = None  # what plain TensorFlow traces apart, with generators of its own
        traced_for: Sequence[Any] | None = self._traced_for
        call: _Call | None = None
        if self._input_signature is not None:
            step, signature, values = self._step, self._filled(bound.args), list(bound.args)
            if signature != self._input_signature:
                traced_for = self._input_signature
                key = tuple(tuple(spec.shape) for spec in tf.nest.flatten(signature))
        else:
            bound.apply_defaults()
            call = _Call.of(bound, self._name)
            step, signature, values = self._step, [], call.tensors
            key = (call.key, self._traced_for)
            trace = key if self._traced_for is None else (call.kind, self._traced_for)
        replica = tf.distribute.get_replica_context()
        number = 0  # each replica has variables and generators of its own
        if replica is not None:
            number = int(tf.get_static_value(replica.replica_id_in_sync_group))
        met = (number, self._taken_from, key)
        if met not in self._compiled:
            if tf.inside_function():
                raise TraceError(
                    f"{self._name} has no plan for these shapes, and cannot be planned inside a "
                    "tf.function: call it, or compiled(...) on specs, before"
                )
            with self._lock:  # a second thread with this signature waits for the plan
                if met not in self._compiled:
                    if call is not None:
                        names = call.names()
                        step, signature = call.of_tensors(step), _named(call.tensors, names)
                        if traced_for is not None:
                            traced_for = _named(traced_for, names)
                    if replica is not None and replica.num_replicas_in_sync > 1:
                        step = collectives.planned_apart(
                            step, self._number, self._drawn, repr(traced_for)
                        )
                    self._compiled[met] = self._planned(
                        step,
                        signature,
                        traced_for,
                        self._generators[number, self._taken_from, trace],
                    )
                    alike = sum(found[:2] == met[:2] for found in self._compiled)
                    if traced_for is not None and alike == 2:
                        self._warn_of_generators(self._compiled[met])
        return self._compiled[met], values

    def _planned(
        self,
        step: Callable[..., Any],
        signature: list[Any],
        traced_for: Sequence[Any] | None,
        generators: Generators,
    ) -> CompiledStep:
        """Plans the step for a signature.

        A share of the plain peak is no reason to end a training that has begun: where it
        is not enough for another signature, beside what is held by now, the least budget
        is taken that is.
        """
        at_least = max((step.budget for step in self.steps), default=0)
        attempt = 0
        while True:
            attempt += 1
            try:
                return CompiledStep(
                    step,
                    signature,
                    self._options,
                    self._name,
                    autograph=self._autograph,
                    traced_for=traced_for,
                    taken_from=self._taken_from,
                    generators=generators,
                    at_least=at_least,
                )
            except InfeasibleBudgetError as error:
                share = self._options.budget != "auto" and is_share(self._options.budget)
                if not (share and self.steps) or attempt == _ATTEMPTS:
                    raise
                at_least = error.least_budget
                warn(
                    f"{self._name}: {self._options.budget!r} of the plain peak is not enough for "
                    f"another shape of batch, beside what is held by now: {error}; planning "
                    f"within {format_bytes(at_least)}",
                    RuntimeWarning,
                )

    def _warn_of_generators(self, step: CompiledStep) -> None:
        """Says where plans for two shapes of one trace do not draw as that would."""
        if draws(step.prepared.program):
            warn(
                f"{self._name} is planned for batches of two shapes, and draws numbers in a "
                "function that is called as it is, or on a GPU in another way than uniform or "
                "normal: each plan has a generator of its own there; the plain step has one for "
                "both, so they are not the plain step's; keras.random with a SeedGenerator is "
                "exact",
                RuntimeWarning,
            )

    def _filled(self, args: Sequence[Any]) -> list[Any]:
        """The input signature, with these arguments' sizes where it leaves them open."""
        signature = list(self._input_signature or ())
        if all(spec.shape.is_fully_defined() for spec in tf.nest.flatten(signature)):
            return signature

        def fill(spec: tf.TensorSpec, value: Any) -> tf.TensorSpec:
            shape = spec.shape.merge_with(getattr(value, "shape", np.shape(value)))
            return tf.TensorSpec(shape, spec.dtype, spec.name)

        return tf.nest.map_structure(fill, signature, list(args))


@dataclass(frozen=True)
class _Call:
    """The arguments of one call, tensors apart from the rest.

    Attributes:
      bound: the arguments, by parameter.
      nest: the arguments and keyword arguments.
      leaves: of the nest, ``_TENSOR`` where there is a tensor.
      tensors: the tensors, or the specs that stand for them.
      key: equal for calls that one plan serves; kind: for those of tensors of any shape.
    """

    bound: inspect.BoundArguments
    nest: tuple[Any, ...]
    leaves: list[Any]
    tensors: list[Any]
    key: Hashable
    kind: Hashable

    @staticmethod
    def of(bound: inspect.BoundArguments, name: str) -> _Call:
        """Sorts the arguments of a call of the function ``name``.

        Raises:
          TraceError: naming an argument that is ragged or sparse.
        """
        nest = (bound.args, bound.kwargs)
        leaves: list[Any] = []
        tensors: list[Any] = []
        keys: list[Hashable] = [repr(tf.nest.map_structure(lambda leaf: None, nest))]
        kinds = keys[:]
        for leaf in tf.nest.flatten(nest):
            if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)):
                raise TraceError(
                    f"{name}: {_where(bound, leaf)} is a {type(leaf).__name__}; remat needs dense "
                    "tensors of known shapes: pad it, or make it dense"
                )
            if isinstance(leaf, (tf.Tensor, tf.TensorSpec, np.ndarray, np.generic)):
                tensor = leaf if isinstance(leaf, tf.TensorSpec) else tf.convert_to_tensor(leaf)
                tensors.append(tensor)
                leaves.append(_TENSOR)
                keys.append((tuple(tensor.shape), tensor.dtype))
                kinds.append(tensor.dtype)
            else:
                leaves.append(leaf)
                keys.append((type(leaf), leaf if isinstance(leaf, _CONSTANTS) else id(leaf)))
                kinds.append(keys[-1])
        return _Call(bound, nest, leaves, tensors, tuple(keys), tuple(kinds))

    def names(self) -> list[str]:
        """The name that ``tf.function`` gives each tensor."""
        pairs = zip(_names(self.bound), self.leaves, strict=True)
        return [name for name, leaf in pairs if leaf is _TENSOR]

    def of_tensors(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """``step`` as a function of the tensors alone, all else as in this call.

        It holds on to everything else, so that no later object has its id.
        """
        nest, leaves = self.nest, self.leaves

        def call(*tensors: tf.Tensor) -> Any:
            given = iter(tensors)
            filled = [next(given) if leaf is _TENSOR else leaf for leaf in leaves]
            args, kwargs = tf.nest.pack_sequence_as(nest, filled)
            return step(*args, **kwargs)

        return call


_numbers = itertools.count()
_TENSOR = object()  # stands for a tensor among other leaves


def _named(tensors: Sequence[Any], names: Sequence[str]) -> list[tf.TensorSpec]:
    """Shape and dtype of each tensor (or spec of one), under these names."""
    pairs = zip(tensors, names, strict=True)
    return [tf.TensorSpec(tensor.shape, tensor.dtype, name) for tensor, name in pairs]


def _names(bound: inspect.BoundArguments) -> list[str]:
    """For each leaf of the arguments the name that ``tf.function`` gives it."""
    arguments: list[tuple[str, Any]] = []
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            arguments += [(f"{name}_{i}", value) for i, value in enumerate(bound.arguments[name])]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            arguments.append((name, bound.arguments[name]))
    names: list[str] = []
    for name, value in (*arguments, *sorted(bound.kwargs.items())):
        count = len(tf.nest.flatten(value))
        # It numbers them in the order of the dictionaries, and flattens them in that of the keys.
        numbers = list(_leaves(tf.nest.pack_sequence_as(value, list(range(count)))))
        if sorted(numbers) != list(range(count)):
            numbers = list(range(count))  # a nest of another kind
        places = sorted(range(count), key=numbers.__getitem__)
        names += [f"{name}_{place}" if place else name for place in places]
    return names


def _leaves(nest: Any) -> Iterator[Any]:
    """Those of a nest of dictionaries, lists and tuples, as they come."""
    if isinstance(nest, Mapping):
        nest = nest.values()
    elif not isinstance(nest, (list, tuple)):
        yield nest
        return
    for one in nest:
        yield from _leaves(one)


def _where(bound: inspect.BoundArguments, wanted: Any) -> str:
    """Names the place of a leaf among the arguments."""
    for path, leaf in keras.tree.flatten_with_path(dict(bound.arguments)):
        if leaf is wanted:
            argument, *inside = path
            return f"the argument {argument}" + "".join(f"[{key!r}]" for key in inside)
    raise AssertionError("a leaf of the arguments is not among them")
