"""Stage 1⅛: variables are not left in the mode in which whoever reads one copies it.

Gathering rows of a variable, or writing some, turns that mode on
(``resource_variable_ops.cc`` in TensorFlow's source).  Each update that is not of rows
would then move the variable to another place, each read would be a copy, and neither
would be in any plan.  So rows are gathered from what ``ReadVariableOp`` returns, which
has the same bits and can be computed again, and after rows are written the mode is
turned off.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
from tensorflow.core.framework import graph_pb2, types_pb2
from tensorflow.core.framework.node_def_pb2 import NodeDef

from .inplace import sharing
from .pieces import constant_node
from .trace import Trace, branch_bodies, imported, loop_bodies

_WRITES_ROWS = ("ResourceScatter", "ResourceStridedSliceAssign")  # beginnings of types
_FROM_VALUES = {"ResourceGather": "GatherV2", "ResourceGatherNd": "GatherNd"}


def without_copy_on_read(traced: Trace) -> Trace:
    """A step that does not turn the mode on, or not for long; the trace itself if it does not.
    ``pieces`` stays as TensorFlow runs it."""
    functions = (function.node_def for function in traced.graph_def.library.function)
    if not any(map(_turns_it_on, itertools.chain(traced.graph_def.node, *functions))):
        return traced
    graph_def = graph_pb2.GraphDef()
    graph_def.CopyFrom(traced.graph_def)
    _rewrite(graph_def.node, "", "")
    for function in graph_def.library.function:
        _rewrite(function.node_def, ":value:0", ":output:0")
    graph = imported(graph_def)
    return replace(
        traced,
        graph_def=graph_def,
        graph=graph,
        bodies=loop_bodies(graph, graph_def),
        branches=branch_bodies(graph, graph_def),
    )


def _turns_it_on(node: NodeDef) -> bool:
    return node.op in _FROM_VALUES or node.op.startswith(_WRITES_ROWS)


def _rewrite(nodes: Any, value: str, output: str) -> None:
    """Changes the nodes that turn the mode on.

    Args:
      nodes: of a graph or a function.
      value, output: what comes after a node's name where its value is read, of a read and
        of a constant.
    """
    for node in [*filter(_turns_it_on, nodes)]:
        if node.op in _FROM_VALUES:
            _gather_from_value(node, nodes, value, output)
        else:
            write = nodes.add()
            write.CopyFrom(node)
            write.name = f"{node.name}/write"
            # What waits for it waits for both.
            share = sharing()
            share.name, share.device = node.name, node.device
            share.input.extend([node.input[0], f"^{write.name}"])
            node.CopyFrom(share)


def _gather_from_value(node: NodeDef, nodes: Any, value: str, output: str) -> None:
    variable, indices, *controls = node.input
    dtype, index = node.attr["dtype"].type, node.attr["Tindices"].type
    batch = node.attr["batch_dims"].i if "batch_dims" in node.attr else 0
    read = nodes.add(name=f"{node.name}/read", op="ReadVariableOp", device=node.device)
    read.attr["dtype"].type = dtype
    read.input.extend([variable, *controls])
    node.op = _FROM_VALUES[node.op]
    del node.input[:]
    node.input.extend([f"{read.name}{value}", indices])
    for name in ("dtype", "validate_indices"):
        node.attr.pop(name, None)
    node.attr["Tparams"].type, node.attr["Tindices"].type = dtype, index
    if node.op == "GatherV2":
        axis = nodes.add()
        axis.CopyFrom(constant_node(f"{node.name}/axis", np.array(batch, np.int32)))
        axis.device = node.device
        node.attr["Taxis"].type = types_pb2.DT_INT32
        node.input.append(f"{axis.name}{output}")
