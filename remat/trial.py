"""A step run on zeros before its first real run, so that nothing of that remains."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import tensorflow as tf

from . import allocator
from .allocator import Device, lacking_bytes
from .generators import ASKING, Generators, keeps_state, kernel_handles
from .loops import LOOPS
from .program import ON_VARIABLES, Kind, Program, has_effects
from .timeline import Allocation, record
from .variables import variables_put_back

# Steps until batch and results lie where they do for every other step.
SETTLING = 2
# Stateful operations whose effects a trial run can undo: it puts variables back, and
# a fresh lowering resets random states.
_REVERSIBLE = (
    *(*ON_VARIABLES, "While", "If", "Case", "StatefulPartitionedCall", "TensorList"),
    *("Assert", "CheckNumerics"),  # where they fail on zeros, so does the run
    *ASKING,  # of generators; other queues and iterators have handles that are not
)


@dataclass(frozen=True)
class Trial:
    """What runs on zeros took.

    Attributes:
      peak: bytes, or None if memory ran out.
      recorded: what the first run allocated.
      lacking: if memory ran out in that run, bytes of what there was no room for; 0 if nothing
        says so.
    """

    peak: int | None
    recorded: list[Allocation]
    lacking: int = 0


def why_not(program: Program, generators: Generators) -> str | None:
    """Why a step may not be run on zeros; None if it may."""
    if not is_reversible(program, generators):
        return "it has effects beside its variables"
    if _may_not_end(program):
        return "on zeros its loops might not end"
    return None


def is_reversible(program: Program, generators: Generators) -> bool:
    """Whether a run can be undone by putting the variables back."""
    kernels = {id(handle) for handle in kernel_handles(generators)}
    for index, external in program.captures:
        of_something = external.dtype in (tf.resource, tf.variant)
        if of_something and index not in program.variables and id(external) not in kernels:
            return False  # a table, an iterator, ...
    return not any(has_effects(type, beside=_REVERSIBLE) for type in _types(program))


def draws(program: Program) -> bool:
    """Whether a step has random generators whose states are not in variables."""
    return any(map(keeps_state, _types(program)))


def zeros(program: Program) -> list[tf.Tensor]:
    """A batch of zeros."""
    return [
        tf.zeros(program.ops[index].shapes[0], program.ops[index].dtypes[0])
        for index in program.inputs
    ]


def run_on_zeros(
    step: Callable[..., list[tf.Tensor]],
    settled: Callable[[], AbstractContextManager[object]],
    program: Program,
    device: Device,
    budget: int,
    *,
    runs: int,
) -> Trial:
    """Runs a lowered step as in a training loop (the last results are held during the
    next run), until it has settled or takes more than its budget.

    Every variable is put back afterwards, bit for bit.

    Args:
      step: what is run.
      settled: puts the memory pool into the state that its plan is for.
      program: what it was lowered from.
      device: where.
      budget: bytes.
      runs: after which it has settled.

    Raises:
      tf.errors.OpError: what it fails with on zeros: a division, a singular matrix.
    """
    peak = 0
    recorded: list[Allocation] = []
    results: list[tf.Tensor] | None = []
    inputs: list[tf.Tensor] = []
    lacking = 0

    def run() -> None:
        nonlocal results, lacking
        try:
            with settled():
                results = step(*inputs)
        except tf.errors.ResourceExhaustedError as error:
            results, lacking = None, lacking_bytes(error)

    with variables_put_back(program):
        for number in range(runs):
            inputs = zeros(program)
            allocator.reset_peak(device)
            if number == 0:
                recorded = record(run, on_gpu=device.name.startswith("GPU"))
            else:
                run()
            if results is None:
                return Trial(None, recorded, lacking if number == 0 else 0)
            peak = max(peak, allocator.peak_bytes(device))
            if number >= SETTLING - 1 and peak > budget:
                break
    return Trial(peak, recorded)


def _types(program: Program) -> set[str]:
    """The types of the operations that run once, and of those in functions that they run."""
    types = {op.type for op in program.ops if op.kind is Kind.ONCE}
    for function in program.library.library.function:
        types.update(node.op for node in function.node_def)
    return types


def _may_not_end(program: Program) -> bool:
    """Whether a loop goes on for as long as some value, which is no counter, says."""
    functions = {function.signature.name: function for function in program.library.library.function}
    nodes = [
        *program.nodes,
        *(node for function in functions.values() for node in function.node_def),
    ]
    return any(
        tf.as_dtype(test.attr["T"].type).is_floating
        for node in nodes
        if node.op in LOOPS
        for test in functions[node.attr["cond"].func.name].node_def
        if "T" in test.attr  # reading it would put it there
    )
