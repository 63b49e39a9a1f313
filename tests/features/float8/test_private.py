"""Which devices multiply in float8."""

from __future__ import annotations

import pytest
import torch

from meshwright.errors import LayoutError
from meshwright.features.float8.private import check_device, uses_scaled_mm


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (12, 0)])
def test_new_devices_and_cpus_are_fine(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for device in ("cpu", "cuda:1"):
        check_device(torch.device(device))


def test_an_older_device_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(LayoutError, match="compute capability 8.6"):
        check_device(torch.device("cuda:0"))


def test_cpus_emulate():
    assert uses_scaled_mm(torch.device("cuda:0")) and not uses_scaled_mm(torch.device("cpu"))
