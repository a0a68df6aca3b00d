"""Measured costs go to a folder of the test run's own, not to the user's."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REMAT_CACHE", str(tmp_path_factory.mktemp("costs")))
        yield
