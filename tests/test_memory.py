"""The model of the allocator against the allocator itself."""

from __future__ import annotations

import pytest
from child import COUNTED, run

from remat.memory import Arena, OutOfMemoryError


def test_chunks_are_those_of_tensorflow() -> None:
    """Random allocations and frees: the same bytes in use after each of them."""
    found = run(
        """
import random
from remat.memory import Arena

def in_use():
    return tf.config.experimental.get_memory_info("CPU:0")["current"]

empty = lambda size: tf.raw_ops.Empty(shape=[size], dtype=tf.uint8, init=False)
for size in (1, 1000, 100_000):
    del_me = empty(size)  # whatever the runtime itself holds on to, it holds now
del del_me
before = in_use()
gigabyte = 1 << 30
empty(gigabyte)  # one block, larger than any region so far
arena = Arena()
arena.claim(gigabyte)
chooser = random.Random(0)
held, differences, made = [], [], 0
for _ in range(400):
    if len(held) > 20 or (held and chooser.random() < 0.45):
        tensor, chunk = held.pop(chooser.randrange(len(held)))
        del tensor
        arena.free(chunk)
    else:
        # Above what the small regions of the start could serve.
        size = int(2 ** chooser.uniform(22, 26))
        held.append((empty(size), arena.allocate(size)))
        made += 1
    if in_use() - before != arena.in_use:
        differences.append(len(held))
answer(differences=differences, made=made)
""",
        COUNTED,
    )
    assert found["made"] > 150
    assert found["differences"] == []


def test_a_limit_is_a_limit() -> None:
    arena = Arena(limit=1 << 20, growth=False)
    half = arena.allocate(1 << 19)
    arena.allocate(1 << 18)
    with pytest.raises(OutOfMemoryError):
        arena.allocate(1 << 19)
    arena.free(half)
    arena.allocate(1 << 19)
    assert arena.footprint <= 1 << 20


def test_a_chunk_below_twice_the_request_is_handed_out_whole() -> None:
    arena = Arena(limit=1 << 20, growth=False)
    first = arena.allocate(1000 * 256)
    arena.allocate(256)
    arena.free(first)
    assert arena.allocate(600 * 256).size == 1000 * 256
