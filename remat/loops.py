"""Makes loops that are in pieces whole again.

Before TensorFlow optimises a step it breaks each ``While`` into pieces
(``Enter``, ``Merge``, ``Switch``, ``NextIteration``, ``Exit``; Yu et al.,
"Dynamic Control Flow in Large-Scale Machine Learning", EuroSys 2018), and it
rewrites arithmetic across them: the last digits of what a loop computes depend
on it.  A graph in pieces cannot be scheduled, though: which of its operations
run, and how often, is known only while it runs.  So after the same rewriting
each loop becomes one operation again, of the very operations that are left.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, types_pb2
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.framework.node_def_pb2 import NodeDef
from tensorflow.python.framework import graph_to_function_def, op_def_registry

LOOPS = ("While", "StatelessWhile")
# TensorFlow's own names: to be broken into pieces; shapes, and those of variables.
LOWERED = "_lower_using_switch_merge"
_CONDITIONALS = ("If", "StatelessIf", "Case", "StatelessCase")
_SHAPES = "_output_shapes"
_HANDLE = {"_handle_dtypes", "_handle_shapes"}
_HELD = "_remat_lowered"


class UnknownLoopError(Exception):
    """A loop in pieces is not of the form that TensorFlow breaks loops into."""


def keep_shapes(graph_def: graph_pb2.GraphDef) -> bool:
    """Whether all values of all loops have the shapes with which they go in.

    Args:
      graph_def: before it is optimised, with the shapes of its outputs.
    """
    nodes = {node.name: node for node in graph_def.node}
    for node in graph_def.node:
        if node.op in LOOPS:
            types = node.attr["T"].list.type
            for slot, after in enumerate(node.attr["output_shapes"].list.shape):
                name, number = _parted(node.input[slot])
                if types[slot] == types_pb2.DT_RESOURCE:
                    continue
                source = nodes[name]
                if _SHAPES in source.attr:
                    before = source.attr[_SHAPES].list.shape[number]
                else:  # an argument
                    before = source.attr["shape"].shape
                if before != after:
                    return False
    # Of loops in functions it is not known with which shapes they are entered.
    return all(
        not shape.unknown_rank and all(dimension.size >= 0 for dimension in shape.dim)
        for function in graph_def.library.function
        for node in function.node_def
        if node.op in LOOPS
        for shape in node.attr["output_shapes"].list.shape
    )


def hold_conditionals(graph_def: graph_pb2.GraphDef) -> None:
    """Has conditionals outside of loops stay whole where loops are broken into pieces."""
    _rename(graph_def, LOWERED, _HELD)


def release_conditionals(graph_def: graph_pb2.GraphDef) -> None:
    """Undoes ``hold_conditionals``."""
    _rename(graph_def, _HELD, LOWERED)


def _rename(graph_def: graph_pb2.GraphDef, old: str, new: str) -> None:
    functions = {function.signature.name: function for function in graph_def.library.function}
    waiting: list[Sequence[NodeDef]] = [graph_def.node]
    while waiting:  # the graph, and what it calls; not the bodies of loops
        for node in waiting.pop():
            if node.op in _CONDITIONALS and old in node.attr:
                node.attr[new].CopyFrom(node.attr.pop(old))
            called = node.attr["f"].func.name if node.op.endswith("PartitionedCall") else node.op
            if called in functions:
                waiting.append(functions.pop(called).node_def)


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
      nodes: all that is in the frame, by name; what is in loops inside it, too.
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
            name, number = _parted(reference)
            if (name, number) in self.arguments:
                renamed.append(f"{self.arguments[name, number]}:0")
            elif name not in seams:
                renamed.append(reference)
            elif number >= 0:
                raise UnknownLoopError(f"{reference} is read in the loop {self.name}")
        return renamed


def make_whole(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """The graph with one ``While`` for each loop in pieces that is not inside another one.

    Its functions are in the graph's library.  Loops and conditionals
    inside it stay in pieces.  Values keep the shapes with which they go in
    (``keep_shapes`` says whether that is so).

    Raises:
      UnknownLoopError: if a loop is not of the form that is expected.
    """
    frames = _frames(graph_def)
    inside: dict[str, dict[str, NodeDef]] = {}
    for node in graph_def.node:
        if frames[node.name]:
            inside.setdefault(frames[node.name][0], {})[node.name] = node
    loops = [_loop(name, nodes, frames) for name, nodes in inside.items()]
    functions = [_functions(loop, graph_def) for loop in loops]
    whole = graph_pb2.GraphDef(library=graph_def.library, versions=graph_def.versions)
    whole.node.extend(node for node in graph_def.node if not frames[node.name])
    results: dict[str, tuple[str, int]] = {}
    for loop, both in zip(loops, functions, strict=True):
        _as_while(whole.node.add(name=loop.name), loop, *both)
        whole.library.function.extend(both)
        for node in loop.nodes.values():
            if node.op == "Exit" and frames[node.name] == (loop.name,):
                results[node.name] = loop.name, _number(loop, node)
    # Where all results of a loop were read at once, this had the loop's name.
    names = {node.name: f"{node.name}/results" for node in whole.node if node.name in inside}
    for node in whole.node:
        if node.op not in LOOPS:
            node.name = names.get(node.name, node.name)
        for slot, reference in enumerate(node.input):
            source, number = _parted(reference)
            if source in results or source in names:
                name, result = results.get(source) or (names[source], number)
                node.input[slot] = f"{name}:{result}" if number >= 0 else f"^{name}"
    return whole


def _parted(reference: str) -> tuple[str, int]:
    """The node and the output that a node reads; -1 for a control edge."""
    if reference.startswith("^"):
        return reference[1:], -1
    name, _, number = reference.partition(":")
    return name, int(number or 0)


def _frames(graph_def: graph_pb2.GraphDef) -> dict[str, tuple[str, ...]]:
    """The loops that each node is in, the outermost first.

    All inputs of a node are in the same; ``Enter`` leads into one, and what
    reads ``Exit`` is out of it.
    """
    readers: dict[str, list[NodeDef]] = {}
    for node in graph_def.node:
        for reference in node.input:
            readers.setdefault(_parted(reference)[0], []).append(node)
    frames: dict[str, tuple[str, ...]] = {
        node.name: () for node in graph_def.node if not node.input
    }
    waiting = deque(node for node in graph_def.node if not node.input)
    while waiting:
        node = waiting.popleft()
        frame = frames[node.name]
        for reader in readers.get(node.name, ()):
            if reader.name in frames:
                continue
            own = frame[:-1] if node.op == "Exit" else frame
            if reader.op == "Enter":
                own = (*own, reader.attr["frame_name"].s.decode())
            frames[reader.name] = own
            waiting.append(reader)
    if len(frames) < len(graph_def.node):
        raise UnknownLoopError("a cycle that no loop enters")
    return frames


def _loop(name: str, nodes: dict[str, NodeDef], frames: dict[str, tuple[str, ...]]) -> _Loop:
    """Finds the parts of a loop."""
    own = [node for node in nodes.values() if frames[node.name] == (name,)]
    changing, first, following = [], [], []
    for merge in own:
        if merge.op != "Merge":
            continue
        sources = [nodes[_parted(reference)[0]] for reference in merge.input]
        kinds = [source.op for source in sources]
        if kinds == ["Enter", "NextIteration"]:
            changing.append(merge)
            first.append(sources[0])
            following.append(sources[1])
        elif "NextIteration" in kinds:
            raise UnknownLoopError(f"{merge.name} merges {', '.join(kinds)}")
    conditions = [node for node in own if node.op == "LoopCond"]
    if len(conditions) != 1 or not changing:
        raise UnknownLoopError(f"{name}: {len(conditions)} conditions, {len(changing)} values")
    entered = {node.name for node in first}
    constant = [node for node in own if node.op == "Enter" and node.name not in entered]
    arguments = {(merge.name, 0): f"argument_{n}" for n, merge in enumerate(changing)}
    arguments |= {(e.name, 0): f"argument_{n}" for n, e in enumerate(constant, len(changing))}
    loop = _Loop(name, nodes, changing, first, following, constant, conditions[0], arguments)
    for node in own:
        if node.op == "Switch" and _parted(node.input[1])[0] == loop.condition.name:
            arguments[node.name, 1] = f"argument_{_number(loop, node)}"
    return loop


def _number(loop: _Loop, node: NodeDef) -> int:
    """Which of the changing values an ``Exit`` or a ``Switch`` is of."""
    while node.op in ("Exit", "Switch"):
        if node.op == "Switch" and _parted(node.input[1])[0] != loop.condition.name:
            break
        node = loop.nodes[_parted(node.input[0])[0]]
    for number, merge in enumerate(loop.changing):
        if merge.name == node.name:
            return number
    raise UnknownLoopError(f"{node.name} is not a value of the loop {loop.name}")


def _functions(loop: _Loop, graph_def: graph_pb2.GraphDef) -> tuple[FunctionDef, FunctionDef]:
    """A loop's condition and its body, functions of the same arguments."""
    condition = _function(loop, graph_def, "condition", [loop.condition.input[0]], [])
    results = [node.input[0] for node in loop.next]
    results += [f"{enter.name}:0" for enter in loop.constant]
    seams = loop.seams
    ends = [_parted(reference)[0] for node in loop.next for reference in node.input[1:]]
    targets = [name for name in dict.fromkeys(ends) if name not in seams]
    body = _function(loop, graph_def, "body", results, targets)
    tested, computed = ({node.name for node in one.node_def} for one in (condition, body))
    for node in loop.nodes.values():
        if node.op == "Exit" or node.name in seams or not _acts(node, graph_def):
            continue
        if (node.name in tested) == (node.name in computed):
            raise UnknownLoopError(f"{node.name} is not in one of the functions of {loop.name}")
    return condition, body


def _function(
    loop: _Loop,
    graph_def: graph_pb2.GraphDef,
    kind: str,
    results: Sequence[str],
    targets: Sequence[str],
) -> FunctionDef:
    """A function of what some tensors in a loop need, and of nodes that are to run as well."""
    part = graph_pb2.GraphDef(library=graph_def.library, versions=graph_def.versions)
    sources = {node.name: node for node in graph_def.node}
    for number, enter in enumerate(loop.entered):
        node = part.node.add(name=f"argument_{number}", op="_Arg")
        node.attr["T"].type, node.attr["index"].i = enter.attr["T"].type, number
        source = sources[_parted(enter.input[0])[0]]
        for attribute in _HANDLE.intersection(source.attr):
            node.attr[attribute].CopyFrom(source.attr[attribute])
    results = loop.within(results)
    needed = {node.name for node in part.node}
    waiting = [*results, *targets]
    while waiting:
        name, _ = _parted(waiting.pop())
        if name in needed:
            continue
        needed.add(name)
        node = part.node.add()
        node.CopyFrom(loop.nodes[name])
        for attribute in ("_class", _SHAPES):  # of the pieces
            node.attr.pop(attribute, None)
        if node.device == loop.first[0].device:  # the loop's own
            node.device = ""
        del node.input[:]
        node.input.extend(loop.within(loop.nodes[name].input))
        waiting += node.input
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(part, name="")
    tensor = graph.get_tensor_by_name
    made = graph_to_function_def.graph_to_function_def(
        graph,
        [operation for operation in graph.get_operations() if operation.type != "_Arg"],
        [tensor(f"argument_{number}:0") for number in range(len(loop.entered))],
        [tensor("{}:{}".format(*_parted(result))) for result in results],
    )
    made.signature.name = f"{loop.name.replace('/', '_')}_{kind}"
    for node in made.node_def:  # what is known of variables' shapes would be forgotten
        shapes = [t.shape.as_proto() for t in graph.get_operation_by_name(node.name).outputs]
        node.attr[_SHAPES].list.shape.extend(shapes)
    for target in targets:
        made.signature.control_output.append(target)
        made.control_ret[target] = target
    return made


def _acts(node: NodeDef, graph_def: graph_pb2.GraphDef) -> bool:
    """Whether it matters that an operation runs, and how often."""
    if node.op == "ReadVariableOp":
        return False
    for function in graph_def.library.function:
        if function.signature.name == node.op:
            return function.signature.is_stateful
    return op_def_registry.get(node.op).is_stateful


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
