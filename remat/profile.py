"""What operations cost on the device at hand, by micro-benchmarks.

Each distinct operation is run by itself: a function that holds copies of the
one operation, chained by control edges so that they run one after the other,
with Grappler off so that they stay apart.  They read several sets of inputs in
turn, more than a cache holds: in a step, what an operation reads was often
written long before.  The time of an empty function is subtracted; what remains
holds the executor's own few microseconds, which the operation also costs in a
step.

Memory needs to hold no more than the inputs and outputs of one operation (the
sets take at most half of what that leaves free), so a step that does not fit
can still be priced.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import math
import os
import platform
import re
import statistics
import tempfile
import time
from bisect import bisect_left as bisect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, function_pb2, node_def_pb2, op_def_pb2
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager import context, execute
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops import handle_data_util
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from . import allocator
from .profiles import roofline
from .profiles.devices import DeviceSpec, UnknownDeviceError, find_device
from .profiles.price import Pricer, spec_of_rows
from .profiles.signature import OpSignature, TensorType
from .profiles.table import Row, Table, append_rows, cache_path, load_table

CLOCK = "time.perf_counter around a synchronised function, less an empty one"

# Integer inputs of these attribute types say what to compute (axes, shapes, pads),
# as do inputs whose type is fixed to an integer; other integer inputs are data.
_PARAMETER_TYPES = frozenset(
    {"Tidx", "Tperm", "Tpaddings", "Tmultiples", "Tshape", "Index", "index_type", "Taxis"}
    | {"Tdim", "Tlen", "Tk", "Tshift", "Tnumsegments", "Tsize"}
)
# Inputs that repeat the shape of the output: known even where they are computed at run time.
_OUTPUT_SHAPE = frozenset(
    {"shape", "dims", "input_sizes", "filter_sizes", "orig_input_shape", "out_shape"}
)
_LARGEST_VALUE = 64  # elements of a constant that a signature carries
# Attributes that name things or seed them, without a say in what is computed.
_INERT_ATTRS = frozenset(
    {"container", "shared_name", "names", "seed", "seed2", "device", "allowed_devices"}
    | {"debug_name", "message"}
)
_INDEX_BOUNDS: Mapping[str, Callable[[OpSignature], int]] = {
    "GatherV2": lambda s: s.inputs[0].shape[(s.inputs[2].value or (0,))[0]],
    "Gather": lambda s: s.inputs[0].shape[0],
    "GatherNd": lambda s: min(s.inputs[0].shape[: s.inputs[1].shape[-1]], default=1),
    "ScatterNd": lambda s: min(s.outputs[0].shape[: s.inputs[0].shape[-1]], default=1),
    "UnsortedSegmentSum": lambda s: s.outputs[0].shape[0],
    "SparseSoftmaxCrossEntropyWithLogits": lambda s: s.inputs[0].shape[-1],
    "OneHot": lambda s: (s.inputs[1].value or (1,))[0],
}
# oneDNN's gradient uses a workspace that the forward operation leaves behind, and
# TensorFlow picks it only where it sees both: the forward operation runs once, first.
_FORWARD: Mapping[str, str] = {"MaxPoolGrad": "MaxPool"}
_BLOCK_SECONDS = 0.002  # small operations are timed in chains of about this length ...
_MOST_COPIES = 512  # ... and at most this many copies
_CACHED = 2**26  # bytes that few caches hold
_SMALL = 2**16  # bytes of inputs that are in the cache anyway
_MOST_SETS = 8  # of inputs
_MOST_ATTEMPTS = 2  # where other work disturbed the device ...
_DISTURBED = 1.2  # ... which shows when a reference slows down by this factor
_DRAWN = 2**16  # random numbers, at most
_SAVE_SECONDS = 10.0  # between appends to a table
_FLOPS_PER_BYTE = 10.0  # of a typical device; only the order of measuring depends on it
_MARK = "remat run "  # prefix of the stretches marked in a profile
_TIME_IS_UP = "time was up before its turn"


class UnmeasurableError(Exception):
    """An operation that cannot be run by itself; the message says why."""


@dataclass(frozen=True)
class Measurement:
    """What ``measure_operations`` found.

    Attributes:
      rows: one a measured operation.
      reasons: why each other one has no row, by signature text.
      interrupted: True if Ctrl-C ended it early; ``rows`` holds what was done.
    """

    rows: tuple[Row, ...]
    reasons: Mapping[str, str]
    interrupted: bool = False


def signature_of(
    node: node_def_pb2.NodeDef,
    inputs: Sequence[TensorType],
    outputs: Sequence[TensorType],
    constants: Mapping[int, np.ndarray],
) -> OpSignature:
    """The signature of a node.

    Args:
      node: the node; its name, device and control inputs play no part.
      inputs: dtype and shape of each data input; of a variable handle, the
        shape of the variable.
      outputs: dtype and shape of each output.
      constants: values of the inputs that are constants, by input index.
    """
    op_def = op_def_registry.get(node.op)
    arguments = _arguments(op_def, node) if op_def is not None else []
    typed = []
    for index, tensor in enumerate(inputs):
        value = None
        argument = arguments[index] if index < len(arguments) else None
        if argument is not None and _is_parameter(argument, tensor):
            if argument.name in _OUTPUT_SHAPE or (node.op, argument.name) == ("Slice", "size"):
                value = outputs[0].shape if len(outputs) == 1 else None
            elif index in constants and constants[index].size <= _LARGEST_VALUE:
                value = tuple(int(item) for item in np.ravel(constants[index]))
        typed.append(TensorType(tensor.dtype, tensor.shape, value))
    attrs = []
    for name in sorted(node.attr):
        if not name.startswith("_") and name not in _INERT_ATTRS:
            text = _attr_text(node.attr[name])
            if text is not None:
                attrs.append((name, text))
    return OpSignature(node.op, tuple(typed), tuple(outputs), tuple(attrs))


def graph_signatures(graph: tf.Graph) -> dict[str, OpSignature]:
    """The signature of every operation of a graph, by operation name."""
    signatures = {}
    for operation in graph.get_operations():
        constants = {}
        for index, tensor in enumerate(operation.inputs):
            if tensor.op.type == "Const" and tensor.dtype in (tf.int32, tf.int64):
                constants[index] = tf.make_ndarray(tensor.op.get_attr("value"))
        signatures[operation.name] = signature_of(
            operation.node_def,
            [tensor_type(tensor) for tensor in operation.inputs],
            [tensor_type(tensor) for tensor in operation.outputs],
            constants,
        )
    return signatures


def tensor_type(tensor: tf.Tensor) -> TensorType:
    """Dtype and static shape of a symbolic tensor; of a variable handle, the variable's shape."""
    shape = tensor.shape
    if tensor.dtype == tf.resource:
        held = handle_data_util.get_resource_handle_data(tensor).shape_and_type
        shape = tf.TensorShape(held[0].shape if held else None)
    if shape.rank is None:
        return TensorType(tensor.dtype.name, (-1,))
    return TensorType(tensor.dtype.name, tuple(-1 if n is None else n for n in shape))


def measure_operations(
    signatures: Iterable[OpSignature],
    *,
    device: str | None = None,
    known: Collection[str] = (),
    path: Path | None = None,
    share: float = 0.98,
    least_bytes: int = 64 * 1024,
    spread: float = 0.05,
    seconds_each: float = 0.04,
    progress: Callable[[int, int, OpSignature], None] | None = None,
    deadline: float | None = None,
) -> Measurement:
    """Measures each distinct operation by itself on one device.

    Args:
      signatures: the operations of one step or several; an operation that
        occurs n times should be listed n times, since those on which a step
        spends most come first.
      device: for instance "GPU:0"; the first GPU, else the CPU, by default.
      known: signature texts that have a row already and are left out.
      path: table that rows are appended to every few seconds and at the end,
        so that little is lost whatever happens.
      share: part of the work to measure.  What makes up the rest (a rough
        estimate from FLOPs and bytes) is many different small operations,
        which other rows price well enough.
      least_bytes: operations whose inputs and outputs together hold less are
        left out: their price is the launch overhead.
      spread: repeats stop once the interquartile range is within this
        fraction of the median ...
      seconds_each: ... or after this many seconds on one operation.
      progress: called with (done, total, next signature).
      deadline: seconds for everything; what is left then has no row.

    Returns:
      The rows, and for each other operation the reason why it has none.
    """
    started = time.monotonic()
    device = device or default_device()
    wanted, reasons = _worth_measuring(signatures, share, least_bytes)
    wanted = [signature for signature in wanted if signature.text not in known]
    rows: list[Row] = []
    pending: list[_Timing] = []
    saved_at = started
    interrupted = False
    provenance = device_provenance(device)
    bench = _Bench(device)

    def save() -> None:
        added = [_row(timing, provenance) for timing in bench.with_exact_workspace(pending)]
        if path is not None and added:
            append_rows(path, added)
        rows.extend(added)
        pending.clear()

    try:
        for index, signature in enumerate(wanted):
            if progress is not None:
                progress(index, len(wanted), signature)
            if deadline is not None and time.monotonic() - started > deadline:
                reasons[signature.text] = _TIME_IS_UP
                continue
            try:
                pending.append(bench.measure_undisturbed(signature, spread, seconds_each))
            except (UnmeasurableError, tf.errors.OpError) as error:
                reasons[signature.text] = str(error).split("\n", 1)[0]
            if time.monotonic() - saved_at > _SAVE_SECONDS:
                save()
                saved_at = time.monotonic()
    except KeyboardInterrupt:
        interrupted = True
    save()
    return Measurement(tuple(rows), reasons, interrupted)


def measured_pricer(
    signatures: Iterable[OpSignature],
    *,
    device: str | None = None,
    progress: Callable[[int, int, OpSignature], None] | None = None,
    deadline: float | None = None,
) -> Pricer:
    """Prices from the user's table of this device; what it lacks is measured and recorded.

    Raises:
      TableError: if the table on disk is damaged; the message names the file.
      KeyboardInterrupt: once what was measured so far is recorded.
    """
    device = device or default_device()
    signatures = list(signatures)
    path = table_path(device)
    spec = device_at_hand(device)
    started = time.monotonic()

    def measure(wanted: Iterable[OpSignature], share: float) -> Pricer:
        measurement = measure_operations(
            wanted,
            device=device,
            known=_table(path),
            path=path,
            share=share,
            progress=progress,
            deadline=None if deadline is None else deadline - (time.monotonic() - started),
        )
        if measurement.interrupted:
            raise KeyboardInterrupt
        return Pricer(spec, _table(path))

    # Seconds can be told from other rows; scratch memory cannot, and a step that takes
    # more than was known does not fit.  So first the largest of each type that has no
    # row yet, which says whether the type takes any, then all others of such types.
    known = {row.signature.op for row in _table(path).rows}
    largest: dict[str, OpSignature] = {}
    for signature in sorted(set(signatures), key=lambda s: s.input_bytes + s.output_bytes):
        if signature.op not in known:
            largest[signature.op] = signature
    pricer = measure(largest.values(), share=1.0)
    prices = {signature: pricer.price(signature) for signature in set(signatures)}
    measure(
        [s for s, price in prices.items() if price.workspace and price.kind != "measured"],
        share=1.0,
    )
    return measure(signatures, share=0.98)


def device_at_hand(device: str | None = None) -> DeviceSpec:
    """The specification of a device of this process: listed, or else measured."""
    device = device or default_device()
    try:
        return find_device(device_provenance(device)["device"])
    except UnknownDeviceError:
        return measure_device(device)


def measure_device(device: str | None = None) -> DeviceSpec:
    """The specification of a device that has none, from a few operations large and tiny.

    They are measured once and recorded in the user's table.
    """
    device = device or default_device()
    path = table_path(device)
    table = _table(path)
    reference = _reference_operations(on_gpu=device.startswith("GPU"))
    measurement = measure_operations(
        reference, device=device, known=table, path=path, share=1.0, least_bytes=0
    )
    provenance = device_provenance(device)
    memory = None
    if device.startswith("CPU") and hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return spec_of_rows(provenance["device"], table.merged(measurement.rows).rows, memory=memory)


def table_path(device: str) -> Path:
    """Where the user's own costs of a device are recorded."""
    provenance = device_provenance(device)
    return cache_path(provenance["device"], provenance["driver"], provenance["tensorflow"])


def _table(path: Path) -> Table:
    """The table of a device, empty if nothing was measured on it yet."""
    return load_table(path) if path.exists() else Table()


def default_device() -> str:
    """The first GPU, else the CPU."""
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def device_provenance(device: str) -> dict[str, str]:
    """The provenance columns of rows measured on ``device`` now."""
    kind, _, index = device.partition(":")
    if kind == "GPU":
        physical = tf.config.list_physical_devices("GPU")[int(index or 0)]
        name = tf.config.experimental.get_device_details(physical).get("device_name", "GPU")
        build = tf.sysconfig.get_build_info()
        driver = f"CUDA {build.get('cuda_version')}, cuDNN {build.get('cudnn_version')}"
        version = Path("/proc/driver/nvidia/version")
        if version.exists():
            found = re.search(r"\d+\.\d+(\.\d+)?", version.read_text())
            driver = f"NVIDIA {found[0] if found else '?'}, {driver}"
    else:
        name = cpu_name()
        # What decides the price of an operation on a CPU, beside the CPU.
        threads = tf.config.threading.get_intra_op_parallelism_threads() or "all"
        pooled = os.environ.get("TF_CPU_ALLOCATOR_USE_BFC", "").lower() in ("1", "true")
        driver = (
            f"oneDNN {os.environ.get('TF_ENABLE_ONEDNN_OPTS', 'default')}, {threads} threads, "
            f"{'BFC' if pooled else 'system'} allocator"
        )
    return {
        "device": name,
        "driver": driver,
        "tensorflow": tf.__version__,
        "date": datetime.date.today().isoformat(),
        "clock": CLOCK,
    }


def cpu_name() -> str:
    """Model and number of usable cores, for instance "AMD EPYC, 2 cores"."""
    model = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        found = re.search(r"model name\s*:\s*(.+)", information.read_text())
        model = found[1].strip() if found else model
    usable = getattr(os, "sched_getaffinity", None)  # Linux only
    return f"{model}, {len(usable(0)) if usable else os.cpu_count()} cores"


@dataclass(frozen=True)
class _Timing:
    """One measured operation; ``workspace`` may be an upper bound at first."""

    signature: OpSignature
    seconds: float
    spread: float
    repeats: int
    workspace: int | None


def _row(timing: _Timing, provenance: Mapping[str, str]) -> Row:
    return Row(
        signature=timing.signature,
        seconds=timing.seconds,
        spread=timing.spread,
        repeats=timing.repeats,
        output_bytes=timing.signature.output_bytes,
        workspace_bytes=timing.workspace,
        **provenance,
    )


class _Arguments(NamedTuple):
    """What an operation is run on; handles do not keep their variables alive."""

    inputs: list[tf.Tensor | tf.Variable]

    @property
    def tensors(self) -> list[tf.Tensor]:
        """What is passed to it."""
        return [item.handle if isinstance(item, tf.Variable) else item for item in self.inputs]


class _Bench:
    """Runs one operation at a time on one device."""

    _names = itertools.count()

    def __init__(self, device: str) -> None:
        self.device = device
        self._context = context.context()
        self._context.ensure_initialized()
        config = config_pb2.ConfigProto()
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        self._attrs = ("executor_type", "", "config_proto", config.SerializeToString())
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
    ) -> _Timing:
        """The fastest of a few attempts: the first that nothing else seems to have slowed."""
        best = self._measure(signature, spread, seconds_each)
        for _ in range(_MOST_ATTEMPTS - 1):
            if self._is_undisturbed():
                break
            again = self._measure(signature, spread, seconds_each)
            best = min(best, again, key=lambda timing: timing.seconds)
        return best

    def with_exact_workspace(self, timings: Sequence[_Timing]) -> list[_Timing]:
        """Replaces upper bounds of workspaces by the peak of the bytes that were asked for.

        One profile of one run of each operation tells.  The allocator's own peak, which
        the upper bounds are from, counts chunks of up to twice what was asked for.
        """
        unsure = [index for index, timing in enumerate(timings) if timing.workspace]
        result = list(timings)
        if not unsure:
            return result
        with tempfile.TemporaryDirectory() as folder:
            # Level 1 is what records memory; without any device tracing it is cheap.
            options = tf.profiler.experimental.ProfilerOptions(
                host_tracer_level=1, python_tracer_level=0, device_tracer_level=0
            )
            try:
                with tf.profiler.experimental.Profile(folder, options):
                    for index in unsure:
                        self._run_marked(timings[index].signature, f"{_MARK}{index}")
            except tf.errors.AlreadyExistsError:
                return result  # someone else is profiling; the upper bounds stay
            space = xplane_pb2.XSpace()
            for path in Path(folder).rglob("*.xplane.pb"):
                space.MergeFromString(path.read_bytes())
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

    def _measure(self, signature: OpSignature, spread: float, seconds_each: float) -> _Timing:
        arguments = self._arguments(signature)
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
        return _Timing(
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
    template = _node(signature, f"/device:{device}")
    last = function.node_def.add(name="first", op="NoOp")
    if signature.op in _FORWARD:
        last.CopyFrom(template)
        last.name, last.op = "first", _FORWARD[signature.op]
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


def _node(signature: OpSignature, device: str = "") -> node_def_pb2.NodeDef:
    """A node with the op and the attributes of a signature."""
    types = {attr.name: attr.type for attr in _op_def(signature.op).attr}
    node = node_def_pb2.NodeDef(op=signature.op, device=device)
    for name, text in signature.attrs:
        if name not in types:
            raise UnmeasurableError(f"{signature.op} has no attribute {name!r} in this TensorFlow")
        try:
            node.attr[name].CopyFrom(_attr_value(text, types[name]))
        except (ValueError, TypeError):
            raise UnmeasurableError(f"attribute {name} cannot be {text!r}") from None
    return node


def _op_def(op: str) -> op_def_pb2.OpDef:
    op_def = op_def_registry.get(op)
    if op_def is None:
        raise UnmeasurableError(f"{op} is not an operation of this TensorFlow")
    return op_def


def _worth_measuring(
    signatures: Iterable[OpSignature], share: float, least_bytes: int
) -> tuple[list[OpSignature], dict[str, str]]:
    """The operations to measure, the most work first, and why the others are not."""
    reasons = {}
    work = {}
    for signature, count in Counter(signatures).items():
        try:
            _check_measurable(signature)
        except UnmeasurableError as error:
            reasons[signature.text] = str(error)
            continue
        if signature.input_bytes + signature.output_bytes < least_bytes:
            reasons[signature.text] = "so small that it costs the launch overhead"
            continue
        done = roofline.work(signature)
        work[signature] = count * max(done.flops / _FLOPS_PER_BYTE, done.bytes)
    wanted: list[OpSignature] = []
    left = share * sum(work.values())
    for signature in sorted(work, key=lambda signature: -work[signature]):
        if left > 0 or share >= 1:
            wanted.append(signature)
        else:
            reasons[signature.text] = "among the small remainder of the work"
        left -= work[signature]
    return wanted, reasons


def _reference_operations(on_gpu: bool) -> list[OpSignature]:
    """Products of matrices, and sums beyond any cache, inside one, and of a few elements."""
    size, beyond, cached = (4096, 2**24, 2**22) if on_gpu else (1024, 2**22, 2**15)
    operations = []
    for dtype in ("float32", "float64", "bfloat16", "float16"):
        square = TensorType(dtype, (size, size))
        attrs = (("T", dtype), ("transpose_a", "false"), ("transpose_b", "false"))
        operations.append(OpSignature("MatMul", (square, square), (square,), attrs))
    for elements in (beyond, cached, 2**4):
        vector = TensorType("float32", (elements,))
        operations.append(OpSignature("AddV2", (vector, vector), (vector,), (("T", "float32"),)))
    return operations


def _check_measurable(signature: OpSignature) -> None:
    """Every reason not to run an operation, in one place."""
    op_def = _op_def(signature.op)
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
    if signature.op == "ResourceStridedSliceAssign":
        # Each part of a large variable would be measured on a variable of its own.
        raise UnmeasurableError("moves a part of a variable, which the bandwidth prices")
    if op_def.is_stateful and not holds_variable and not draws:
        raise UnmeasurableError("has state of its own")
    arguments = _arguments(op_def, _node(signature))
    if len(arguments) != len(signature.inputs):
        raise UnmeasurableError(f"{signature.op} has {len(arguments)} inputs in this TensorFlow")
    for argument, tensor in zip(arguments, signature.inputs, strict=True):
        if _is_parameter(argument, tensor) and tensor.value is None:
            raise UnmeasurableError(f"its {argument.name} is not a constant")


def _arguments(
    op_def: op_def_pb2.OpDef, node: node_def_pb2.NodeDef
) -> list[op_def_pb2.OpDef.ArgDef]:
    """The declared argument behind each data input of a node."""
    arguments = []
    for argument in op_def.input_arg:
        count = 1
        if argument.number_attr:
            count = node.attr[argument.number_attr].i
        elif argument.type_list_attr:
            count = len(node.attr[argument.type_list_attr].list.type)
        arguments.extend([argument] * count)
    return arguments


def _is_parameter(argument: op_def_pb2.OpDef.ArgDef, tensor: TensorType) -> bool:
    """True if the value of the input, not only its shape, says what is computed."""
    if tensor.dtype not in ("int32", "int64"):
        return False
    fixed = not argument.type_attr and not argument.type_list_attr
    return fixed or argument.type_attr in _PARAMETER_TYPES


def _attr_text(value: attr_value_pb2.AttrValue) -> str | None:
    """Text of an attribute; None for those that a signature does not hold."""
    kind = value.WhichOneof("value")
    if kind in (None, "tensor", "placeholder"):
        return None
    if kind != "list":
        return _scalar_text(kind, getattr(value, kind))
    for field, items in value.list.ListFields():
        return ",".join(_scalar_text(field.name, item) for item in items)
    return ""


def _scalar_text(kind: str, value: object) -> str:
    if kind == "s":
        return value.decode("utf-8", "replace")  # type: ignore[attr-defined]
    if kind == "type":
        return str(tf.as_dtype(value).name)
    if kind == "b":
        return "true" if value else "false"
    if kind == "shape":
        return "x".join(str(size.size) for size in value.dim)  # type: ignore[attr-defined]
    if kind == "func":
        return str(value.name)  # type: ignore[attr-defined]
    return repr(value)


def _attr_value(text: str, kind: str) -> attr_value_pb2.AttrValue:
    """Reads an attribute back; ``kind`` is the type that its op declares."""
    value = attr_value_pb2.AttrValue()
    if not kind.startswith("list("):
        _set_scalar(value, text, kind)
        return value
    value.list.SetInParent()
    fields = {"int": "i", "float": "f", "bool": "b", "string": "s", "type": "type"}
    inner = kind[len("list(") : -1]
    for item in filter(None, text.split(",")):
        scalar = attr_value_pb2.AttrValue()
        _set_scalar(scalar, item, inner)
        getattr(value.list, fields[inner]).append(getattr(scalar, fields[inner]))
    return value


def _set_scalar(value: attr_value_pb2.AttrValue, text: str, kind: str) -> None:
    if kind == "int":
        value.i = int(text)
    elif kind == "float":
        value.f = float(text)
    elif kind == "bool":
        value.b = text == "true"
    elif kind == "string":
        value.s = text.encode()
    elif kind == "type":
        value.type = tf.as_dtype(text).as_datatype_enum
    elif kind == "shape":
        value.shape.SetInParent()
        for size in filter(None, text.split("x")):
            value.shape.dim.add(size=int(size))
    else:
        raise ValueError(f"an attribute of type {kind} has no text form")


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
    signs = {"MemoryAllocation": 1, "MemoryDeallocation": -1}
    stretches: list[tuple[int, int, str]] = []
    changes: list[tuple[int, int]] = []
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                moment = line.timestamp_ns * 1000 + event.offset_ps
                if name.startswith(_MARK):
                    stretches.append((moment, moment + event.duration_ps, name))
                elif name in signs:
                    stats = {
                        plane.stat_metadata[stat.metadata_id].name: stat for stat in event.stats
                    }
                    allocator = stats["allocator_name"]
                    owner = allocator.str_value or plane.stat_metadata[allocator.ref_value].name
                    if owner.startswith("GPU") == on_gpu:
                        size = stats["requested_bytes"]
                        requested = size.int64_value or size.uint64_value
                        changes.append((moment, signs[name] * requested))
    changes.sort()
    peaks = {}
    for start, end, name in stretches:
        held = peaks[name] = 0
        for _, change in changes[bisect(changes, (start,)) : bisect(changes, (end,))]:
            held += change
            peaks[name] = max(peaks[name], held)
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
