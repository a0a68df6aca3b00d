"""The tutorials run from top to bottom, and show what their committed outputs show."""

from __future__ import annotations

from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted((ROOT / "tutorials").glob("*.ipynb"))
LARGEST = 200_000  # bytes of a committed notebook


def kinds(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """For each cell, the kinds of its outputs: "text/html", "image/png", ..."""
    return [
        sorted({kind for output in cell.get("outputs", ()) for kind in output.get("data", ())})
        for cell in notebook.cells
    ]


def test_there_are_tutorials() -> None:
    assert len(TUTORIALS) == 5


@pytest.mark.long
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert path.stat().st_size < LARGEST
    notebook = nbformat.read(path, as_version=4)
    committed = kinds(notebook)
    assert any("image/png" in shown for shown in committed)
    # Every tutorial has a process of its own, and sets TensorFlow's environment itself.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("TF_CPU_BFC_MEM_LIMIT_IN_MB", raising=False)
    client = nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    assert kinds(notebook) == committed
    warned = [
        output["text"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.get("name") == "stderr" and "Warning" in output["text"]
    ]
    assert warned == []
