"""Stage 1½: what a loop, a conditional or a call runs, it runs in the order in which its
memory is predicted, as far as that matters.

Inside a function TensorFlow runs whatever is ready, at once where it has threads for
it.  What a turn of a loop takes would be chance then: two gradients of convolutions that
each ask for scratch memory, or one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from .pieces import has_pieces, name_of
from .program import Kind, Program

_LARGE = 1e-2  # of the plain peak: by so much may a function's order move its memory


def chained_in_functions(
    program: Program,
    functions: Mapping[str, tuple[Program, Mapping[int, int]]],
    plain_peak: int,
) -> Program:
    """Puts a chain through the operations of functions that move much memory.

    Of those that move less, down to half as much, no more run at once than there are
    threads, in the given order: four gates of a turn may be read as they come or lie there
    together.  The others run at the same time, as they did: most turns of recurrent layers
    have no large operation, and waiting for each other would take them longer.

    Args:
      program: the step.
      functions: what it runs, by name, and the bytes of scratch memory of the operations.
      plain_peak: bytes, which say what is large.

    Returns:
      A program with another library; ``program`` itself if there is nothing to change.
    """
    threads = tf.config.threading.get_inter_op_parallelism_threads() or os.cpu_count() or 1
    large = _LARGE * plain_peak / max(1, threads - 1)
    changed = graph_pb2.GraphDef()
    changed.CopyFrom(program.library)
    count = 0
    for function in changed.library.function:
        nodes = {node.name: node for node in function.node_def}
        if function.signature.name not in functions or has_pieces(function.node_def):
            continue
        body, workspace = functions[function.signature.name]
        started: list[str] = []
        previous = None
        for index, op in enumerate(body.ops):
            if op.kind not in (Kind.PURE, Kind.ONCE) or op.name not in nodes:
                continue
            read = (body.ops[source].bytes[number] for source, number in op.inputs)
            moved = max(sum(op.bytes) + workspace.get(index, 0), *read, 0)
            if moved < large / 2:
                continue
            before = [started[-threads]] if len(started) >= threads else []
            if moved >= large:
                before += [previous] if previous is not None else []
                previous = op.name
            started.append(op.name)
            node = nodes[op.name]
            for name in dict.fromkeys(before):
                if name not in map(name_of, node.input):
                    node.input.append(f"^{name}")
                    count += 1
    return replace(program, library=changed) if count else program
