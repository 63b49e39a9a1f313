"""Rotary embedding: a rotation, by relative positions only, as Hugging Face's; numbers of tokens on every layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import LayoutError
from meshwright.nn.attention.mask_spec import TokenLayout
from meshwright.nn.attention.positions import RopeScaling, apply_rotary_emb, rope_tables, token_rows

LLAMA_31 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=8192)
sizes = st.integers(1, 12).map(lambda n: 2 * n)
stretches = st.sampled_from([None, LLAMA_31, RopeScaling(4.0, 1.0, 4.0, 64)])


def tables(seq_len, head_dim, *, theta=10000.0, scaling=None, dtype=torch.float64):
    return rope_tables(torch.arange(seq_len), head_dim, theta=theta, scaling=scaling, dtype=dtype)


def turn(vectors_th, **options):
    """Turn the vector at each position."""
    cos, sin = tables(len(vectors_th), vectors_th.shape[1], **options)
    return apply_rotary_emb(vectors_th[None, :, None], cos, sin)[0, :, 0]


@given(sizes, stretches, st.integers(0, 2**31))
def test_norms_are_kept_and_position_0_is_not_turned(head_dim, scaling, seed):
    vectors = torch.randn(9, head_dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = turn(vectors, scaling=scaling)
    torch.testing.assert_close(found.norm(dim=1), vectors.norm(dim=1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[0], vectors[0], rtol=0, atol=0)


@given(sizes, stretches, st.integers(0, 2**31), st.integers(0, 20), st.integers(0, 20), st.integers(1, 40))
def test_products_depend_on_the_distance_only(head_dim, scaling, seed, first, second, shift):
    generator = torch.Generator().manual_seed(seed)
    query, key = torch.randn(2, head_dim, generator=generator, dtype=torch.float64)
    queries, keys = (turn(x.expand(81, -1), scaling=scaling) for x in (query, key))
    here, there = queries[first] @ keys[second], queries[first + shift] @ keys[second + shift]
    torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-9)


def test_another_distance_is_another_product():
    vectors = turn(torch.ones(5, 8, dtype=torch.float64))
    assert len({round((vectors[0] @ other).item(), 6) for other in vectors}) == 5


@settings(max_examples=20)
@given(sizes, st.sampled_from([10000.0, 500000.0]), st.booleans())
def test_it_is_the_rotation_of_transformers(head_dim, theta, stretched):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama import modeling_llama

    rope = {"rope_type": "default", "rope_theta": theta}
    if stretched:
        rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 8192}  # fmt: skip
    config = transformers.LlamaConfig(hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim,
                                      max_position_embeddings=131072, rope_parameters=rope)  # fmt: skip
    q, k = torch.randn(2, 1, 2, 40, head_dim)  # b n t h
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(q, torch.arange(40)[None])
    expected = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    ours = tables(40, head_dim, theta=theta, scaling=LLAMA_31 if stretched else None, dtype=torch.float32)
    for x, wanted in zip((q, k), expected, strict=True):
        found = apply_rotary_emb(x.transpose(1, 2), *ours).transpose(1, 2)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_stretching_keeps_the_short_waves_and_slows_the_long_ones():
    plain, stretched = (
        torch.atan2(sin[1], cos[1])
        for cos, sin in (tables(2, 128, theta=500000.0), tables(2, 128, theta=500000.0, scaling=LLAMA_31))
    )
    ratio = plain / stretched
    wavelength = 2 * torch.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192
    assert short.any() and long.any()
    torch.testing.assert_close(ratio[short], torch.full_like(ratio[short], 1.0))
    torch.testing.assert_close(ratio[long], torch.full_like(ratio[long], 8.0))
    assert (ratio.diff() >= -1e-9).all()  # and between them it blends


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
