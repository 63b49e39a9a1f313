"""Modules that compute below float64 are noted, and blamed for differences that their rounding explains, no others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from meshwright.mesh.axes import Axes
from meshwright.prove.locate.first_difference import Forward
from meshwright.prove.locate.narrow_operators import NarrowOperators, narrow_words


class Narrow(nn.Module):
    """Casts inside, and raises in place of returning once it is told to."""

    ends = False

    def forward(self, x):
        x = x.float().exp().double()
        if self.ends:
            raise StopIteration
        return x


def test_the_module_that_casts_is_noted():
    model, mode = nn.Sequential(nn.Linear(2, 2).double(), Narrow()), NarrowOperators()
    x = torch.ones(1, 2).double()
    with mode.watch(model), mode:
        model[0](x)
        assert not mode.take()
        model(x)
        assert mode.take() == {"1": "float32"}
        assert not mode.take()
        model[1].ends = True
        with pytest.raises(StopIteration):
            model(x)
        mode.take()
        torch.ones(2).double()
    assert mode.take() == {"": "float32"}, "what raised no longer runs"


def forward(error, narrow):
    """Two values, the second of which is wrong on rank 1 of 2."""
    right = {"output of a": np.arange(1.0, 7.0).reshape(2, 3), "output of b": np.arange(2.0, 8.0).reshape(2, 3)}
    wrong = {**right, "output of b": right["output of b"] * np.array([1.0, 1.0, 1.0 + error])}
    ranks = [{0: right}, {0: wrong}]
    return Forward(ranks, [right, right], Axes(dp_shard=2), tokens={}, epsilons={}, narrow=[{}, narrow])


def words(error, narrow):
    values = forward(error, narrow)
    first = values.first_difference()
    assert first is not None and first.name == "output of b"
    return narrow_words(first, values)


def test_the_rounding_of_a_narrow_dtype_is_named():
    assert words(1e-7, {"output of b": {"b.norm": "float32"}}) == (
        "part of the computation runs in float32, in b.norm: the difference is its rounding"
    )
    assert "bfloat16, in the model and 1 other module:" in words(
        1e-3, {"output of a": {"a": "bfloat16"}, "output of b": {"": "bfloat16"}}
    )


@pytest.mark.parametrize(
    ("error", "narrow"),
    [
        (1e-3, {"output of b": {"b": "float32"}}),  # larger than rounding
        (1e-7, {"output of a": {"a": "float32"}}),  # before a value that is right
        (1e-7, {}),  # all in float64
    ],
)
def test_other_differences_are_not(error, narrow):
    assert words(error, narrow) is None
