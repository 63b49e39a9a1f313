"""Which devices multiply in float8, and products beside those of the same numbers in float64."""

from __future__ import annotations

import pytest
import torch

from meshwright.errors import LayoutError
from meshwright.features.float8.private import check_device, scaled_mm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (12, 0)])
def test_new_devices_and_cpus_are_fine(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for device in ("cpu", "cuda:1"):
        check_device(torch.device(device))


def test_an_older_device_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(LayoutError, match=r"compute capability 8\.6"):
        check_device(torch.device("cuda:0"))


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)], ids=str)
def test_products_are_those_of_the_numbers(dtype, formats, transposed):
    """Whatever is by rows and what by columns; up to float32 sums and the result's rounding."""
    torch.manual_seed(0)
    shapes = ((32, 64), (64, 48))
    a, b = (
        torch.randn(shape[::-1] if t else shape).to(one)
        for shape, one, t in zip(shapes, formats, transposed, strict=True)
    )
    a, b = (x.T if t else x for x, t in zip((a, b), transposed, strict=True))
    found = scaled_mm(a, b, torch.tensor(3.0), torch.tensor(0.25), dtype, fast=False)
    expected, sums = a.double() @ b.double() * 0.75, a.double().abs() @ b.double().abs() * 0.75
    assert found.dtype == dtype
    assert ((found.double() - expected).abs() <= ROUNDING[dtype] * expected.abs() + 64 * 2.0**-23 * sums).all()
