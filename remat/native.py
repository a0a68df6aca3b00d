"""oneDNN's own operations, and the fused convolutions that TensorFlow makes one of at run time.

Grappler fuses a convolution of bfloat16 with what follows it into a ``_FusedConv2D``, which
is no operation of that type until the runtime puts oneDNN's in its place
(``mkl_layout_pass.cc`` in TensorFlow's source).  Python refuses such a graph, so the one
is put in place of the other here.
"""

from __future__ import annotations

import itertools

from tensorflow.core.framework import graph_pb2, node_def_pb2, types_pb2

# The gradients of a convolution's kernel and of its bias as one (``onednn``).
MERGED = "_MklNativeConv2DBackpropFilterWithBias"
_FUSED, _NATIVE = "_FusedConv2D", "_MklNativeFusedConv2D"


def name_fused_convolutions(graph_def: graph_pb2.GraphDef) -> None:
    """Makes of each fused convolution of bfloat16 what the runtime would make of it."""
    functions = (function.node_def for function in graph_def.library.function)
    for node in itertools.chain(graph_def.node, *functions):
        if node.op == _FUSED and node.attr["T"].type == types_pb2.DT_BFLOAT16:
            node.op = _NATIVE
            label(node)


def label(node: node_def_pb2.NodeDef) -> None:
    """Names the kernel of a node, where it has to be named to be found."""
    if node.op in (MERGED, _NATIVE):
        node.attr["_kernel"].s = b"MklNameChangeOp"
