"""What makes two operations cost the same: the key of every price.

A signature holds the op type, the dtypes and shapes of inputs and outputs, the
values of small integer constant inputs (reduction axes, shapes, permutations,
pads: they decide what is computed), and the attributes that matter for the
computation.  Its text form is the key of a row in a table of costs::

    Sum(float32[16x64x64x256], int32[3]=0 1 2) -> (float32[256]) {T=float32; keep_dims=false}

Nothing here needs TensorFlow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple
from urllib.parse import quote, unquote

# Bytes of an element, by TensorFlow's name of its type; handles and texts are not counted.
_BYTES = {
    **dict.fromkeys(("resource", "string", "variant"), 0),
    **dict.fromkeys(
        ("bool", "int8", "uint8", "qint8", "quint8", "int2", "int4", "uint2", "uint4"), 1
    ),
    **dict.fromkeys(("float8_e5m2", "float8_e5m2fnuz", "float8_e4m3fn", "float8_e4m3fnuz"), 1),
    **dict.fromkeys(("float8_e4m3b11fnuz", "float4_e2m1fn"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16", "qint16", "quint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "qint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
_OPERAND = re.compile(
    r"^(?P<dtype>\w+)\[(?P<shape>(?:-1|\d+)(?:x(?:-1|\d+))*)?\](?:=(?P<value>[-\d ]*))?$"
)
_SIGNATURE = re.compile(
    r"^(?P<op>[\w>]+)\((?P<inputs>[^()]*)\) -> \((?P<outputs>[^()]*)\)(?: \{(?P<attrs>.*)\})?$"
)
# Characters that stay readable in an attribute; ";", "=", "{", "}" and "%" are escaped.
_PLAIN = " ,.:+-*/()[]<>_|"


class SignatureError(ValueError):
    """A text that should be a signature is not one."""


class TensorType(NamedTuple):
    """An input or output: dtype, shape and, for a small integer constant, its value.

    A variable handle has dtype ``resource`` and the shape of the variable.  An
    unknown dimension is -1.
    """

    dtype: str
    shape: tuple[int, ...]
    value: tuple[int, ...] | None = None

    @property
    def elements(self) -> int:
        """Number of elements (0 if a dimension is unknown)."""
        return 0 if any(size < 0 for size in self.shape) else math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the tensor; 0 for a handle or an unknown dimension."""
        return self.elements * dtype_bytes(self.dtype)

    def __str__(self) -> str:
        text = f"{self.dtype}[{'x'.join(map(str, self.shape))}]"
        return text if self.value is None else f"{text}={' '.join(map(str, self.value))}"


@dataclass(frozen=True)
class OpSignature:
    """The key under which the cost of an operation is recorded.

    Attributes:
      op: TensorFlow's op type, for instance ``Conv2D``.
      inputs: its data inputs in order.
      outputs: its outputs in order.
      attrs: pairs (name, text of the value) in order of name, without those
        that do not change the computation.
    """

    op: str
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    attrs: tuple[tuple[str, str], ...] = ()

    @cached_property
    def text(self) -> str:
        """The canonical text; ``from_text`` reads it back."""
        attrs = "; ".join(f"{name}={quote(value, safe=_PLAIN)}" for name, value in self.attrs)
        inputs, outputs = (", ".join(map(str, side)) for side in (self.inputs, self.outputs))
        return f"{self.op}({inputs}) -> ({outputs})" + (f" {{{attrs}}}" if attrs else "")

    @staticmethod
    def from_text(text: str) -> OpSignature:
        """Reads the canonical text.

        Raises:
          SignatureError: if it is not one, or of a type that TensorFlow does not have.
        """
        match = _SIGNATURE.match(text) if isinstance(text, str) else None
        if match is None:
            raise SignatureError(f"not the signature of an operation: {text!r}")
        attrs = []
        for pair in filter(None, (match["attrs"] or "").split("; ")):
            name, equals, value = pair.partition("=")
            if not equals:
                raise SignatureError(f"attribute {pair!r} has no value in {text!r}")
            attrs.append((name, unquote(value)))
        return OpSignature(
            match["op"], _operands(match["inputs"]), _operands(match["outputs"]), tuple(attrs)
        )

    def attr(self, name: str, default: str = "") -> str:
        """The text of an attribute, or ``default`` where it is not recorded."""
        return next((value for key, value in self.attrs if key == name), default)

    @property
    def is_static(self) -> bool:
        """True if every dimension is known."""
        return all(size >= 0 for tensor in self.inputs + self.outputs for size in tensor.shape)

    @property
    def input_bytes(self) -> int:
        """Bytes read at most: every input once, the variables behind handles included."""
        return sum(
            tensor.elements * dtype_bytes(self.variable_dtype)
            if tensor.dtype == "resource"
            else tensor.bytes
            for tensor in self.inputs
        )

    @property
    def output_bytes(self) -> int:
        """Bytes of all outputs."""
        return sum(tensor.bytes for tensor in self.outputs)

    @property
    def variable_dtype(self) -> str:
        """The dtype of the variables behind resource inputs."""
        return self.attr("dtype") or self.attr("T") or "float32"


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element; 0 for handles, strings, variants and what TensorFlow does not have.

    >>> dtype_bytes("bfloat16"), dtype_bytes("bool"), dtype_bytes("complex64")
    (2, 1, 8)
    """
    return _BYTES.get(dtype.removesuffix("_ref"), 0)


def _operands(text: str) -> tuple[TensorType, ...]:
    return tuple(_parse_operands(text))


def _parse_operands(text: str) -> Iterator[TensorType]:
    for operand in filter(None, text.split(", ")):
        match = _OPERAND.match(operand)
        if match is None:
            raise SignatureError(f"not a tensor of a signature: {operand!r}")
        try:
            shape = tuple(map(int, match["shape"].split("x"))) if match["shape"] else ()
            value = None if match["value"] is None else tuple(map(int, match["value"].split()))
        except ValueError:
            raise SignatureError(f"not a tensor of a signature: {operand!r}") from None
        if match["dtype"].removesuffix("_ref") not in _BYTES:
            raise SignatureError(f"TensorFlow has no type {match['dtype']!r}, as in {operand!r}")
        yield TensorType(match["dtype"], shape, value)
