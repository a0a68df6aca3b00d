"""One operation at a time, run by itself: its seconds and its scratch memory.

The operation is run by a function that holds copies of it, chained by control
edges so that they run one after the other, with Grappler off so that they stay
apart.  They read several sets of inputs in turn, more than a cache holds: in a
step, what an operation reads was often written long before.  The time of an
empty function is subtracted; what remains holds the executor's own few
microseconds, which the operation also costs in a step.

Memory needs to hold no more than the inputs and outputs of one operation (the
sets take at most half of what that leaves free).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import function_pb2
from tensorflow.python.eager import context, execute
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from . import allocator, timeline
from .lower import as_written
from .profiles import roofline
from .profiles.signature import OpSignature, TensorType
from .signatures import UnmeasurableError, arguments_of, is_parameter, node_of, op_def_of

_INDEX_BOUNDS: Mapping[str, Callable[[OpSignature], int]] = {
    "GatherV2": lambda s: s.inputs[0].shape[(s.inputs[2].value or (0,))[0]],
    "Gather": lambda s: s.inputs[0].shape[0],
    **dict.fromkeys(
        ("GatherNd", "ResourceGatherNd", "TensorScatterAdd", "TensorScatterUpdate"),
        lambda s: min(s.inputs[0].shape[: s.inputs[1].shape[-1]], default=1),
    ),
    **dict.fromkeys(
        ("SparseSegmentSum", "SparseSegmentMean", "SparseSegmentSqrtN"),
        lambda s: s.inputs[0].shape[0],
    ),
    "ScatterNd": lambda s: min(s.outputs[0].shape[: s.inputs[0].shape[-1]], default=1),
    "UnsortedSegmentSum": lambda s: s.outputs[0].shape[0],
    "SparseSoftmaxCrossEntropyWithLogits": lambda s: s.inputs[0].shape[-1],
    "OneHot": lambda s: (s.inputs[1].value or (1,))[0],
}
# oneDNN's gradient uses a workspace that the forward operation leaves behind, and
# TensorFlow picks it only where it sees both: the forward operation runs once, first.
_FORWARD: Mapping[str, str] = {"MaxPoolGrad": "MaxPool", "MaxPool3DGrad": "MaxPool3D"}
_BLOCK_SECONDS = 0.002  # small operations are timed in chains of about this length ...
_MOST_COPIES = 512  # ... and at most this many copies
_CACHED = 2**26  # bytes that few caches hold
_SMALL = 2**16  # bytes of inputs that are in the cache anyway
_MOST_SETS = 8  # of inputs
_MOST_ATTEMPTS = 2  # where other work disturbed the device ...
_DISTURBED = 1.2  # ... which shows when a reference slows down by this factor
_DRAWN = 2**16  # random numbers, at most
_MARK = "remat run "  # prefix of the stretches marked in a profile


@dataclass(frozen=True)
class Timing:
    """One measured operation; ``workspace`` may be an upper bound at first."""

    signature: OpSignature
    seconds: float
    spread: float
    repeats: int
    workspace: int | None


class _Arguments(NamedTuple):
    """What an operation is run on; handles do not keep their variables alive."""

    inputs: list[tf.Tensor | tf.Variable]

    @property
    def tensors(self) -> list[tf.Tensor]:
        """What is passed to it."""
        return [item.handle if isinstance(item, tf.Variable) else item for item in self.inputs]


class Bench:
    """Runs one operation at a time on one device."""

    _names = itertools.count()

    def __init__(self, device: str) -> None:
        self.device = device
        self._context = context.context()
        self._context.ensure_initialized()
        self._attrs = ("executor_type", "", "config_proto", as_written())
        with tf.device(self.device):
            self._reference = tf.ones([512, 512])
        try:
            self._counts_bytes = self._memory()["current"] > 0
        except ValueError:  # the CPU's plain allocator, without oneDNN
            self._counts_bytes = False
        at_hand = allocator.device_at_hand()
        self._limit = at_hand.limit if at_hand.name == device else None
        self._reference_seconds = math.inf
        with self._registered(OpSignature("NoOp", (), ()), copies=0) as run:
            # The least, since noise only adds, and what is subtracted must not be noise.
            self._empty_seconds = min(run([]) for _ in range(50))

    def measure_undisturbed(
        self, signature: OpSignature, spread: float, seconds_each: float
    ) -> Timing:
        """The fastest of a few attempts: the first that nothing else seems to have slowed."""
        arguments = self._arguments(signature)
        best = self._measure(signature, arguments, spread, seconds_each)
        for _ in range(_MOST_ATTEMPTS - 1):
            if self._is_undisturbed():
                break
            again = self._measure(signature, arguments, spread, seconds_each)
            best = min(best, again, key=lambda timing: timing.seconds)
        return best

    def with_exact_workspace(self, timings: Sequence[Timing]) -> list[Timing]:
        """Replaces upper bounds of workspaces by the peak of the bytes that were asked for.

        One profile of one run of each operation tells.  The allocator's own peak, which
        the upper bounds are from, counts chunks of up to twice what was asked for.
        """
        unsure = [index for index, timing in enumerate(timings) if timing.workspace]
        result = list(timings)
        if not unsure:
            return result

        def run() -> None:
            for index in unsure:
                self._run_marked(timings[index].signature, f"{_MARK}{index}")

        try:
            space = timeline.profile(run)
        except tf.errors.AlreadyExistsError:
            return result  # someone else is profiling; the upper bounds stay
        peaks = _requested_peaks(space, on_gpu=self.device.startswith("GPU"))
        for index in unsure:
            timing = timings[index]
            exact = max(0, peaks[f"{_MARK}{index}"] - _held_bytes(timing.signature))
            result[index] = replace(timing, workspace=exact)
        return result

    def _run_marked(self, signature: OpSignature, mark: str) -> None:
        arguments = self._arguments(signature)
        with self._registered(signature, copies=1) as run:
            run(arguments.tensors)
            with tf.profiler.experimental.Trace(mark):
                run(arguments.tensors)

    def _is_undisturbed(self) -> bool:
        """False if a product of two matrices takes longer than it did at best."""
        taken = []
        for _ in range(3):
            started = time.perf_counter()
            with tf.device(self.device):
                tf.linalg.matmul(self._reference, self._reference)
            self._synchronise()
            taken.append(time.perf_counter() - started)
        self._reference_seconds = min(self._reference_seconds, *taken)
        return statistics.median(taken) <= _DISTURBED * self._reference_seconds

    def _measure(
        self, signature: OpSignature, arguments: _Arguments, spread: float, seconds_each: float
    ) -> Timing:
        overhead = self._empty_seconds
        if signature.op in _FORWARD:
            with self._registered(signature, copies=0) as run:
                run(arguments.tensors)
                overhead = min(_sample(lambda: run(arguments.tensors), spread, seconds_each))
        with self._registered(signature, copies=1) as run:
            run(arguments.tensors)  # the first run also chooses kernels and builds primitives
            workspace, seconds = self._largest_workspace(signature, lambda: run(arguments.tensors))
            single = max(seconds - overhead, _BLOCK_SECONDS / _MOST_COPIES)
            copies = max(1, int(_BLOCK_SECONDS / single))
            sets = self._sets(signature, arguments)
            turns = itertools.cycle(sets)
            if copies == 1:
                samples = _sample(lambda: run(next(turns).tensors), spread, seconds_each)
        if copies > 1:
            width = min(copies, len(sets))
            with self._registered(signature, copies, width) as run:

                def sample() -> float:
                    return run([tensor for _ in range(width) for tensor in next(turns).tensors])

                sample()
                samples = _sample(sample, spread, seconds_each)
        return Timing(
            signature=signature,
            # Noise may put an operation that does nothing below the empty function.
            seconds=max(statistics.median(samples) - overhead, 0.0) / copies,
            spread=_relative_spread(samples),
            repeats=copies * len(samples),
            workspace=workspace,
        )

    @contextlib.contextmanager
    def _registered(
        self, signature: OpSignature, copies: int, width: int = 1
    ) -> Iterator[Callable[[list[tf.Tensor]], float]]:
        """Registers a chain of copies that read ``width`` sets of inputs in turn; yields a
        function that runs it on them and returns the seconds."""
        name = f"__remat_profile_{next(self._names)}"
        self._context.add_function_def(_chain(name, signature, copies, width, self.device))

        def run(arguments: list[tf.Tensor]) -> float:
            started = time.perf_counter()
            execute.execute(name, 0, arguments, self._attrs, self._context)
            self._synchronise()
            return time.perf_counter() - started

        try:
            yield run
        finally:
            self._context.remove_function(name)

    def _synchronise(self) -> None:
        """Waits for the device; a CPU is done when the call returns."""
        if not self.device.startswith("CPU"):
            tf.test.experimental.sync_devices()

    def _memory(self) -> dict[str, int]:
        return tf.config.experimental.get_memory_info(self.device)

    def _largest_workspace(
        self, signature: OpSignature, run: Callable[[], float]
    ) -> tuple[int | None, float]:
        """Upper bound of the bytes beyond inputs and outputs (None if nobody counts them),
        and the seconds that the run took."""
        if not self._counts_bytes:
            return None, run()
        tf.config.experimental.reset_memory_stats(self.device)
        before = self._memory()["current"]
        seconds = run()
        return max(0, self._memory()["peak"] - before - _held_bytes(signature)), seconds

    def _arguments(self, signature: OpSignature) -> _Arguments:
        if self._limit is not None:
            # TensorFlow would wait ten seconds for someone to free what lacks.  It hands
            # out chunks of up to twice the size whole, and free ones need not adjoin.
            needed = signature.input_bytes + _held_bytes(signature)
            needed += max(tensor.bytes for tensor in signature.inputs + signature.outputs)
            free = self._limit - self._memory()["current"]
            if needed > free:
                raise UnmeasurableError(f"it needs {needed} free bytes, and there are {free}")
        return _Arguments([self._make_input(signature, tensor) for tensor in signature.inputs])

    def _sets(self, signature: OpSignature, first: _Arguments) -> list[_Arguments]:
        """Equal inputs, together more than a cache holds: in a step, what an operation
        reads was often written long before.  They take at most half of what is free."""
        size = sum(tensor.bytes for tensor in signature.inputs)
        if size < _SMALL or signature.op in _FORWARD:
            return [first]
        count = min(_MOST_SETS, math.ceil(_CACHED / size))
        if self._limit is not None:
            count = min(count, 1 + (self._limit - self._memory()["current"]) // (2 * size))
        return [
            first,
            *(_Arguments([*map(_copied, first.inputs)]) for _ in range(count - 1)),
        ]

    def _make_input(self, signature: OpSignature, tensor: TensorType) -> tf.Tensor | tf.Variable:
        """A realistic value: positive floats (in every function's domain), valid indices."""
        if tensor.value is not None:
            with tf.device("CPU:0"):
                return tf.constant(tensor.value, tensor.dtype, tensor.shape)
        with tf.device(self.device):
            if tensor.dtype == "resource":
                dtype = signature.variable_dtype
                return tf.Variable(_random(dtype, tensor.shape, 1), trainable=False)
            bound = _INDEX_BOUNDS.get(signature.op, _default_bound)(signature)
            return _random(tensor.dtype, tensor.shape, bound)


def check_measurable(signature: OpSignature) -> None:
    """Every reason not to run an operation, in one place."""
    op_def = op_def_of(signature.op)
    if roofline.work(signature) == roofline.NOTHING:
        raise UnmeasurableError("computes nothing and moves nothing")
    if any(attr.type in ("func", "list(func)") for attr in op_def.attr):
        raise UnmeasurableError("runs another function")
    if any(attr.name == "token" for attr in op_def.attr):
        raise UnmeasurableError("runs Python code")
    if not signature.is_static:
        raise UnmeasurableError("a shape is not static")
    for tensor in signature.inputs + signature.outputs:
        if tensor.dtype in ("string", "variant"):
            raise UnmeasurableError(f"a {tensor.dtype} has no random value")
    if any(tensor.dtype == "resource" for tensor in signature.outputs):
        raise UnmeasurableError("makes a handle")
    holds_variable = any(tensor.dtype == "resource" for tensor in signature.inputs)
    draws = re.search("Random|Normal|Multinomial", signature.op)
    if signature.op in ("ResourceScatterUpdate", "ResourceStridedSliceAssign"):
        # Each part of a large variable would be measured on a variable of its own.
        raise UnmeasurableError("moves a part of a variable, which the bandwidth prices")
    if op_def.is_stateful and not holds_variable and not draws:
        raise UnmeasurableError("has state of its own")
    arguments = arguments_of(op_def, node_of(signature))
    if len(arguments) != len(signature.inputs):
        raise UnmeasurableError(f"{signature.op} has {len(arguments)} inputs in this TensorFlow")
    for argument, tensor in zip(arguments, signature.inputs, strict=True):
        if is_parameter(argument, tensor) and tensor.value is None:
            raise UnmeasurableError(f"its {argument.name} is not a constant")


def _copied(value: tf.Tensor | tf.Variable) -> tf.Tensor | tf.Variable:
    if isinstance(value, tf.Variable):
        return tf.Variable(value, trainable=False)
    with tf.device(value.device):
        return tf.raw_ops.DeepCopy(x=value)


def _chain(
    name: str, signature: OpSignature, copies: int, width: int, device: str
) -> function_pb2.FunctionDef:
    """A function that runs copies of one operation one after the other, on sets of inputs
    in turn."""
    function = function_pb2.FunctionDef()
    function.signature.name = name
    function.signature.is_stateful = True
    sets: list[list[str]] = []
    for number in range(width):
        sets.append([])
        for index, tensor in enumerate(signature.inputs):
            argument = function.signature.input_arg.add(name=f"s{number}_a{index}")
            argument.type = tf.as_dtype(tensor.dtype).as_datatype_enum
            sets[-1].append(argument.name)
    template = node_of(signature, f"/device:{device}")
    last = function.node_def.add(name="first", op="NoOp")
    if signature.op in _FORWARD:
        last.CopyFrom(template)
        last.name, last.op = "first", _FORWARD[signature.op]
        for key in {*last.attr} - {attribute.name for attribute in op_def_of(last.op).attr}:
            del last.attr[key]
        last.input.append(sets[0][0])
        sets[0][1] = "first:output:0"
    for copy in range(copies):
        node = function.node_def.add()
        node.CopyFrom(template)
        node.name = f"run{copy}"
        node.input.extend([*sets[copy % width], f"^{last.name}"])
        last = node
    function.signature.control_output.append("done")
    function.control_ret["done"] = last.name
    return function


def _random(dtype: str, shape: tuple[int, ...], bound: int) -> tf.Tensor:
    """Floats in [0.1, 1.1), integers in [0, bound), booleans true half the time.

    They are drawn on the host, where drawing needs no memory of the device; a
    large tensor repeats what was drawn.
    """
    target = tf.as_dtype(dtype)
    drawn = np.random.default_rng(0).random(min(math.prod(shape), _DRAWN))
    values: np.ndarray = drawn + 0.1
    if target.is_bool:
        values = drawn < 0.5
    elif target.is_integer:
        values = drawn * max(1, bound)
    elif target.is_complex:
        values = values * (1 + 1j)
    return tf.constant(np.resize(values.astype(target.as_numpy_dtype), shape))


def _default_bound(signature: OpSignature) -> int:
    """Indices below the variable's first dimension; other integers below 2."""
    handle = signature.inputs[0] if signature.inputs else None
    return handle.shape[0] if handle and handle.dtype == "resource" and handle.shape else 2


def _held_bytes(signature: OpSignature) -> int:
    """Bytes of the outputs while the operation runs, a forward operation's included."""
    forward = signature.inputs[1].bytes if signature.op in _FORWARD else 0
    return signature.output_bytes + forward


def _requested_peaks(space: xplane_pb2.XSpace, on_gpu: bool) -> dict[str, int]:
    """The most bytes that were asked for at once within each marked stretch of a profile."""
    changes = timeline.allocations(space, on_gpu=on_gpu)
    moments = [change.seconds for change in changes]
    peaks = {}
    for name, start, end in timeline.stretches(space, _MARK):
        inside = changes[bisect_left(moments, start) : bisect_left(moments, end)]
        peaks[name] = max(itertools.accumulate((c.requested for c in inside), initial=0))
    return peaks


def _sample(run: Callable[[], float], spread: float, limit: float) -> list[float]:
    """Seconds of several runs: at least 3, then until they agree or ``limit`` seconds passed."""
    samples: list[float] = []
    while len(samples) < 3 or (
        sum(samples) < limit and (len(samples) < 7 or _relative_spread(samples) > spread)
    ):
        samples.append(run())
    return samples


def _relative_spread(samples: Sequence[float]) -> float:
    """Interquartile range over the median."""
    low, middle, high = statistics.quantiles(samples, n=4)
    return (high - low) / middle
