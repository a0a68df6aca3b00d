"""What loops, conditionals and calls hold inside while they run.

To a schedule each of them is one operation.  The values of the functions that
it runs come and go within that one run, and so they are its scratch memory.
"""

from __future__ import annotations

import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.core.framework.function_pb2 import FunctionDef

from .conditionals import CONDITIONALS
from .loops import LOOPS
from .memory import creation_events, requests
from .pieces import CALLS, runs
from .program import Program, Tensor, build
from .trace import Trace, TraceError, function_graph, imported, loop_bodies, variable_node


def held_inside(program: Program) -> dict[int, int]:
    """Bytes that operations hold, beside their results, for the functions that they run.

    Of several branches that is the one that holds most, whichever is taken.  A
    turn of a loop holds its values beside the results, which are the turn
    before's.  What kernels in there ask for besides, and functions with a value
    whose shape is not known, or with a loop in pieces, count for nothing.

    Returns:
      The bytes, by operation, where there are any.
    """
    library = {function.signature.name: function for function in program.library.library.function}
    found = {}
    for index, op in enumerate(program.ops):
        if op.type not in (*LOOPS, *CONDITIONALS, *CALLS, *library):
            continue
        functions = [library[name] for name in runs(program.nodes[index]) if name in library]
        most = max((_most(program, op.inputs, function) for function in functions), default=0)
        if op.type not in LOOPS:
            most -= sum(op.bytes)
        if most > 0:
            found[index] = most
    return found


def _most(program: Program, inputs: tuple[Tensor, ...], function: FunctionDef) -> int:
    """The most bytes that a function's own values take at once."""
    if any(node.op == "NextIteration" for node in function.node_def):
        return 0
    # What is in front of its arguments chooses among the branches.
    given = inputs[len(inputs) - len(function.signature.input_arg) :]
    try:
        body = build(_traced(program, given, function))
    except TraceError:
        return 0
    asked = requests(body, creation_events(body), held_inside(body))
    return max(asked.timeline(0), default=0)


def _traced(program: Program, given: tuple[Tensor, ...], function: FunctionDef) -> Trace:
    """A function as a step of its own, for the arguments that it is given."""
    external = dict(program.captures)
    shapes = [tf.TensorShape(program.ops[source].shapes[number]) for source, number in given]
    arguments = [argument.name for argument in function.signature.input_arg]
    graph_def, tensors = function_graph(function, shapes, program.library.library.function)
    captured = {
        name: external[source]
        for name, (source, _) in zip(arguments, given, strict=True)
        if source in external and source in program.variables
    }
    for node in graph_def.node:
        if node.name in captured and node.attr["dtype"].type == types_pb2.DT_RESOURCE:
            spec = program.variables[given[arguments.index(node.name)][0]]
            shape = spec.shape.as_proto()
            node.CopyFrom(variable_node(node.name, spec.dtype.as_datatype_enum, shape))
    graph = imported(graph_def)
    inputs = tuple(name for name in arguments if name not in captured)
    return Trace(
        graph_def=graph_def,
        graph=graph,
        bodies=loop_bodies(graph, graph_def),
        inputs=inputs,
        captures=tuple(captured.items()),
        outputs=tuple(
            tensors[function.ret[result.name]] for result in function.signature.output_arg
        ),
        targets=tuple(function.control_ret.values()),
        structured_outputs=None,
        pieces=graph_def,
        sources=inputs,
        taking=None,
    )
