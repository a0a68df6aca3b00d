"""Stage 1½: functions of a step hold no large constant that is one number, many times.

TensorFlow holds a constant of a function that an operation calls for as long as the
process runs, and makes one of whatever can be computed from constants alone when the
function is first called.  Grappler leaves zeros in the gradients of loops.
"""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, types_pb2
from tensorflow.core.framework.node_def_pb2 import NodeDef

from .arena import GRAIN
from .pieces import constant_node
from .program import Program

_FILLED = (tf.float16, tf.bfloat16, tf.float32, tf.float64)  # types that every device fills with
# The mark of what shares a buffer with other operations: one with this attribute is not
# folded, whatever it says (IsConstantFoldable in constant_folding.cc), and this one says
# that no output does.
_UNFOLDED = "_scoped_allocator"


def keep_unfolded(node: NodeDef) -> None:
    """Has an operation run each time, though it reads constants only."""
    node.attr[_UNFOLDED].list.SetInParent()


def repeated(node: NodeDef | None) -> np.ndarray | None:
    """The number that a constant is full of, as an array of no dimensions; None if it is
    not, or if it is empty."""
    if node is None or node.op != "Const":
        return None
    array = tf.make_ndarray(node.attr["value"].tensor)
    element = array.reshape(-1)[:1]
    same = array.tobytes() == element.tobytes() * array.size
    return element.reshape(()) if same and array.size else None


def filled_in_functions(program: Program) -> graph_pb2.GraphDef:
    """The functions of a step, with large constants of one number filled each time.

    Returns:
      A new library; the program's own if there is nothing to change.
    """
    changed = graph_pb2.GraphDef()
    changed.CopyFrom(program.library)
    count = 0
    for function in changed.library.function:
        for node in list(function.node_def):
            added = _fill(node)
            function.node_def.extend(added)
            count += len(added)
    return changed if count else program.library


def _fill(node: NodeDef) -> list[NodeDef]:
    """Fills what is a large constant; returns the operations that it then reads."""
    if node.op != "Const":
        return []
    value = node.attr["value"].tensor
    if tf.as_dtype(value.dtype) not in _FILLED:
        return []
    shape = [dimension.size for dimension in value.tensor_shape.dim]
    element = repeated(node)
    if element is None or math.prod(shape) * element.itemsize < GRAIN:
        return []
    added = [
        constant_node(f"{node.name}/dims", np.array(shape, np.int32)),
        constant_node(f"{node.name}/element", element),
    ]
    filling = NodeDef(name=node.name, op="Fill", device=node.device)
    filling.input.extend([*(f"{each.name}:output:0" for each in added), *node.input])
    filling.attr["T"].type, filling.attr["index_type"].type = value.dtype, types_pb2.DT_INT32
    keep_unfolded(filling)
    for each in added:
        each.device = node.device
    node.CopyFrom(filling)
    return added
