"""Stage 3: what each operation of a program costs, in seconds and workspace bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from .bodies import held_inside
from .profile import measured_pricer, recorded_pricer
from .profiles.price import Coverage, Price, coverage, load_pricer
from .profiles.signature import OpSignature, TensorType
from .profiles.table import TableError
from .program import KEPT_SCRATCH, Kind, Program
from .signatures import signature_of

Profile = str | os.PathLike[str] | Mapping[str, float]


@dataclass(frozen=True)
class Prices:
    """Prices of a program's operations.

    Attributes:
      seconds: of each operation (0 for what does not compute).
      workspace: bytes an operation holds only while it runs, where there are any.
      coverage: how much of it was measured, fitted or computed.
      device: name of the device they are for.
    """

    seconds: tuple[float, ...]
    workspace: Mapping[int, int]
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

    Returns:
      The prices of each version.

    Raises:
      UnknownDeviceError, TableError: if ``profile`` names nothing usable.
    """
    signatures = [signatures_of(program) for program in versions]
    if profile == "auto":
        every = [signature for found in signatures for signature in found.values()]
        pricer = measured_pricer(every, deadline=deadline, progress=progress)
    elif isinstance(profile, Mapping):
        pricer = load_pricer(profile, recorded_pricer())
        for name in pricer.given:
            if "(" not in name and op_def_registry.get(name) is None:
                raise TableError(f"{name!r} has a price, and TensorFlow has no such operation")
    else:
        pricer = load_pricer(profile)
    distinct = {s: pricer.price(s) for found in signatures for s in set(found.values())}
    return [
        _prices(program, {index: distinct[s] for index, s in found.items()}, pricer.device.name)
        for program, found in zip(versions, signatures, strict=True)
    ]


def _prices(program: Program, prices: Mapping[int, Price], device: str) -> Prices:
    """Prices of some operations, with what they leave to others and hold inside."""
    workspace = {index: found.workspace for index, found in prices.items() if found.workspace}
    for index, op in enumerate(program.ops):
        # The backward operation finds what the forward one kept.
        if op.type in KEPT_SCRATCH and index in workspace:
            for reader in program.consumers[index]:
                if program.ops[reader].type == KEPT_SCRATCH[op.type]:
                    workspace.pop(reader, None)
    workspace |= held_inside(program)
    return Prices(
        seconds=tuple(
            prices[index].seconds if index in prices else 0.0 for index in range(len(program.ops))
        ),
        workspace=workspace,
        coverage=coverage(prices.values()),
        device=device,
    )


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
