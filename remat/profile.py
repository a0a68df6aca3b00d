"""What operations cost on the device at hand: measured once, recorded, looked up.

What decides most of a step is measured first (``bench``); rows go to a table
of the user's own (``device.table_path``), and what is in the table is not
measured again.  A step that does not fit in memory can be priced as well: one
operation is run at a time.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import tensorflow as tf

from .allocator import lacking_bytes
from .bench import Bench, Timing, check_measurable
from .device import default_device, device_provenance, table_path
from .notices import warn
from .profiles import roofline
from .profiles.devices import DeviceSpec, UnknownDeviceError, find_device
from .profiles.price import Pricer, spec_of_rows
from .profiles.signature import OpSignature, TensorType
from .profiles.table import Row, Table, TableError, append_rows, load_table
from .signatures import UnmeasurableError

_SAVE_SECONDS = 10.0  # between appends to a table
_FLOPS_PER_BYTE = 10.0  # of a typical device; only the order of measuring depends on it
_FIRST_PART = 0.5  # of the time there is: what has no row yet comes before what has a rough one
_TIME_IS_UP = "time was up before its turn"


@dataclass(frozen=True)
class Measurement:
    """What ``measure_operations`` found.

    Attributes:
      rows: one a measured operation.
      reasons: why each other one has no row, by signature text.
      least_workspace: bytes of scratch memory of some of these, at least, by signature text:
        what they asked for when there was no room for it.
      interrupted: True if Ctrl-C ended it early; ``rows`` holds what was done.
    """

    rows: tuple[Row, ...]
    reasons: Mapping[str, str]
    least_workspace: Mapping[str, int] = field(default_factory=dict)
    interrupted: bool = False


def measure_operations(
    signatures: Iterable[OpSignature],
    *,
    device: str | None = None,
    known: Collection[str] = (),
    path: Path | None = None,
    share: float = 0.98,
    least_bytes: int = 64 * 1024,
    spread: float = 0.05,
    seconds_each: float = 0.02,
    progress: Callable[[int, int, OpSignature], None] | None = None,
    deadline: float | None = None,
) -> Measurement:
    """Measures each distinct operation by itself on one device.

    Args:
      signatures: the operations of one step or several; an operation that
        occurs n times should be listed n times (or counted, in a ``Counter``),
        since those on which a step spends most come first.
      device: for instance "GPU:0"; the first GPU, else the CPU, by default.
      known: signature texts that have a row already and are left out.
      path: table that rows are appended to every few seconds and at the end,
        so that little is lost whatever happens; where it cannot be written, a warning
        says so, and rows are only returned.
      share: part of the work to measure.  What makes up the rest (a rough
        estimate from FLOPs and bytes) is many different small operations,
        which other rows price well enough.
      least_bytes: operations whose inputs and outputs together hold less are
        left out: their price is the launch overhead.
      spread: repeats stop once the interquartile range is within this
        fraction of the median ...
      seconds_each: ... or after this many seconds on one operation, which is then measured
        once more some seconds later, when what disturbed it may be over; the faster counts.
      progress: called with (done, total, next signature).
      deadline: seconds for everything; what is left then has no row.  Nothing is measured
        once more in its second half.

    Returns:
      The rows, and for each other operation the reason why it has none.
    """
    started = time.monotonic()
    device = device or default_device()
    wanted, reasons = _worth_measuring(signatures, share, least_bytes)
    wanted = [signature for signature in wanted if signature.text not in known]
    rows: list[Row] = []
    least_workspace: dict[str, int] = {}
    pending: list[Timing] = []
    saved_at = started
    interrupted = False
    provenance = device_provenance(device)
    bench = Bench(device)

    def is_past(share: float) -> bool:
        return deadline is not None and time.monotonic() - started > share * deadline

    def steadier(timing: Timing) -> Timing:
        if timing.spread <= spread or interrupted or is_past(_FIRST_PART):
            return timing
        try:
            again = bench.measure_undisturbed(timing.signature, spread, seconds_each)
        except (UnmeasurableError, tf.errors.OpError):  # there is less memory than there was
            return timing
        return min(timing, again, key=lambda each: each.seconds)

    def save() -> None:
        nonlocal path
        timings = bench.with_exact_workspace([*map(steadier, pending)])
        added = [_row(timing, provenance) for timing in timings]
        if path is not None and added:
            try:
                append_rows(path, added)
            except OSError as error:
                warn(
                    f"what is measured is not recorded, and will be measured again: {path} cannot "
                    f"be written ({error.strerror}); have REMAT_CACHE name a folder that can",
                )
                path = None
        rows.extend(added)
        pending.clear()

    try:
        for index, signature in enumerate(wanted):
            if progress is not None:
                progress(index, len(wanted), signature)
            if is_past(1):
                reasons[signature.text] = _TIME_IS_UP
                continue
            try:
                pending.append(bench.measure_undisturbed(signature, spread, seconds_each))
            except (UnmeasurableError, tf.errors.OpError) as error:
                reasons[signature.text] = str(error).split("\n", 1)[0]
                lacking = lacking_bytes(error)
                if lacking not in {0, *(tensor.bytes for tensor in signature.outputs)}:
                    least_workspace[signature.text] = lacking
            if time.monotonic() - saved_at > _SAVE_SECONDS:
                save()
                saved_at = time.monotonic()
        save()
    except KeyboardInterrupt:
        interrupted = True
        save()
    return Measurement(tuple(rows), reasons, least_workspace, interrupted)


def measured_pricer(
    signatures: Iterable[OpSignature],
    *,
    device: str | None = None,
    progress: Callable[[int, int, OpSignature], None] | None = None,
    deadline: float | None = None,
) -> Pricer:
    """Prices from the user's table of this device; what it lacks is measured and recorded.

    Its ``reasons`` say why what has no row then was not measured.

    Raises:
      TableError: if the table on disk is damaged, or of another device; the message names
        the file.
      KeyboardInterrupt: once what was measured so far is recorded.
    """
    device = device or default_device()
    signatures = Counter(signatures)
    path = table_path(device)
    spec = spec_at_hand(device)
    started = time.monotonic()
    pricer = Pricer(spec, _table(device))
    reasons: dict[str, str] = {}
    least_workspace: dict[str, int] = {}

    def measure(wanted: Iterable[OpSignature], share: float) -> None:
        nonlocal pricer
        measurement = measure_operations(
            wanted,
            device=device,
            known=pricer.table,
            path=path,
            share=share,
            progress=progress,
            deadline=None if deadline is None else deadline - (time.monotonic() - started),
        )
        if measurement.interrupted:
            raise KeyboardInterrupt
        reasons.update(measurement.reasons)
        least_workspace.update(measurement.least_workspace)
        if measurement.rows:
            pricer = Pricer(spec, pricer.table.merged(measurement.rows))

    # Seconds can be told from other rows; scratch memory cannot, and a step that takes
    # more than was known does not fit.  So first the largest of each type that has no
    # row yet, which says whether the type takes any, then all others of such types.
    known = {row.signature.op for row in pricer.table.rows}
    largest: dict[str, OpSignature] = {}
    for signature in sorted(signatures, key=lambda s: s.input_bytes + s.output_bytes):
        if signature.op not in known:
            largest[signature.op] = signature
    measure(largest.values(), share=1.0)
    prices = {signature: pricer.price(signature) for signature in signatures}
    measure(
        [s for s, price in prices.items() if price.workspace and price.kind != "measured"],
        share=1.0,
    )
    measure(signatures, share=0.98)
    return replace(pricer, reasons=reasons, least_workspace=least_workspace)


def recorded_pricer(device: str | None = None) -> Pricer:
    """Prices from the user's table of this device as it is, without scratch memory.

    What operations of other sizes take of that says little, and nothing is measured here;
    running the step does.

    Raises:
      TableError: if the table on disk is damaged; the message names the file.
    """
    device = device or default_device()
    rows = _table(device).rows
    return Pricer(
        spec_at_hand(device), Table(tuple(replace(row, workspace_bytes=None) for row in rows))
    )


def spec_at_hand(device: str | None = None) -> DeviceSpec:
    """The specification of a device of this process: listed, or else measured."""
    device = device or default_device()
    try:
        return find_device(device_provenance(device)["device"])
    except UnknownDeviceError:
        return measure_device(device)


def measure_device(device: str | None = None) -> DeviceSpec:
    """The specification of a device that has none, from a few operations large and tiny.

    They are measured once and recorded in the user's table.
    """
    device = device or default_device()
    path = table_path(device)
    table = _table(device)
    reference = _reference_operations(on_gpu=device.startswith("GPU"))
    measurement = measure_operations(
        reference, device=device, known=table, path=path, share=1.0, least_bytes=0
    )
    if measurement.interrupted:
        raise KeyboardInterrupt
    provenance = device_provenance(device)
    memory = None
    if device.startswith("CPU") and hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return spec_of_rows(provenance["device"], table.merged(measurement.rows).rows, memory=memory)


def _table(device: str) -> Table:
    """The user's table of a device, empty if nothing was measured on it yet."""
    path, here = table_path(device), device_provenance(device)["device"]
    table = load_table(path) if path.exists() else Table()
    if table.device not in (None, here):
        raise TableError(
            f"{path}: what was measured on {table.device} is where the table of {here} belongs; "
            "move it away"
        )
    return table


def _row(timing: Timing, provenance: Mapping[str, str]) -> Row:
    return Row(
        signature=timing.signature,
        seconds=timing.seconds,
        spread=timing.spread,
        repeats=timing.repeats,
        output_bytes=timing.signature.output_bytes,
        workspace_bytes=timing.workspace,
        **provenance,
    )


def _worth_measuring(
    signatures: Iterable[OpSignature], share: float, least_bytes: int
) -> tuple[list[OpSignature], dict[str, str]]:
    """The operations to measure, the most work first, and why the others are not."""
    reasons = {}
    work = {}
    for signature, count in Counter(signatures).items():
        try:
            check_measurable(signature)
        except UnmeasurableError as error:
            reasons[signature.text] = str(error)
            continue
        done = roofline.work(signature)
        small = signature.input_bytes + signature.output_bytes < least_bytes
        if small and done.kind != roofline.UNKNOWN:
            reasons[signature.text] = "so small that it costs the launch overhead"
            continue
        work[signature] = count * max(done.flops / _FLOPS_PER_BYTE, done.bytes)
    wanted: list[OpSignature] = []
    left = share * sum(work.values())
    for signature in sorted(work, key=lambda signature: -work[signature]):
        if left > 0 or share >= 1:
            wanted.append(signature)
        else:
            reasons[signature.text] = "among the small remainder of the work"
        left -= work[signature]
    return wanted, reasons


def _reference_operations(on_gpu: bool) -> list[OpSignature]:
    """Products of matrices, and sums beyond any cache, inside one, and of a few elements."""
    size, beyond, cached = (4096, 2**24, 2**22) if on_gpu else (1024, 2**22, 2**15)
    operations = []
    for dtype in ("float32", "float64", "bfloat16", "float16"):
        square = TensorType(dtype, (size, size))
        attrs = (("T", dtype), ("transpose_a", "false"), ("transpose_b", "false"))
        operations.append(OpSignature("MatMul", (square, square), (square,), attrs))
    for elements in (beyond, cached, 2**4):
        vector = TensorType("float32", (elements,))
        operations.append(OpSignature("AddV2", (vector, vector), (vector,), (("T", "float32"),)))
    return operations
