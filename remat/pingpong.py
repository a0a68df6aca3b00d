"""Trains one of several alike parts at a time; the others wait in the host's memory.

Where several parts of one shape share the rest of a model (one encoder and a
decoder for each side, say), only the part that trains needs its variables and
its optimizer's slots on the device.  There is one set of variables; what they
hold is changed for another part's values every now and then::

    sides = remat.PingPong([*decoder.variables, *optimizer.variables], parts=2)
    for number, batches in enumerate(dataset):
        sides.switch(number // 100 % 2)
        step(*batches[sides.part])        # tf.function, remat.function or remat.compile

The step is one and the same for all parts, so it is traced and planned once.
The parts train in turns: that is another training than all at once, and of as
many more steps as there are parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from . import allocator


class PingPong:
    """Variables whose values are those of one part at a time.

    Attributes:
      part: whose values the variables hold.
    """

    def __init__(self, variables: Sequence[Any], parts: int = 2) -> None:
        """Every part begins with the values that the variables have now.

        Args:
          variables: Keras's or TensorFlow's, built: those of a part and of
            its optimizer.
          parts: how many there are.

        Raises:
          ValueError: if there are no variables, or less than two parts.
        """
        if not variables:
            raise ValueError("there are no variables; build the model and the optimizer first")
        if parts < 2:
            raise ValueError(f"parts is {parts}; with less than 2 there is nothing to switch")
        self.part = 0
        self._variables = list(variables)
        self._waiting: list[list[np.ndarray]] = [self._read() for _ in range(parts)]

    def switch(self, part: int) -> None:
        """Makes the variables hold another part's values; bit for bit what it had.

        Raises:
          IndexError: if there is no such part.
        """
        if not 0 <= part < len(self._waiting):
            raise IndexError(f"there is no part {part}; there are {len(self._waiting)}")
        if part == self.part:
            return
        self._waiting[self.part] = self._read()
        for variable, value in zip(self._variables, self._waiting[part], strict=True):
            own = variable.value if isinstance(variable, keras.Variable) else variable
            # Where plans expect it: an assignment would move the variable to the value's memory.
            allocator.overwrite(own.handle, tf.constant(value, own.dtype))
        self.part = part

    def values(self, part: int) -> list[np.ndarray]:
        """What a part's variables hold, in the order they were given: to save it, say."""
        return self._read() if part == self.part else self._waiting[part]

    def _read(self) -> list[np.ndarray]:
        # A copy: on the CPU an array can share the variable's own memory.
        return [variable.numpy().copy() for variable in self._variables]
