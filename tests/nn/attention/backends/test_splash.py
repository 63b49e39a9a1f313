"""Translation of masks and arguments for torch_xla's splash attention, against a stand-in for it.

The stand-in has the fields, arguments and mask semantics of torch_xla 2.9's wrapper, and raises on runtime calls that
torch_xla removed.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import sys
from types import ModuleType

import pytest
import torch

from meshwright.errors import ConfigError, LayoutError
from meshwright.nn.attention.backends.splash import config_fields, document_numbers, splash_attention
from meshwright.nn.attention.mask_spec import MaskSpec
from tests.nn.attention.dense_masks import dense_batch, softmax_attention

SEQ_LEN, HEAD_DIM = 128, 8


@dataclasses.dataclass(frozen=True)
class SplashAttentionConfig:
    """Fields of torch_xla's, by name, without their defaults where we set them."""

    sa_block_q: int
    sa_block_kv: int
    sa_block_kv_compute: int
    sa_block_q_dkv: int
    sa_block_kv_dkv: int
    sa_block_kv_dkv_compute: int
    sa_block_q_dq: int
    sa_block_kv_dq: int
    mesh: str
    qkv_partition_spec: tuple
    segment_ids_partition_spec: tuple
    sa_use_fused_bwd_kernel: bool = True
    attentiontype_local_sliding: bool = False
    slide_window_size: int | None = None

    def to_json(self):
        return json.dumps(dataclasses.asdict(self))


class Removed(ModuleType):
    """A module whose removed functions fail the test that calls them."""

    def __getattr__(self, name):
        if name in ("xrt_world_size", "get_ordinal", "get_local_ordinal"):
            raise AssertionError(f"torch_xla removed {name}; torch_xla.runtime has world_size and global_ordinal")
        raise AttributeError(name)


@pytest.fixture
def calls(monkeypatch):
    """The stand-in's modules are imported in place of torch_xla's; the configurations it was called with."""
    seen = []

    def splash(q, k, v, config, decoder_segment_ids=None, causal=True, attn_logits_soft_cap=None):
        fields = json.loads(config)
        mesh = ast.literal_eval(fields["mesh"])
        assert mesh == {"device_ids": [3], "mesh_shape": (1, 1), "axis_names": ("data", "fsdp")}
        seen.append(fields | {"causal": causal})
        assert q.shape == k.shape == v.shape, "make_splash_mha takes as many key/value heads as query heads"
        i = torch.arange(q.shape[2])
        visible = (i[:, None] >= i if causal else torch.ones(len(i), len(i), dtype=torch.bool))[None]
        if fields["attentiontype_local_sliding"]:
            # LocalMask's sides exclude the query.
            visible = visible & ((i[:, None] - i).abs() <= fields["slide_window_size"])
        if decoder_segment_ids is not None:
            visible = visible & (decoder_segment_ids[:, :, None] == decoder_segment_ids[:, None])
        scores = (q @ k.mT).masked_fill(~visible[:, None], -math.inf)
        return scores.softmax(-1) @ v

    modules = {name: Removed(name) for name in (
        "torch_xla", "torch_xla.core", "torch_xla.core.xla_model", "torch_xla.runtime", "torch_xla.experimental",
        "torch_xla.experimental.splash_attention",
    )}  # fmt: skip
    modules["torch_xla.runtime"].world_size = lambda: 4
    modules["torch_xla.runtime"].global_ordinal = lambda: 3
    modules["torch_xla.experimental.splash_attention"].splash_attention = splash
    modules["torch_xla.experimental.splash_attention"].SplashAttentionConfig = SplashAttentionConfig
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return seen


@pytest.mark.parametrize("spec", [
    MaskSpec(), MaskSpec(causal=True), MaskSpec(causal=True, window=1), MaskSpec(window=20),
    MaskSpec(causal=True, documents=((100, 28), (1, 127))),
    MaskSpec(causal=True, window=9, documents=((64, 64), (128,))),
])  # fmt: skip
@pytest.mark.parametrize("scale", [0.2, HEAD_DIM**-0.5])
def test_the_translated_call_is_attention(calls, spec, scale):
    q, k, v = (torch.randn(2, SEQ_LEN, heads, HEAD_DIM, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    segments = None if spec.documents is None else document_numbers(spec.documents)
    before = q.detach().clone()
    found = splash_attention(q, k, v, segments_bs=segments, rules=spec, scale=scale)
    expected, _ = softmax_attention(q, k, v, dense_batch(spec, SEQ_LEN, 2), scale)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    for one, other in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert torch.equal(q, before), "queries are not scaled in place"
    assert len(calls) == 1 and calls[0]["causal"] is spec.causal


@pytest.mark.parametrize(("seq_len", "block"), [(128, 128), (384, 384), (4096, 2048), (2176, 128)])
def test_blocks_divide_the_sequence(seq_len, block):
    fields = config_fields(MaskSpec(), seq_len, device=0)
    assert {size for name, size in fields.items() if name.startswith("sa_block")} == {block}


def test_other_lengths_are_refused():
    with pytest.raises(LayoutError):
        config_fields(MaskSpec(), 200, device=0)


def test_the_stand_in_fails_on_removed_calls(calls):
    xla_model = sys.modules["torch_xla.core.xla_model"]
    for name in ("xrt_world_size", "get_ordinal"):
        with pytest.raises(AssertionError):
            getattr(xla_model, name)()


def test_torch_xla_is_imported_on_request_only(monkeypatch):
    assert "torch_xla" not in sys.modules
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    q = torch.zeros(1, SEQ_LEN, 1, HEAD_DIM)
    with pytest.raises(ConfigError) as error:
        splash_attention(q, q, q, segments_bs=None, rules=MaskSpec(), scale=1.0)
    assert "torch_xla" in error.value.what
