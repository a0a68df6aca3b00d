"""Makes loops that are in pieces whole again (``pieces`` says why)."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tensorflow.core.framework import graph_pb2, types_pb2
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.framework.node_def_pb2 import NodeDef
from tensorflow.python.framework import function_def_to_graph

from . import conditionals
from .pieces import LOWERED, SHAPES, UnknownFormError, acts, as_function, parted, readers

LOOPS = ("While", "StatelessWhile")


def keep_shapes(graph_def: graph_pb2.GraphDef) -> bool:
    """Whether all values of all loops have the shapes with which they go in.

    Args:
      graph_def: before it is optimised, with the shapes of all outputs, and of
        the arguments of its functions.
    """
    graphs = [graph_def]
    for function in graph_def.library.function:
        if any(node.op in LOOPS for node in function.node_def):
            shapes = function.attr["_input_shapes"].list.shape
            graphs.append(function_def_to_graph.function_def_to_graph_def(function, shapes)[0])
    return all(_keeps_shapes(graph) for graph in graphs)


def _keeps_shapes(graph_def: graph_pb2.GraphDef) -> bool:
    nodes = {node.name: node for node in graph_def.node}
    for node in graph_def.node:
        if node.op in LOOPS:
            types = node.attr["T"].list.type
            for slot, after in enumerate(node.attr["output_shapes"].list.shape):
                name, number = parted(node.input[slot])
                if types[slot] == types_pb2.DT_RESOURCE:
                    continue
                source = nodes[name]
                if SHAPES in source.attr:
                    before = source.attr[SHAPES].list.shape[number]
                else:  # an argument
                    before = source.attr["shape"].shape
                if before != after:
                    return False
    return True


def one_turn_at_a_time(graph_def: graph_pb2.GraphDef) -> None:
    """Has every loop, those inside functions included, end a turn before the next begins.

    TensorFlow lets up to 32 turns overlap where they do not wait for each other.
    How many do is chance, and each holds memory of its own; the values are the same.
    """
    functions = (function.node_def for function in graph_def.library.function)
    for node in itertools.chain(graph_def.node, *functions):
        if "parallel_iterations" in node.attr:  # of loops, whole or in pieces
            node.attr["parallel_iterations"].i = 1


@dataclass(frozen=True)
class _Loop:
    """One loop in pieces.

    Attributes:
      name: of its frame.
      nodes: all that is in the frame, by name; loops inside it are whole.
      changing: of each value that changes, its ``Merge``.
      first, next: of each of these, its ``Enter`` and its ``NextIteration``.
      constant: ``Enter`` of each value that does not change.
      condition: the ``LoopCond``.
      arguments: of its functions, by the tensor that each is in the frame.
    """

    name: str
    nodes: dict[str, NodeDef]
    changing: list[NodeDef]
    first: list[NodeDef]
    next: list[NodeDef]
    constant: list[NodeDef]
    condition: NodeDef
    arguments: dict[tuple[str, int], str]

    @property
    def entered(self) -> list[NodeDef]:
        """``Enter`` of each value, in the order of the arguments."""
        return [*self.first, *self.constant]

    @property
    def seams(self) -> set[str]:
        """The nodes that hold the pieces together, which functions do without."""
        names = {name for name, _ in self.arguments} | {self.condition.name}
        return names | {node.name for node in self.next}

    def within(self, references: Iterable[str]) -> list[str]:
        """What a node reads, as the same node of a function reads it."""
        renamed, seams = [], self.seams
        for reference in references:
            name, number = parted(reference)
            if (name, number) in self.arguments:
                renamed.append(f"{self.arguments[name, number]}:0")
            elif name not in seams:
                renamed.append(reference)
            elif number >= 0:
                raise UnknownFormError(f"{reference} is read in the loop {self.name}")
        return renamed


def make_whole(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """The graph with one ``While`` for each loop in pieces.

    Its functions are in the graph's library; in these loops and conditionals are
    whole, too.  Values keep the shapes with which
    they go in (``keep_shapes`` says whether that is so).

    Raises:
      UnknownFormError: if a loop is not of the form that is expected.
    """
    whole = graph_pb2.GraphDef()
    whole.CopyFrom(graph_def)
    while innermost := _innermost(whole):
        whole = _with_whole(whole, innermost)
    return whole


def _innermost(graph_def: graph_pb2.GraphDef) -> dict[str, dict[str, NodeDef]]:
    """The nodes of the loops in pieces that are inside the most others, by name."""
    places = frames(graph_def)
    depth = max(map(len, places.values()), default=0)
    found: dict[str, dict[str, NodeDef]] = {}
    for node in graph_def.node:
        if depth and len(places[node.name]) == depth:
            found.setdefault(places[node.name][-1], {})[node.name] = node
    return found


def _with_whole(
    graph_def: graph_pb2.GraphDef, inside: Mapping[str, dict[str, NodeDef]]
) -> graph_pb2.GraphDef:
    """The graph with one ``While`` for each of some loops, given with the nodes of each."""
    loops = [_loop(name, nodes) for name, nodes in inside.items()]
    functions = [_functions(loop, graph_def) for loop in loops]
    whole = graph_pb2.GraphDef(library=graph_def.library, versions=graph_def.versions)
    pieces = {name for nodes in inside.values() for name in nodes}
    whole.node.extend(node for node in graph_def.node if node.name not in pieces)
    results: dict[str, tuple[str, int]] = {}
    for loop, both in zip(loops, functions, strict=True):
        # What was around the loop is named after it, and so would be what the runtime puts
        # around it when it breaks it into pieces again.
        name = f"{loop.name}/whole"
        _as_while(whole.node.add(name=name), loop, *(first for first, *_ in both))
        whole.library.function.extend(itertools.chain(*both))
        for node in loop.nodes.values():
            if node.op == "Exit":
                results[node.name] = name, _number(loop, node)
    for node in whole.node:
        for slot, reference in enumerate(node.input):
            source, number = parted(reference)
            if source in results:
                name, result = results[source]
                node.input[slot] = f"{name}:{result}" if number >= 0 else f"^{name}"
    return whole


def frames(graph_def: graph_pb2.GraphDef) -> dict[str, tuple[str, ...]]:
    """The loops in pieces that each node is in, the outermost first.

    All inputs of a node are in the same; ``Enter`` leads into one, and what
    reads ``Exit`` is out of it.
    """
    reading = readers(graph_def)
    found: dict[str, tuple[str, ...]] = {node.name: () for node in graph_def.node if not node.input}
    waiting = deque(node for node in graph_def.node if not node.input)
    while waiting:
        node = waiting.popleft()
        frame = found[node.name]
        for reader in reading[node.name]:
            if reader.name in found:
                continue
            own = frame[:-1] if node.op == "Exit" else frame
            if reader.op == "Enter":
                own = (*own, reader.attr["frame_name"].s.decode())
            found[reader.name] = own
            waiting.append(reader)
    if len(found) < len(graph_def.node):
        raise UnknownFormError("a cycle that no loop enters")
    return found


def _loop(name: str, nodes: dict[str, NodeDef]) -> _Loop:
    """Finds the parts of a loop."""
    own = nodes.values()
    changing, first, following = [], [], []
    for merge in own:
        if merge.op != "Merge":
            continue
        sources = [nodes[parted(reference)[0]] for reference in merge.input]
        kinds = [source.op for source in sources]
        if kinds == ["Enter", "NextIteration"]:
            changing.append(merge)
            first.append(sources[0])
            following.append(sources[1])
        elif "NextIteration" in kinds:
            raise UnknownFormError(f"{merge.name} merges {', '.join(kinds)}")
    conditions = [node for node in own if node.op == "LoopCond"]
    if len(conditions) != 1 or not changing:
        raise UnknownFormError(f"{name}: {len(conditions)} conditions, {len(changing)} values")
    entered = {node.name for node in first}
    constant = [node for node in own if node.op == "Enter" and node.name not in entered]
    arguments = {(merge.name, 0): f"argument_{n}" for n, merge in enumerate(changing)}
    arguments |= {(e.name, 0): f"argument_{n}" for n, e in enumerate(constant, len(changing))}
    loop = _Loop(name, nodes, changing, first, following, constant, conditions[0], arguments)
    for node in own:
        if node.op == "Switch" and parted(node.input[1])[0] == loop.condition.name:
            arguments[node.name, 1] = f"argument_{_number(loop, node)}"
    return loop


def _number(loop: _Loop, node: NodeDef) -> int:
    """Which of the changing values an ``Exit`` or a ``Switch`` is of."""
    while node.op in ("Exit", "Switch"):
        if node.op == "Switch" and parted(node.input[1])[0] != loop.condition.name:
            break
        node = loop.nodes[parted(node.input[0])[0]]
    for number, merge in enumerate(loop.changing):
        if merge.name == node.name:
            return number
    raise UnknownFormError(f"{node.name} is not a value of the loop {loop.name}")


def _functions(
    loop: _Loop, graph_def: graph_pb2.GraphDef
) -> tuple[list[FunctionDef], list[FunctionDef]]:
    """A loop's condition and its body, functions of the same arguments, each with those that it
    runs."""
    condition = _function(loop, graph_def, "condition", [loop.condition.input[0]], [])
    results = [node.input[0] for node in loop.next]
    results += [f"{enter.name}:0" for enter in loop.constant]
    seams = loop.seams
    ends = [parted(reference)[0] for node in loop.next for reference in node.input[1:]]
    targets = [name for name in dict.fromkeys(ends) if name not in seams]
    body = _function(loop, graph_def, "body", results, targets)
    tested, computed = (
        {node.name for function in functions for node in function.node_def}
        for functions in (condition, body)
    )
    for node in loop.nodes.values():
        if node.op == "Exit" or node.name in seams or not acts(node, graph_def):
            continue
        if (node.name in tested) == (node.name in computed):
            raise UnknownFormError(f"{node.name} is not in one of the functions of {loop.name}")
    return condition, body


def _function(
    loop: _Loop,
    graph_def: graph_pb2.GraphDef,
    kind: str,
    results: Sequence[str],
    targets: Sequence[str],
) -> list[FunctionDef]:
    """A function of what some tensors in a loop need, and of nodes that are to run as well."""
    arguments = [(parted(enter.input[0])[0], enter.attr["T"].type) for enter in loop.entered]
    device = loop.first[0].device
    name = f"{loop.name}_{kind}"
    return as_function(
        name,
        graph_def,
        loop.nodes,
        arguments,
        loop.within,
        results,
        targets,
        device,
        conditionals.make_whole,
    )


def _as_while(node: NodeDef, loop: _Loop, condition: FunctionDef, body: FunctionDef) -> None:
    """Makes a node the loop, whose outputs are its changing and then its constant values."""
    entered = loop.entered
    stateful = condition.signature.is_stateful or body.signature.is_stateful
    node.op = "While" if stateful else "StatelessWhile"
    node.input.extend(enter.input[0] for enter in entered)
    node.input.extend(dict.fromkeys(c for enter in entered for c in enter.input[1:]))
    node.attr["T"].list.type.extend(enter.attr["T"].type for enter in entered)
    node.attr["output_shapes"].list.SetInParent()  # those with which the values go in
    node.attr["cond"].func.name = condition.signature.name
    node.attr["body"].func.name = body.signature.name
    node.attr["parallel_iterations"].i = entered[0].attr["parallel_iterations"].i
    node.attr[LOWERED].b = True
