"""The traced step as a list of operations: what each one is, reads and holds.

This is the op-level view that grouping, simulation and lowering share.  What
costs neither time nor memory is resolved here: identities are bypassed, shape
arithmetic is folded into constants, and control edges are reduced to those
that order effects.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.python.framework import op_def_registry, tensor_util

from .device import default_device
from .loops import LOOPS
from .open_shapes import largest_shapes
from .pieces import constant_node
from .trace import Body, Trace, TraceError

Tensor = tuple[int, int]  # (operation, output)


class Kind(enum.Enum):
    """How an operation may be scheduled."""

    ARGUMENT = "argument"  # an input or a captured resource: there before the step
    CONSTANT = "constant"
    READ = "read"  # ReadVariableOp: shares the variable's buffer
    ALIAS = "alias"  # shares the buffer of its first input; cloned with each copy
    PURE = "pure"  # same inputs, same bits: may be recomputed
    ONCE = "once"  # has effects, randomness or a body of its own: runs exactly once


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
      name: its node's name in the traced graph.
      type: TensorFlow's operation type.
      kind: how it may be scheduled.
      inputs: the tensors it reads.
      controls: the ``ONCE`` and ``READ`` operations whose effects must come
        before it (only for ``ONCE`` and ``READ`` operations).
      bytes: of each output.
      shapes, dtypes: of each output.
      forwards: inputs whose buffer an output may take over, in the order tried.
      forwarded: that output.
      passed: outputs of what is no alias that share an input's buffers, each with that input:
        what no turn of a loop changes, lists of what the turns have read from another list,
        and optionals.
      keeps: lists and optionals that a loop or conditional returns, each with an input whose
        buffer is in there, too: what a first turn began with, or what a branch has read.
      shares: such lists and optionals, each with another output whose buffer is in there, too.
      parts: lists whose ``bytes`` are so many buffers of one size.
      varies: whether only the run knows the sizes of its outputs; ``bytes`` and
        ``shapes`` are the largest that they can be.
      resource: for ``READ``, the ``ARGUMENT`` that holds the variable.
    """

    name: str
    type: str
    kind: Kind
    inputs: tuple[Tensor, ...]
    controls: tuple[int, ...]
    bytes: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[tf.DType, ...]
    forwards: tuple[int, ...] = ()
    forwarded: int = 0
    passed: tuple[tuple[int, int], ...] = ()
    keeps: tuple[tuple[int, int], ...] = ()
    shares: tuple[tuple[int, int], ...] = ()
    parts: tuple[tuple[int, int], ...] = ()
    varies: bool = False

    @property
    def resource(self) -> int:
        """For ``READ``: the operation that provides the variable's handle."""
        return self.inputs[0][0]


@dataclass(frozen=True)
class Program:
    """All operations of a step in a topological order, and what it returns.

    Attributes:
      ops: the operations.
      nodes: the ``NodeDef`` of each.
      outputs: the tensors the step returns.
      targets: operations that must run although nothing reads them.
      library: the functions that call-like operations use.
    """

    ops: tuple[Op, ...]
    nodes: tuple[node_def_pb2.NodeDef, ...] = field(repr=False)
    outputs: tuple[Tensor, ...]
    targets: tuple[int, ...]
    inputs: tuple[int, ...]
    captures: tuple[tuple[int, tf.Tensor], ...] = field(repr=False)
    library: graph_pb2.GraphDef = field(repr=False)

    def rewritten(
        self,
        ops: Iterable[Op],
        nodes: Iterable[node_def_pb2.NodeDef],
        moved: Mapping[int, Tensor],
    ) -> Program:
        """The same step made of other operations.

        Args:
          ops, nodes: all of them.
          moved: of each old operation that the step takes, returns or must run,
            where its first output is now (the others follow it).
        """
        return replace(
            self,
            ops=tuple(ops),
            nodes=tuple(nodes),
            outputs=tuple(
                (moved[index][0], moved[index][1] + number) for index, number in self.outputs
            ),
            targets=tuple(moved[index][0] for index in self.targets),
            inputs=tuple(moved[index][0] for index in self.inputs),
            captures=tuple((moved[index][0], external) for index, external in self.captures),
        )

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """For each operation, the operations that read it."""
        lists: list[list[int]] = [[] for _ in self.ops]
        for index, op in enumerate(self.ops):
            for producer in dict.fromkeys(p for p, _ in op.inputs):
                lists[producer].append(index)
        return tuple(map(tuple, lists))

    @cached_property
    def constant(self) -> Mapping[int, int]:
        """Operations that depend on constants alone, each with one of these."""
        found: dict[int, int] = {}
        for index, op in enumerate(self.ops):
            if op.kind is Kind.CONSTANT:
                found[index] = index
            elif (
                op.kind in (Kind.PURE, Kind.ALIAS)
                and op.inputs
                and all(producer in found for producer, _ in op.inputs)
            ):
                found[index] = found[op.inputs[0][0]]
        return found

    @cached_property
    def varying(self) -> int:
        """The most bytes of values of sizes that only the run knows that are alive at once."""
        last = {
            index: max(readers, default=index)
            for index, readers in enumerate(self.consumers)
            if self.ops[index].varies
        }
        alive, most = 0, 0
        ends: dict[int, int] = {}
        for index, op in enumerate(self.ops):
            if index in last:
                alive += sum(op.bytes)
                ends[last[index]] = ends.get(last[index], 0) + sum(op.bytes)
            most = max(most, alive)
            alive -= ends.get(index, 0)
        return most

    @cached_property
    def size_follows(self) -> Mapping[Tensor, frozenset[Tensor]]:
        """For values of sizes that only the run knows, and shapes that tell of these: the
        values whose sizes theirs follows.

        It is itself where it follows none: the first output where all are of one size, and of
        partitions by one value, which are parts of a whole, those of the first.  None is
        followed by what puts such parts together again.  Of what an operation reads, a shape
        says more than what is given that shape.
        """
        found: dict[Tensor, frozenset[Tensor]] = {}
        first: dict[Tensor, int] = {}
        for index, op in enumerate(self.ops):
            known = [tensor for tensor in op.inputs if tensor in found]
            whole = [(i, n) for i, n in known if self.ops[i].dtypes[n].is_integer]
            followed = frozenset(source for tensor in whole or known for source in found[tensor])
            for number, dtype in enumerate(op.dtypes):
                if op.varies and op.type == "DynamicPartition":
                    same = first.setdefault(op.inputs[1], index)
                    found[index, number] = frozenset([(same, number)])
                elif op.varies and op.type in _PUT_TOGETHER:
                    found[index, number] = frozenset()
                elif op.varies:
                    found[index, number] = followed or frozenset([(index, 0)])
                elif followed and dtype.is_integer:
                    found[index, number] = followed
        return found

    @cached_property
    def unfolded(self) -> frozenset[int]:
        """Constants that the lowered function must take as arguments.

        TensorFlow's runtime evaluates operations on constants when a function
        is made ready, and holds the results for good, up to 10 MB each: what
        the step would write for a moment (a tile of zeros) becomes resident.
        It allocates large constants amid the first step; as arguments they are
        where they stay before.
        """
        found = set()
        for index, source in self.constant.items():
            if sum(self.ops[index].bytes) > _SMALL_CONSTANT:
                found.add(source)
        return frozenset(found)

    @cached_property
    def variables(self) -> Mapping[int, tf.TensorSpec]:
        """Shape and dtype of what each captured variable or tensor holds."""
        held = {}
        for index, external in self.captures:
            if external.dtype != tf.resource:
                held[index] = tf.TensorSpec(external.shape, external.dtype)
                continue
            handle = getattr(external, "_handle_data", None)
            if handle is not None and handle.is_set and len(handle.shape_and_type) == 1:
                (data,) = handle.shape_and_type
                held[index] = tf.TensorSpec(tf.TensorShape(data.shape), data.dtype)
        return held

    @cached_property
    def variable_bytes(self) -> Mapping[int, int]:
        """Bytes of each captured variable or tensor of known shape."""
        return {
            index: spec.shape.num_elements() * spec.dtype.size
            for index, spec in self.variables.items()
            if spec.shape.is_fully_defined() and spec.dtype != tf.string
        }


# Prefixes of stateful operations whose every effect is on variables, or on their own
# random state or result.
ON_VARIABLES = (
    "Assign", "ReadVariableOp", "VarHandleOp", "VarIsInitializedOp", "VariableShape",
    "ResourceApply", "ResourceSparseApply", "ResourceScatter", "ResourceGather",
    "ResourceStridedSliceAssign", "DisableCopyOnRead", "DeepCopy",
    "Random", "TruncatedNormal", "Multinomial", "ParameterizedTruncatedNormal",
    "StatefulUniform", "StatefulStandardNormal", "StatefulTruncatedNormal",
)  # fmt: skip

# Outputs that are their input.
_IDENTITIES = frozenset(
    ["Identity", "IdentityN", "StopGradient", "PreventGradient", "Snapshot", "EnsureShape"]
)
# Output 0 shares the buffer of input 0 under another shape.
_ALIASES = frozenset(["Reshape", "Squeeze", "ExpandDims", "Bitcast"])

_PUT_TOGETHER = ("DynamicStitch", "ParallelDynamicStitch")  # parts of a whole

_UNARY = [
    "Abs",
    "Acos",
    "Acosh",
    "Asin",
    "Asinh",
    "Atan",
    "Atanh",
    "Ceil",
    "Cos",
    "Cosh",
    "Digamma",
    "Erf",
    "Erfc",
    "Erfinv",
    "Exp",
    "Expm1",
    "Floor",
    "Inv",
    "Reciprocal",
    "Invert",
    "Lgamma",
    "LogicalNot",
    "Log",
    "Log1p",
    "Neg",
    "Rint",
    "Round",
    "Rsqrt",
    "Sigmoid",
    "Sign",
    "Sin",
    "Sinh",
    "Sqrt",
    "Square",
    "Tan",
    "Tanh",
    "Relu",
    "Relu6",
    "Elu",
    "Selu",
    "LeakyRelu",
    "Softplus",
    "Softsign",
    "BiasAdd",
    "Softmax",
    "LogSoftmax",
    "ZerosLike",
    "OnesLike",
    "TensorScatterUpdate",
    "TensorScatterAdd",
    "Cumsum",
]
_BINARY = [
    "Add",
    "AddV2",
    "Sub",
    "Mul",
    "MulNoNan",
    "Div",
    "DivNoNan",
    "RealDiv",
    "FloorDiv",
    "TruncateDiv",
    "Maximum",
    "Minimum",
    "Mod",
    "FloorMod",
    "TruncateMod",
    "Pow",
    "SquaredDifference",
    "Xdivy",
    "Xlogy",
    "Xlog1py",
    "Atan2",
    "NextAfter",
    "LogicalAnd",
    "LogicalOr",
    "BitwiseAnd",
    "BitwiseOr",
    "BitwiseXor",
    "SigmoidGrad",
    "TanhGrad",
    "SqrtGrad",
    "RsqrtGrad",
    "InvGrad",
    "ReciprocalGrad",
    "ReluGrad",
    "Relu6Grad",
    "EluGrad",
    "SeluGrad",
    "LeakyReluGrad",
    "SoftplusGrad",
    "SoftsignGrad",
]
# Which inputs' buffers TensorFlow's kernels try to reuse for an output, when
# nobody else holds them (OpKernelContext::forward_input_or_allocate_output) ...
_FORWARDS: dict[str, tuple[int, ...]] = {
    **{name: (0,) for name in _UNARY if name not in ("ZerosLike", "OnesLike", "Cumsum")},
    **{name: (0, 1) for name in _BINARY},
    "Select": (1, 2),
    "SelectV2": (1, 2),
    "FusedBatchNormV3": (0,),
    "_UnaryOpsComposition": (0,),
    "SoftmaxCrossEntropyWithLogits": (0,),
    "SparseSoftmaxCrossEntropyWithLogits": (0,),
}
# ... which oneDNN does with the other summand of a sum that was fused into a product, the
# input after what is multiplied and the bias ...
_FUSED, _FUSED_ADDEND = ("_FusedConv2D", "_MklNativeFusedConv2D", "_FusedMatMul"), 3
# ... and for which output, if that is not the first: the gradient, beside the loss.
_FORWARDED = {"SoftmaxCrossEntropyWithLogits": 1, "SparseSoftmaxCrossEntropyWithLogits": 1}

# Outputs that a kernel leaves for the gradient's, by type and number.
_RESERVED = {("FusedBatchNormV3", 5), ("_FusedBatchNormEx", 5)}
# One output, computed element by element from inputs of its shape (or smaller).
ELEMENTWISE = frozenset([*_UNARY, *_BINARY, "AddN", "Select", "SelectV2", "Cast"]) - {
    "Softmax", "LogSoftmax", "TensorScatterUpdate", "TensorScatterAdd", "Cumsum"
}  # fmt: skip
# Kernels that ask for scratch memory before their outputs; others do after.
SCRATCH_FIRST = frozenset(
    "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits MaxPoolGrad Einsum".split()
)
# What oneDNN's kernels keep from the forward to the backward operation; alone,
# each of the two takes it as scratch memory.
KEPT_SCRATCH = {"MaxPool": "MaxPoolGrad", "MaxPool3D": "MaxPool3DGrad"}
# One large output from small inputs, at the price of writing it.
BROADCASTS = frozenset(["Tile", "BroadcastTo", "Fill"])

# Kernels that hand on their first input where their result has as many elements.
_SAME_IF_WHOLE = frozenset(
    "Sum Mean Prod Max Min Tile BroadcastTo Slice StridedSlice Pad PadV2 MirrorPad SplitV Pack "
    "Transpose".split()
)

# What takes parts of its first input, and the bytes at whose multiples Eigen wants values.
_SLICES = frozenset(["Unpack", "SplitV", "Slice", "StridedSlice"])
_ALIGNED = 64

# What makes a list, and which of its inputs is the length (-1 if that is open).
_LISTS = {"TensorListReserve": 1, "EmptyTensorList": 1}
# What puts something into one, and which of its inputs that is.
LIST_WRITES = {"TensorListSetItem": 2, "TensorListPushBack": 1}

# What makes an optional of a value, and a value of an optional.
_OPTIONALS = frozenset(["OptionalFromValue", "OptionalGetValue"])

_SMALL_CONSTANT = 4096  # bytes of shape arithmetic worth folding


def build(trace: Trace, *, turns: Mapping[str, int] | None = None, fold: bool = True) -> Program:
    """Reads a traced step.

    Args:
      trace: the step.
      turns: of loops, by name, as far as they are known: as long is a list of open length
        that each turn adds something to.
      fold: whether arithmetic on shapes becomes constants.  (The plain step
        computes them where it was traced for a batch of any size, and waits for
        them.)

    Raises:
      TraceError: naming a value whose shape is not static.
    """
    graph = trace.graph
    arguments = {*trace.inputs, *(name for name, _ in trace.captures)}
    operations = _topological(graph, [*trace.outputs, *trace.targets, *arguments])
    definitions = {node.name: node for node in trace.graph_def.node}

    ops: list[Op] = []
    nodes: list[node_def_pb2.NodeDef] = []
    values: dict[str, Tensor] = {}  # tensor name -> where its value comes from
    shapes: dict[str, tuple[int, ...]] = {}  # tensor name -> its shape, or the largest it may have
    largest = cache(lambda: largest_shapes(trace))  # few steps need it, and it takes imports
    numbers: dict[str, int] = {}  # operation name -> index of its Op
    listed: dict[Tensor, int] = {}  # bytes of all that is in a list
    # Effects that come before an operation by way of operations without
    # effects of their own: these pass the obligation on to whoever uses them.
    passed_on: dict[str, frozenset[int]] = {}
    nothing: frozenset[int] = frozenset()
    # The last write of each resource, and the reads since.  (Grappler drops
    # control edges that other paths imply, and adds needless ones; any
    # topological order keeps the reads and writes of a resource right.)
    written: dict[int, int] = {}
    read: dict[int, list[int]] = {}

    def add(op: Op, node: node_def_pb2.NodeDef) -> int:
        ops.append(op)
        nodes.append(node)
        return len(ops) - 1

    for operation in operations:
        name, kind = operation.name, _kind(operation, arguments)
        if (
            fold
            and kind is Kind.ALIAS
            and any(
                ops[values[tensor.name][0]].kind is not Kind.CONSTANT
                for tensor in operation.inputs[1:]
            )
        ):
            kind = Kind.PURE  # its shape is computed: not free to clone
        before: frozenset[int] = nothing
        for control in operation.control_inputs:
            effect = numbers.get(control.name)
            if effect is not None and ops[effect].kind is Kind.ONCE:
                before |= {effect}
            before |= passed_on.get(control.name, nothing)
        for tensor in operation.inputs:
            before |= passed_on.get(tensor.op.name, nothing)
        controls: list[int] = []
        resources = [values[t.name][0] for t in operation.inputs if t.dtype == tf.resource]
        for resource in resources:
            controls += [written[resource]] if resource in written else []
            controls += read.get(resource, []) if kind is Kind.ONCE else []
        if kind is Kind.ONCE:
            controls += before
        elif before:
            passed_on[name] = before.difference(controls)

        if operation.type == "NoOp":
            continue
        if operation.type in _IDENTITIES:
            for tensor, source in zip(operation.outputs, operation.inputs, strict=True):
                values[tensor.name] = values[source.name]
                shapes[tensor.name] = shapes[source.name]
            continue
        folded = _fold(operation) if kind is Kind.PURE else None
        if fold and folded is not None:
            for tensor, array in zip(operation.outputs, folded, strict=True):
                node = constant_node(f"{name}/{tensor.value_index}", array)
                values[tensor.name] = (add(constant_op(array, node.name), node), 0)
                shapes[tensor.name] = array.shape
            continue
        varies = False
        for tensor in operation.outputs:
            shape = _shape(tensor) if folded is None else folded[tensor.value_index].shape
            if shape is None and (operation.type, tensor.value_index) in _RESERVED:
                shape = _reserved(operation, shapes[operation.inputs[0].name])
            if shape is None:
                shape, varies = largest().get(tensor.name), True
                kind = kind if kind is Kind.ALIAS else Kind.ONCE
            if shape is None:
                raise TraceError(
                    f"the value {tensor.name} ({operation.type}) has the shape {tensor.shape}; "
                    "remat needs every shape to be known when the step is traced" + _hint(operation)
                )
            shapes[tensor.name] = shape
        sizes = [_bytes(tensor, shapes[tensor.name]) for tensor in operation.outputs]
        kept = _Kept()
        if operation.type == "TensorListFromTensor":  # its parts are copies
            whole = shapes[operation.inputs[0].name]
            sizes[0] = _bytes(operation.inputs[0], whole)
            kept.parts[0] = whole[0]
        if operation.type == "ZerosLike":
            sizes[0] = max(sizes[0], listed.get(values[operation.inputs[0].name], 0))
        if sizes and operation.outputs[0].dtype == tf.variant:
            listed[len(ops), 0] = sizes[0]
        if operation.type in _OPTIONALS:
            kept.passed[0] = sizes[0] = 0
        if name in trace.branches:
            kept = _kept_by_branches(trace.branches[name], turns or {})
        if operation.type in LOOPS:
            for number, tensor in enumerate(operation.inputs):
                listed[len(ops), number] = listed.get(values[tensor.name], 0)
            kept = _kept(operation, trace.bodies[operation.name], turns or {})
            listed |= {(len(ops), number): size for number, size in kept.listed.items()}
        for number, size in kept.bytes.items():
            sizes[number] = size
        numbers[name] = add(
            Op(
                name=name,
                type=operation.type,
                kind=kind,
                inputs=tuple(values[tensor.name] for tensor in operation.inputs),
                controls=tuple(sorted(set(controls))),
                bytes=tuple(sizes),
                shapes=tuple(shapes[tensor.name] for tensor in operation.outputs),
                dtypes=tuple(tensor.dtype for tensor in operation.outputs),
                forwards=_forwards(operation, kind),
                forwarded=_FORWARDED.get(operation.type, 0),
                passed=tuple(kept.passed.items()),
                keeps=tuple(kept.keeps),
                shares=tuple(kept.shares),
                parts=tuple(kept.parts.items()),
                varies=varies,
            ),
            definitions[name],
        )
        for tensor in operation.outputs:
            values[tensor.name] = (numbers[name], tensor.value_index)
        for resource in resources:
            if kind is Kind.READ:
                read.setdefault(resource, []).append(numbers[name])
            else:
                written[resource], read[resource] = numbers[name], []

    return Program(
        ops=tuple(ops),
        nodes=tuple(nodes),
        outputs=tuple(values[name] for name in trace.outputs),
        targets=tuple(numbers[name] for name in trace.targets if name in numbers),
        inputs=tuple(numbers[name] for name in trace.inputs),
        captures=tuple((numbers[name], external) for name, external in trace.captures),
        library=graph_pb2.GraphDef(
            versions=trace.graph_def.versions, library=trace.graph_def.library
        ),
    )


def _topological(graph: tf.Graph, results: Iterable[str]) -> list[tf.Operation]:
    """Operations and tensors with all that they need, as operations, stably sorted.

    Control edges count.  Creation order is not a topological order once loops
    have gradients, nor after Grappler.
    """
    position = {operation: i for i, operation in enumerate(graph.get_operations())}
    wanted = [graph.get_operation_by_name(name.split(":")[0]) for name in results]
    needed: set[tf.Operation] = set()
    while wanted:
        operation = wanted.pop()
        if operation not in needed:
            needed.add(operation)
            wanted += [tensor.op for tensor in operation.inputs]
            wanted += operation.control_inputs
    done: set[tf.Operation] = set()
    result: list[tf.Operation] = []
    for root in sorted(needed, key=position.__getitem__):
        stack = [(root, False)]
        while stack:
            operation, ready = stack.pop()
            if operation in done:
                continue
            if ready:
                done.add(operation)
                result.append(operation)
                continue
            stack.append((operation, True))
            before = {tensor.op for tensor in operation.inputs} | set(operation.control_inputs)
            stack += [
                (other, False)
                for other in sorted(before - done, key=position.__getitem__, reverse=True)
            ]
    return result


def _kind(operation: tf.Operation, arguments: set[str]) -> Kind:
    if operation.name in arguments:
        return Kind.ARGUMENT
    if operation.type == "Const":
        return Kind.CONSTANT
    if operation.type == "ReadVariableOp":
        return Kind.READ
    tensors = [*operation.inputs, *operation.outputs]
    if (
        calls(operation.type)
        or has_effects(operation.type)
        or any(tensor.dtype in (tf.resource, tf.variant) for tensor in tensors)
    ):
        return Kind.ONCE
    if operation.type in _ALIASES or _is_view(operation) or _hands_on(operation):
        return Kind.ALIAS
    return Kind.PURE


def calls(type: str) -> bool:
    """Whether operations of a type run functions: loops, branches, or a function's own name."""
    definition = op_def_registry.get(type)
    return definition is None or any(
        attribute.type in ("func", "list(func)") for attribute in definition.attr
    )


def has_effects(type: str, beside: tuple[str, ...] = ()) -> bool:
    """Whether operations of a type have effects, other than types with the prefixes ``beside``."""
    definition = op_def_registry.get(type)
    stateful = definition is not None and definition.is_stateful
    return stateful and not type.startswith(beside)


def _forwards(operation: tf.Operation, kind: Kind) -> tuple[int, ...]:
    if kind is not Kind.PURE:
        return ()
    if operation.type == "AddN":
        candidates: Iterable[int] = range(len(operation.inputs))
    elif operation.type in _FUSED and b"Add" in operation.get_attr("fused_ops"):
        candidates = [_FUSED_ADDEND]
    else:
        candidates = _FORWARDS.get(operation.type, ())
    output = operation.outputs[_FORWARDED.get(operation.type, 0)]
    return tuple(
        index
        for index in candidates
        if operation.inputs[index].shape == output.shape
        and operation.inputs[index].dtype == output.dtype
    )


def _is_view(operation: tf.Operation) -> bool:
    """Whether an operation gives whole rows of its first input, in that one's buffer.

    Kernels do so where every row begins at an aligned address (``IsInnerDimsSizeAligned``
    in tensorflow/core/kernels/ops_util.h).
    """
    if operation.type not in _SLICES or not operation.outputs:
        return False
    whole, part = operation.inputs[0].shape, operation.outputs[0].shape
    if not whole.is_fully_defined() or not part.is_fully_defined() or whole.rank < 2:
        return False
    one_row = False
    if operation.type == "Unpack":
        one_row = operation.get_attr("axis") == 0
    elif operation.type == "StridedSlice":
        strides = tensor_util.constant_value(operation.inputs[3])
        if strides is None or (strides != 1).any() or operation.get_attr("new_axis_mask"):
            return False
        one_row = operation.get_attr("shrink_axis_mask") == 1  # of the first axis, no other
    if part.rank != whole.rank - one_row:
        return False
    row_bytes = math.prod(whole[1:]) * operation.inputs[0].dtype.size
    return whole[1:] == (part if one_row else part[1:]) and row_bytes % _ALIGNED == 0


def _hands_on(operation: tf.Operation) -> bool:
    """Whether an operation that gives all of its first input gives it in that one's buffer.

    Where the size of a batch is open there are many that have nothing to do, in gradients
    above all.
    """
    if operation.type not in _SAME_IF_WHOLE:
        return False
    before, after = operation.inputs[0].shape, operation.outputs[0].shape
    count = before.num_elements()
    if count is None or count < 2 or count != after.num_elements():
        return False
    if operation.type == "BroadcastTo":
        return before == after
    if operation.type == "StridedSlice":
        strides = tensor_util.constant_value(operation.inputs[3])
        return strides is not None and (strides == 1).all()
    if operation.type == "Transpose":
        order = tensor_util.constant_value(operation.inputs[1])
        moved = [] if order is None else [axis for axis in order if before[axis] > 1]
        return order is not None and moved == sorted(moved)
    return True


@dataclass(frozen=True)
class _Kept:
    """What outputs hold that is not simply a value of their own.

    Attributes:
      passed, keeps, shares, parts: as ``Op`` has them.
      bytes: what outputs take, where that is not one value.
      listed: of all that is in a list, whoever holds it.
    """

    passed: dict[int, int] = field(default_factory=dict)
    keeps: list[tuple[int, int]] = field(default_factory=list)
    shares: list[tuple[int, int]] = field(default_factory=list)
    parts: dict[int, int] = field(default_factory=dict)
    bytes: dict[int, int] = field(default_factory=dict)
    listed: dict[int, int] = field(default_factory=dict)


def _kept(loop: tf.Operation, body: Body, turns: Mapping[str, int]) -> _Kept:
    """What a loop keeps of each of its turns, for its gradient or its result.

    Lists count where their length and the shape of what goes in are known.  Several may
    hold the same values, and these are there until the last of the lists is gone.

    Args:
      loop: the loop.
      body: its body.
      turns: that it and the loops inside it take, by name, as far as they are known.
    """
    arguments = {argument.name: number for number, argument in enumerate(body.arguments)}
    results = [_source(result) for result in body.results]
    last = {result.name: number for number, result in enumerate(results)}
    kept = _Kept()
    for number, argument in enumerate(body.arguments):
        if results[number] is argument:
            kept.passed[number] = number
            kept.bytes[number] = 0
    same = {body.arguments[number].name: number for number in kept.passed}
    holding: dict[str, list[tuple[int, int, int]]] = {}  # (how many, of what size, the list)
    for number, (before, after) in enumerate(zip(loop.inputs, results, strict=True)):
        if before.op.type not in _LISTS or after.op.type not in LIST_WRITES:
            continue
        length = tensor_util.constant_value(before.op.inputs[_LISTS[before.op.type]])
        if after.op.type == "TensorListPushBack" and (length is None or length < 0):
            length = turns.get(loop.name)
        item = _source(after.op.inputs[LIST_WRITES[after.op.type]])
        began = arguments.get(item.name)
        item = item if began is None else results[began]  # of the turn before
        shape = _shape(item)
        if length is None or length < 0 or shape is None:
            continue
        size = _held(item, body, turns)
        kept.listed[number] = int(length) * size
        whole = None
        if item.op.type == "TensorListGetItem":
            whole = same.get(_source(item.op.inputs[0]).name)
        if whole is not None:
            kept.passed[number] = whole
            kept.bytes[number] = 0
            continue
        if began is not None:
            kept.keeps.append((number, began))
        # What is the same in every turn, or a variable's, is held by others.
        if item.op.type != "ReadVariableOp" and item.name not in arguments:
            count = max(0, int(length) - (began is not None))
            holding.setdefault(item.name, []).append((count, size, number))
    for name, lists in holding.items():
        count, size, owner = max(lists)
        if name in last and count and owner not in dict(kept.keeps):  # the last turn's, too
            kept.shares.append((owner, last[name]))
            count -= 1
        kept.shares.extend((other, owner) for _, _, other in lists if other != owner)
        kept.bytes[owner] = count * size
        kept.parts[owner] = count
    return kept


def _held(value: tf.Tensor, body: Body, turns: Mapping[str, int]) -> int:
    """Bytes of a value in the body of a loop or a branch.

    Of what a loop or a conditional in it has kept, what no other value of these holds; what
    they were given and keep counts, too.
    """
    name, number = value.op.name, value.value_index
    if value.dtype != tf.variant:
        return _bytes(value, _shape(value) or ())
    if name in body.bodies:
        kept = _kept(value.op, body.bodies[name], turns)
        if kept.bytes.get(number):
            return kept.listed[number]
    elif name in body.branches:
        kept = _kept_by_branches(body.branches[name], turns)
    else:
        return 0
    before = [_source(value.op.inputs[slot]) for output, slot in kept.keeps if output == number]
    return kept.bytes.get(number, 0) + sum(_held(each, body, turns) for each in before)


def _kept_by_branches(branches: Sequence[Body], turns: Mapping[str, int]) -> _Kept:
    """What a conditional keeps for its gradient, of the branch that keeps most.

    Args:
      branches: its branches.
      turns: that loops inside them take, as ``_kept`` takes them.
    """
    most = _Kept()
    for body in branches:
        kept = _Kept()
        arguments = {argument.name: number for number, argument in enumerate(body.arguments)}
        results = [_source(result) for result in body.results]
        owners = {
            result.name: number
            for number, result in enumerate(results)
            if result.dtype not in (tf.resource, tf.variant)
        }
        for number, result in enumerate(results):
            values = result.op.inputs if result.op.type == "OptionalFromValue" else ()
            for value in map(_source, values):
                shape = _shape(value)
                if value.name in arguments:  # behind what chooses the branch
                    kept.keeps.append((number, arguments[value.name] + 1))
                elif value.name in owners:
                    kept.shares.append((number, owners[value.name]))
                elif shape is not None and value.op.type not in ("Const", "ReadVariableOp"):
                    owners[value.name] = number
                    size = _held(value, body, turns)
                    kept.bytes[number] = kept.bytes.get(number, 0) + size
        if sum(kept.bytes.values()) >= sum(most.bytes.values()):
            most = kept
    return most


def _reserved(operation: tf.Operation, image: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what fused batch normalisation leaves for its gradient, which TensorFlow
    does not state: nothing, or where it contains a ReLU (on a GPU always), a number for every
    eight elements.  The first run corrects it."""
    contains = "activation_mode" in operation.node_def.attr and (
        operation.get_attr("activation_mode") == b"Relu"
    )
    leaves = contains or default_device().startswith("GPU")
    return (-(-math.prod(image) // 8),) if leaves and operation.get_attr("is_training") else (0,)


def _hint(operation: tf.Operation) -> str:
    """What to do about a shape that is not known."""
    if operation.type.startswith("TensorList"):
        return ": make a TensorArray with the size that it has in the end, for parts of one shape"
    return ""


def _source(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor whose buffer this one shares."""
    while tensor.op.type == "Identity" or tensor.op.type in _ALIASES:
        tensor = tensor.op.inputs[0]
    return tensor


def _fold(operation: tf.Operation) -> list[np.ndarray] | None:
    """The values of an operation that only does arithmetic on static shapes."""
    if not operation.outputs:
        return None
    if operation.type == "BroadcastGradientArgs":
        shapes = [tensor_util.constant_value_as_shape(tensor) for tensor in operation.inputs]
        if not all(shape.is_fully_defined() for shape in shapes):
            return None
        with tf.init_scope():  # not in a graph: this is arithmetic
            axes = tf.raw_ops.BroadcastGradientArgs(s0=list(shapes[0]), s1=list(shapes[1]))
        return [np.asarray(each) for each in axes]
    arrays = []
    for position, tensor in enumerate(operation.outputs):
        if tensor.dtype not in (tf.int32, tf.int64) or not tensor.shape.is_fully_defined():
            return None
        if _bytes(tensor, tuple(tensor.shape)) > _SMALL_CONSTANT:
            return None
        if operation.type in ("Shape", "ShapeN"):
            shape = operation.inputs[position].shape
            value = np.array(shape.as_list()) if shape.is_fully_defined() else None
        else:
            value = tensor_util.constant_value(tensor)
        if value is None:
            return None
        arrays.append(np.asarray(value, tensor.dtype.as_numpy_dtype).reshape(tensor.shape))
    return arrays


class Rewriter:
    """What writes a program anew.

    Attributes:
      program: the old one.
      ops, nodes: the new one, as far as it is written.
      moved: old index -> new one.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.ops: list[Op] = []
        self.nodes: list[node_def_pb2.NodeDef] = []
        self.moved: dict[int, int] = {}

    def add(self, op: Op, node: node_def_pb2.NodeDef) -> int:
        """Adds an operation that runs like ``node``; returns its index."""
        named = node_def_pb2.NodeDef()
        named.CopyFrom(node)
        named.name = op.name
        self.ops.append(op)
        self.nodes.append(named)
        return len(self.ops) - 1

    def add_constant(self, name: str, values: int | Sequence[int]) -> Tensor:
        """Adds an integer, or a vector of integers."""
        array = np.array(values, np.int32)
        return self.add(constant_op(array, name), constant_node(name, array)), 0

    def new(self, indices: Iterable[int]) -> tuple[int, ...]:
        """New indices of operations that have been moved."""
        return tuple(self.moved[index] for index in indices)

    def rewritten(self) -> Program:
        """The new program, once all is written."""
        moved = {old: (new, 0) for old, new in self.moved.items()}
        return self.program.rewritten(self.ops, self.nodes, moved)


def constant_op(array: np.ndarray, name: str) -> Op:
    """The operation that is a constant."""
    return Op(
        name=name,
        type="Const",
        kind=Kind.CONSTANT,
        inputs=(),
        controls=(),
        bytes=(array.nbytes,),
        shapes=(array.shape,),
        dtypes=(tf.dtypes.as_dtype(array.dtype),),
    )


def _shape(tensor: tf.Tensor) -> tuple[int, ...] | None:
    """The shape, if it is known; that of a handle does not matter."""
    if tensor.dtype in (tf.resource, tf.variant):
        return ()
    return tuple(tensor.shape) if tensor.shape.is_fully_defined() else None


def _bytes(tensor: tf.Tensor, shape: tuple[int, ...]) -> int:
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    return math.prod(shape) * tensor.dtype.size
