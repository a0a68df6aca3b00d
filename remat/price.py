"""Stage 3: what each operation of a program costs, in seconds and workspace bytes."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from .bodies import Inside, held_inside, inside
from .conditionals import CONDITIONALS
from .notices import warn
from .profile import measured_pricer, recorded_pricer
from .profiles.price import Coverage, Price, Pricer, coverage, load_pricer
from .profiles.signature import OpSignature, TensorType
from .profiles.table import TableError
from .program import KEPT_SCRATCH, Kind, Program
from .signatures import signature_of

_LARGE = 64 * 1024  # bytes moved; what moves less costs a launch, mostly

Profile = str | os.PathLike[str] | Mapping[str, float]


@dataclass(frozen=True)
class Prices:
    """Prices of a program's operations.

    Attributes:
      seconds: of each operation (0 for what does not compute).
      workspace: bytes an operation holds only while it runs, where there are any.
      functions: what loops, conditionals and calls run, by name, and their workspace.
      coverage: how much of it was measured, fitted, computed or is not known, and why not
        measured; what loops run counts with all its turns.
      device: name of the device they are for.
    """

    seconds: tuple[float, ...]
    workspace: Mapping[int, int]
    functions: Mapping[str, tuple[Program, Mapping[int, int]]]
    coverage: Coverage
    device: str


def price(
    versions: Sequence[Program],
    profile: Profile = "auto",
    *,
    deadline: float = 10.0,
    progress: Callable[[int, int, OpSignature], None] | None = None,
) -> list[Prices]:
    """Prices every operation that computes.

    Args:
      versions: a step, or several versions of one, which share most of what is measured.
      profile: "auto" (this device's recorded costs; what is missing there is
        measured now and recorded, what cannot be measured is computed from
        the device's roofline), a device's name, a CSV table, or seconds by
        signature text or operation type (others are priced by what is recorded).
      deadline: seconds that measuring may take.
      progress: called with (done, total, next signature) while measuring.

    A loop costs what the operations of a turn cost, times its turns; of a conditional's
    branches the dearest counts.

    Returns:
      The prices of each version.

    Warns:
      UserWarning: if nothing says before the step runs how long some operations take
        (loops until something is so, Python functions, what nobody has counted the work
        of); if ``profile`` has prices for what the step does not do.

    Raises:
      UnknownDeviceError, TableError: if ``profile`` names nothing usable.
    """
    steps = [_signed(program, inside(program)) for program in versions]
    runs: Counter[OpSignature] = Counter()
    for step in steps:
        _count(step, runs)
    if profile == "auto":
        pricer = measured_pricer(runs, deadline=deadline, progress=progress)
    elif isinstance(profile, Mapping):
        pricer = load_pricer(profile, recorded_pricer())
        for name in pricer.given:
            if "(" not in name and op_def_registry.get(name) is None:
                raise TableError(f"{name!r} has a price, and TensorFlow has no such operation")
    else:
        pricer = load_pricer(profile)
    prices = cache(pricer.price)
    found = [_prices(step, prices, pricer) for step in steps]
    _warn_of_unused(runs, pricer.given)
    _warn_of_unknown(steps, prices)
    return found


@dataclass(frozen=True)
class _Signed:
    """A program with the signatures of its operations, and of those that they run.

    Attributes:
      program: the program.
      signatures: by operation.
      inside: what loops, conditionals and calls run.
      functions: these functions, by name.
    """

    program: Program
    signatures: Mapping[int, OpSignature]
    inside: Mapping[int, Inside]
    functions: Mapping[int, Mapping[str, _Signed]]


def _signed(program: Program, found: Mapping[int, Inside]) -> _Signed:
    functions = {
        index: {name: _signed(*function) for name, function in each.functions.items()}
        for index, each in found.items()
    }
    return _Signed(program, signatures_of(program), found, functions)


def _count(step: _Signed, runs: Counter[OpSignature], times: int = 1) -> None:
    """Adds how often each operation runs."""
    for index, signature in step.signatures.items() if times else ():
        runs[signature] += times
        for function in step.functions.get(index, {}).values():
            _count(function, runs, times * step.inside[index].times)


def _parts(
    step: _Signed, index: int, price: Callable[[OpSignature], Price], launch: float
) -> list[tuple[OpSignature, Price]]:
    """The prices of what an operation does: one, or those of all that it runs."""
    signature = step.signatures[index]
    own = price(signature)
    within = step.inside.get(index)
    if within is None or own.kind == "given":
        return [(signature, own)]
    functions = [
        [part for other in function.signatures for part in _parts(function, other, price, launch)]
        for function in step.functions[index].values()
    ]
    if step.program.ops[index].type in CONDITIONALS:  # whichever is taken
        functions = [max(functions, key=_total, default=[])]
    certain = within.complete and within.turns is not None
    return [
        (signature, replace(own, seconds=launch, kind="roofline" if certain else "unknown")),
        *(
            (inner, replace(part, seconds=within.times * part.seconds))
            for parts in functions
            for inner, part in parts
        ),
    ]


def _total(parts: Iterable[tuple[OpSignature, Price]]) -> float:
    return math.fsum(price.seconds for _, price in parts)


def _warn_of_unused(signatures: Iterable[OpSignature], given: Mapping[str, float]) -> None:
    unused = given.keys() - {name for each in signatures for name in (each.op, each.text)}
    if unused:
        warn(
            f"the step has no operation {', '.join(sorted(unused))} that profile={{...}} has a "
            "price for (TensorFlow may have fused it into another)",
        )


def _warn_of_unknown(steps: Iterable[_Signed], price: Callable[[OpSignature], Price]) -> None:
    types = sorted({type for step in steps for type in _unknown(step, price)})
    if types:
        warn(
            f"nothing says before the step runs how long these take: {', '.join(types)}. A loop "
            "is priced as one turn of it, others by the bytes that they move; profile={...} "
            "takes the seconds of an operation's type",
        )


def _unknown(step: _Signed, price: Callable[[OpSignature], Price]) -> Iterator[str]:
    """Types of operations whose prices may be far from what they take."""
    for index, signature in step.signatures.items():
        kind, within = price(signature).kind, step.inside.get(index)
        moved = signature.input_bytes + signature.output_bytes
        if within is not None and kind != "given":
            if within.turns is None or not within.complete:
                yield signature.op
            for function in step.functions[index].values():
                yield from _unknown(function, price)
        elif kind == "unknown" and moved >= _LARGE:
            yield signature.op


def _prices(step: _Signed, price: Callable[[OpSignature], Price], pricer: Pricer) -> Prices:
    """Prices of a program's operations, with what they hold inside."""
    launch = pricer.device.launch_seconds
    functions: dict[str, tuple[Program, Mapping[int, int]]] = {}
    parts = {index: _parts(step, index, price, launch) for index in step.signatures}
    return Prices(
        seconds=tuple(_total(parts.get(index, ())) for index in range(len(step.program.ops))),
        workspace=_workspace(step, price, functions),
        functions=functions,
        coverage=coverage(itertools.chain.from_iterable(parts.values()), pricer.reasons),
        device=pricer.device.name,
    )


def _workspace(
    step: _Signed,
    price: Callable[[OpSignature], Price],
    functions: dict[str, tuple[Program, Mapping[int, int]]],
) -> dict[int, int]:
    """Bytes that operations hold only while they run, less what they leave to others; adds to
    ``functions`` what they run, and the workspace of that."""
    program = step.program
    workspace = {
        index: bytes_
        for index, signature in step.signatures.items()
        if (bytes_ := price(signature).workspace)
    }
    for index, op in enumerate(program.ops):
        # The backward operation finds what the forward one kept.
        if op.type in KEPT_SCRATCH and index in workspace:
            for reader in program.consumers[index]:
                if program.ops[reader].type == KEPT_SCRATCH[op.type]:
                    workspace.pop(reader, None)
    for index, run in step.functions.items():
        inner = {
            name: (each.program, _workspace(each, price, functions)) for name, each in run.items()
        }
        functions.update(inner)
        held = held_inside(program, index, inner.values())
        if held:
            workspace[index] = held
    return workspace


def signatures_of(program: Program) -> dict[int, OpSignature]:
    """The signature of every operation that computes, by its index."""
    constants: dict[int, np.ndarray] = {}
    for index, op in enumerate(program.ops):
        if op.kind is Kind.CONSTANT and op.dtypes[0] in (tf.int32, tf.int64):
            constants[index] = tf.make_ndarray(program.nodes[index].attr["value"].tensor)

    def type_of(source: int, number: int) -> TensorType:
        op = program.ops[source]
        if op.dtypes[number] == tf.resource:
            held = program.variables.get(source)
            if held is None or not held.shape.is_fully_defined():
                return TensorType("resource", (-1,))
            return TensorType("resource", tuple(held.shape))
        return TensorType(op.dtypes[number].name, op.shapes[number])

    return {
        index: signature_of(
            program.nodes[index],
            [type_of(source, number) for source, number in op.inputs],
            [type_of(index, number) for number in range(len(op.bytes))],
            {
                slot: constants[source]
                for slot, (source, _) in enumerate(op.inputs)
                if source in constants
            },
        )
        for index, op in enumerate(program.ops)
        if op.kind in (Kind.PURE, Kind.ONCE)
    }
