"""Numbers of tokens: every layout holds its part of the same numbers."""

from __future__ import annotations

import pytest
import torch

from meshwright.errors import LayoutError
from meshwright.nn.attention.token_layout import TokenLayout
from meshwright.nn.dropout_add.token_rows import token_rows

FULL = TokenLayout(16, samples=(3, 1000))


def test_a_token_is_numbered_by_its_sample_and_position():
    assert torch.equal(token_rows(FULL), torch.tensor([[48], [16_000]]) + torch.arange(16))


def test_ranks_hold_slices_of_the_samples_tokens():
    whole = token_rows(FULL)
    zigzag = ((((0, 4), (12, 16)),), (((4, 12),),))
    positions = (torch.tensor([0, 1, 2, 3, 12, 13, 14, 15]), torch.arange(4, 12))
    for rank, position in enumerate(positions):
        on_rank = FULL.on(zigzag, rank)
        assert torch.equal(token_rows(on_rank), whole[:, position])
        parts = [token_rows(TokenLayout(**vars(on_rank) | {"stream": (part, 2)})) for part in range(2)]
        assert torch.equal(torch.cat(parts, 1), whole[:, position])


def test_samples_may_be_sharded_differently():
    shards = ((((0, 8),), ((8, 16),)), (((8, 16),), ((0, 8),)))
    whole = token_rows(FULL)
    assert torch.equal(token_rows(FULL.on(shards, 0)), torch.stack([whole[0, :8], whole[1, 8:]]))


def test_layouts_without_numbers_or_equal_parts_are_refused():
    with pytest.raises(LayoutError, match="no numbers of samples"):
        token_rows(TokenLayout(16))
    with pytest.raises(LayoutError, match="3 equal parts"):
        token_rows(TokenLayout(16, samples=(0,), stream=(0, 3)))
