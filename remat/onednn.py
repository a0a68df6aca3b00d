"""Stage 1¼: what oneDNN merges at run time is one operation from here on.

On a CPU with oneDNN, TensorFlow runs the gradients of a convolution's kernel
and of its bias as one (``mkl_layout_pass.cc`` in TensorFlow's source; the other
merges Grappler has made already).  The merged kernel adds in an order of its
own, so a step that keeps the two apart differs from the plain one in the last
digits.  And TensorFlow merges without regard for control edges: between the
two there must be none.  So they are scheduled as one operation, which is
lowered to the two, for TensorFlow to merge.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2
from tensorflow.python.framework import op_def_registry
from tensorflow.python.util import _pywrap_util_port

from .device import default_device
from .native import MERGED
from .program import Kind, Op, Program, Tensor

_KERNEL, _BIAS = "Conv2DBackpropFilter", "BiasAddGrad"
_GRADIENT = {_KERNEL: 2, _BIAS: 0}  # the input that both read
_ATTRIBUTES = ("T", "strides", "use_cudnn_on_gpu", "padding", "data_format", "dilations")


def merge_bias_gradients(program: Program) -> Program:
    """Makes one operation of each ``Conv2DBackpropFilter`` and the ``BiasAddGrad`` beside it.

    Returns:
      A program that computes what TensorFlow would make of this one; ``program``
      itself where it would merge nothing.
    """
    merges = default_device().startswith("CPU") and _pywrap_util_port.IsMklEnabled()
    if not merges or op_def_registry.get(MERGED) is None:
        return program
    readers: dict[Tensor, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, op in enumerate(program.ops):
        if (
            op.kind is Kind.PURE
            and op.type in _GRADIENT
            and op.dtypes[0] in (tf.float32, tf.bfloat16)
        ):
            readers[op.inputs[_GRADIENT[op.type]]][op.type].append(index)
    merged = {
        bias: kernel
        for found in readers.values()
        for bias, kernel in zip(found[_BIAS], found[_KERNEL], strict=False)
        if len(found[_BIAS]) == len(found[_KERNEL]) == 1
        and _fit(program.nodes[kernel], program.nodes[bias])
    }
    return _rewritten(program, merged) if merged else program


def unmerge(node: node_def_pb2.NodeDef, bias: node_def_pb2.NodeDef) -> None:
    """Makes the two nodes of a merged one; ``bias`` becomes that of its second output."""
    node.op = _KERNEL
    bias.name, bias.op = second_name(node.name), _BIAS
    for name in ("T", "data_format"):
        bias.attr[name].CopyFrom(node.attr[name])
    bias.input.append(node.input[_GRADIENT[_KERNEL]])
    bias.input.extend(name for name in node.input if name.startswith("^"))


def second_name(name: str) -> str:
    """The name of the node that a merged node's second output comes from."""
    return f"{name}/bias"


def _fit(kernel: node_def_pb2.NodeDef, bias: node_def_pb2.NodeDef) -> bool:
    return (
        kernel.attr["padding"].s in (b"SAME", b"VALID")
        and kernel.attr["data_format"].s == bias.attr["data_format"].s
    )


def _rewritten(program: Program, merged: dict[int, int]) -> Program:
    """The program with merged operations: index of a bias's gradient -> of its kernel's."""
    ops: list[Op] = []
    nodes: list[node_def_pb2.NodeDef] = []
    biases = {kernel: bias for bias, kernel in merged.items()}
    moved: dict[int, Tensor] = {}  # where each operation's first output is now

    def tensor(source: int, number: int) -> Tensor:
        new, first = moved[source]
        return new, first + number

    def add(index: int) -> None:
        """Adds an operation after what it reads."""
        index = merged.get(index, index)
        op, node = program.ops[index], program.nodes[index]
        if index in moved:
            return
        for source in (*(source for source, _ in op.inputs), *op.controls):
            add(source)
        inputs = tuple(tensor(*read) for read in op.inputs)
        controls = tuple(sorted(moved[effect][0] for effect in op.controls))
        op = replace(op, inputs=inputs, controls=controls)
        moved[index] = len(ops), 0
        if index in biases:
            bias = program.ops[biases[index]]
            moved[biases[index]] = len(ops), len(op.bytes)
            op = replace(
                op,
                type=MERGED,
                bytes=op.bytes + bias.bytes,
                shapes=op.shapes + bias.shapes,
                dtypes=op.dtypes + bias.dtypes,
            )
            attributes = {name: node.attr[name] for name in _ATTRIBUTES if name in node.attr}
            node = node_def_pb2.NodeDef(name=node.name, op=MERGED, attr=attributes)
        ops.append(op)
        nodes.append(node)

    for index in range(len(program.ops)):
        add(index)
    return program.rewritten(ops, nodes, moved)
