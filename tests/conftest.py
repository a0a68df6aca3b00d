"""What all tests share: costs measured go to a folder of their own; annealing is compiled."""

from __future__ import annotations

import signal

import pytest

from remat.solvers.compiling import ready

# Processes of pytest-xdist ignore Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REMAT_CACHE", str(tmp_path_factory.mktemp("costs")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """Annealing is compiled before the first test: no test's time limit meets that."""
    ready()
