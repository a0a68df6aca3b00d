"""Recorded costs: one CSV a device, one row a distinct operation.

Columns: ``signature`` (the key, see ``remat.profiles.signature``), ``op``,
``seconds`` (median of a run), ``spread``, ``repeats``, ``output_bytes``,
``workspace_bytes`` (empty where the allocator does not count), and the
provenance: ``device``, ``driver``, ``tensorflow``, ``date``, ``clock``.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..solvers.files import written
from . import roofline
from .signature import OpSignature, SignatureError

if TYPE_CHECKING:
    import pandas as pd
try:
    import fcntl
except ImportError:  # there are no such locks on Windows, nor is there TensorFlow to measure
    fcntl = None  # type: ignore[assignment]

_MOST_BYTES = 2**50
_SHORTEST, _LONGEST = 1e-12, 1e6  # seconds of an operation, on any device
# FLOP/s that no device reaches, and FLOPs of an operation from which on that is looked at: what
# computes hardly anything may be faster than the clock tells.
_MOST_FLOPS, _FLOPS = 1e17, 10**7
_CONTRADICTS = 2.0  # between two rows of an operation, beyond ...
_LAUNCH = 1e-5  # ... what they spread and the seconds of a launch, which is never the same
_MOST_NAMED = 3  # contradictions in one warning
_MOST_TABLES = 8  # that are kept once they were read
COLUMNS = (
    "signature",
    "op",
    "seconds",
    "spread",
    "repeats",
    "output_bytes",
    "workspace_bytes",
    "device",
    "driver",
    "tensorflow",
    "date",
    "clock",
)


class TableError(ValueError):
    """A table of costs, or a file that should hold one, is not valid."""


@dataclass(frozen=True)
class Row:
    """One measured operation.

    Attributes:
      signature: the operation.
      seconds: median of a run, net of the dispatch of the benchmark.
      spread: interquartile range of the repeats over their median.
      repeats: number of runs behind the median.
      output_bytes: bytes of all outputs.
      workspace_bytes: peak bytes beyond inputs and outputs while it ran;
        None where the allocator does not count them.
      device, driver, tensorflow, date, clock: where and how it was measured.

    Raises:
      TableError: if a figure cannot be a measurement.
    """

    signature: OpSignature
    seconds: float
    spread: float
    repeats: int
    output_bytes: int
    workspace_bytes: int | None
    device: str
    driver: str
    tensorflow: str
    date: str
    clock: str

    def __post_init__(self) -> None:
        for name in ("seconds", "spread"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise TableError(f"{name} is {value}; it must be finite and not negative")
        if not (self.seconds == 0 or _SHORTEST <= self.seconds <= _LONGEST):
            raise TableError(f"seconds is {self.seconds}, which no operation takes")
        if max(self.signature.input_bytes, self.signature.output_bytes) > _MOST_BYTES:
            raise TableError("the signature has more bytes than a device could hold")
        for name in ("device", "driver", "tensorflow", "date", "clock"):
            if not getattr(self, name):
                raise TableError(f"{name} is empty; it says how a row was measured")
        if self.repeats < 1:
            raise TableError(f"repeats is {self.repeats}; a measurement has at least 1")
        if self.output_bytes != self.signature.output_bytes:
            raise TableError(
                f"output_bytes is {self.output_bytes}, but the outputs of the signature hold "
                f"{self.signature.output_bytes}"
            )
        if self.workspace_bytes is not None and not 0 <= self.workspace_bytes <= _MOST_BYTES:
            raise TableError(
                f"workspace_bytes is {self.workspace_bytes}; it must be 0 or more, and no more "
                "than a device could hold"
            )


@dataclass(frozen=True)
class Table(Mapping[str, Row]):
    """The rows of one device, by signature text; a later row replaces an earlier one.

    Raises:
      TableError: if the rows come from more than one device.
    """

    rows: tuple[Row, ...] = ()
    _by_text: dict[str, Row] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_text = {row.signature.text: row for row in self.rows}
        devices = sorted({row.device for row in by_text.values()})
        if len(devices) > 1:
            raise TableError(
                f"rows of {len(devices)} devices ({', '.join(devices)}); keep one table a device"
            )
        object.__setattr__(self, "rows", tuple(by_text.values()))
        object.__setattr__(self, "_by_text", by_text)

    def __getitem__(self, text: str) -> Row:
        return self._by_text[text]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_text)

    def __len__(self) -> int:
        return len(self._by_text)

    @property
    def device(self) -> str | None:
        """The device's name; None for an empty table."""
        return self.rows[0].device if self.rows else None

    def merged(self, rows: Iterable[Row]) -> Table:
        """This table with ``rows`` added; where both have an operation, ``rows`` win."""
        return Table((*self.rows, *rows))


def load_table(path: str | os.PathLike[str]) -> Table:
    """Reads a table and checks every row of it; of rows of one operation the last is taken.

    A file that has not changed since is not read again.

    Warns:
      UserWarning: if rows of one operation contradict each other (they differ by more than
        a factor of 2, and by more than their spreads); if rows were measured with another
        TensorFlow than the one that is installed, or with several drivers: kernels, and so
        costs, differ between versions.

    Raises:
      TableError: naming the file, the line and what is wrong.
      OSError: if it cannot be read.
    """
    table, notes = _read(path)
    _warn(notes)
    return table


def _read(path: str | os.PathLike[str]) -> tuple[Table, tuple[str, ...]]:
    """A table, and what ``load_table`` warns of."""
    there = os.stat(path)
    identity = (there.st_dev, there.st_ino, there.st_mtime_ns, there.st_size)
    return _parsed(os.fspath(path), identity)


@functools.lru_cache(_MOST_TABLES)
def _parsed(path: str, identity: tuple[int, ...]) -> tuple[Table, tuple[str, ...]]:
    """What ``_read`` returns for a file of this identity."""
    import pandas as pd

    try:
        frame = pd.read_csv(
            path,
            dtype=str,
            keep_default_na=False,
            encoding="utf-8",
            compression=None,
            skip_blank_lines=False,  # rows are numbered as lines are
        )
    except (UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise TableError(
            f"{path}: not a CSV table of costs, or one that is damaged ({error}); move it away and "
            "record it again (remat profile), or give another one"
        ) from None
    missing = [column for column in COLUMNS if column not in frame.columns]
    if missing:
        raise TableError(
            f"{path}: has no column {', '.join(map(repr, missing))}; is this a table that "
            "`remat profile` wrote?"
        )
    # pandas numbers what occurs again.
    repeated = [column for column in COLUMNS if f"{column}.1" in frame.columns]
    if repeated:
        raise TableError(f"{path}: has more than one column {', '.join(map(repr, repeated))}")
    rows = {}
    for line, values in enumerate(frame.to_dict("records"), start=2):
        if not any(values.values()):
            continue  # a blank line
        try:
            rows[f"row {line}"] = _row(values)
        except (SignatureError, TableError) as error:
            raise TableError(f"{path}, row {line}: {error}") from None
    try:
        table = Table(tuple(rows.values()))
    except TableError as error:
        raise TableError(f"{path}: {error}") from None
    notes = (*_contradictions(rows.items()), *_mixtures(table))
    return table, tuple(f"{path}: {note}" for note in notes)


def save_table(table: Table, path: str | os.PathLike[str]) -> None:
    """Writes a table; the old file stays whole until the new one is."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with written(path) as file:
        to_frame(table).to_csv(file, index=False)


def append_rows(path: str | os.PathLike[str], rows: Iterable[Row]) -> Table:
    """Adds rows to a table on disk (made if it is not there) and returns the whole.

    Where both have an operation, ``rows`` win.  Processes that do so at once wait for each
    other: ``.NAME.lock`` beside the table is locked meanwhile, and free again as soon as its
    holder has ended, however it ended.

    Warns:
      UserWarning: if a new row contradicts one that it replaces, or is of another driver or
        TensorFlow (see ``load_table``); if the file system has no locks.

    Raises:
      TableError: if the file is not a table, or is another device's.
      OSError: if it cannot be written.
    """
    rows = tuple(rows)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        before = _read(path)[0] if Path(path).exists() else Table()
        after = before.merged(rows)
        save_table(after, path)
    named = [*(("the table", row) for row in before.rows), *(("the new row", row) for row in rows)]
    _warn([f"{path}: {note}" for note in (*_contradictions(named), *_mixtures(after))])
    return after


@contextlib.contextmanager
def _locked(path: str | os.PathLike[str]) -> Iterator[None]:
    """Holds the lock of a table.

    It is of a file beside it: the table itself is replaced, and some file systems lock
    only what is open for writing, which a folder never is.
    """
    if fcntl is None:
        yield
        return
    table = Path(os.path.realpath(path))
    lock = os.open(table.with_name(f".{table.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            _warn(
                [
                    f"{path}: cannot be locked ({error.strerror}); rows that another process "
                    "adds right now may be lost"
                ]
            )
        yield
    finally:
        os.close(lock)  # which gives it up


def to_frame(table: Table) -> pd.DataFrame:
    """The table as a pandas frame with the columns of the file."""
    import pandas as pd

    records = [
        {**vars(row), "signature": row.signature.text, "op": row.signature.op} for row in table.rows
    ]
    frame = pd.DataFrame(records, columns=list(COLUMNS))
    return frame.astype({"workspace_bytes": "Int64"})


def cache_path(device: str, driver: str, tensorflow: str) -> Path:
    """The user's own table for a device and what runs on it.

    ``$REMAT_CACHE``, else ``$XDG_CACHE_HOME/remat``, else ``~/.cache/remat``; without a home,
    in the folder for temporary files.
    """
    folder = os.environ.get("REMAT_CACHE")
    if not folder:
        base = os.environ.get("XDG_CACHE_HOME")
        try:
            folder = str(Path(base or Path.home() / ".cache") / "remat")
        except RuntimeError:  # a user of whom the system knows nothing, as in a container
            folder = str(Path(tempfile.gettempdir()) / "remat")
    name = re.sub(r"[^a-z0-9.]+", "-", f"{device} {driver} tf {tensorflow}".lower()).strip("-")
    return Path(folder) / f"{name}.csv"


def _row(values: Mapping[str, Any]) -> Row:
    signature = OpSignature.from_text(values["signature"])
    if values["op"] != signature.op:
        raise TableError(f"op is {values['op']!r}, but the signature is of {signature.op!r}")
    seconds = _number(values, "seconds")
    flops = roofline.work(signature).flops
    if flops > _FLOPS and seconds < flops / _MOST_FLOPS:
        raise TableError(
            f"seconds is {seconds} for an operation of {flops:.3g} FLOPs; no device is so fast"
        )
    workspace = values["workspace_bytes"]
    return Row(
        signature=signature,
        seconds=seconds,
        spread=_number(values, "spread"),
        repeats=_whole(values, "repeats"),
        output_bytes=_whole(values, "output_bytes"),
        workspace_bytes=_whole(values, "workspace_bytes") if workspace != "" else None,
        **{name: values[name] for name in ("device", "driver", "tensorflow", "date", "clock")},
    )


def _number(values: Mapping[str, Any], name: str) -> float:
    try:
        return float(_figure(values[name]))
    except ValueError:
        raise TableError(f"{name} is {values[name]!r}, not a number") from None


def _whole(values: Mapping[str, Any], name: str) -> int:
    try:
        return int(_figure(values[name]))
    except ValueError:
        raise TableError(f"{name} is {values[name]!r}, not a whole number") from None


def _figure(text: str) -> str:
    """A number's text; Python reads more as numbers than other programs do."""
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return text


def _contradictions(rows: Iterable[tuple[str, Row]]) -> Iterator[str]:
    """Tells of rows, each with where it is, that replace another one that says otherwise."""
    taken: dict[str, tuple[str, Row]] = {}
    found = []
    for where, row in rows:
        text = row.signature.text
        if text in taken and _contradict(taken[text][1], row):
            before, other = taken[text]
            found.append(
                f"{row.seconds:.3g} s in {where} and {other.seconds:.3g} s in {before} for {text}"
            )
        taken[text] = where, row
    if found:
        if len(found) > _MOST_NAMED:
            found[_MOST_NAMED:] = [f"{len(found) - _MOST_NAMED} more"]
        yield (
            f"contradictory rows, of which the later are taken: {'; '.join(found)} (delete what "
            "is wrong, and it is measured again)"
        )


def _contradict(one: Row, other: Row) -> bool:
    low, high = sorted((one.seconds, other.seconds))
    noise = one.spread * one.seconds + other.spread * other.seconds + _LAUNCH
    return high > _CONTRADICTS * low and high - low > noise


def _mixtures(table: Table) -> Iterator[str]:
    """Tells of rows that were measured with something else than others, or than what is here."""
    drivers = sorted({row.driver for row in table.rows})
    if len(drivers) > 1:
        yield (
            f"rows of {len(drivers)} drivers ({'; '.join(drivers)}), between which costs may "
            "differ; keep one table a driver"
        )
    versions = {row.tensorflow for row in table.rows}
    try:
        installed = metadata.version("tensorflow")
    except metadata.PackageNotFoundError:
        if len(versions) > 1:
            yield (
                f"rows of {len(versions)} versions of TensorFlow ({', '.join(sorted(versions))}), "
                "between which costs may differ; keep one table a version"
            )
        return
    others = sorted(versions - {installed})
    if others:
        count = sum(row.tensorflow != installed for row in table.rows)
        yield (
            f"{count} of {len(table)} rows were measured with TensorFlow {', '.join(others)}, and "
            f"{installed} is installed; costs may differ (measure again with `remat profile`)"
        )


def _warn(notes: Sequence[str]) -> None:
    for note in notes:
        warnings.warn(note, stacklevel=3)
