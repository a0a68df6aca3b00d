"""Replicas that meet in the middle of a step, as synchronised BatchNormalization does.

Under ``MirroredStrategy`` TensorFlow traces one graph for all replicas, and
``ReplicaContext.all_reduce`` adds values up in there.  A plan is for one
replica, so while one is traced, an operation takes that place which waits for
the same operation of all others (``CollectiveReduceV2``, which runs exactly
once).  Every replica meets the others in the order of the trace, whatever its
plan: else two could wait for each other.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from .program import Program

_MEETING = "CollectiveReduceV2"
_LARGEST_SEED = (1 << 31) - 1
_GROUP = 1 << 30  # TensorFlow counts its own groups from 1


def check_side_by_side(program: Program, name: str) -> None:
    """Refuses to run a step in which replicas meet where they run one after the other.

    Raises:
      ValueError: if it would wait forever.
    """
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync == 1 or len(strategy.extended.worker_devices) == 1:
        return  # alone in this process
    if any(op.type == _MEETING for op in program.ops):
        raise ValueError(
            f"{name}: replicas meet in this step, and outside of a tf.function strategy.run runs "
            f"one after the other, which would wait forever: plan it with "
            f"strategy.run(lambda *batch: {name}.compiled(*batch) and None, args=batch), then "
            "call it by strategy.run in a tf.function"
        )


def planned_apart(
    step: Callable[..., Any], number: int, drawn: dict[Any, int], key: Any
) -> Callable[..., Any]:
    """``step``, to be traced for one of several replicas.

    Args:
      step: the training step.
      number: of the step; every replica gives it the same one.
      drawn: how many random operations without seeds of their own the first
        replica has, by ``key``.  They are numbered in the one graph of all
        replicas, and so each draws other numbers.

    Raises (when it is traced):
      ValueError: if replicas add up values that are not dense.
    """

    def one_replica(*arguments: Any) -> Any:
        numbered = tf.compat.v1.get_default_graph().seed is not None
        if numbered:
            for _ in range(_place() * drawn.get(key, 0)):
                _number_of_next()
        with _meetings(number):
            results = step(*arguments)
        if numbered:
            drawn.setdefault(key, _number_of_next())
        return results

    return one_replica


def _place() -> int:
    """The number of this replica among those of this process."""
    replica = tf.distribute.get_replica_context()
    here = len(replica.strategy.extended.worker_devices)
    return int(tf.get_static_value(replica.replica_id_in_sync_group)) % here


def _number_of_next() -> int:
    """Takes the number that the next random operation without a seed would get."""
    _, number = tf.compat.v1.random.get_seed(None)
    return int(number) % _LARGEST_SEED  # which stands for zero


@contextmanager
def _meetings(number: int) -> Iterator[None]:
    replica = tf.distribute.get_replica_context()
    replica.all_reduce = _AllReduce(replica.num_replicas_in_sync, number)
    try:
        yield
    finally:
        del replica.all_reduce


class _AllReduce:
    """Stands in for ``ReplicaContext.all_reduce`` while a step is traced."""

    def __init__(self, replicas: int, number: int) -> None:
        self._replicas = replicas
        self._number = number
        self._meetings: list[tf.Operation] = []

    def __call__(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """The sum or mean of what all replicas have, as each of them gets it.

        ``options`` are hints for communication and have no effect.
        """
        if isinstance(reduce_op, str):
            reduce_op = tf.distribute.ReduceOp(reduce_op.upper())
        for leaf in tf.nest.flatten(value):
            if isinstance(leaf, tf.IndexedSlices):
                raise ValueError("replicas of a planned step cannot add up sparse values")

        @tf.custom_gradient
        def added_up(tensor: tf.Tensor) -> Any:
            total = self._meet(tensor)
            if reduce_op == tf.distribute.ReduceOp.MEAN:
                total /= tf.cast(self._replicas, total.dtype)
            # What one gives goes to all, so that all give it back.
            return total, lambda gradient: self(reduce_op, gradient)

        return tf.nest.map_structure(lambda leaf: added_up(tf.convert_to_tensor(leaf)), value)

    def _meet(self, tensor: tf.Tensor) -> tf.Tensor:
        # A key is for one shape; parts of a batch, and so the plans, may differ in theirs.
        meeting = (self._number, len(self._meetings), tensor.shape.as_list(), tensor.dtype.name)
        with tf.control_dependencies(self._meetings[-1:]):
            total = tf.raw_ops.CollectiveReduceV2(
                input=tensor,
                group_size=self._replicas,
                group_key=_GROUP,
                instance_key=zlib.crc32(repr(meeting).encode()) >> 1,
                ordering_token=[],
                merge_op="Add",
                final_op="Id",
                communication_hint="auto",
            )
        self._meetings.append(total.op)
        return total
