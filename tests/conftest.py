"""Fixtures and settings of all tests. Imports no torch: pure tests collect and run without it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest

from meshwright.testing.gang import PRELOAD, GangPool

# Wall-clock deadlines fail at random on a loaded machine. In CI every run draws the same examples.
hypothesis.settings.register_profile(
    "meshwright",
    deadline=None,
    derandomize=os.environ.get("CI") == "true",
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("meshwright")


@pytest.fixture(scope="session")
def gang() -> Iterator[GangPool]:
    """`gang(world_size)`: worker processes for tests that move data; shared by the whole run.

    The runs that tests launch are forked from the same server, and need not import what it has.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.testing.gang.PRELOAD", (*PRELOAD, "meshwright.train.run", "matplotlib.pyplot"))
        pool = GangPool()
        yield pool
        pool.close()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip `gpu` tests where there is no CUDA device."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device: torch.cuda.is_available() is False on this machine")
