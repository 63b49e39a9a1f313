"""Parameter counts and FLOPs of a Llama's description against the module."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meshwright.models.decoder.description import RopeScaling, describe
from meshwright.models.decoder.module import Decoder
from meshwright.models.llama.family import LlamaSpec
from tests.models.specs import build

small = st.integers(1, 4)


@st.composite
def specs(draw):
    kv_heads = draw(small)
    return LlamaSpec(num_layers=draw(st.integers(1, 3)), dim=draw(st.integers(1, 24)), num_heads=kv_heads * draw(small),
                     num_kv_heads=kv_heads, ffn_dim=draw(st.integers(1, 30)), vocab_size=draw(st.integers(2, 40)),
                     head_dim=2 * draw(small), tie_embeddings=draw(st.booleans()))  # fmt: skip


@given(specs())
def test_parameter_counts(spec):
    model, facts = build(spec, dtype=torch.float32), describe(spec, 8)
    assert sum(p.numel() for p in model.parameters()) == facts.num_params()
    assert sum(p.numel() for p in model.blocks["0"].parameters()) == facts.kinds[0].num_elements
    matrices = sum(p.numel() for p in model.blocks["0"].parameters() if p.dim() == 2)
    attention = 2 * spec.num_heads * spec.head_dim * 9
    assert facts.kinds[0].flops == 2 * matrices + attention
    assert facts.last[0].flops == 2 * model.head.weight.numel()


@settings(max_examples=15)
@given(specs(), st.integers(1, 12), st.integers(1, 3))
def test_flops_of_forward_and_backward(spec, seq_len, batch):
    """PyTorch's counter counts attention's whole square, the spec the half on and below the diagonal."""
    model = Decoder(spec)
    tokens = torch.zeros(batch, seq_len, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    upper_half = 6 * spec.num_layers * spec.num_heads * spec.head_dim * (seq_len - 1)
    found = counter.get_total_flops() / (batch * seq_len)
    assert found - upper_half == pytest.approx(describe(spec, seq_len).flops_per_token, rel=1e-12)


def test_identity_tells_models_apart():
    base = LlamaSpec(2, 16, 2, 2, 32, 64, 8)
    changes = {"num_layers": 3, "dim": 32, "num_heads": 4, "num_kv_heads": 1, "ffn_dim": 16, "vocab_size": 65,
               "head_dim": 4, "rope_theta": 5e5, "rope_scaling": RopeScaling(), "norm_eps": 1e-6,
               "tie_embeddings": True, "window": 8}  # fmt: skip
    assert {*changes, "global_every"} == {field.name for field in fields(base)}
    from dataclasses import replace

    others = [replace(base, **{name: value}).identity() for name, value in changes.items()]
    mixed = replace(base, window=8, global_every=2).identity()
    assert mixed != replace(base, window=8).identity() and replace(base, global_every=2).identity() == base.identity()
    assert all(other != base.identity() for other in others) and base.identity()["kind"] == "llama"
