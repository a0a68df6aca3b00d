"""What all tests share: costs measured go to a folder of their own; annealing is compiled."""

from __future__ import annotations

import os
import signal

import pytest

from remat.solvers.compiling import ready

# Processes of pytest-xdist ignore Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules with long tests first, so that no worker is left with one in the end."""
    long = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.getbasetemp()
        if "PYTEST_XDIST_WORKER" in os.environ:
            folder = folder.parent  # which all workers share
        patch.setenv("REMAT_CACHE", str(folder / "costs"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """Annealing is compiled before the first test: no test's time limit meets that."""
    ready()
