"""Puts the functions that a step calls into its graph, as TensorFlow does before it optimises.

Grappler, too, puts functions in place of their calls, and breaks loops and
conditionals into pieces, but it has everything in them wait for all that the
call reads.  The runtime has done so before, and lets operations wait for what
they read themselves; Grappler then rewrites other things.  So Grappler does it
alone first, what it adds is taken away, and only then it runs as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence

from tensorflow.core.framework import graph_pb2, types_pb2
from tensorflow.core.framework.node_def_pb2 import NodeDef
from tensorflow.core.framework.op_def_pb2 import OpDef
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2
from tensorflow.python.grappler import tf_optimizer

from .loops import LOOPS
from .pieces import CALLS, LOWERED, SHAPES, UNINFERABLE, name_of

_MARK = "remat_reads"  # in the names of identities before calls
_MARKED = re.compile(rf"(?P<path>.*{_MARK}_\d+)")
_START = "/input_control_node/"  # in the name of what a call's operations wait for


def inlined(
    graph_def: graph_pb2.GraphDef,
    config: config_pb2.ConfigProto,
    results: Sequence[str],
    keep: Sequence[str],
) -> graph_pb2.GraphDef:
    """The graph with functions in place of their calls, and control flow in pieces.

    Args:
      graph_def: the step.
      config: the settings in force.
      results, keep: as ``optimised`` takes them.
    """
    signatures = {
        function.signature.name: function.signature for function in graph_def.library.function
    }
    marked = graph_pb2.GraphDef()
    marked.CopyFrom(graph_def)
    marks, calls = _mark(marked.node, signatures, "")
    if not calls:
        return graph_def
    marked.node.extend(marks)
    for function in marked.library.function:
        function.node_def.extend(_mark(function.node_def, signatures, ":output:0")[0])
    alone = config_pb2.ConfigProto()
    alone.CopyFrom(config)
    alone.graph_options.rewrite_options.optimizers.append("function")
    found = optimised(marked, alone, results, [*keep, *calls])
    for nodes in (found.node, *(function.node_def for function in found.library.function)):
        kept = _unmark(nodes)
        del nodes[:]
        nodes.extend(kept)
    return found


def optimised(
    graph_def: graph_pb2.GraphDef,
    config: config_pb2.ConfigProto,
    results: Sequence[str],
    keep: Sequence[str],
) -> graph_pb2.GraphDef:
    """Runs Grappler.

    Args:
      results: names of nodes whose values are read.  (Grappler wants one; it may be any.)
      keep: names of nodes that are there afterwards.
    """
    meta_graph = meta_graph_pb2.MetaGraphDef()
    meta_graph.graph_def.CopyFrom(graph_def)
    # What is in a collection of any other name is kept, without anyone reading it.
    meta_graph.collection_def["train_op"].node_list.value.extend(results or keep[:1])
    meta_graph.collection_def["remat"].node_list.value.extend(keep)
    shapes = {
        node.name: node.attr[SHAPES]
        for node in graph_def.node
        if node.op in UNINFERABLE and SHAPES in node.attr
    }
    found = tf_optimizer.OptimizeGraph(config, meta_graph)
    for node in found.node:
        if node.name in shapes:
            node.attr[SHAPES].CopyFrom(shapes[node.name])
    return found


def _mark(
    nodes: Iterable[NodeDef], functions: Mapping[str, OpDef], output: str
) -> tuple[list[NodeDef], list[str]]:
    """Puts an identity, known by its name, before all that calls of functions read.

    Args:
      nodes: of a graph or a function.
      functions: those that there are.
      output: what an operation's name is followed by where its output is read.

    Returns:
      The identities, and the names of the calls.
    """
    marks, calls = [], []
    for node in nodes:
        types = _types_read(node, functions)
        if types is None:
            continue
        calls.append(node.name)
        for slot, kind in enumerate(types):
            mark = NodeDef(name=f"{node.name}/{_MARK}_{slot}", op="Identity")
            mark.input.append(node.input[slot])
            mark.attr["T"].type = kind
            node.input[slot] = f"{mark.name}{output}"
            marks.append(mark)
    return marks, calls


def _types_read(node: NodeDef, functions: Mapping[str, OpDef]) -> Sequence[int] | None:
    """The types of what a call reads; None for what is not to be put in place."""
    if node.op in functions:
        return [argument.type for argument in functions[node.op].input_arg]
    if node.op in CALLS:
        return node.attr["Tin"].list.type
    if LOWERED not in node.attr:  # reading it would put it there
        return None
    if node.op in LOOPS:
        return node.attr["T"].list.type
    first = node.attr["Tcond"].type if "Tcond" in node.attr else types_pb2.DT_INT32
    return [first, *node.attr["Tin"].list.type]


def _unmark(nodes: Sequence[NodeDef]) -> list[NodeDef]:
    """The nodes without the identities, and without what waits for these only."""
    sources = {
        node.name: node.input[0]
        for node in nodes
        if node.name.rpartition("/")[2].startswith(_MARK)  # others are named after these
    }
    kept = [node for node in nodes if node.name not in sources]
    for node in kept:
        for slot, reference in enumerate(node.input):
            while name_of(reference) in sources and not reference.startswith("^"):
                reference = sources[name_of(reference)]
            node.input[slot] = reference
        _stop_waiting(node, sources)
    _rename(kept, sources)
    while idle := {node.name for node in kept if _START in node.name and not node.input}:
        kept = [node for node in kept if node.name not in idle]
        for node in kept:
            _stop_waiting(node, idle)
    return kept


def _rename(nodes: Sequence[NodeDef], sources: Mapping[str, str]) -> None:
    """Names what is named after identities after what these read, as the runtime does.

    Grappler sorts the terms of sums by name, so that their last digits depend on names.
    """

    def renamed(name: str) -> str:
        found = _MARKED.match(name)
        if found is None:
            return name
        path = found["path"].split("/")
        paths = ("/".join(path[start:]) for start in range(len(path)))
        mark = next(path for path in paths if path in sources)
        before, after = found["path"].removesuffix(mark), name[found.end() :]
        return f"{before}{renamed(name_of(sources[mark]))}{after}"

    for node in nodes:
        node.name = renamed(node.name)
        for slot, reference in enumerate(node.input):
            name = name_of(reference)
            node.input[slot] = reference.replace(name, renamed(name), 1)


def _stop_waiting(node: NodeDef, names: Container[str]) -> None:
    kept = [r for r in node.input if not (r.startswith("^") and r[1:] in names)]
    if len(kept) < len(node.input):
        del node.input[:]
        node.input.extend(kept)
