"""In the mode of proofs nothing becomes float32, by a cast or by PyTorch's default, which comes back after it."""

from __future__ import annotations

import pytest
import torch

from meshwright.models.foreign.packing import Float64Mode


def test_casts_and_defaults_are_float64() -> None:
    x = torch.ones(2, dtype=torch.float64)
    with Float64Mode():
        found = [x.float(), x.to(torch.float32), x.to(dtype=torch.bfloat16), torch.softmax(x, 0, dtype=torch.float32)]
        found += [torch.ones(2), torch.full((), torch.finfo(x.dtype).min), torch.tensor(0.1)]
    assert {tensor.dtype for tensor in found} == {torch.float64}
    assert found[-1].item() == 0.1


def test_the_default_comes_back_also_after_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), Float64Mode(), Float64Mode():
        raise ValueError("inside")
    assert torch.get_default_dtype() is torch.float32 and torch.ones(1).dtype is torch.float32
