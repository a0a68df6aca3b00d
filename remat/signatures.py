"""The signature of an operation, from its node and back.

A signature says what decides the cost of an operation (``profiles.signature``):
type, shapes, attributes, and the values of those inputs that say what to
compute.  From it a node is made again that can be run by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, node_def_pb2, op_def_pb2
from tensorflow.python.framework import op_def_registry

from .native import MERGED, label
from .profiles.signature import OpSignature, TensorType

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


class UnmeasurableError(Exception):
    """An operation that cannot be run by itself; the message says why."""


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
    arguments = arguments_of(op_def, node) if op_def is not None else []
    typed = []
    for index, tensor in enumerate(inputs):
        value = None
        argument = arguments[index] if index < len(arguments) else None
        if argument is not None and is_parameter(argument, tensor):
            if argument.name in _OUTPUT_SHAPE or (node.op, argument.name) == ("Slice", "size"):
                value = outputs[0].shape if len(outputs) == 1 or node.op == MERGED else None
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


def node_of(signature: OpSignature, device: str = "") -> node_def_pb2.NodeDef:
    """A node with the op and the attributes of a signature."""
    types = {attr.name: attr.type for attr in op_def_of(signature.op).attr}
    node = node_def_pb2.NodeDef(op=signature.op, device=device)
    for name, text in signature.attrs:
        if name not in types:
            raise UnmeasurableError(f"{signature.op} has no attribute {name!r} in this TensorFlow")
        try:
            node.attr[name].CopyFrom(_attr_value(text, types[name]))
        except (ValueError, TypeError):
            raise UnmeasurableError(f"attribute {name} cannot be {text!r}") from None
    label(node)
    return node


def op_def_of(op: str) -> op_def_pb2.OpDef:
    op_def = op_def_registry.get(op)
    if op_def is None:
        raise UnmeasurableError(f"{op} is not an operation of this TensorFlow")
    return op_def


def arguments_of(
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


def is_parameter(argument: op_def_pb2.OpDef.ArgDef, tensor: TensorType) -> bool:
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
