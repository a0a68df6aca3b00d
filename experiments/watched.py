"""What ``fit`` of an experiment is watched with."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf


class Clock(keras.callbacks.Callback):
    """Seconds of every step, and a device's peak (bytes) over all of them."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.seconds: list[float] = []
        self.peak = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._started = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seconds.append(time.perf_counter() - self._started)
        memory = tf.config.experimental.get_memory_info(self.device)
        self.peak = max(self.peak, memory["peak"])


def digest(variables: Iterable[Any]) -> str:
    """Of all bits of the variables."""
    found = hashlib.sha256()
    for variable in variables:
        found.update(np.array(variable).tobytes())
    return found.hexdigest()
