"""Stage 1⅛: rows of a variable are gathered from what is read of it.

``ResourceGather`` has its variable copied by whoever reads it whole or updates it
afterwards (its copy-on-read mode, ``resource_variable_ops.cc`` in TensorFlow's
source): with each update it would move to another place, and the copies would be in no
plan.  Gathering from what ``ReadVariableOp`` returns has the same bits, and can be
computed again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from tensorflow.core.framework import graph_pb2, types_pb2

from .pieces import constant_node
from .trace import Trace, branch_bodies, imported, loop_bodies

_FROM_VALUES = {"ResourceGather": "GatherV2", "ResourceGatherNd": "GatherNd"}


def gathered_from_reads(traced: Trace) -> Trace:
    """The step with a read and a gather in place of each gather from a variable; the trace
    itself if there are none.  ``pieces`` stays as TensorFlow runs it."""
    graph_def = graph_pb2.GraphDef()
    graph_def.CopyFrom(traced.graph_def)
    functions = graph_def.library.function
    count = _rewrite(graph_def.node, "", "")
    count += sum(_rewrite(function.node_def, ":value:0", ":output:0") for function in functions)
    if not count:
        return traced
    graph = imported(graph_def)
    return replace(
        traced,
        graph_def=graph_def,
        graph=graph,
        bodies=loop_bodies(graph, graph_def),
        branches=branch_bodies(graph, graph_def),
    )


def _rewrite(nodes: Any, value: str, output: str) -> int:
    """Replaces the gathers among some nodes; returns how many there were.

    Args:
      nodes: of a graph or a function.
      value, output: what comes after a node's name where its value is read, of a read and
        of a constant.
    """
    found = [node for node in nodes if node.op in _FROM_VALUES]
    for node in found:
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
    return len(found)
