"""Stage 2: the program becomes the graph that solvers see, and a schedule events.

A step has thousands of operations; what decides its memory is a few hundred.
The rule of grouping:

* *Heavy* operations read or write a large value (or overwrite a large
  variable).  Everything else is *small*: it runs once, as soon as it can, and
  its results are kept.  A value is large above a threshold chosen so that all
  small values together stay within one percent of the plain peak.
* Aliases and reads of variables are not nodes; they are cloned with each copy
  of what they alias.
* A heavy operation A is merged into B, its only successor, if either B needs
  nothing large that A does not need, and returns no more than A; or A is
  elementwise with at most one large input, no larger than its output (B may
  as well read that input).  Keeping A's value instead would never pay.  (But A
  stays alone where the step returns its value; and where it may write into the
  buffer of what it reads, B may not, and the two together would hold more than
  any operation does by itself.)
* A variable's update is thereby one node: every copy of what reads a large
  variable comes before the node that overwrites it (``Graph.order``).

Contracting an edge to an only successor cannot close a cycle.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .memory import Event
from .program import BROADCASTS, ELEMENTWISE, KEPT_SCRATCH, Kind, Program, Tensor
from .solvers.graph import Graph, Node

_LARGE = 1e-3  # of the plain peak: no value above this is small
_SMALL_TOTAL = 1e-2  # of the plain peak: all small values together


@dataclass(frozen=True)
class Extraction:
    """A program seen as a graph.

    Attributes:
      program: the operations.
      graph: the graph of groups.
      groups: the operations of each node, in execution order.
      threshold: bytes above which a value is large.
    """

    program: Program
    graph: Graph
    groups: tuple[tuple[int, ...], ...]
    threshold: int

    def anew(self, program: Program, workspace: Mapping[int, int]) -> Extraction:
        """The same nodes, by what is known now of the memory that their operations take.

        Args:
          program: the same operations; what takes over whose buffer may differ.
          workspace: as ``extract`` takes it.
        """
        return _with_memory(self, _Heavy(program, self.threshold), workspace)

    @cached_property
    def small(self) -> frozenset[int]:
        """Operations that compute but are in no node."""
        grouped = {op for group in self.groups for op in group}
        return frozenset(
            index
            for index, op in enumerate(self.program.ops)
            if op.kind in (Kind.PURE, Kind.ONCE) and index not in grouped
        )


def extract(
    program: Program,
    seconds: Sequence[float],
    workspace: Mapping[int, int],
    *,
    plain_peak: int,
    resident: int,
    name: str = "step",
    grouped: bool = True,
) -> Extraction:
    """Groups a program into a solver's graph.

    Args:
      program: the step.
      seconds: cost of each operation.
      workspace: bytes that an operation holds only while it runs.
      plain_peak: bytes of the plain step's peak, which sets what is large.
      resident: bytes held throughout the step.
      name: the graph's name.
      grouped: False for a node for each operation that computes anything, to
        see what grouping costs.
    """
    threshold = _threshold(program, plain_peak) if grouped else 0
    heavy = _Heavy(program, threshold)
    groups = _merge(program, heavy, threshold) if grouped else [[index] for index in heavy.reads]
    return _build(program, heavy, groups, seconds, workspace, threshold, resident, name)


def _threshold(program: Program, plain_peak: int) -> int:
    """The largest size such that all values up to it are small together."""
    sizes = sorted(
        size for op in program.ops if op.kind in (Kind.PURE, Kind.ONCE) for size in op.bytes
    )
    total, threshold = 0, 0
    for size in sizes:
        total += size
        if total > _SMALL_TOTAL * plain_peak or size > _LARGE * plain_peak:
            break
        threshold = size
    return threshold


class _Heavy:
    """Heavy operations and what each of them needs.

    Attributes:
      reads: for each heavy operation, the large tensors of other heavy
        operations that it reads (aliases resolved).
      needs: for each heavy operation, the heavy operations that must have run
        at least once before it, for small values and effects.
      readers: for each heavy operation that overwrites a large variable, the
        heavy operations that read the old value.
      root: for each tensor, the one whose buffer it is.
      holds: for each of these that holds the buffers of others, those.
      read_by: who reads the buffers of each operation: (reader, output).
    """

    def __init__(self, program: Program, threshold: int) -> None:
        self.program = program
        self.root = _roots(program)
        self.holds = _holds(program, self.root)
        self.read_by = _read_by(program, self.root, self.holds)
        sizes = program.variable_bytes
        ops = program.ops
        self.reads: dict[int, frozenset[Tensor]] = {}
        self.needs: dict[int, frozenset[int]] = {}
        self.readers: dict[int, frozenset[int]] = {}
        large_reads = {
            index
            for index, op in enumerate(ops)
            if op.kind is Kind.READ and sizes.get(op.resource, 0) > threshold
        }
        readers: dict[int, set[int]] = {index: set() for index in large_reads}
        overwrites: dict[int, frozenset[int]] = {}  # the large reads that each writer follows
        # Heavy operations behind each small one, heavy ones behind themselves.
        behind: list[frozenset[int]] = []
        for index, op in enumerate(ops):
            roots = [each for source in op.inputs for each in self.buffers(source)]
            large = {
                tensor
                for tensor in roots
                if tensor[0] in self.reads and ops[tensor[0]].bytes[tensor[1]] > threshold
            }
            variables = {tensor[0] for tensor in roots if tensor[0] in large_reads}
            overwritten = frozenset(large_reads.intersection(op.controls))
            before = frozenset().union(
                *(
                    behind[source]
                    for source, number in op.inputs
                    if self.root[source, number] not in large or ops[source].passed
                ),
                *(behind[control] for control in op.controls),
            )
            is_heavy = op.kind in (Kind.PURE, Kind.ONCE) and (
                bool(large)
                or bool(variables)
                or (op.kind is Kind.ONCE and bool(overwritten))
                or any(size > threshold for size in op.bytes)
            )
            if not is_heavy:
                behind.append(before | {tensor[0] for tensor in large})
                continue
            behind.append(frozenset([index]))
            self.reads[index] = frozenset(large)
            self.needs[index] = before - {index}
            for variable in variables:
                readers[variable].add(index)
            if overwritten:
                overwrites[index] = overwritten
        late: dict[int, set[int]] = {}
        for index, overwritten in overwrites.items():
            found = {reader for variable in overwritten for reader in readers[variable]}
            self.readers[index] = frozenset(reader for reader in found if reader < index)
            late[index] = {reader for reader in found if reader > index}
        if any(late.values()):
            self._add_late(late)

    def buffers(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """The tensors whose buffers are there as long as one is."""
        root = self.root[tensor]
        return root, *self.holds.get(root, ())

    def _add_late(self, late: Mapping[int, set[int]]) -> None:
        """Has what comes after writers in the graph read before them, where it can.

        TensorFlow itself orders only the read: what it is for may come later, and would
        then make the kernel copy the variable.
        """
        after: dict[int, set[int]] = {index: set() for index in self.reads}
        for reader, tensors in self.reads.items():
            before = {tensor[0] for tensor in tensors} | self.needs[reader]
            for source in before | self.readers.get(reader, frozenset()):
                after[source].add(reader)
        for index, found in late.items():
            bound = {index}  # to come after it
            pending = [index]
            while found and pending:
                new = after[pending.pop()] - bound
                bound |= new
                pending += new
            self.readers[index] |= found - bound
            for reader in found - bound:
                after[reader].add(index)


def _roots(program: Program) -> dict[Tensor, Tensor]:
    """For each tensor, the one whose buffer it is."""
    roots: dict[Tensor, Tensor] = {}
    for index, op in enumerate(program.ops):
        for number in range(len(op.bytes)):
            if op.kind is Kind.ALIAS:
                roots[index, number] = roots[op.inputs[0]]
            else:
                roots[index, number] = (index, number)
        for number, source in op.passed:
            roots[index, number] = roots[op.inputs[source]]
    return roots


def _holds(program: Program, roots: Mapping[Tensor, Tensor]) -> dict[Tensor, frozenset[Tensor]]:
    """For each tensor that holds the buffers of others, those, and what they hold."""
    found: dict[Tensor, frozenset[Tensor]] = {}
    for index, op in enumerate(program.ops):
        held = [(output, roots[op.inputs[slot]]) for output, slot in op.keeps]
        for output, root in [*held, *((output, (index, other)) for output, other in op.shares)]:
            others = found.get((index, output), frozenset())
            found[index, output] = others | found.get(root, frozenset()) | {root}
    return found


def _read_by(
    program: Program,
    roots: Mapping[Tensor, Tensor],
    holds: Mapping[Tensor, frozenset[Tensor]],
) -> list[list[tuple[int, int]]]:
    """Who reads the buffers of each operation, whatever shares or holds them: (reader, output)."""
    found: list[list[tuple[int, int]]] = [[] for _ in program.ops]
    for index, op in enumerate(program.ops):
        if op.kind is not Kind.ALIAS:
            for root in map(roots.__getitem__, op.inputs):
                for source, number in (root, *holds.get(root, ())):
                    found[source].append((index, number))
    return found


def _merge(program: Program, heavy: _Heavy, threshold: int) -> list[list[int]]:
    """Groups of heavy operations, by the rule in the module's docstring."""
    ops = program.ops
    read_outside: dict[Tensor, set[int]] = {}
    for index, tensors in heavy.reads.items():
        for tensor in tensors:
            read_outside.setdefault(tensor, set()).add(index)
    results = {heavy.root[tensor] for tensor in program.outputs}
    returning = {index for index, output in results if ops[index].bytes[output] > threshold}

    group: dict[int, int] = {index: index for index in heavy.reads}
    members: dict[int, list[int]] = {index: [index] for index in heavy.reads}
    inputs: dict[int, set[int]] = {i: {t[0] for t in ts} for i, ts in heavy.reads.items()}
    before: dict[int, set[int]] = {
        index: inputs[index] | heavy.needs[index] | heavy.readers.get(index, frozenset())
        for index in heavy.reads
    }
    after: dict[int, set[int]] = {index: set() for index in heavy.reads}
    for index, sources in before.items():
        for source in sources:
            after[source].add(index)

    def size(number: int) -> int:
        """Bytes that others read of a group."""
        return sum(
            ops[index].bytes[output]
            for index in members[number]
            for output in range(len(ops[index].bytes))
            if (index, output) in results
            or any(group[reader] != number for reader in read_outside.get((index, output), ()))
        )

    def once(number: int) -> bool:
        return any(ops[index].kind is Kind.ONCE for index in members[number])

    def elementwise(number: int) -> bool:
        kinds = ELEMENTWISE if inputs[number] else ELEMENTWISE | BROADCASTS
        return all(ops[index].type in kinds for index in members[number])

    def takes_over(number: int) -> bool:
        """Whether a group may write its value into the buffer of what it reads."""
        return any(
            heavy.root[ops[index].inputs[slot]][0] in inputs[number]
            for index in members[number]
            for slot in ops[index].forwards
        )

    # What some operation holds by itself.
    floor = max(
        (sum(map(size, {*inputs[n]} if takes_over(n) else {n, *inputs[n]})) for n in members),
        default=0,
    )
    pending = sorted(members, reverse=True)
    while pending:
        a = pending.pop()
        if a not in members or len(after[a]) != 1:
            continue
        (b,) = after[a]
        if (once(a) and not once(b)) or not returning.isdisjoint(members[a]):
            continue
        nothing_else = inputs[b] - {a} <= inputs[a] and size(b) <= size(a)
        passes_through = (
            elementwise(a) and len(inputs[a]) <= 1 and all(size(x) <= size(a) for x in inputs[a])
        )
        if not (nothing_else or passes_through):
            continue
        held = sum(map(size, inputs[a] | inputs[b]))
        if size(b) < size(a) and takes_over(a) and held > floor:
            continue
        for index in members[a]:
            group[index] = b
        members[b] = members.pop(a) + members[b]
        inputs[b] = (inputs[b] - {a}) | inputs.pop(a)
        for source in before[a]:
            after[source].discard(a)
            after[source].add(b)
        before[b] = (before[b] - {a}) | before.pop(a)
        del after[a]
        pending.append(b)
        pending += sorted(before[b], reverse=True)
    return [sorted(members[number]) for number in sorted(members)]


def _build(
    program: Program,
    heavy: _Heavy,
    groups: Sequence[list[int]],
    seconds: Sequence[float],
    workspace: Mapping[int, int],
    threshold: int,
    resident: int,
    name: str,
) -> Extraction:
    """The solver's graph of the groups, in a topological order."""
    ops = program.ops
    number = {index: g for g, members in enumerate(groups) for index in members}
    data = [
        {number[t[0]] for index in members for t in heavy.reads[index]} - {g}
        for g, members in enumerate(groups)
    ]
    needs = [
        {number[n] for index in members for n in heavy.needs[index]} - {g}
        for g, members in enumerate(groups)
    ]
    overwritten = [
        {number[r] for index in members for r in heavy.readers.get(index, ())} - {g}
        for g, members in enumerate(groups)
    ]
    # What a loop holds for its gradient is of no use a second time while it does.
    held = {source for kept in heavy.holds.values() for source, _ in kept}
    once = [
        any(ops[index].kind is Kind.ONCE or index in held for index in members)
        for members in groups
    ]
    results = {heavy.root[tensor] for tensor in program.outputs}
    # A group whose results are all small never needs to run again: they are kept.
    outward = [_outward(program, heavy, members) for members in groups]
    large = [[t for t in tensors if ops[t[0]].bytes[t[1]] > threshold] for tensors in outward]
    once = [flag or not large[g] for g, flag in enumerate(once)]

    order = _sorted(
        len(groups),
        [data[g] | needs[g] | overwritten[g] for g in range(len(groups))],
        [members[0] for members in groups],
    )
    nodes: list[Node] = []
    position: dict[int, int] = {}  # group -> node
    markers: dict[int, int] = {}  # node -> the node that says it has run once
    node_groups: list[tuple[int, ...]] = []
    edges: list[tuple[int, int]] = []
    pairs: list[tuple[int, int]] = []
    ancestors: list[int] = []  # bit sets

    def add(node: Node, members: Iterable[int], sources: Iterable[int]) -> int:
        index = len(nodes)
        nodes.append(node)
        node_groups.append(tuple(members))
        bits = 1 << index
        for source in sources:
            edges.append((source, index))
            bits |= ancestors[source]
        ancestors.append(bits)
        return index

    for g in order:
        members = groups[g]
        sources = sorted(position[x] for x in data[g])
        known = 0
        for source in sources:
            known |= ancestors[source]
        for source in sorted((position[x] for x in needs[g]), reverse=True):
            if known >> source & 1:
                continue
            if nodes[source].recomputable:
                if source not in markers:
                    marker = Node(f"{nodes[source].name} (done)", 0.0, 0, recomputable=False)
                    markers[source] = add(marker, (), [source])
                source = markers[source]
            sources.append(source)
            known |= ancestors[source]
        position[g] = add(
            Node(
                name=name_for_people(program, members),
                cost=sum(seconds[index] for index in members),
                bytes=0,  # for now
                recomputable=not once[g],
                backward=any("gradient_tape" in ops[index].name for index in members),
            ),
            members,
            sorted(set(sources)),
        )
        pairs += [(position[reader], position[g]) for reader in sorted(overwritten[g])]
    grouped = set(number)
    rest = sum(
        seconds[index]
        for index, op in enumerate(ops)
        if op.kind in (Kind.PURE, Kind.ONCE) and index not in grouped
    )
    add(Node("small operations", rest, 0, recomputable=False), (), ())
    # A value that several outputs alias is held once.
    holders = {position[number[tensor[0]]] for tensor in results if tensor[0] in number}
    graph = Graph(
        name=name,
        nodes=tuple(nodes),
        edges=tuple(sorted(set(edges))),
        resident=resident,
        outputs=tuple(sorted(holders)),
        order=tuple(pairs),
    )
    sizeless = Extraction(program, graph, tuple(node_groups), threshold)
    return _with_memory(sizeless, heavy, workspace)


def _with_memory(extraction: Extraction, heavy: _Heavy, workspace: Mapping[int, int]) -> Extraction:
    """The extraction with the memory that each of its nodes takes."""
    program, groups = heavy.program, extraction.groups
    number = {index: g for g, members in enumerate(groups) for index in members}
    nodes = list(extraction.graph.nodes)
    for g, members in enumerate(groups):
        if not members:
            continue
        outward = _outward(program, heavy, members)
        held = _held(program, outward, workspace, extraction.threshold)
        scratch, forward = _scratch(program, heavy, members, outward, held, workspace, number)
        nodes[g] = replace(nodes[g], bytes=held, workspace=scratch, forward=forward)
    for g, node in enumerate(nodes):
        if node.forward is not None and nodes[node.forward].bytes != node.bytes:
            nodes[g] = replace(node, forward=None)
    graph = replace(extraction.graph, nodes=tuple(nodes))
    return replace(extraction, program=program, graph=graph)


def _held(
    program: Program, tensors: Iterable[Tensor], workspace: Mapping[int, int], threshold: int
) -> int:
    """Bytes of the large ones of some tensors, with what their kernels keep beside them."""
    held = 0
    for index, output in tensors:
        op = program.ops[index]
        if op.bytes[output] > threshold:
            held += op.bytes[output]
            held += workspace.get(index, 0) if op.type in KEPT_SCRATCH else 0
    return held


def _outward(program: Program, heavy: _Heavy, members: Sequence[int]) -> list[Tensor]:
    """Tensors of a group that something outside of it reads."""
    results = {heavy.root[tensor] for tensor in program.outputs}
    inside = set(members)
    tensors = []
    for index in members:
        outside = {tensor for reader, tensor in heavy.read_by[index] if reader not in inside}
        tensors += [
            (index, output)
            for output in range(len(program.ops[index].bytes))
            if (index, output) in results or output in outside
        ]
    return tensors


def _scratch(
    program: Program,
    heavy: _Heavy,
    members: Sequence[int],
    outward: Sequence[Tensor],
    held: int,
    workspace: Mapping[int, int],
    number: Mapping[int, int],
) -> tuple[int, int | None]:
    """Workspace of a group beside its outputs, and the group whose buffer it
    takes over."""
    scratch = max(0, _extra(program, heavy, members, outward, workspace, None) - held)
    for tensor in dict.fromkeys(
        heavy.root[program.ops[index].inputs[slot]]
        for index in members
        for slot in program.ops[index].forwards
    ):
        if tensor not in heavy.reads.get(members[0], ()) and not any(
            tensor in heavy.reads[index] for index in members
        ):
            continue
        if tensor[0] in members or sum(program.ops[tensor[0]].bytes) != held or not held:
            continue
        if _extra(program, heavy, members, outward, workspace, tensor) <= scratch:
            return scratch, number[tensor[0]]
    return scratch, None


def _extra(
    program: Program,
    heavy: _Heavy,
    members: Sequence[int],
    outward: Sequence[Tensor],
    workspace: Mapping[int, int],
    donated: Tensor | None,
) -> int:
    """Most bytes that running a group adds to what is held already.

    ``donated`` is an input that nobody needs afterwards: its buffer may be
    taken over.
    """
    ops, inside = program.ops, set(members)
    references: dict[Tensor, int] = {tensor: 1 for tensor in outward}
    for index in members:
        for source in ops[index].inputs:
            root = heavy.root[source]
            if root[0] in inside or root == donated:
                references[root] = references.get(root, 0) + 1
    buffer: dict[Tensor, Tensor] = {} if donated is None else {donated: donated}
    taken: Tensor | None
    live = peak = 0
    for index in members:
        op = ops[index]
        roots = [buffer.get(heavy.root[source]) for source in op.inputs]
        for output, size in enumerate(op.bytes):
            tensor: Tensor = (index, output)
            candidates = [roots[slot] for slot in op.forwards] if output == op.forwarded else []
            taken = next(
                (
                    root
                    for root in candidates
                    if root is not None
                    and references.get(root) == 1
                    and ops[root[0]].bytes[root[1]] == size
                ),
                None,
            )
            if taken is None:
                buffer[tensor] = tensor
                live += size
            else:
                buffer[tensor] = taken
                references[taken] += references.get(tensor, 0)
        peak = max(peak, live + workspace.get(index, 0))
        for read in roots:
            if read is None:
                continue
            references[read] -= 1
            if references[read] == 0:
                live -= ops[read[0]].bytes[read[1]]
        for output, size in enumerate(op.bytes):
            if buffer[index, output] == (index, output) and not references.get((index, output)):
                live -= size
    return peak


def name_for_people(
    program: Program, members: Iterable[int], workspace: Mapping[int, int] | None = None
) -> str:
    """The name of the operation of a node that takes the most: results, and scratch memory
    where that is given."""
    scratch = workspace or {}

    def taken(index: int) -> int:
        return sum(program.ops[index].bytes) + scratch.get(index, 0)

    largest = max(members, key=lambda index: (taken(index), index))
    # In fit all of a step is in a call, whose name would say nothing.
    return re.sub("^(Stateful)?PartitionedCall/", "", program.ops[largest].name)


def _sorted(count: int, before: Sequence[Iterable[int]], priority: Sequence[int]) -> list[int]:
    """A topological order that follows ``priority`` where it is free to."""
    waiting = [len(set(sources)) for sources in before]
    after: list[list[int]] = [[] for _ in range(count)]
    for index, sources in enumerate(before):
        for source in set(sources):
            after[source].append(index)
    ready = [(priority[index], index) for index in range(count) if not waiting[index]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for other in after[index]:
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, (priority[other], other))
    return order


def expand(extraction: Extraction, schedule: Sequence[int]) -> tuple[Event, ...]:
    """The events that carry out a schedule of the graph.

    A node's operations run in order; small operations run as soon as what they
    need has run; aliases and reads appear when first needed for each copy.  A
    small variable is overwritten after its last reader has run: TensorFlow
    would copy it otherwise, and the copy, somewhere in the middle of the pool,
    would stay there for good.
    """
    return _Expander(extraction, schedule).run()


class _Expander:
    def __init__(self, extraction: Extraction, schedule: Sequence[int]) -> None:
        self.schedule = schedule
        self.program = extraction.program
        self.groups = extraction.groups
        self.small = extraction.small
        self.root = _roots(extraction.program)
        self.events: list[Event] = []
        self.newest: dict[int, int] = {}
        self.copies: dict[int, int] = {}
        # How many inputs and effects each operation still waits for.
        self.waiting: list[int] = []
        self.unlocks: list[list[int]] = [[] for _ in self.program.ops]
        for index, op in enumerate(self.program.ops):
            before = {source for source, _ in op.inputs} | set(op.controls)
            self.waiting.append(len(before))
            for source in before:
                self.unlocks[source].append(index)
        self.ready: list[int] = []  # small operations that may run
        # Runs of nodes that still come before a read variable is overwritten.
        self.reads_left: dict[int, int] = {}
        self.overwrites: dict[int, list[int]] = {}
        self._wait_for_readers()

    def _wait_for_readers(self) -> None:
        ops = self.program.ops
        runs: dict[int, list[int]] = {}  # when the operations of nodes run
        for moment, index in enumerate(op for node in self.schedule for op in self.groups[node]):
            runs.setdefault(index, []).append(moment)
        read_by = _read_by(self.program, self.root, _holds(self.program, self.root))
        # When the first operation of a node runs that comes after an operation.
        until = [math.inf] * len(ops)
        for index in range(len(ops) - 1, -1, -1):
            until[index] = min(
                (
                    runs[other][0] if other in runs else until[other]
                    for other in self.unlocks[index]
                ),
                default=math.inf,
            )
        for index in self.small:
            if ops[index].kind is not Kind.ONCE:
                continue
            for read in ops[index].controls:
                if ops[read].kind is not Kind.READ:
                    continue
                readers = [reader for reader, _ in read_by[read] if reader in runs]
                # Else what comes after it cannot wait.
                if readers and max(runs[reader][-1] for reader in readers) < until[index]:
                    self.reads_left[read] = sum(len(runs[reader]) for reader in readers)
                    self.overwrites.setdefault(read, []).append(index)
                    self.waiting[index] += 1

    def run(self) -> tuple[Event, ...]:
        free = [index for index, count in enumerate(self.waiting) if not count]
        for index in free:
            if self.program.ops[index].kind is Kind.ARGUMENT:
                self._emit(index)
            else:
                self._available(index)
        self._run_small()
        for node in self.schedule:
            for index in self.groups[node]:
                self._emit(index)
                self._run_small()  # one of the same node may need it
        for index, op in enumerate(self.program.ops):
            if index not in self.newest and op.kind in (Kind.PURE, Kind.ONCE):
                raise AssertionError(f"{op.name} was never ready to run")
        for index in {op for op, _ in self.program.outputs}:
            self._ensure(index)
        return tuple(self.events)

    def _available(self, index: int) -> None:
        """Says that an operation has run, or may be emitted when needed."""
        kind = self.program.ops[index].kind
        if index in self.small and index not in self.newest:
            heapq.heappush(self.ready, index)
            return
        if kind in (Kind.PURE, Kind.ONCE) and index not in self.newest:
            return  # in a node: the schedule says when
        for other in self.unlocks[index]:
            self.waiting[other] -= 1
            if not self.waiting[other]:
                self._available(other)

    def _run_small(self) -> None:
        while self.ready:
            self._emit(heapq.heappop(self.ready))

    def _emit(self, index: int) -> int:
        op = self.program.ops[index]
        for control in op.controls:
            self._ensure(control)
        inputs = tuple((self._ensure(source), number) for source, number in op.inputs)
        copy = self.copies.get(index, 0)
        self.copies[index] = copy + 1
        self.events.append(Event(index, copy, inputs))
        self.newest[index] = len(self.events) - 1
        if copy == 0 and op.kind in (Kind.ARGUMENT, Kind.PURE, Kind.ONCE):
            self._available(index)
        if op.kind in (Kind.PURE, Kind.ONCE) and index not in self.small:
            self._count_reads(index)
        return self.newest[index]

    def _count_reads(self, index: int) -> None:
        for tensor in self.program.ops[index].inputs:
            source = self.root[tensor][0]
            if source not in self.reads_left:
                continue
            self.reads_left[source] -= 1
            if self.reads_left[source] == 0:
                for write in self.overwrites[source]:
                    self.waiting[write] -= 1
                    if not self.waiting[write]:
                        self._available(write)

    def _ensure(self, index: int) -> int:
        """The event that holds the newest copy of an operation's result."""
        op = self.program.ops[index]
        event = self.newest.get(index)
        if op.kind is Kind.ALIAS:
            source = self._ensure(op.inputs[0][0])
            if event is None or self.events[event].inputs[0][0] != source:
                return self._emit(index)
        elif event is None:
            if op.kind not in (Kind.CONSTANT, Kind.READ):
                raise AssertionError(f"{op.name} is needed before it has run")
            return self._emit(index)
        assert event is not None
        return event
