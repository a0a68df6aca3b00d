"""The price of any operation: measured, fitted from other sizes, or from the roofline.

A ``Pricer`` answers from the best source it has, and says which that was:

* ``given``: the caller's own figure for a signature or an op type;
* ``measured``: a row of the table;
* ``fitted``: rows of the same operation at other sizes (another batch size, say);
* ``roofline``: the device's specification, corrected by the table's rows;
* ``unknown``: the same of the bytes that it moves, as nobody has counted what it computes.
"""

from __future__ import annotations

import math
import numbers
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

from . import roofline
from .devices import DeviceSpec, UnknownDeviceError, find_device
from .signature import OpSignature, SignatureError, TensorType
from .table import Row, Table, TableError, load_table

Kind = Literal["given", "measured", "fitted", "roofline", "unknown"]
_NEAREST = 4  # rows behind a fit
_RECORDED = Path(__file__).parent  # where tables are named after their device
_FLOATS = ("float32", "float64", "bfloat16", "float16")
_MOST_NAMED = 4  # types of operations in a line
_MOST_REASONS = 6  # lines
_BEYOND_CACHE = 32 * 2**20  # bytes from which on an operation shows the memory's bandwidth


@dataclass(frozen=True)
class Price:
    """What one run of an operation costs.

    Attributes:
      seconds: how long it takes.
      workspace: bytes it holds beside inputs and outputs while it runs.
      kind: where the seconds come from.
    """

    seconds: float
    workspace: int
    kind: Kind


@dataclass(frozen=True)
class Pricer:
    """Prices operations on one device.

    Attributes:
      device: its specification.
      table: its measured rows.
      given: seconds by signature text or op type, which come before all else.
      reasons: why operations without a row were not measured, by signature text.
      least_workspace: bytes that some of these are known to need at least, by signature text.
    """

    device: DeviceSpec
    table: Table = field(default_factory=Table)
    given: Mapping[str, float] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    least_workspace: Mapping[str, int] = field(default_factory=dict)

    def price(self, signature: OpSignature) -> Price:
        """The price of one run."""
        row = self.table.get(signature.text)
        workspace = self._workspace(signature, row)
        for key in (signature.text, signature.op):
            if key in self.given:
                return Price(self.given[key], workspace, "given")
        if row is not None:
            return Price(row.seconds, workspace, "measured")
        neighbours = self._neighbours(signature)
        if neighbours:
            return Price(self._fit(signature, neighbours), workspace, "fitted")
        unknown = roofline.work(signature).kind == roofline.UNKNOWN
        seconds = roofline.seconds(signature, self.device, self._correction)
        return Price(seconds, workspace, "unknown" if unknown else "roofline")

    @cached_property
    def _correction(self) -> roofline.Correction:
        return roofline.fit_correction(self.table.rows, self.device)

    @cached_property
    def _families(self) -> dict[tuple[object, ...], list[Row]]:
        families: dict[tuple[object, ...], list[Row]] = {}
        for row in self.table.rows:
            families.setdefault(_family(row.signature), []).append(row)
        return families

    @cached_property
    def _workspace_shares(self) -> dict[str, float]:
        """By op type, the median of workspace over bytes of inputs and outputs."""
        shares: dict[str, list[float]] = {}
        for row in self.table.rows:
            moved = row.signature.input_bytes + row.signature.output_bytes
            if row.workspace_bytes is not None and moved:
                shares.setdefault(row.signature.op, []).append(row.workspace_bytes / moved)
        return {op: sorted(values)[len(values) // 2] for op, values in shares.items()}

    def _workspace(self, signature: OpSignature, row: Row | None) -> int:
        """Measured, or what the same op type needed for its size, or 0."""
        if row is not None and row.workspace_bytes is not None:
            return row.workspace_bytes
        share = self._workspace_shares.get(signature.op, 0.0)
        likely = math.ceil(share * (signature.input_bytes + signature.output_bytes))
        return max(likely, self.least_workspace.get(signature.text, 0))

    def _neighbours(self, signature: OpSignature) -> list[Row]:
        """The rows of the same operation at the sizes nearest to this one.

        What took no more than a launch says nothing of sizes: relative errors of it would
        outweigh all others.
        """
        scaled = []
        for row in self._families.get(_family(signature), ()):
            if row.seconds <= self.device.launch_seconds:
                continue
            scale = _scale(signature, row.signature)
            if scale is not None and scale != 1:
                scaled.append((abs(math.log(scale)), row))
        scaled.sort(key=lambda pair: pair[0])
        return [row for _, row in scaled[:_NEAREST]]

    def _fit(self, signature: OpSignature, rows: Sequence[Row]) -> float:
        """Seconds as constant + slope x roofline, by least squares of the relative error.

        Neither is negative.  Rows of one size only, or rows that would make the
        constant negative, give the slope alone, above the launch overhead.  Where larger
        rows were not slower, that is their noise: between them their mean holds.
        """
        target = self._net(signature)
        sizes = [self._net(row.signature) for row in rows]
        times = [row.seconds for row in rows]
        # Minimise the sum of (constant/t + slope*size/t - 1)^2.
        ones = [1 / t for t in times]
        slopes = [size / t for size, t in zip(sizes, times, strict=True)]
        a, b, c = _dot(ones, ones), _dot(ones, slopes), _dot(slopes, slopes)
        determinant = a * c - b * b
        if determinant > 1e-9 * a * c:
            constant = (c * sum(ones) - b * sum(slopes)) / determinant
            slope = (a * sum(slopes) - b * sum(ones)) / determinant
            if constant >= 0 and slope >= 0:
                return constant + slope * target
            if slope < 0 and min(sizes) <= target <= max(sizes):
                return sum(ones) / a
        launch = self.device.launch_seconds
        if c == 0:  # moves nothing and computes nothing
            return sum(times) / len(times)
        return launch + target * (sum(slopes) - launch * b) / c

    def _net(self, signature: OpSignature) -> float:
        """Roofline seconds above the launch overhead, uncorrected."""
        return roofline.seconds(signature, self.device) - self.device.launch_seconds


@dataclass(frozen=True)
class Share:
    """Some of a step's operations.

    Attributes:
      operations: how many.
      seconds: sum of their prices.
      types: their types, those that cost most first.
    """

    operations: int
    seconds: float
    types: tuple[str, ...]

    @property
    def named(self) -> str:
        """The dearest types."""
        more = len(self.types) - _MOST_NAMED
        return ", ".join(self.types[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Coverage:
    """How much of a step each kind of price makes up.

    Attributes:
      kinds: the operations of each kind of price.
      unmeasured: those that have no row where measuring was asked for, by the reason why.
    """

    kinds: Mapping[Kind, Share]
    unmeasured: Mapping[str, Share] = field(default_factory=dict)

    @property
    def operations(self) -> dict[Kind, int]:
        """Number of operations by kind."""
        return {kind: share.operations for kind, share in self.kinds.items()}

    @property
    def seconds(self) -> dict[Kind, float]:
        """Sum of their prices by kind."""
        return {kind: share.seconds for kind, share in self.kinds.items()}

    def __str__(self) -> str:
        total = math.fsum(self.seconds.values()) or 1.0
        lines = [
            f"{kind:9} {share.operations:7} operations {share.seconds:10.4f} s "
            f"{100 * share.seconds / total:5.1f} %  {share.named}"
            for kind, share in self.kinds.items()
            if share.operations
        ]
        reasons = sorted(self.unmeasured.items(), key=lambda item: -item[1].seconds)
        shown = reasons[:_MOST_REASONS]
        if len(reasons) > _MOST_REASONS:
            shown.append(("other reasons", _sum(share for _, share in reasons[_MOST_REASONS:])))
        for reason, share in shown:
            lines.append(
                f"not measured: {share.operations} operation{'s' * (share.operations > 1)}, "
                f"{100 * share.seconds / total:.1f} % ({share.named}): {reason}"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class Validation:
    """How well one kind of price predicts rows that it has not seen.

    Attributes:
      kind: "fitted" or "roofline".
      rows: number of rows predicted.
      median_error: median of |predicted / measured - 1|.
      largest_tenth_error: that error's 90th percentile.
      total_ratio: sum of the predictions over sum of the measurements.
    """

    kind: Kind
    rows: int
    median_error: float
    largest_tenth_error: float
    total_ratio: float


def coverage(
    prices: Iterable[tuple[OpSignature, Price]], reasons: Mapping[str, str] | None = None
) -> Coverage:
    """Counts and sums the prices of a step's operations by kind.

    Args:
      prices: each operation with its price.
      reasons: why operations were not measured, by signature text.
    """
    reasons = reasons or {}
    kinds: dict[Kind, list[Share]] = {kind: [] for kind in get_args(Kind)}
    unmeasured: dict[str, list[Share]] = {}
    for signature, price in prices:
        share = Share(1, price.seconds, (signature.op,))
        kinds[price.kind].append(share)
        if signature.text in reasons and price.kind not in ("measured", "given"):
            unmeasured.setdefault(reasons[signature.text], []).append(share)
    return Coverage(
        {kind: _sum(shares) for kind, shares in kinds.items()},
        {reason: _sum(shares) for reason, shares in unmeasured.items()},
    )


def _sum(shares: Iterable[Share]) -> Share:
    """All in one; of a share of several types the first stands for its seconds."""
    shares = tuple(shares)
    by_type: dict[str, float] = {}
    for share in shares:
        for index, op in enumerate(share.types):
            by_type[op] = by_type.get(op, 0.0) + (0.0 if index else share.seconds)
    return Share(
        sum(share.operations for share in shares),
        math.fsum(share.seconds for share in shares),
        tuple(sorted(by_type, key=lambda op: -by_type[op])),
    )


def cross_validate(table: Table, device: DeviceSpec, folds: int = 10) -> tuple[Validation, ...]:
    """Predicts every row without it, and reports the error of each kind of price.

    For fits, each row in turn is left out.  For the roofline, a tenth of the
    rows (every tenth by signature) is left out at a time, and no row at another
    size is used.
    """
    pairs: dict[Kind, list[tuple[float, float]]] = {"fitted": [], "roofline": []}
    pricer = Pricer(device, table)
    ordered = sorted(table.rows, key=lambda row: row.signature.text)
    for row in ordered:
        neighbours = pricer._neighbours(row.signature)
        if neighbours:
            pairs["fitted"].append((pricer._fit(row.signature, neighbours), row.seconds))
    for fold in range(folds):
        kept = [row for index, row in enumerate(ordered) if index % folds != fold]
        correction = roofline.fit_correction(kept, device)
        for row in ordered[fold::folds]:
            predicted = roofline.seconds(row.signature, device, correction)
            pairs["roofline"].append((predicted, row.seconds))
    return tuple(_validation(kind, found) for kind, found in pairs.items() if found)


def spec_of_rows(name: str, rows: Iterable[Row], memory: int | None = None) -> DeviceSpec:
    """A specification from the best that measured rows achieved.

    Raises:
      TableError: if there are no rows to tell from.
    """
    matrix: dict[str, float] = {}
    vector: dict[str, float] = {}
    cached, uncached, launch = 0.0, 0.0, math.inf
    for row in rows:
        if row.seconds <= 0:
            continue
        done = roofline.work(row.signature)
        peaks = matrix if done.matrix else vector
        dtype = roofline.compute_dtype(row.signature)
        peaks[dtype] = max(peaks.get(dtype, 0.0), done.flops / row.seconds)
        cached = max(cached, done.bytes / row.seconds)
        if done.bytes >= _BEYOND_CACHE:
            uncached = max(uncached, done.bytes / row.seconds)
        launch = min(launch, row.seconds)
    if not matrix and not vector:
        raise TableError(f"no measured rows of {name} to tell its speed from")
    matrix, vector = (
        {dtype: peak for dtype, peak in peaks.items() if peak > 0} for peaks in (matrix, vector)
    )
    fastest = max(matrix.values(), default=0.0)
    vector.setdefault("float32", max(vector.values(), default=fastest))
    if not vector["float32"] or not cached:
        raise TableError(f"what was measured of {name} computes nothing to tell its speed from")
    if matrix:  # a dtype that was not measured: far from what a vector of it takes
        matrix = dict.fromkeys(_FLOATS, matrix.get("float32", fastest)) | matrix
    return DeviceSpec(
        name=name,
        matrix_flops=matrix,
        vector_flops=vector,
        bandwidth=uncached or cached,
        memory=memory,
        launch_seconds=launch,
        source="the best of its measured rows",
    )


def load_pricer(
    profile: str | os.PathLike[str] | Mapping[str, float], others: Pricer | None = None
) -> Pricer:
    """The pricer that a user's ``profile=`` names.

    Args:
      profile: a device's name, with its recorded table (``profiles/NAME.csv``)
        where there is one; a CSV table; or seconds by signature text or op type.
      others: what prices operations that a mapping does not list.

    Raises:
      UnknownDeviceError: if it is neither a file nor the name of a device.
      TableError: if the file is not a table, or a given price is not a price.
      TypeError: if it is nothing of this kind.
    """
    if isinstance(profile, Mapping):
        return _given_pricer(profile, others)
    if not isinstance(profile, (str, os.PathLike)):
        raise TypeError(
            'a profile is "auto", the name of a device, a CSV table or seconds by operation, '
            f"not {profile!r}"
        )
    name, path = os.fspath(profile), Path(profile)
    if name and path.is_dir():
        raise TableError(f"{path} is a folder; give a CSV table in it")
    if path.suffix == ".csv" or path.is_file() or len(path.parts) > 1:
        if not path.is_file():
            raise TableError(f"{path}: there is no such table")
        table = load_table(path)
        return Pricer(_spec_of_table(table, path), table)
    recorded = {found.stem: found for found in sorted(_RECORDED.glob("*.csv"))}
    try:
        spec = find_device(name)
    except UnknownDeviceError as error:
        if name not in recorded:
            named = f"; recorded: {', '.join(recorded)}" if recorded else ""
            raise UnknownDeviceError(f"{error}{named}") from None
        table = load_table(recorded[name])
        return Pricer(_spec_of_table(table, recorded[name]), table)
    table = load_table(recorded[spec.name]) if spec.name in recorded else Table()
    return Pricer(spec, table)


def _given_pricer(given: Mapping[str, float], others: Pricer | None) -> Pricer:
    if others is None:
        raise TableError("a mapping of prices needs a device for the operations it leaves out")
    prices = {}
    for key, value in given.items():
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not number or not 0 <= value < math.inf:
            raise TableError(f"the price of {key!r} is {value!r}; it must be seconds, 0 or more")
        if not isinstance(key, str) or not re.fullmatch(r"[\w>]+", key):
            try:
                key = OpSignature.from_text(key).text
            except SignatureError as error:
                raise TableError(
                    f"{key!r} has a price, but is neither an operation type nor a signature "
                    f"({error})"
                ) from None
        prices[key] = float(value)
    return replace(others, given=prices)


def _spec_of_table(table: Table, path: Path) -> DeviceSpec:
    if table.device is None:
        raise TableError(f"{path}: the table has no rows")
    try:
        return find_device(table.device)
    except UnknownDeviceError:
        pass
    try:
        return spec_of_rows(table.device, table.rows)
    except TableError as error:
        raise TableError(f"{path}: {error}") from None


def _family(signature: OpSignature) -> tuple[object, ...]:
    """What operations share that differ in size only."""
    operands = tuple(
        (tensor.dtype, len(tensor.shape), tensor.value is None)
        for tensor in (*signature.inputs, *signature.outputs)
    )
    return signature.op, signature.attrs, len(signature.inputs), operands


def _scale(target: OpSignature, other: OpSignature) -> float | None:
    """The one factor by which some dimensions of ``target`` exceed those of ``other``.

    1 if they are the same; None if they differ otherwise.  Values of integer
    inputs must agree, unless they repeat the shape of the output.
    """
    ratio: tuple[int, int] | None = None
    for mine, its in zip(
        (*target.inputs, *target.outputs), (*other.inputs, *other.outputs), strict=True
    ):
        if mine.value != its.value and not (
            _is_output_shape(mine, target) and _is_output_shape(its, other)
        ):
            return None
        for a, b in zip(mine.shape, its.shape, strict=True):
            if a == b:
                continue
            if a <= 0 or b <= 0:
                return None
            if ratio is None:
                ratio = (a, b)
            elif a * ratio[1] != b * ratio[0]:
                return None
    return 1.0 if ratio is None else ratio[0] / ratio[1]


def _is_output_shape(tensor: TensorType, signature: OpSignature) -> bool:
    return tensor.value == signature.outputs[0].shape


def _validation(kind: Kind, pairs: Sequence[tuple[float, float]]) -> Validation:
    errors = sorted(abs(predicted / max(seen, 1e-9) - 1) for predicted, seen in pairs)
    return Validation(
        kind=kind,
        rows=len(pairs),
        median_error=errors[len(errors) // 2],
        largest_tenth_error=errors[min(len(errors) - 1, int(0.9 * len(errors)))],
        total_ratio=sum(p for p, _ in pairs) / max(sum(s for _, s in pairs), 1e-9),
    )


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(left, right, strict=True))
