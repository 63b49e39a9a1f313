"""A compiled block takes micro-batches with other documents without compiling again."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from meshwright.nn.attention.mask_spec import MaskSpec, TokenLayout
from meshwright.nn.recompute import recompute
from tests.nn.blocks import context, make_block

MIXES = [((20, 12), (32,)), ((1, 30, 1), (16, 16)), ((32,), (5, 5, 5, 5, 12)), ((8,) * 4, (31, 1))]


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True])
def test_other_documents_take_the_same_graph(recomputes: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = make_block(16, mask=MaskSpec(causal=True, window=9))
    if recomputes:
        recompute(block)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    counters.clear()
    for documents in MIXES:
        x = torch.randn(2, 32, 16)
        tokens = context(block.attention, TokenLayout(32, documents), torch.float32)
        torch.testing.assert_close(compiled(x, tokens), block(x, tokens), rtol=1e-5, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1
