"""Makes conditionals that are in pieces whole again (``pieces`` says why).

In pieces, a ``Switch`` hands each value that a branch reads to one of its two
outputs, the operations of the other branch do not run, and a ``Merge`` takes
the result of the branch that has run.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, graph_pb2, types_pb2
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.framework.node_def_pb2 import NodeDef

from .pieces import (
    CALLS,
    LOWERED,
    SHAPES,
    UNINFERABLE,
    UnknownFormError,
    acts,
    as_function,
    in_order,
    name_of,
    parted,
)

CONDITIONALS = ("If", "StatelessIf", "Case", "StatelessCase")
_SWITCHES = ("Switch", "_SwitchN")  # into two branches, into any number
_HELD = "_remat_lowered"
# The name of an end says which conditional it is of.
_END = re.compile(r"(.+)/(?:output|merge|branch_executed)/_\d+")

# The branches that an operation is in, the outermost first: which tensor chooses, and its number.
_Place = tuple[tuple[tuple[str, int], int], ...]


def branches(operation: tf.Operation) -> list[attr_value_pb2.NameAttrList]:
    """The functions that are the branches of a conditional."""
    if operation.type.endswith("If"):
        return [operation.get_attr("else_branch"), operation.get_attr("then_branch")]
    return list(operation.get_attr("branches"))


def hold(graph_def: graph_pb2.GraphDef) -> None:
    """Has conditionals outside of loops stay whole where loops are broken into pieces."""
    _rename(graph_def, LOWERED, _HELD)


def release(graph_def: graph_pb2.GraphDef) -> None:
    """Undoes ``hold``."""
    _rename(graph_def, _HELD, LOWERED)


def _rename(graph_def: graph_pb2.GraphDef, old: str, new: str) -> None:
    functions = {function.signature.name: function for function in graph_def.library.function}
    waiting: list[Sequence[NodeDef]] = [graph_def.node]
    while waiting:  # the graph, and what it calls; not the bodies of loops
        for node in waiting.pop():
            if node.op in CONDITIONALS and old in node.attr:
                node.attr[new].CopyFrom(node.attr.pop(old))
            called = node.attr["f"].func.name if node.op in CALLS else node.op
            if called in functions:
                waiting.append(functions.pop(called).node_def)


def make_whole(graph_def: graph_pb2.GraphDef, keep: Iterable[str]) -> graph_pb2.GraphDef:
    """The graph with one ``If`` or ``Case`` for each conditional that is in pieces.

    Its functions are in the graph's library; in these those inside it are whole, too.

    Args:
      graph_def: without loops in pieces.
      keep: names of nodes that run whatever branches are taken.

    Raises:
      UnknownFormError: if a conditional is not of the form that is expected.
    """
    if not any(node.op in _SWITCHES for node in graph_def.node):
        return graph_def
    pieces = _Pieces(graph_def)
    for name in keep:
        if pieces.places[name]:
            raise UnknownFormError(f"{name} is in a branch")
    ends = {merge.name: one for one in pieces.conditionals() for merge in one.merges}
    whole = graph_pb2.GraphDef(library=graph_def.library, versions=graph_def.versions)
    for node in graph_def.node:
        one = ends.get(node.name)
        if one is None:
            if not pieces.places[node.name] and node.op not in _SWITCHES:
                whole.node.add().CopyFrom(node)
        elif one.name == node.name:
            branches = pieces.branches(one)
            pieces.as_one(whole.node.add(name=one.name), one, [first for first, *_ in branches])
            whole.library.function.extend(itertools.chain(*branches))
    for node in whole.node:
        for slot, reference in enumerate(node.input):
            name, number = parted(reference)
            if name in ends:
                one = ends[name]
                node.input[slot] = (
                    f"{one.name}:{one.results.index(name)}" if number >= 0 else f"^{one.name}"
                )
    in_order(whole)  # raises where two would wait for each other
    return whole


@dataclass(frozen=True)
class _Conditional:
    """One conditional in pieces.

    Attributes:
      test: the tensor that chooses.
      count: of the branches.
      nodes: what is in its branches, by name.
      merges: where the branches meet again.
      results: the names of those of them whose values are read.
      arguments: the tensors that the branches read.
      waits: the nodes that it comes after.
    """

    test: tuple[str, int]
    count: int
    nodes: dict[str, NodeDef]
    merges: list[NodeDef]
    results: list[str]
    arguments: list[tuple[str, int]]
    waits: list[str]

    @property
    def name(self) -> str:
        """That of the first ``Merge``, which is no more."""
        return self.merges[0].name


class _Pieces:
    """A graph with conditionals in pieces.

    Attributes:
      places: the branches that each node is in.
    """

    def __init__(self, graph_def: graph_pb2.GraphDef) -> None:
        self.graph_def = graph_def
        self.nodes = {node.name: node for node in graph_def.node}
        self.places: dict[str, _Place] = {}
        for node in in_order(graph_def):
            self.places[node.name] = self._place(node)
        handed = {node.name: node.input[0] for node in graph_def.node if self._hands_on(node)}
        for node in graph_def.node:
            inputs = list(node.input)
            del node.input[:]
            for reference in inputs:
                name, number = parted(reference)
                if name not in handed:
                    node.input.append(reference)
                elif number >= 0:
                    node.input.append(handed[name])
                else:  # which says that the branch runs: once what its switch waits for is done
                    switch = self.nodes[name_of(handed[name])]
                    node.input.extend(r for r in switch.input if parted(r)[1] < 0)
        for name, node in self.nodes.items():
            if self.places[name] and node.op not in UNINFERABLE:
                node.attr.pop(SHAPES, None)  # those before the rewriting
        self.graph = tf.Graph()
        with self.graph.as_default():
            tf.graph_util.import_graph_def(graph_def, name="")
        self.read = {parted(reference) for node in graph_def.node for reference in node.input}

    def _place(self, node: NodeDef) -> _Place:
        """The branches that a node is in: those of all that it reads."""
        places = [self._place_of(reference) for reference in node.input]
        if node.op == "Merge":
            values = places[: node.attr["N"].i]
            shortest = min(values, key=len)
            if any(len(value) > len(shortest) for value in values):
                # That is the value: the test is a constant, and the others are never there.
                if not shortest:
                    source = node.input[values.index(shortest)]
                    waits = [r for r in node.input if parted(r)[1] < 0 and not self._place_of(r)]
                    node.CopyFrom(_identity(node, source, waits))
                return shortest
            if not shortest:
                raise UnknownFormError(f"{node.name} merges what is in no branch")
            outer, (test, _) = values[0][:-1], values[0][-1]
            if len(set(values)) < len(values) or any(
                value[:-1] != outer or value[-1][0] != test for value in values
            ):
                raise UnknownFormError(f"{node.name} merges what is not in branches of one test")
            places = [outer, *(place[: len(outer)] for place in places)]
        longest = max(places, key=len, default=())
        if any(place != longest[: len(place)] for place in places):
            raise UnknownFormError(f"{node.name} is in two branches at once")
        return longest

    def _place_of(self, reference: str) -> _Place:
        """The branches that a value, or the end of an operation, is in."""
        name, number = parted(reference)
        node, place = self.nodes[name], self.places[name]
        if node.op == "Merge" and number > 0:
            raise UnknownFormError(f"{reference} is read: the number of the branch that ran")
        if node.op in _SWITCHES and number >= 0:
            place = (*place, (parted(node.input[1]), number))
        return place

    def _hands_on(self, node: NodeDef) -> bool:
        """Whether a node only hands on what a branch is given, or says that the branch runs."""
        if node.op != "Identity" or len(node.input) > 1:
            return False
        source = self.nodes[parted(node.input[0])[0]]
        return source.op in _SWITCHES and not self.places[source.name]

    def conditionals(self) -> list[_Conditional]:
        """The conditionals that are not inside others.

        What several need (equal operations are one by now) each computes for itself.
        """
        ends: dict[str, list[NodeDef]] = {}
        for node in self.graph_def.node:
            if node.op == "Merge" and not self.places[node.name]:
                found = _END.fullmatch(node.name)
                ends.setdefault(found[1] if found else node.name, []).append(node)
        conditionals = [self._conditional(merges) for merges in ends.values()]
        changed = [self._variables(filter(self._acts, one.nodes)) for one in conditionals]
        for name, place in self.places.items():
            if not place:
                continue
            several = [number for number, one in enumerate(conditionals) if name in one.nodes]
            if self._acts(name) and len(several) != 1:
                raise UnknownFormError(f"{name} is in {len(several)} conditionals")
            if len(several) > 1:
                read = self._variables([name])
                if any(not read.isdisjoint(changed[number]) for number in several):
                    raise UnknownFormError(f"{name} is read in two conditionals, and changed")
        return conditionals

    def _variables(self, names: Iterable[str]) -> set[tuple[str, int]]:
        """The handles that nodes take, as they are outside of all branches."""
        found = set()
        for name in names:
            for source, number in map(parted, self.nodes[name].input):
                if number < 0 or self._type(source, number) != types_pb2.DT_RESOURCE:
                    continue
                while self.nodes[source].op in ("Identity", *_SWITCHES):
                    source, number = parted(self.nodes[source].input[0])
                found.add((source, number))
        return found

    def _inside(self, names: Iterable[str]) -> set[str]:
        """Nodes in branches, and what they need that is in branches, too."""
        found: set[str] = set()
        waiting = [*names]
        while waiting:
            name = waiting.pop()
            if self.places[name] and name not in found:
                found.add(name)
                waiting += [source for source, _ in map(parted, self.nodes[name].input)]
        return found

    def _acts(self, name: str) -> bool:
        return acts(self.nodes[name], self.graph_def)

    def _conditional(self, merges: list[NodeDef]) -> _Conditional:
        """The conditional with some ends."""
        inside = self._inside(name for merge in merges for name, _ in map(parted, merge.input))
        nodes = {name: node for name, node in self.nodes.items() if name in inside}
        arguments, waits = [], []
        for reader in [*nodes.values(), *merges]:
            for name, number in map(parted, reader.input):
                if name in nodes:
                    continue
                source = self.nodes[name]
                if number < 0:
                    waits.append(name)
                else:
                    arguments.append(self._outside(name, number))
                if source.op in _SWITCHES:
                    waits += [other for other, edge in map(parted, source.input) if edge < 0]
        if any(self.nodes[name].op in _SWITCHES for name in waits):
            raise UnknownFormError(f"{merges[0].name} waits for a switch")
        return _Conditional(
            test=self._place_of(merges[0].input[0])[-1][0],
            count=merges[0].attr["N"].i,
            nodes=nodes,
            merges=merges,
            results=[merge.name for merge in merges if (merge.name, 0) in self.read],
            arguments=list(dict.fromkeys(arguments)),
            waits=list(dict.fromkeys(waits)),
        )

    def _outside(self, name: str, number: int) -> tuple[str, int]:
        """The tensor outside of all branches that a value is which comes into one."""
        node = self.nodes[name]
        return parted(node.input[0]) if node.op in _SWITCHES else (name, number)

    def branches(self, one: _Conditional) -> list[list[FunctionDef]]:
        """The branches as functions of the same arguments, each with those that it runs."""

        def within(references: Iterable[str]) -> list[str]:
            renamed = []
            for reference in references:
                name, number = parted(reference)
                if name in one.nodes:
                    renamed.append(reference)
                elif number >= 0:
                    argument = one.arguments.index(self._outside(name, number))
                    renamed.append(f"argument_{argument}:0")
            return renamed

        arguments = [(name, self._type(name, number)) for name, number in one.arguments]
        functions = []
        for number in range(one.count):
            place = (one.test, number)
            results = [
                reference
                for merge in one.merges
                for reference in merge.input[: one.count]
                if merge.name in one.results and self._place_of(reference)[-1] == place
            ]
            targets = [  # what is in conditionals inside this one is waited for by their ends
                name
                for name, node in one.nodes.items()
                if self.places[name] == (place,) and (node.op == "Merge" or self._acts(name))
            ]
            functions.append(
                as_function(
                    f"{one.name}_branch_{number}",
                    self.graph_def,
                    one.nodes,
                    arguments,
                    within,
                    results,
                    targets,
                    one.merges[0].device,
                    make_whole,
                )
            )
            if len(results) != len(one.results):
                raise UnknownFormError(f"{one.name} takes nothing from branch {number}")
        run = {node.name for function in itertools.chain(*functions) for node in function.node_def}
        for name in one.nodes:
            if name not in run and self._acts(name):
                raise UnknownFormError(f"{name} is in no branch of {one.name}")
        return functions

    def _type(self, name: str, number: int) -> int:
        kind: int = self.graph.get_tensor_by_name(f"{name}:{number}").dtype.as_datatype_enum
        return kind

    def as_one(self, node: NodeDef, one: _Conditional, branches: Sequence[FunctionDef]) -> None:
        """Makes a node the conditional."""
        names = [branch.signature.name for branch in branches]
        if self._type(*one.test) == types_pb2.DT_BOOL:
            node.op = "If"
            node.attr["Tcond"].type = types_pb2.DT_BOOL
            node.attr["else_branch"].func.name, node.attr["then_branch"].func.name = names
        else:
            node.op = "Case"
            for name in names:
                node.attr["branches"].list.func.add(name=name)
        if not any(branch.signature.is_stateful for branch in branches):
            node.op = f"Stateless{node.op}"
        node.input.extend("{}:{}".format(*tensor) for tensor in [one.test, *one.arguments])
        node.input.extend(f"^{name}" for name in one.waits)
        for attribute in ("Tin", "Tout", "output_shapes"):
            node.attr[attribute].list.SetInParent()  # they may be empty
        node.attr["Tin"].list.type.extend(self._type(*argument) for argument in one.arguments)
        for result in one.results:
            tensor = self.graph.get_tensor_by_name(f"{result}:0")
            node.attr["Tout"].list.type.append(tensor.dtype.as_datatype_enum)
            node.attr["output_shapes"].list.shape.append(tensor.shape.as_proto())
        node.attr[LOWERED].b = True


def _identity(merge: NodeDef, source: str, waits: Iterable[str]) -> NodeDef:
    """What takes the place of a ``Merge`` of one value."""
    node = NodeDef(name=merge.name, op="Identity", device=merge.device, input=[source, *waits])
    node.attr["T"].CopyFrom(merge.attr["T"])
    return node
