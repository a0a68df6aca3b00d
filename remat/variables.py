"""The variables that a step captures: what buffers they have, and their values put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from . import allocator
from .inplace import stays
from .program import Program


def variables_of(program: Program) -> list[tuple[tf.Tensor, tf.TensorSpec]]:
    """Handle and specification of every captured variable."""
    return [
        (external, program.variables[index])
        for index, external in program.captures
        if external.dtype == tf.resource and index in program.variables
    ]


def own_buffers(program: Program) -> None:
    """Gives each captured variable a buffer of its own, as its first update would.

    Variables that were made while a function was traced (the slots of an optimizer
    that is built by its first use) share one if they start with equal values; one
    that starts with an array may have numpy's.
    """
    for handle, spec in variables_of(program):
        if stays(spec):
            allocator.own(handle, spec)


def move_what_moves(program: Program) -> None:
    """Gives another buffer to each captured variable that gets one with each step."""
    moved = []
    for handle, spec in variables_of(program):
        if not stays(spec):
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=spec.dtype)
            moved.append((handle, tf.raw_ops.DeepCopy(x=value)))
    # Not one by one: each would find the place that the one before has left.
    for handle, value in moved:
        tf.raw_ops.AssignVariableOp(resource=handle, value=value)


@contextmanager
def variables_put_back(program: Program) -> Iterator[None]:
    """Saves every captured variable to the host, and puts it back at the end."""
    handles = variables_of(program)
    saved = [
        tf.raw_ops.ReadVariableOp(resource=handle, dtype=spec.dtype).numpy()  # a copy
        for handle, spec in handles
    ]
    try:
        yield
    finally:
        for (handle, spec), value in zip(handles, saved, strict=True):
            allocator.overwrite(handle, tf.constant(value, spec.dtype))
