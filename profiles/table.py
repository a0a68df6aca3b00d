"""Recorded costs: a row a distinct operation on one device."""

from __future__ import annotations

from dataclasses import dataclass

from .signature import OpSignature


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
