"""Stage 3: what each operation of a program costs, in seconds and workspace bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from . import profile as profile_module
from .profile import (
    default_device,
    device_provenance,
    measure_operations,
    signature_of,
)
from .profiles.devices import DeviceSpec, UnknownDeviceError, find_device
from .profiles.price import Coverage, Price, Pricer, coverage, load_pricer
from .profiles.signature import OpSignature, TensorType
from .profiles.table import Table, append_rows, cache_path, load_table
from .program import Kind, Program

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
    program: Program,
    profile: Profile = "auto",
    *,
    deadline: float = 60.0,
    progress: Callable[[int, int, OpSignature], None] | None = None,
) -> Prices:
    """Prices every operation that computes.

    Args:
      program: the step.
      profile: "auto" (this device's recorded costs; what is missing there is
        measured now and recorded, what cannot be measured is computed from
        the device's roofline), a device's name, a CSV table, or seconds by
        signature text or operation type.
      deadline: seconds that measuring may take.
      progress: called with (done, total, next signature) while measuring.

    Raises:
      UnknownDeviceError, TableError: if ``profile`` names nothing usable.
    """
    signatures = _signatures(program)
    if profile == "auto":
        pricer = _measured(list(signatures.values()), deadline, progress)
    elif isinstance(profile, Mapping):
        pricer = load_pricer(profile, _device_at_hand())
    else:
        pricer = load_pricer(profile)
    distinct = {signature: pricer.price(signature) for signature in set(signatures.values())}
    prices: dict[int, Price] = {index: distinct[s] for index, s in signatures.items()}
    return Prices(
        seconds=tuple(
            prices[index].seconds if index in prices else 0.0 for index in range(len(program.ops))
        ),
        workspace={index: found.workspace for index, found in prices.items() if found.workspace},
        coverage=coverage(prices.values()),
        device=pricer.device.name,
    )


def _measured(
    signatures: Sequence[OpSignature],
    deadline: float,
    progress: Callable[[int, int, OpSignature], None] | None,
) -> Pricer:
    """This device's pricer, after measuring what its table does not hold."""
    provenance = device_provenance(default_device())
    path = cache_path(provenance["device"], provenance["driver"], provenance["tensorflow"])
    table = load_table(path) if path.exists() else Table()
    measurement = measure_operations(signatures, known=table, deadline=deadline, progress=progress)
    if measurement.rows:
        table = append_rows(path, measurement.rows)
    if measurement.interrupted:
        raise KeyboardInterrupt
    return Pricer(_device_at_hand(), table)


def _device_at_hand() -> DeviceSpec:
    """The specification of the device that runs the step."""
    device = default_device()
    name = device_provenance(device)["device"]
    try:
        return find_device(name)
    except UnknownDeviceError:
        return profile_module.measure_device(device)


def _signatures(program: Program) -> dict[int, OpSignature]:
    """The signature of every operation that computes, by its index."""
    constants: dict[int, np.ndarray] = {}
    for index, op in enumerate(program.ops):
        if op.kind is Kind.CONSTANT and op.dtypes[0] in (tf.int32, tf.int64):
            constants[index] = tf.make_ndarray(program.nodes[index].attr["value"].tensor)

    def type_of(source: int, number: int) -> TensorType:
        op = program.ops[source]
        if op.dtypes[number] == tf.resource:
            held = program.variables.get(source)
            known = held is not None and held.shape.is_fully_defined()
            return TensorType("resource", tuple(held.shape) if known else (-1,))
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
