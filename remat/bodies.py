"""What loops, conditionals and calls run inside.

To a schedule each of them is one operation.  The values of the functions that
it runs come and go within that one run, and so they are its scratch memory; and
it takes as long as their operations do, in every turn of a loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework.function_pb2 import FunctionDef

from .conditionals import CONDITIONALS
from .loops import LOOPS
from .memory import creation_events, requests
from .pieces import CALLS, SHAPES, has_pieces, in_order, parted, runs
from .program import LIST_WRITES, Kind, Op, Program, Tensor, build
from .trace import Trace, TraceError, branch_bodies, function_graph, imported, loop_bodies


@dataclass(frozen=True)
class Inside:
    """What one operation runs.

    Attributes:
      functions: by name, each as a program of its own, and what its operations run, by
        their index.  Those with a value whose shape is not known are left out.
      turns: how often they run (of a conditional, one of them does); None if nothing
        says so before the step runs.
      complete: whether no function is left out.
    """

    functions: Mapping[str, tuple[Program, Mapping[int, Inside]]]
    turns: int | None
    complete: bool

    @property
    def times(self) -> int:
        """How often they run as far as is known: at least once, if nothing is."""
        return 1 if self.turns is None else self.turns


def inside(program: Program) -> dict[int, Inside]:
    """What each loop, conditional and call of a program runs, by its index."""
    return _inside(_Place(program, {}, {}), {})[0]


def known_turns(program: Program) -> dict[str, int]:
    """How many turns loops take, those inside others included, by name, where it is known and
    lists of open length are filled."""
    return _known_turns(program, inside(program)) if _fills_lists(program) else {}


def _known_turns(program: Program, found: Mapping[int, Inside]) -> dict[str, int]:
    known: dict[str, set[int]] = {}
    for name, turns in _all_turns(program, found):
        known.setdefault(name, set()).add(turns)
    # A function that is called twice may have loops of one name and of different lengths.
    return {name: turns.pop() for name, turns in known.items() if len(turns) == 1}


def _all_turns(program: Program, found: Mapping[int, Inside]) -> Iterator[tuple[str, int]]:
    for index, each in found.items():
        for function in each.functions.values():
            yield from _all_turns(*function)
        if each.turns is not None and program.ops[index].type in LOOPS:
            yield program.ops[index].name, each.turns


def _fills_lists(program: Program) -> bool:
    return any(op.type == "EmptyTensorList" for op in program.ops)


@dataclass(frozen=True)
class _Part:
    """What is known of each part of a list: its shape, and what it is a list of, if it is one."""

    shape: tuple[int, ...]
    parts: _Part | None = None


def _inside(
    here: _Place, given: Mapping[str, _Part]
) -> tuple[dict[int, Inside], dict[Tensor, _Part]]:
    """What operations run, and the parts of lists.

    Args:
      here: the operations; their loops are added to it.
      given: by the name of an argument that is a list, its parts.
    """
    program = here.program
    library = {function.signature.name: function for function in program.library.library.function}
    found: dict[int, Inside] = {}
    parts: dict[Tensor, _Part] = {}
    for index, op in enumerate(program.ops):
        part = given.get(op.name) if op.kind is Kind.ARGUMENT else _part(program, op, parts)
        if part is not None:
            parts[index, 0] = part
            if part.parts is not None and op.type == "TensorListPopBack":
                parts[index, 1] = part.parts
        if op.type not in (*LOOPS, *CONDITIONALS, *CALLS, *library):
            continue
        attributes = program.nodes[index].attr
        condition = attributes["cond"].func.name if op.type in LOOPS else None
        functions: dict[str, _Place | None] = {}
        read: dict[str, tuple[Program, Mapping[int, Inside]]] = {}
        for name in runs(program.nodes[index]):
            if name not in library or name in functions:
                continue
            # What is in front of its arguments chooses among the branches.
            names = _arguments(library[name])
            inputs = op.inputs[len(op.inputs) - len(names) :]
            lists = {
                argument: parts[tensor]
                for argument, tensor in zip(names, inputs, strict=True)
                if tensor in parts
            }
            try:
                traced = _traced(program, inputs, library[name], lists)
                body = build(traced)
            except TraceError:
                functions[name] = None
                continue
            arguments = {} if name == condition else dict(zip(names, inputs, strict=True))
            numbers = _numbers_given(here, arguments, body if condition else None)
            place = functions[name] = _Place(body, {}, numbers)
            within, made = _inside(place, lists)
            if _fills_lists(body):
                body = build(traced, turns=_known_turns(body, within))
            read[name] = (body, within)
            for number, tensor in enumerate(body.outputs):
                if tensor in made and len(body.outputs) == len(op.bytes):
                    parts[index, number] = made[tensor]
        turns: int | None = 1
        if condition:
            body_name = attributes["body"].func.name
            here.loops[index] = _Loop(
                op.inputs,
                functions[condition],
                functions[body_name],
                (_arguments(library[condition]), _arguments(library[body_name])),
            )
            turns = _turns(here, here.loops[index])
        complete = None not in functions.values()
        found[index] = Inside(read, turns, complete)
    return found, parts


# What hands a list on.
_HAND_ON = ("TensorListPopBack", "ZerosLike", "AddN", "TensorListResize")


def _part(program: Program, op: Op, parts: Mapping[Tensor, _Part]) -> _Part | None:
    """The parts of the list that an operation returns, if known."""
    if op.type in LIST_WRITES:
        source, number = written = op.inputs[LIST_WRITES[op.type]]
        return _Part(program.ops[source].shapes[number], parts.get(written))
    if op.type == "TensorListFromTensor":
        source, number = op.inputs[0]
        return _Part(program.ops[source].shapes[number][1:])
    return parts.get(op.inputs[0]) if op.type in _HAND_ON else None


def held_inside(
    program: Program, index: int, functions: Iterable[tuple[Program, Mapping[int, int]]]
) -> int:
    """Bytes that an operation holds, beside its results, for the functions that it runs.

    Of several branches that is the one that holds most, whichever is taken; it
    gives up what it is given when it has read it.  A turn of a loop holds its
    values beside those of the turn before.  These are the results, but in the
    first turn, and each turn before has freed what it has taken from lists, which
    was there before it was taken; what a turn adds to lists is part of the results.

    Args:
      program: the operations.
      index: of the operation.
      functions: each, and the bytes that its operations hold only while they run.
    """
    op = program.ops[index]
    most, freed = 0, 0
    for body, workspace in functions:
        given_up = _given_up(program, op, body)
        asked = requests(body, creation_events(body), workspace, given_up)
        taken = _taken_from_lists(program, op, body) if op.type in LOOPS else {}
        there = sum(given_up.values())
        for number, live in enumerate(asked.timeline(0)):
            there += taken.get(number, 0)
            most = max(most, live - there)
        freed = max(freed, sum(taken.values()))
    there = sum(op.bytes)
    if op.type in LOOPS:
        there = min(freed, there) + sum(op.bytes[n] // count for n, count in op.parts if count)
    return max(0, most - there)


def _arguments_of(program: Program, tensors: Sequence[Tensor], body: Program) -> dict[int, Tensor]:
    """What each argument of a function is, but for variables, by its index."""
    variables = {source for source, _ in program.captures if source in program.variables}
    given = [tensor for tensor in tensors if tensor[0] not in variables]
    return dict(zip(body.inputs, given, strict=True))


def _read_once(program: Program, tensor: Tensor) -> bool:
    """Whether only one operation reads a tensor."""
    readers = (program.ops[reader].inputs for reader in program.consumers[tensor[0]])
    return sum(tensor in inputs for inputs in readers) == 1


def _held_once(program: Program, tensor: Tensor) -> bool:
    """Whether only one operation reads a tensor, and nothing else holds its buffer."""
    source, number = tensor
    op = program.ops[source]
    return (
        op.kind in (Kind.PURE, Kind.ONCE)
        and _read_once(program, tensor)
        and tensor not in program.outputs
        and number not in dict(op.passed)
        and all(number not in pair for pair in op.shares)
    )


def _given_up(program: Program, op: Op, body: Program) -> dict[int, int]:
    """Bytes of the arguments of a branch that only it reads, by their index there.

    Where it has no chain (``chains``), it may read all of them before it has written much.
    """
    if op.type not in CONDITIONALS or has_pieces(body.nodes):
        return {}
    return {
        argument: program.ops[source].bytes[number]
        for argument, (source, number) in _arguments_of(program, op.inputs[1:], body).items()
        if _held_once(program, (source, number)) and program.ops[source].bytes[number]
    }


def _taken_from_lists(program: Program, op: Op, body: Program) -> dict[int, int]:
    """Bytes that operations of a turn of a loop take from lists that only it reads, by index."""
    lists = _arguments_of(program, op.inputs, body)
    taken = {}
    for index, each in enumerate(body.ops):
        if each.type == "TensorListPopBack" and each.inputs[0][0] in lists:
            source, number = lists[each.inputs[0][0]]
            parts = dict(program.ops[source].parts).get(number)
            if parts and _read_once(program, (source, number)):
                taken[index] = program.ops[source].bytes[number] // parts
    return taken


def _traced(
    program: Program,
    given: tuple[Tensor, ...],
    function: FunctionDef,
    lists: Mapping[str, _Part],
) -> Trace:
    """A function as a step of its own, for the arguments that it is given."""
    external = dict(program.captures)
    shapes = [tf.TensorShape(program.ops[source].shapes[number]) for source, number in given]
    arguments = _arguments(function)
    sources = {
        name: source
        for name, (source, _) in zip(arguments, given, strict=True)
        if source in external and source in program.variables
    }
    captured = {name: external[source] for name, source in sources.items()}
    variables = {name: program.variables[source] for name, source in sources.items()}
    graph_def, tensors = function_graph(
        function, shapes, program.library.library.function, variables
    )
    _describe_parts(graph_def, lists)
    graph = imported(graph_def)
    inputs = tuple(name for name in arguments if name not in captured)
    return Trace(
        graph_def=graph_def,
        graph=graph,
        bodies=loop_bodies(graph, graph_def),
        branches=branch_bodies(graph, graph_def),
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


def _describe_parts(graph_def: graph_pb2.GraphDef, lists: Mapping[str, _Part]) -> None:
    """Says what comes out of lists whose parts are known."""
    known = {(name, 0): part for name, part in lists.items()}
    for node in in_order(graph_def):
        part = known.get(parted(node.input[0])) if node.input else None
        if part is None:
            continue
        results: dict[str, list[tuple[int, ...]]] = {
            "TensorListPopBack": [(), part.shape],
            "TensorListGetItem": [part.shape],
            "TensorListElementShape": [(len(part.shape),)],
        }
        if node.op in results:
            described = node.attr[SHAPES].list.shape
            del described[:]
            described.extend(tf.TensorShape(shape).as_proto() for shape in results[node.op])
        if node.op in (*LIST_WRITES, *_HAND_ON, "Identity"):
            known[node.name, 0] = part
        if part.parts is not None and node.op == "TensorListPopBack":
            known[node.name, 1] = part.parts


def _arguments(function: FunctionDef) -> list[str]:
    return [argument.name for argument in function.signature.input_arg]


# --- How many turns a loop takes --------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Operations, and what is known of the numbers that they compute before they run.

    Attributes:
      program: the operations.
      loops: those that were read so far, by index.
      numbers: what arguments are, by name, whenever it runs; of a list, what each of its
        parts is.
    """

    program: Program
    loops: dict[int, _Loop]
    numbers: Mapping[str, Fraction]


@dataclass(frozen=True)
class _Loop:
    """A loop, as what decides on its turns knows it.

    Attributes:
      inputs: what its first turn is given.
      condition, body: its functions; None if they cannot be read.
      names: of the arguments of each of them.
    """

    inputs: tuple[Tensor, ...]
    condition: _Place | None
    body: _Place | None
    names: tuple[Sequence[str], Sequence[str]]


def _turns(here: _Place, loop: _Loop) -> int | None:
    """How many turns a loop takes that counts to a limit, if both are known.

    So do the loops of Python's ``range``, recurrent layers, and the gradients of these,
    which take as many turns as the loop forward has counted; also inside other loops,
    where it is as many in each of their turns.  Of several conditions that must all hold,
    the first to fail ends it.
    """
    if loop.condition is None or loop.body is None:
        return None
    found = []
    condition = loop.condition.program
    for comparison, *sides in _comparisons(condition, condition.outputs[0]):
        if comparison.startswith("Greater"):
            sides.reverse()
        lines = [_line(here, loop, side) for side in sides]
        if None in lines:
            continue
        (lower, rise), (upper, fall) = (line for line in lines if line is not None)
        if rise > fall:
            turns = (upper - lower) / (rise - fall)
            whole = math.floor(turns) + 1 if comparison.endswith("Equal") else math.ceil(turns)
            found.append(max(0, whole))
    return min(found, default=None)


def _comparisons(condition: Program, tensor: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The comparisons that must all hold."""
    op = condition.ops[tensor[0]]
    if op.type == "LogicalAnd":
        for each in op.inputs:
            yield from _comparisons(condition, each)
    elif op.type in ("Less", "LessEqual", "Greater", "GreaterEqual"):
        left, right = op.inputs
        yield op.type, left, right


def _line(here: _Place, loop: _Loop, tensor: Tensor) -> tuple[Fraction, Fraction] | None:
    """A value of a loop's condition before the first turn, and what each turn adds to it."""
    assert loop.condition is not None
    op = loop.condition.program.ops[tensor[0]]
    if op.kind is not Kind.ARGUMENT:
        constant = _number(loop.condition, tensor)
        return None if constant is None else (constant, Fraction(0))
    slot = loop.names[0].index(op.name)
    start, step = _number(here, loop.inputs[slot]), _step(here, loop, slot)
    return None if start is None or step is None else (start, step)


def _step(here: _Place, loop: _Loop, slot: int) -> Fraction | None:
    """What each turn adds to a value."""
    assert loop.body is not None
    body, names = loop.body.program, loop.names[1]
    result = body.outputs[slot]
    op = body.ops[result[0]]
    if op.name == names[slot]:
        return Fraction(0)
    if op.type not in ("Add", "AddV2", "Sub"):
        return None
    value, added = op.inputs
    if op.type != "Sub" and body.ops[value[0]].name != names[slot]:
        value, added = added, value
    if body.ops[value[0]].name != names[slot]:
        return None
    step = _number(loop.body, added)
    return -step if step is not None and op.type == "Sub" else step


def _number(here: _Place, tensor: Tensor) -> Fraction | None:
    """A number that is known before it is computed; of a list, what each of its parts is."""
    source, slot = tensor
    op = here.program.ops[source]
    if source in here.loops:
        return _number_of_loop(here, here.loops[source], slot)
    if op.kind is Kind.ARGUMENT:
        return here.numbers.get(op.name)
    if op.type == "TensorListPopBack":
        return _number(here, op.inputs[0])
    if op.kind is not Kind.CONSTANT or math.prod(op.shapes[0]) != 1:
        return None
    value = tf.make_ndarray(here.program.nodes[source].attr["value"].tensor).item()
    return Fraction(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _number_of_loop(here: _Place, loop: _Loop, slot: int) -> Fraction | None:
    """A number that a loop returns, if it is known before it runs."""
    turns = _turns(here, loop)
    if turns is None or loop.body is None:
        return None
    first = here.program.ops[loop.inputs[slot][0]]
    result = loop.body.program.ops[loop.body.program.outputs[slot][0]]
    if first.type == "EmptyTensorList" and result.type == "TensorListPushBack":
        filled, added = result.inputs
        if loop.body.program.ops[filled[0]].name == loop.names[1][slot]:
            return _number(loop.body, added)
        return None
    step, start = _step(here, loop, slot), _number(here, loop.inputs[slot])
    return None if step is None or start is None else start + turns * step


def _numbers_given(
    here: _Place, given: Mapping[str, Tensor], repeated: Program | None
) -> dict[str, Fraction]:
    """The numbers that a function is given whenever it runs.

    Args:
      here: what it is called by.
      given: its arguments, by name.
      repeated: the function, if it is the body of a loop: what it returns is what it is given
        in the next turn.
    """
    numbers = {}
    for slot, (name, tensor) in enumerate(given.items()):
        if repeated is not None:
            result = repeated.ops[repeated.outputs[slot][0]]
            while result.type == "TensorListPopBack":
                result = repeated.ops[result.inputs[0][0]]
            if result.name != name:
                continue
        number = _number(here, tensor)
        if number is not None:
            numbers[name] = number
    return numbers
