"""Seconds of an operation that nobody measured, from its FLOPs and bytes.

The roofline model (Williams, Waterman and Patterson, "Roofline: an insightful
visual performance model", CACM 2009)::

    seconds = launch + max(FLOPs / peak, bytes / bandwidth)

``work`` counts FLOPs and bytes from a signature alone.  A multiply-add is two
FLOPs; taps of a window that fall on padding are not counted; a function such
as exp or rsqrt is one FLOP, and such operations are a class of their own, so
that what a device needs for them is learnt from its measured rows
(``Correction``).  Bytes are what must move at least: inputs and outputs once.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .devices import DeviceSpec
from .signature import OpSignature, SignatureError, TensorType, dtype_bytes

if TYPE_CHECKING:
    from .table import Row


@dataclass(frozen=True)
class Work:
    """What an operation does.

    Attributes:
      kind: the class of operations that it is corrected with.
      flops: floating-point operations.
      bytes: bytes read and written.
      matrix: True if it runs on matrix units where the device has them.
    """

    kind: str
    flops: int
    bytes: int
    matrix: bool = False


NOTHING = Work("free", 0, 0)
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Correction:
    """What a device's measured rows say about its roofline.

    Above the launch overhead, measured = scale x roofline ^ exponent: caches
    and threads make small operations relatively cheaper or dearer.

    Attributes:
      curves: (natural logarithm of scale, exponent) by op type and operand
        pattern, by op type, by class, and for all rows.
    """

    curves: Mapping[str, tuple[float, float]]

    def apply(self, signature: OpSignature, done: Work, net: float) -> float:
        """Seconds above the launch overhead, from the roofline's ``net`` seconds."""
        if net <= 0:
            return 0.0
        for key in _keys(signature, done):
            if key in self.curves:
                intercept, exponent = self.curves[key]
                return math.exp(intercept + exponent * math.log(net))
        return net


NO_CORRECTION = Correction({})
_LEAST_ROWS = 3  # rows behind a scale ...
_LEAST_ROWS_OF_EXPONENT = 8  # ... and behind an exponent other than 1
_MOST_ROWS = 60  # that an exponent is fitted to
_MOST_KEPT = 2**16  # operations whose work is kept once it was counted


def seconds(
    signature: OpSignature, device: DeviceSpec, correction: Correction = NO_CORRECTION
) -> float:
    """Predicted seconds of one run."""
    done = work(signature)
    net = _net_seconds(signature, done, device)
    return device.launch_seconds + correction.apply(signature, done, net)


def fit_correction(rows: Iterable[Row], device: DeviceSpec) -> Correction:
    """Learns the correction of a device from rows measured on it.

    Exponents are medians of the slopes between pairs of rows, and scales
    medians of what remains (Theil 1950, Sen 1968): a few bad rows do not matter.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        done = work(row.signature)
        net = _net_seconds(row.signature, done, device)
        measured = row.seconds - device.launch_seconds
        if net <= 0 or measured <= 0:
            continue  # says nothing beyond the launch overhead
        for key in _keys(row.signature, done):
            points.setdefault(key, []).append((math.log(net), math.log(measured)))
    return Correction(
        {key: _curve(sorted(found)) for key, found in points.items() if len(found) >= _LEAST_ROWS}
    )


def _keys(signature: OpSignature, done: Work) -> tuple[str, ...]:
    """From the most to the least specific."""
    result = signature.outputs[0].shape if signature.outputs else ()
    pattern = "".join(
        "=" if tensor.shape == result else "1" if tensor.elements == 1 else "b"
        for tensor in signature.inputs
        if tensor.value is None
    )
    return f"op {signature.op} {pattern}", f"op {signature.op}", f"class {done.kind}", "all"


def _curve(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    exponent = 1.0
    if len(points) >= _LEAST_ROWS_OF_EXPONENT:
        some = points[:: -(-len(points) // _MOST_ROWS)]
        slopes = [
            (y2 - y1) / (x2 - x1)
            for (x1, y1), (x2, y2) in itertools.combinations(some, 2)
            if x2 - x1 > 0.3  # apart by more than a third, so that noise does not rule
        ]
        if slopes:
            exponent = min(max(statistics.median(slopes), 0.5), 1.5)
    return statistics.median(y - exponent * x for x, y in points), exponent


@functools.lru_cache(_MOST_KEPT)
def work(signature: OpSignature) -> Work:
    """FLOPs and bytes of one run, from the shapes alone.

    Of a type whose FLOPs nobody has counted here, and where a shape is not known, it is
    the bytes (as far as they are known), of kind ``UNKNOWN``.

    Raises:
      SignatureError: if an operation of this type has other operands or attributes.
    """
    shapes = [tensor.shape for tensor in (*signature.inputs, *signature.outputs)]
    if signature.op in _ASSIGNMENTS:  # the variable has the shape of what is assigned
        del shapes[0]
    if any(size < 0 for shape in shapes for size in shape):
        return _unknown(signature)
    count = _COUNTS.get(signature.op, _unknown)
    try:
        return count(signature)
    except (IndexError, KeyError, ValueError):
        raise SignatureError(f"not what {signature.op} takes: {signature.text}") from None


def _net_seconds(signature: OpSignature, done: Work, device: DeviceSpec) -> float:
    peak = device.peak_flops(compute_dtype(signature), done.matrix)
    return max(done.flops / peak, done.bytes / device.bandwidth)


def compute_dtype(signature: OpSignature) -> str:
    """The type of the numbers that an operation computes with; of complex ones, of their parts."""
    for tensor in (*signature.inputs, *signature.outputs):
        if "float" in tensor.dtype:
            return tensor.dtype
        if tensor.dtype.startswith("complex"):
            return "float64" if tensor.dtype == "complex128" else "float32"
    return "float32"


# --- Moving data ---------------------------------------------------------------------------


def _all_bytes(signature: OpSignature) -> int:
    return signature.input_bytes + signature.output_bytes


def _unknown(signature: OpSignature) -> Work:
    return Work(UNKNOWN, 0, _all_bytes(signature))


def _nothing(signature: OpSignature) -> Work:
    """Passes its input on, or looks at shapes only."""
    return NOTHING


def _copy(signature: OpSignature) -> Work:
    """Reads all inputs and writes all outputs without computing."""
    return Work("movement", 0, _all_bytes(signature))


def _part(signature: OpSignature) -> Work:
    """Reads no more of its input than it writes (slices, gathers by contiguous rows)."""
    return Work("movement", 0, 2 * signature.output_bytes)


def _fill(signature: OpSignature) -> Work:
    """Writes without reading a large input."""
    return Work("movement", 0, signature.output_bytes)


def _gather(signature: OpSignature) -> Work:
    """Reads the rows that the indices name (none twice), and the indices."""
    table, indices = signature.inputs[:2]
    read = signature.output_bytes if table.dtype == "resource" else table.bytes
    moved = min(read, signature.output_bytes) + signature.output_bytes + indices.bytes
    return Work("gather", 0, moved)


def _sparse_segments(signature: OpSignature) -> Work:
    """Reads the rows that the indices name, and adds each to its segment."""
    table, indices, segments = signature.inputs[:3]
    read = indices.elements * math.prod(table.shape[1:])
    moved = read * dtype_bytes(table.dtype) + indices.bytes + segments.bytes
    return Work("gather", read, moved + signature.output_bytes)


# Which input holds the rows that are scattered, where it is not the third.
_SCATTERED: Mapping[str, int] = {"ScatterNd": 1, "DenseBincount": 0, "Bincount": 0}


def _scatter(signature: OpSignature) -> Work:
    """Adds rows into a new tensor: indices and rows are read, every output row is written."""
    slot = 0 if "Segment" in signature.op else _SCATTERED.get(signature.op, 2)
    rows = signature.inputs[slot]
    return Work("gather", rows.elements, _all_bytes(signature))


def _scatter_variable(signature: OpSignature) -> Work:
    """Adds rows into a variable, or writes them: only the named rows of it are touched."""
    _, indices, rows = signature.inputs[:3]
    if signature.op.endswith("Update"):
        return Work("gather", 0, 2 * rows.bytes + indices.bytes)
    return Work("gather", rows.elements, 3 * rows.bytes + indices.bytes)


def _part_of_variable(signature: OpSignature) -> Work:
    """Reads what it writes into a part of a variable."""
    return Work("movement", 0, 2 * signature.inputs[-1].bytes)


def _random(signature: OpSignature) -> Work:
    elements = sum(tensor.elements for tensor in signature.outputs)
    return Work("random", elements, signature.output_bytes)


# --- Elementwise ---------------------------------------------------------------------------

# FLOPs an element, where it is not one.
_PER_ELEMENT: Mapping[str, int] = {
    "SquaredDifference": 2,
    "SigmoidGrad": 3,
    "TanhGrad": 3,
    "RsqrtGrad": 4,
    "SqrtGrad": 2,
    "ReciprocalGrad": 3,
    "InvGrad": 3,
    "SoftplusGrad": 3,
    "SoftsignGrad": 4,
    "EluGrad": 2,
    "SeluGrad": 2,
    "MulNoNan": 2,
    "DivNoNan": 2,
    "ClipByValue": 2,
    "_MklSwish": 2,
    "Cast": 0,
}
_FUNCTIONS = frozenset(
    {"Exp", "Expm1", "Log", "Log1p", "Sqrt", "Rsqrt", "Tanh", "Sigmoid", "Erf", "Erfc", "Erfinv"}
    | {"Pow", "Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Atan2", "Sinh", "Cosh", "Lgamma"}
    | {"Acosh", "Asinh", "Atanh", "BesselI0e", "BesselI1e", "Betainc", "Igamma", "Igammac"}
    | {"InvGrad", "Ndtri", "Polygamma", "ReciprocalGrad", "Xdivy", "Xlog1py", "Xlogy", "Zeta"}
    | {"Digamma", "Softplus", "Elu", "Selu", "Softsign", "SoftplusGrad", "Inv", "Reciprocal"}
    | {"RealDiv", "Div", "DivNoNan", "SigmoidGrad", "TanhGrad", "RsqrtGrad", "SqrtGrad"}
    | {"_MklSwish"}
)


_ELEMENTWISE = frozenset(
    {"Abs", "Add", "AddV2", "Angle", "ApproximateEqual", "BiasAdd", "BitwiseAnd", "BitwiseOr"}
    | {"BitwiseXor", "Ceil", "Complex", "ComplexAbs", "Conj", "Equal", "Floor", "FloorDiv"}
    | {"FloorMod", "Greater", "GreaterEqual", "Imag", "Invert", "IsFinite", "IsInf", "IsNan"}
    | {"LeakyRelu", "LeakyReluGrad", "LeftShift", "Less", "LessEqual", "LogicalAnd", "LogicalNot"}
    | {"LogicalOr", "Maximum", "Minimum", "Mod", "Mul", "Neg", "NextAfter", "NotEqual", "Real"}
    | {"Relu", "Relu6", "Relu6Grad", "ReluGrad", "RightShift", "Rint", "Round", "Select"}
    | {"SelectV2", "Sign", "Square", "Sub", "TruncateDiv", "TruncateMod"}
    | {"FakeQuantWithMinMaxArgs", "FakeQuantWithMinMaxVars"}
)


def _elementwise(signature: OpSignature) -> Work:
    """One FLOP (or as listed) an element of the output."""
    elements = max((tensor.elements for tensor in signature.outputs), default=0)
    flops = elements * _PER_ELEMENT.get(signature.op, 1)
    kind = "function" if signature.op in _FUNCTIONS else "elementwise"
    return Work(kind, flops, _all_bytes(signature))


def _composition(signature: OpSignature) -> Work:
    """Several operations of one input, each on what the one before returns."""
    names = signature.attr("op_names").split(",")
    kind = "function" if _FUNCTIONS.intersection(names) else "elementwise"
    flops = signature.outputs[0].elements * sum(_PER_ELEMENT.get(name, 1) for name in names)
    return Work(kind, flops, _all_bytes(signature))


def _add_n(signature: OpSignature) -> Work:
    flops = (len(signature.inputs) - 1) * signature.outputs[0].elements
    return Work("elementwise", flops, _all_bytes(signature))


# FLOPs an element of an optimizer's fused update.
_UPDATE_FLOPS: Mapping[str, int] = {
    "ResourceApplyGradientDescent": 2,
    "ResourceApplyMomentum": 4,
    "ResourceApplyKerasMomentum": 4,
    "ResourceApplyAdagrad": 6,
    "ResourceApplyAdagradV2": 6,
    "ResourceApplyAdadelta": 14,
    "ResourceApplyFtrl": 15,
    "ResourceApplyFtrlV2": 16,
    "ResourceApplyRMSProp": 9,
    "ResourceApplyAdam": 12,
    "ResourceApplyAdamWithAmsgrad": 13,
}


def _update(signature: OpSignature) -> Work:
    """Reads everything and writes every variable."""
    variables = [tensor for tensor in signature.inputs if tensor.dtype == "resource"]
    elements = max((tensor.elements for tensor in variables), default=0)
    gradients = sum(tensor.bytes for tensor in signature.inputs)
    variable_bytes = signature.input_bytes - gradients
    flops = elements * _UPDATE_FLOPS[signature.op]
    return Work("update", flops, gradients + 2 * variable_bytes)


_ASSIGNMENTS = frozenset(["AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"])


def _assignment(signature: OpSignature) -> Work:
    """Adds a value to a variable of its shape; one that is assigned is taken over."""
    if signature.op == "AssignVariableOp":
        return _nothing(signature)
    value = signature.inputs[1]
    return Work("update", value.elements, 3 * value.bytes)


# --- Reductions, softmax, normalisations ---------------------------------------------------


def _reduction(signature: OpSignature) -> Work:
    """One operation less than there are elements for each result; a mean divides once more."""
    read, written = signature.inputs[0].elements, signature.outputs[0].elements
    flops = read - written + (written if signature.op == "Mean" else 0)
    return Work("reduction", max(flops, 0), _all_bytes(signature))


def _scan(signature: OpSignature) -> Work:
    return Work("reduction", signature.inputs[0].elements, _all_bytes(signature))


def _l2_loss(signature: OpSignature) -> Work:
    return Work("reduction", 2 * signature.inputs[0].elements, _all_bytes(signature))


def _softmax(signature: OpSignature) -> Work:
    """Largest, difference, exp, sum and quotient (or logarithm) of each element."""
    return Work("softmax", 5 * signature.inputs[0].elements, _all_bytes(signature))


def _cross_entropy(signature: OpSignature) -> Work:
    """A softmax, the loss (product and sum) and the gradient (difference) of each element."""
    return Work("softmax", 8 * signature.inputs[0].elements, _all_bytes(signature))


def _batch_norm(signature: OpSignature) -> Work:
    """Training: mean 1, variance 3, normalisation 3 an element; inference: 2."""
    training = signature.attr("is_training", "true") == "true"
    flops = signature.inputs[0].elements * (7 if training else 2)
    return Work("normalisation", flops, _all_bytes(signature))


def _batch_norm_grad(signature: OpSignature) -> Work:
    """Sums of the gradient (1) and of its product with the centred input (3), then 5."""
    return Work("normalisation", 9 * signature.inputs[1].elements, _all_bytes(signature))


def _local_response(signature: OpSignature) -> Work:
    """A square and a sum for each pair of channels in reach of each other; a scale, a bias, a
    power and a product for each element.

    The gradient does that again and, for each pair, two products, a quotient and a sum, for
    each element one sum more (TensorFlow's ``lrn_op.cc``).
    """
    *pixels, channels = signature.inputs[0].shape
    reach = min(int(signature.attr("depth_radius", "5")), channels - 1)
    pairs = channels * (2 * reach + 1) - reach * (reach + 1)  # less those beyond the ends
    a_pair, an_element = (6, 5) if signature.op.endswith("Grad") else (2, 4)
    flops = math.prod(pixels) * (a_pair * pairs + an_element * channels)
    return Work("normalisation", flops, _all_bytes(signature))


# --- Windows: convolutions and pooling -----------------------------------------------------


def _spatial_axes(signature: OpSignature, rank: int) -> range:
    channels_first = signature.attr("data_format").startswith("NC")
    return range(2, rank) if channels_first else range(1, rank - 1)


def _channel_axis(signature: OpSignature, rank: int) -> int:
    return 1 if signature.attr("data_format").startswith("NC") else rank - 1


def _integers(text: str) -> list[int]:
    return [int(item) for item in text.split(",") if item]


def _taps(
    signature: OpSignature, image: Sequence[int], windows: Sequence[int], result: Sequence[int]
) -> int:
    """Pairs (output position, tap) that fall on the image, not on padding, over all axes.

    Args:
      image, result: full shapes of the larger and the smaller side.
      windows: window sizes of the spatial axes.
    """
    rank = len(image)
    strides = _integers(signature.attr("strides")) or [1] * rank
    dilations = _integers(signature.attr("dilations") or signature.attr("rates")) or [1] * rank
    explicit = _integers(signature.attr("explicit_paddings"))
    total = 1
    for window, axis in zip(windows, _spatial_axes(signature, rank), strict=True):
        size, outputs = image[axis], result[axis]
        stride, dilation = strides[axis], dilations[axis]
        before = 0
        if signature.attr("padding") == "SAME":
            reach = (window - 1) * dilation + 1
            before = max((outputs - 1) * stride + reach - size, 0) // 2
        elif explicit:
            before = explicit[2 * axis]
        total *= sum(
            _multiples(before - tap * dilation, size + before - tap * dilation, stride, outputs)
            for tap in range(window)
        )
    return total


def _multiples(start: int, stop: int, step: int, count: int) -> int:
    """How many of the first ``count`` multiples of a step, from 0 on, are in a range."""
    return len(range(max(-(-start // step), 0), min(-(-stop // step), count)))


def _convolution(
    signature: OpSignature,
    image: TensorType,
    kernel: TensorType,
    result: TensorType,
    kind: str,
) -> Work:
    """Two FLOPs a tap; the gradients for input and filter make the same products."""
    taps = _taps(signature, image.shape, kernel.shape[:-2], result.shape)
    # A kernel is (window..., input channels of one group, output channels); a depthwise
    # one (window..., channels, multiplier): either way each pair of them makes a product.
    flops = 2 * image.shape[0] * taps * kernel.shape[-2] * kernel.shape[-1]
    return Work(kind, flops, _all_bytes(signature), matrix=not kind.startswith("depthwise"))


def _forward(signature: OpSignature) -> Work:
    image, kernel = signature.inputs[:2]
    kind = "depthwise convolution" if signature.op.startswith("Depthwise") else "convolution"
    return _convolution(signature, image, kernel, signature.outputs[0], kind)


def _fused_convolution(signature: OpSignature) -> Work:
    plain = _forward(signature)
    flops = plain.flops + _fused_flops(signature)
    return Work(plain.kind, flops, plain.bytes, plain.matrix)


def _input_gradient(signature: OpSignature) -> Work:
    """Also what a transposed convolution is."""
    kernel, result = signature.inputs[1:3]
    kind = "convolution"
    if signature.op.startswith("Depthwise"):
        kind = "depthwise convolution"
    return _convolution(signature, signature.outputs[0], kernel, result, f"{kind}, input gradient")


def _filter_gradient(signature: OpSignature) -> Work:
    image, _, result = signature.inputs[:3]
    kind = "convolution"
    if signature.op.startswith("Depthwise"):
        kind = "depthwise convolution"
    kernel = signature.outputs[0]
    work = _convolution(signature, image, kernel, result, f"{kind}, filter gradient")
    if len(signature.outputs) == 2:  # the bias's gradient
        return replace(work, flops=work.flops + result.elements)
    return work


def _pooling(signature: OpSignature, image: TensorType, result: TensorType) -> Work:
    """One FLOP a tap."""
    rank = len(image.shape)
    sizes = _integers(signature.attr("ksize"))
    windows = [sizes[axis] for axis in _spatial_axes(signature, rank)]
    taps = _taps(signature, image.shape, windows, result.shape)
    channels = image.shape[_channel_axis(signature, rank)]
    kind = "pooling gradient" if signature.op.endswith("Grad") else "pooling"
    return Work(kind, image.shape[0] * taps * channels, _all_bytes(signature))


def _pool(signature: OpSignature) -> Work:
    return _pooling(signature, signature.inputs[0], signature.outputs[0])


def _argmax_gradient(signature: OpSignature) -> Work:
    """Adds each value to where the maximum was."""
    return Work("pooling gradient", signature.inputs[1].elements, _all_bytes(signature))


def _dilation(signature: OpSignature) -> Work:
    """A sum and a maximum for each tap; the gradients look for it again."""
    image, kernel = signature.inputs[:2]
    result = signature.inputs[2] if "Backprop" in signature.op else signature.outputs[0]
    taps = _taps(signature, image.shape, kernel.shape[:2], result.shape)
    flops = 2 * image.shape[0] * taps * image.shape[-1]
    return Work("pooling", flops, _all_bytes(signature))


def _max_pool_gradient(signature: OpSignature) -> Work:
    return _pooling(signature, signature.inputs[0], signature.inputs[2])


def _average_pool_gradient(signature: OpSignature) -> Work:
    return _pooling(signature, signature.outputs[0], signature.inputs[1])


# --- Products ------------------------------------------------------------------------------


def _fused_flops(signature: OpSignature) -> int:
    """One FLOP an element of the output for each operation fused in."""
    fused = [name for name in signature.attr("fused_ops").split(",") if name]
    return len(fused) * signature.outputs[0].elements


def _multiply_add(signature: OpSignature) -> int:
    """FLOPs of one: four products and four sums of real numbers if they are complex."""
    return 8 if signature.outputs[0].dtype.startswith("complex") else 2


def _matmul(signature: OpSignature) -> Work:
    left = signature.inputs[0].shape
    adjoint = "true" in (signature.attr("transpose_a"), signature.attr("adj_x"))
    inner = left[-2] if adjoint else left[-1]
    each = _multiply_add(signature)
    flops = each * signature.outputs[0].elements * inner + _fused_flops(signature)
    return Work("matrix product", flops, _all_bytes(signature), matrix=True)


def _einsum(signature: OpSignature) -> Work:
    """Two FLOPs for each combination of all labels, where two operands meet; before, each is
    summed over the labels that nothing else has (TensorFlow's ``einsum_op_impl.h``)."""
    left, _, right = signature.attr("equation").replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    broadcast: list[int] = []  # the dimensions of "...", from the last one on
    operands: list[tuple[set[str], int]] = []  # labels, and the elements of "..."
    for labels, tensor in zip(left.split(","), signature.inputs, strict=True):
        head, ellipsis, tail = labels.partition("...")
        shape = tensor.shape
        sizes.update(zip(head, shape, strict=False))
        if tail:
            sizes.update(zip(tail, shape[-len(tail) :], strict=True))
        middle = shape[len(head) : len(shape) - len(tail)] if ellipsis else ()
        pairs = itertools.zip_longest(broadcast, reversed(middle), fillvalue=1)
        broadcast = [b if a == 1 else a for a, b in pairs]
        operands.append(({*head, *tail}, math.prod(middle)))

    def combinations(labels: Iterable[str]) -> int:
        return math.prod(sizes[label] for label in labels)

    if len(operands) == 1:
        flops = combinations(sizes) * math.prod(broadcast) - signature.outputs[0].elements
        return Work("reduction" if flops > 0 else "movement", max(flops, 0), _all_bytes(signature))
    (one, in_one), (other, in_other) = operands
    sums = 0
    for mine, beside, elements in ((one, other, in_one), (other, one, in_other)):
        kept = mine & (beside | set(right))
        sums += elements * (combinations(mine) - combinations(kept))
    meeting = combinations((one & other) | ((one | other) & set(right))) * math.prod(broadcast)
    each = _multiply_add(signature)
    if one & other <= set(right):  # nothing to add up
        each = 6 if each > 2 else 1
    return Work("matrix product", sums + each * meeting, _all_bytes(signature), matrix=True)


def _recurrence(signature: OpSignature) -> Work:
    """cuDNN's recurrent layers: each parameter makes a product at every time of a sample."""
    steps, samples = signature.inputs[0].shape[:2]
    forward = 2 * steps * samples * signature.inputs[3].elements
    flops = 2 * forward if "Backprop" in signature.op else forward
    return Work("recurrence", flops, _all_bytes(signature), matrix=True)


def _factorisation(signature: OpSignature) -> Work:
    """Of square matrices, to the leading order (Golub and Van Loan, "Matrix Computations")."""
    matrix = signature.inputs[0].shape
    size, many = matrix[-1], math.prod(matrix[:-2])
    columns = signature.outputs[0].shape[-1] if len(signature.inputs) > 1 else 0
    flops = {
        "Cholesky": size**3 // 3,
        "MatrixDeterminant": 2 * size**3 // 3,
        "LogMatrixDeterminant": 2 * size**3 // 3,
        "MatrixInverse": 2 * size**3,
        "MatrixSolve": 2 * size**3 // 3 + 2 * size**2 * columns,
        "MatrixTriangularSolve": size**2 * columns,
        "CholeskyGrad": 2 * size**3,
    }[signature.op]
    return Work("factorisation", many * flops, _all_bytes(signature))


def _fourier(signature: OpSignature) -> Work:
    """5 n log2 n for n complex numbers, half of that where one side is real.

    Of that side as much is read as the length says, which is an input of its own.
    """
    axes = int(signature.op[-2]) if signature.op.endswith("D") else 1
    real = "RFFT" in signature.op
    side = signature.inputs[0] if signature.op.startswith("RFFT") else signature.outputs[0]
    lengths = side.shape[-axes:]
    moved = _all_bytes(signature)
    if real and signature.inputs[1].value is not None:
        lengths = tuple(int(length) for length in signature.inputs[1].value)
        if signature.op.startswith("RFFT"):
            read = math.prod(map(min, zip(lengths, side.shape[-axes:], strict=True)))
            unread = math.prod(side.shape[-axes:]) - read
            moved -= unread * math.prod(side.shape[:-axes]) * dtype_bytes(side.dtype)
    length = math.prod(lengths)
    elements = math.prod(side.shape[:-axes]) * length
    flops = 5 * elements * math.log2(max(length, 1)) / (2 if real else 1)
    return Work("transform", int(flops), moved)


# --- Resampling ----------------------------------------------------------------------------

# FLOPs an element: a linear interpolation is 3, bilinear makes three of them; bicubic
# weighs four rows of four taps, then the four results.
_RESIZE_FLOPS: Mapping[str, int] = {"NearestNeighbor": 0, "Bilinear": 9, "Bicubic": 40}


def _resize(signature: OpSignature) -> Work:
    each = next(n for method, n in _RESIZE_FLOPS.items() if method in signature.op)
    fine = signature.inputs[0] if signature.op.endswith("Grad") else signature.outputs[0]
    return Work("resampling", each * fine.elements, _all_bytes(signature))


# Pixels of the coarser side that a kernel reaches, to both sides.
_KERNEL_REACH: Mapping[str, float] = {
    "lanczos1": 1, "lanczos3": 3, "lanczos5": 5, "gaussian": 1.5, "box": 0.5, "triangle": 1,
    "keyscubic": 2, "mitchellcubic": 2,
}  # fmt: skip


def _scale_and_translate(signature: OpSignature) -> Work:
    """A multiply-add for each pixel in reach, first along columns, then along rows.

    Which pixels these are is TensorFlow's ``scale_and_translate_op.cc`` for an image that
    fills the result (the scale is data); the gradient meets the same pairs of pixels.
    """
    read, written = signature.inputs[0].shape, signature.outputs[0].shape
    image, result = (written, read) if signature.op.endswith("Grad") else (read, written)
    radius = _KERNEL_REACH[signature.attr("kernel_type", "lanczos3")]
    smooth = signature.attr("antialias", "true") == "true"

    def pairs(axis: int) -> int:
        size, results = image[axis], result[axis]
        step = size / max(results, 1)
        reach = radius * max(step, 1.0) if smooth else radius
        total = 0
        for index in range(results):
            centre = (index + 0.5) * step - 0.5
            first, last = math.ceil(centre - reach), math.floor(centre + reach)
            total += min(max(last, 0), size - 1) - min(max(first, 0), size - 1) + 1
        return total

    flops = 2 * read[0] * read[3] * (pairs(1) * read[2] + pairs(2) * written[1])
    return Work("resampling", flops, _all_bytes(signature))


# FLOPs an element of the crops, from the nearest pixel and between four.  Between four: three
# linear interpolations; for the image's gradient, six products and four sums; for the boxes',
# the slopes along both axes (5 each), each times the gradient, and a product and a sum for
# each of four edges (TensorFlow's ``crop_and_resize_op.cc``).
_CROP_FLOPS: Mapping[str, tuple[int, int]] = {
    "CropAndResize": (0, 9),
    "CropAndResizeGradImage": (1, 10),
    "CropAndResizeGradBoxes": (0, 20),
}


def _crop_and_resize(signature: OpSignature) -> Work:
    """Each pixel of a crop is between four (or at one) of the image: all of these are read,
    though none twice, or added to once all of the image's gradient is zero."""
    if signature.op == "CropAndResize":
        image, crops = signature.inputs[0], signature.outputs[0]
    elif signature.op == "CropAndResizeGradImage":
        image, crops = signature.outputs[0], signature.inputs[0]
    else:
        crops, image = signature.inputs[:2]
    nearest = signature.attr("method") == "nearest"
    pixels = crops.elements * (1 if nearest else 4)
    met = min(pixels * dtype_bytes(image.dtype), image.bytes)
    moved = crops.bytes + met
    if signature.op == "CropAndResizeGradImage":
        moved += met + image.bytes
    flops = crops.elements * _CROP_FLOPS[signature.op][0 if nearest else 1]
    return Work("resampling", flops, moved)


def _project(signature: OpSignature) -> Work:
    """Where each pixel comes from (8 products and sums, 2 quotients), and what is there."""
    pixels = signature.outputs[0]
    each = 9 if signature.attr("interpolation") == "BILINEAR" else 0
    flops = each * pixels.elements + 10 * math.prod(pixels.shape[:-1])
    return Work("resampling", flops, _all_bytes(signature))


def _table(*groups: tuple[Callable[[OpSignature], Work], str]) -> dict[str, Callable[..., Work]]:
    return {op: count for count, ops in groups for op in ops.split()}


_COUNTS: Mapping[str, Callable[[OpSignature], Work]] = _table(
    (
        _nothing,
        "Identity IdentityN Reshape Squeeze ExpandDims StopGradient PreventGradient Snapshot "
        "CheckNumerics Shape ShapeN Size Rank ReadVariableOp VarHandleOp Const Placeholder NoOp "
        "EnsureShape VariableShape BroadcastGradientArgs VarIsInitializedOp _Arg _Retval Bitcast "
        "DisableCopyOnRead Assert StatelessRandomGetKeyCounter StatelessRandomGetAlg "
        "StatelessRandomGetKeyCounterAlg RngReadAndSkip "
        "EmptyTensorList TensorListReserve TensorListSetItem TensorListGetItem "
        "TensorListPushBack TensorListPopBack TensorListLength TensorListElementShape "
        "OptionalFromValue OptionalGetValue OptionalNone OptionalHasValue Switch Merge Enter Exit "
        "NextIteration",
    ),
    (
        _copy,
        "Transpose ConjugateTranspose Concat ConcatV2 Pack Unpack Pad PadV2 MirrorPad "
        "MirrorPadGrad Tile BroadcastTo Split SplitV StridedSliceGrad SpaceToBatchND Reverse "
        "BatchToSpaceND SpaceToDepth DepthToSpace ReverseV2 Roll InvertPermutation MatrixDiagV3 "
        "MatrixBandPart Where ExtractImagePatches IteratorGetNext TensorListStack "
        "DeepCopy TensorListFromTensor TensorListConcat TensorListConcatV2 TensorListGather "
        "DynamicPartition DynamicStitch ParallelDynamicStitch",
    ),
    (_part, "Slice StridedSlice"),
    (_fill, "Fill ZerosLike OnesLike Range OneHot LinSpace"),
    (_gather, "Gather GatherV2 GatherNd ResourceGather ResourceGatherNd"),
    (
        _scatter,
        "ScatterNd TensorScatterAdd TensorScatterSub TensorScatterMax TensorScatterMin "
        "TensorScatterUpdate UnsortedSegmentSum UnsortedSegmentMax UnsortedSegmentMin "
        "UnsortedSegmentProd SegmentSum SegmentMax SegmentMin SegmentMean SegmentProd "
        "DenseBincount Bincount",
    ),
    (_sparse_segments, "SparseSegmentSum SparseSegmentMean SparseSegmentSqrtN"),
    (
        _scatter_variable,
        "ResourceScatterAdd ResourceScatterSub ResourceScatterUpdate ResourceScatterNdAdd "
        "ResourceScatterNdSub ResourceScatterNdUpdate",
    ),
    (_part_of_variable, "ResourceStridedSliceAssign"),
    (
        _random,
        "RandomUniform RandomStandardNormal RandomUniformInt TruncatedNormal "
        "StatelessRandomUniform StatelessRandomUniformV2 StatelessRandomNormal "
        "StatelessRandomNormalV2 StatelessRandomUniformInt StatelessRandomUniformIntV2 "
        "StatelessRandomUniformFullInt StatelessRandomUniformFullIntV2 StatelessTruncatedNormal "
        "StatelessTruncatedNormalV2 StatefulUniform StatefulStandardNormalV2 "
        "StatefulTruncatedNormal StatefulUniformFullInt",
    ),
    (_composition, "_UnaryOpsComposition"),
    (_add_n, "AddN AccumulateNV2"),
    (_update, " ".join(_UPDATE_FLOPS)),
    (_assignment, " ".join(_ASSIGNMENTS)),
    (
        _reduction,
        "Sum Mean Max Min Prod All Any ArgMax ArgMin BiasAddGrad EuclideanNorm",
    ),
    (_scan, "Cumsum Cumprod CumulativeLogsumexp"),
    (_elementwise, " ".join({*_ELEMENTWISE, *_FUNCTIONS, *_PER_ELEMENT})),
    (_l2_loss, "L2Loss"),
    (_softmax, "Softmax LogSoftmax"),
    (_cross_entropy, "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits"),
    (
        _batch_norm,
        "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 _FusedBatchNormEx",
    ),
    (
        _batch_norm_grad,
        "FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3 _FusedBatchNormGradEx",
    ),
    (_forward, "Conv2D Conv3D DepthwiseConv2dNative"),
    (
        _fused_convolution,
        "_FusedConv2D _FusedConv3D _FusedDepthwiseConv2dNative _MklNativeFusedConv2D",
    ),
    (
        _input_gradient,
        "Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput",
    ),
    (
        _filter_gradient,
        "Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter "
        "_MklNativeConv2DBackpropFilterWithBias",
    ),
    (_pool, "MaxPool AvgPool MaxPool3D AvgPool3D MaxPoolWithArgmax"),
    (_argmax_gradient, "MaxPoolGradWithArgmax"),
    (_dilation, "Dilation2D Dilation2DBackpropInput Dilation2DBackpropFilter"),
    (_local_response, "LRN LRNGrad"),
    (_max_pool_gradient, "MaxPoolGrad MaxPool3DGrad"),
    (_average_pool_gradient, "AvgPoolGrad AvgPool3DGrad"),
    (_matmul, "MatMul _FusedMatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 _FusedBatchMatMulV2"),
    (_einsum, "Einsum"),
    (
        _factorisation,
        "Cholesky CholeskyGrad MatrixDeterminant LogMatrixDeterminant MatrixInverse MatrixSolve "
        "MatrixTriangularSolve",
    ),
    (
        _fourier,
        "FFT FFT2D FFT3D IFFT IFFT2D IFFT3D RFFT RFFT2D RFFT3D IRFFT IRFFT2D IRFFT3D",
    ),
    (_recurrence, "CudnnRNN CudnnRNNV2 CudnnRNNV3 CudnnRNNBackpropV2 CudnnRNNBackpropV3"),
    (
        _resize,
        "ResizeNearestNeighbor ResizeNearestNeighborGrad ResizeBilinear ResizeBilinearGrad "
        "ResizeBicubic ResizeBicubicGrad",
    ),
    (_scale_and_translate, "ScaleAndTranslate ScaleAndTranslateGrad"),
    (_project, "ImageProjectiveTransformV2 ImageProjectiveTransformV3"),
    (_crop_and_resize, "CropAndResize CropAndResizeGradImage CropAndResizeGradBoxes"),
)
