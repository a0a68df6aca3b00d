"""Random generators that several plans of one step have in common.

TensorFlow's own random operations keep their state in the kernel, and so each
plan would have one of its own, where the plain step has one for all shapes of
a batch.  ``tf.random.Generator`` draws the same numbers, by the same Philox
generator (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC
2011), from a state that lies in a variable: counter and key.  The plans share
that variable.
"""

from __future__ import annotations

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, types_pb2

_PHILOX = 1  # its number among TensorFlow's algorithms
_FROM_VARIABLE = {
    "RandomUniform": "StatefulUniform",
    "RandomUniformInt": "StatefulUniformInt",
    "RandomStandardNormal": "StatefulStandardNormalV2",
    "TruncatedNormal": "StatefulTruncatedNormal",
}

Generators = dict[str, tf.Variable]
"""The states (int64, counter and key), by the name of the operation that draws."""


def share(graph_def: graph_pb2.GraphDef, generators: Generators) -> list[tuple[str, tf.Tensor]]:
    """Has random operations with seeds draw from variables; not those in loops and branches.

    Args:
      graph_def: an optimised step.
      generators: what other plans have; what is not there is added.

    Returns:
      The handles of the variables, each with the name of the node that stands for it.
    """
    captures = []
    states = graph_pb2.GraphDef()
    for node in graph_def.node:
        if node.op not in _FROM_VARIABLE:
            continue
        seed, other_seed = node.attr["seed"].i, node.attr["seed2"].i
        if not (seed or other_seed):
            continue  # every kernel starts somewhere else
        if node.name not in generators:
            with tf.init_scope():
                generators[node.name] = tf.Variable([0, other_seed, seed], dtype=tf.int64)
        variable = generators[node.name]
        state = states.node.add(name=f"{node.name}/generator", op="VarHandleOp")
        state.attr["dtype"].type = types_pb2.DT_INT64
        state.attr["shape"].shape.CopyFrom(variable.shape.as_proto())
        state.attr["shared_name"].s = state.name.encode()
        algorithm = states.node.add(name=f"{node.name}/algorithm", op="Const")
        algorithm.attr["dtype"].type = types_pb2.DT_INT64
        algorithm.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(_PHILOX, tf.int64))
        drawn = node.attr["dtype"].type or node.attr["Tout"].type
        sizes = node.attr["T"].type
        reads = [state.name, algorithm.name, *node.input]
        node.op = _FROM_VARIABLE[node.op]
        node.attr.clear()
        node.attr["dtype"].type, node.attr["shape_dtype"].type = drawn, sizes
        del node.input[:]
        node.input.extend(reads)
        captures.append((state.name, variable.handle))
    # In front: numbers are drawn when they were, and so sums are added in the same order.
    states.node.extend(graph_def.node)
    del graph_def.node[:]
    graph_def.node.extend(states.node)
    return captures
