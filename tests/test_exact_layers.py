"""Every kind of layer, loss, policy and optimizer trains bit for bit as without remat.

Weights, optimizer slots, averages, seeds, losses and metrics after five steps
of ``train_on_batch``.  A process trains several cases (``layer_cases``),
because TensorFlow takes seconds to start.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

import pytest
from child import REPEATABLE, run

_TOGETHER = 10  # cases in a process


def _names() -> list[str]:
    """The cases, read without importing TensorFlow."""
    tree = ast.parse((Path(__file__).parent / "layer_cases.py").read_text(encoding="utf-8"))
    (table,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CASES"
    ]
    assert isinstance(table, ast.Dict)
    return [ast.literal_eval(key) for key in table.keys if key is not None]


NAMES = _names()


@functools.cache
def _found(group: int) -> dict[str, Any]:
    names = NAMES[group * _TOGETHER : (group + 1) * _TOGETHER]
    return run(
        f"""
import sys
sys.path.insert(0, "tests")
exact()
from layer_cases import compare
answer(**{{name: compare(name) for name in {names!r}}})
""",
        REPEATABLE,  # what runs is what matters here, so memory is not counted
    )


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_same_bits_as_keras(name: str) -> None:
    found = _found(NAMES.index(name) // _TOGETHER)[name]
    assert found["moved"]
    assert found["finite"]
    assert found["differing"] == []
    assert len(found["recomputed"]) == 1
    if found["recomputes"]:
        assert found["recomputed"][0] > 0
