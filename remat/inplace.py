"""Stage 1½: what a function assigns is written into the buffer that the variable has.

Branches of conditionals, bodies of loops and calls assign, too: a branch is
where Keras accumulates gradients.  Why variables are to stay where they are,
``split`` says, which does this for the assignments of the step itself.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, types_pb2
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.framework.node_def_pb2 import NodeDef
from tensorflow.python.framework import kernels

from .constants import keep_unfolded, repeated
from .pieces import constant_node, has_pieces, name_of, runs
from .program import Program

# What holds which variables, by the name of an argument: more than one if it is called with more.
_Given = dict[str, set[tf.TensorSpec]]


def stays(variable: tf.TensorSpec) -> bool:
    """Whether new values of a variable are written into its buffer."""
    shape = variable.shape
    return bool(shape.is_fully_defined() and shape.rank > 0 and _written(variable.dtype))


@functools.cache
def _written(dtype: tf.DType) -> bool:
    """Whether every device at hand can write a new value into a variable of a type."""
    devices = {device.device_type for device in tf.config.list_logical_devices()}
    if dtype == tf.int32 and "GPU" in devices:
        return False  # such are in the host's memory
    node = writing(dtype)
    for kernel in kernels.get_registered_kernels_for_op(node.op).kernel:
        allowed = {each.name: each.allowed_values.list.type for each in kernel.constraint}
        if all(node.attr[name].type in types for name, types in allowed.items()):
            devices.discard(kernel.device_type)
    return not devices


def writing(dtype: tf.DType) -> NodeDef:
    """The operation that writes rows of a variable: of a handle, their numbers and values."""
    # Assigning to a slice would write the same, many times slower.
    node = NodeDef(op="ResourceScatterUpdate")
    node.attr["dtype"].type = dtype.as_datatype_enum
    node.attr["Tindices"].type = types_pb2.DT_INT32
    return node


def sharing() -> NodeDef:
    """The operation after it: writing rows makes every later read of a variable a copy."""
    return NodeDef(op="DisableCopyOnRead")


def counting() -> NodeDef:
    """The operation that numbers rows: from the first to the one past the last, by ones."""
    node = NodeDef(op="Range")
    node.attr["Tidx"].type = types_pb2.DT_INT32
    return node


def written_in_functions(program: Program) -> graph_pb2.GraphDef:
    """The functions of a step, with each assignment of a whole variable written in place.

    Returns:
      A new library; the program's own if there is nothing to change.
    """
    given = _given(program)
    changed = graph_pb2.GraphDef()
    changed.CopyFrom(program.library)
    count = 0
    for function in changed.library.function:
        count += _rewrite(function, given.get(function.signature.name, {}))
    return changed if count else program.library


def _given(program: Program) -> Mapping[str, _Given]:
    """For each function the variables that its arguments may be."""
    functions = {function.signature.name: function for function in program.library.library.function}
    found: dict[str, _Given] = defaultdict(lambda: defaultdict(set))
    waiting: list[str] = []

    def call(node: NodeDef, values: Sequence[Set[tf.TensorSpec]]) -> None:
        for name in functions.keys() & set(runs(node)):
            # What is in front of its arguments chooses among the branches.
            arguments = functions[name].signature.input_arg
            for argument, variables in zip(reversed(arguments), reversed(values), strict=False):
                if not variables <= found[name][argument.name]:
                    found[name][argument.name] |= variables
                    waiting.append(name)

    for op, node in zip(program.ops, program.nodes, strict=True):
        specs = [program.variables.get(source) for source, _ in op.inputs]
        call(node, [set() if spec is None else {spec} for spec in specs])
    while waiting:
        name = waiting.pop()
        nodes = {node.name: node for node in functions[name].node_def}
        for node in nodes.values():
            data = [reference for reference in node.input if not reference.startswith("^")]
            call(node, [found[name].get(_argument(value, nodes), set()) for value in data])
    return found


def _rewrite(function: FunctionDef, given: Mapping[str, Set[tf.TensorSpec]]) -> int:
    """Writes what a function assigns in place; returns how many assignments that are."""
    nodes = {node.name: node for node in function.node_def}
    if has_pieces(function.node_def):
        return 0
    found: list[tuple[NodeDef, tf.TensorSpec]] = []
    for node in function.node_def:
        if node.op == "AssignVariableOp":
            specs = given.get(_argument(node.input[0], nodes), set())
            if len(specs) == 1 and all(map(stays, specs)):
                found.append((node, *specs))
    if not found:
        return 0
    readers: dict[str, list[NodeDef]] = defaultdict(list)
    for node in function.node_def:
        for reference in node.input:
            readers[name_of(reference)].append(node)
    for node, spec in found:
        handle, value, *controls = node.input
        # Nobody is to hold the old value any more, or the new one is written elsewhere.
        handles = dict.fromkeys((name_of(handle), _argument(handle, nodes)))
        reads = [reader for name in handles for reader in readers[name]]
        reads = [reader for reader in reads if reader.op == "ReadVariableOp"]
        after = _after(node, readers)
        kept = _keep_for_later(function, node, spec.dtype, reads, after, readers)
        for holder in [*kept, *sorted(_holders(reads, readers) - after)]:
            if f"^{holder}" not in controls:
                controls.append(f"^{holder}")
                readers[holder].append(node)
        added = [
            constant_node(f"{node.name}/{end}", np.array(row, np.int32))
            for end, row in (("start", 0), ("limit", spec.shape[0]), ("delta", 1))
        ]
        rows, written, shared = counting(), writing(spec.dtype), sharing()
        rows.name, written.name, shared.name = f"{node.name}/rows", f"{node.name}/write", node.name
        rows.input.extend(f"{bound.name}:output:0" for bound in added)
        keep_unfolded(rows)
        element = repeated(nodes.get(name_of(value)))
        if element is not None:  # all rows are given one number
            added.append(constant_node(f"{node.name}/element", element))
            value = f"{added[-1].name}:output:0"
        written.input.extend([handle, f"{rows.name}:output:0", value, *controls])
        shared.input.extend([handle, f"^{written.name}"])
        added += [rows, written]
        for each in (*added, shared):
            each.device = node.device
        node.CopyFrom(shared)
        function.node_def.extend(added)
    return len(found)


def _holders(reads: Iterable[NodeDef], readers: Mapping[str, list[NodeDef]]) -> set[str]:
    """What holds what was read of a variable."""
    values = {name_of(value) for read in reads for value in _values(read, readers)}
    return {reader.name for name in values for reader in readers[name]}


def _values(read: NodeDef, readers: Mapping[str, list[NodeDef]]) -> set[str]:
    """References to what was read of a variable: the reading, and what hands it on."""
    found, waiting = {f"{read.name}:value:0"}, [read]
    while waiting:
        for reader in readers[waiting.pop().name]:
            if reader.op == "Identity":
                found.add(f"{reader.name}:output:0")
                waiting.append(reader)
    return found


def _keep_for_later(
    function: FunctionDef,
    node: NodeDef,
    dtype: tf.DType,
    reads: Iterable[NodeDef],
    after: Set[str],
    readers: Mapping[str, list[NodeDef]],
) -> list[str]:
    """Copies what was read of a variable before a node assigns another value to it, for
    what reads it after that, and for what the function returns.

    TensorFlow would copy, too, but so that the variable has moved.

    Args:
      function: the function.
      node: the assignment.
      dtype: of the variable.
      reads: the operations that read it.
      after: the names of the node and of all that comes after it.
      readers: of each operation; kept up to date.

    Returns:
      The names of the copies.
    """
    copies = []
    for read in reads:
        if read.name in after:
            continue
        same = _values(read, readers)
        names = {name_of(value) for value in same}
        late = [
            reader
            for name in sorted(names)
            for reader in readers[name]
            if reader.name in after - names - {node.name} and same.intersection(reader.input)
        ]
        returned = [result for result, reference in function.ret.items() if reference in same]
        if not late and not returned:
            continue
        copy = NodeDef(op="DeepCopy", name=f"{node.name}/{read.name}", device=node.device)
        copy.attr["T"].type = dtype.as_datatype_enum
        copy.input.append(f"{read.name}:value:0")
        readers[read.name].append(copy)
        for reader in late:
            for slot, reference in enumerate(reader.input):
                if reference in same:
                    reader.input[slot] = f"{copy.name}:y:0"
            readers[copy.name].append(reader)
            for name in names:
                readers[name][:] = [each for each in readers[name] if each is not reader]
        for result in returned:
            function.ret[result] = f"{copy.name}:y:0"
        function.node_def.append(copy)
        copies.append(copy.name)
    return copies


def _argument(reference: str, nodes: Mapping[str, NodeDef]) -> str:
    """The argument of a function that a reference is to, if it is to one."""
    while (node := nodes.get(name_of(reference))) is not None and node.op == "Identity":
        reference = node.input[0]
    return reference


def _after(node: NodeDef, readers: Mapping[str, Iterable[NodeDef]]) -> set[str]:
    """The names of a node and of all that comes after it."""
    found, waiting = {node.name}, [node]
    while waiting:
        for reader in readers.get(waiting.pop().name, ()):
            if reader.name not in found:
                found.add(reader.name)
                waiting.append(reader)
    return found
