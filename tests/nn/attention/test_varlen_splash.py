"""Packed kernels: varlen on CUDA against softmax in float64; splash's translation of masks, against a stand-in for it.

The stand-in has the fields, arguments and mask semantics of torch_xla 2.9's wrapper, and raises on runtime calls that
torch_xla removed.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from meshwright.errors import ConfigError, LayoutError
from meshwright.nn.attention import backend, varlen_splash
from meshwright.nn.attention.attention import ScoreRules, attention
from meshwright.nn.attention.attention_mask import AttentionMask
from meshwright.nn.attention.backend import AttentionRequest, Backend, choose_backend
from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.nn.attention.varlen_splash import config_fields, splash_attention
from tests.helpers import clean_environment
from tests.nn.attention.dense_masks import dense_batch, softmax_attention, wrong_masks

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


REMOVED = ("xrt_world_size", "get_ordinal", "get_local_ordinal")


class StandIn(ModuleType):
    """A module that records which of its names are used, and fails the test that uses a removed one."""

    def __init__(self, name, used, **functions):
        super().__init__(name)
        self._used, self._functions = used, functions

    def __getattr__(self, name):
        if name in REMOVED:
            raise AssertionError(f"torch_xla removed {name}; torch_xla.runtime has world_size and global_ordinal")
        if name not in self._functions:
            raise AttributeError(name)
        self._used.add(f"{self.__name__}.{name}")
        return self._functions[name]


class Calls(list):
    """Configurations that the stand-in was called with, and the names that were used."""

    def __init__(self):
        self.used = set()


@pytest.fixture
def calls(monkeypatch):
    """The stand-in's modules are imported in place of torch_xla's."""
    seen = Calls()

    def kernel(q, k, v, config, decoder_segment_ids=None, causal=True, attn_logits_soft_cap=None):
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

    functions = {
        "torch_xla": {}, "torch_xla.core": {}, "torch_xla.core.xla_model": {}, "torch_xla.experimental": {},
        "torch_xla.runtime": {"world_size": lambda: 4, "global_ordinal": lambda: 3},
        "torch_xla.experimental.splash_attention": {
            "splash_attention": kernel, "SplashAttentionConfig": SplashAttentionConfig,
        },
    }  # fmt: skip
    for name, own in functions.items():
        monkeypatch.setitem(sys.modules, name, StandIn(name, seen.used, **own))
    return seen


@pytest.fixture
def on_xla(monkeypatch):
    """Tensors on the CPU count as those of a TPU where the backend says what it supports; all other claims stand."""
    claims = backend._REFUSALS[Backend.SPLASH]
    monkeypatch.setitem(backend._REFUSALS, Backend.SPLASH, lambda request: claims(replace(request, device="xla")))


@pytest.mark.parametrize(("seq_len", "block"), [(128, 128), (384, 384), (4096, 2048), (2176, 128)])
def test_blocks_divide_the_sequence(seq_len, block):
    fields = config_fields(MaskSpec(), seq_len, device=0)
    assert {size for name, size in fields.items() if name.startswith("sa_block")} == {block}
    with pytest.raises(LayoutError):
        config_fields(MaskSpec(), seq_len + 72, device=0)


SPECS = [
    MaskSpec(), MaskSpec(causal=True, window=1), MaskSpec(causal=True, window=9),
    MaskSpec(window=20, documents=((100, 28), (1, 127))), MaskSpec(causal=True, documents=((64, 32, 32), (128,))),
]  # fmt: skip


def inputs():
    return [torch.randn(2, SEQ_LEN, heads, 128, requires_grad=True) for heads in (4, 2, 2)]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("is_prepared", "scale"), [(False, None), (True, 0.2)])
def test_attention_by_this_backend(calls, on_xla, spec, is_prepared, scale):
    """From the mask's rules and documents to the kernel's arguments, as a model calls it; wrong masks are seen."""
    q, k, v = inputs()

    def mask_of(spec):
        request = AttentionRequest("cpu", "float32", head_dim=128)
        return AttentionMask(spec, SEQ_LEN, device=q.device, backend="splash", request=request) if is_prepared else spec

    before = q.detach().clone()
    found = attention(q, k, v, mask=mask_of(spec), scores=ScoreRules(scale=scale), backend="splash")
    expected, _ = softmax_attention(q, k, v, dense_batch(spec, SEQ_LEN, 2), scale)
    assert torch.equal(q, before), "queries are not scaled in place"
    assert len(calls) == 1 and calls[0]["causal"] is spec.causal
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    for one, other in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    wrong = {name: one for name, one in wrong_masks(spec, SEQ_LEN).items() if not one.prefix}
    assert wrong
    for name, one in wrong.items():
        difference = (
            (attention(q, k, v, mask=mask_of(one), scores=ScoreRules(scale=scale), backend="splash") - expected)
            .abs()
            .max()
        )
        assert difference > 1e-3, name


@pytest.mark.parametrize("spec", SPECS)
def test_only_these_names_of_torch_xla_are_used(calls, on_xla, spec):
    """None of those that it removed; the stand-in would not have them either."""
    attention(*inputs(), mask=spec, backend="splash")
    assert calls.used == {
        "torch_xla.runtime.global_ordinal",
        "torch_xla.experimental.splash_attention.SplashAttentionConfig",
        "torch_xla.experimental.splash_attention.splash_attention",
    }
    for path in Path(varlen_splash.__file__).parents[1].rglob("*.py"):
        assert not [name for name in REMOVED if name in path.read_text("utf-8")], path


def test_other_backends_use_nothing_of_torch_xla(calls):
    """Installed as it is: the choice of `auto` and calls of the others take no name from it."""
    q, k, v = inputs()
    for name in ("auto", "reference", "sdpa"):
        attention(q, k, v, mask=MaskSpec(causal=True, documents=((64, 64), (128,))), backend=name)
    for device in ("cpu", "cuda", "xla"):
        choose_backend(Backend.AUTO, AttentionRequest(device, "float32", head_dim=128))
    assert not calls and not calls.used


IMPORTS = """
import sys
from importlib import import_module
from pkgutil import walk_packages
from meshwright.errors import ConfigError
import meshwright.nn.attention as package

found = []
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch_xla":
            found.append(name)
sys.meta_path.insert(0, Finder())
modules = [one.name for one in walk_packages(package.__path__, package.__name__ + ".")]
assert package.__name__ + ".varlen_splash" in modules
for name in modules:
    import_module(name)
assert not found, found
import torch
from meshwright.nn.attention.varlen_splash import splash_attention
from meshwright.nn.attention.mask_spec import MaskSpec
x = torch.zeros(1, 128, 1, 128)
try:
    splash_attention(x, x, x, segments_bs=None, rules=MaskSpec(), scale=1.0)
except ConfigError:
    assert found, "the finder sees imports"
"""


@pytest.mark.slow
def test_importing_attention_does_not_import_torch_xla():
    """Not even try to, in a new process, whatever is installed."""
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, env=clean_environment())


def test_torch_xla_that_is_not_installed_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    q = torch.zeros(1, SEQ_LEN, 1, HEAD_DIM)
    with pytest.raises(ConfigError) as error:
        splash_attention(q, q, q, segments_bs=None, rules=MaskSpec(), scale=1.0)
    assert "torch_xla" in error.value.what


def test_starts_are_those_of_the_flattened_batch():
    from meshwright.nn.attention.varlen_splash import document_starts

    starts = document_starts(((3, 5), (8,)))
    assert starts.tolist() == [0, 3, 8] + [16] * 62
    assert len(document_starts(((1,) * 65,))) == 129


@pytest.mark.parametrize(("rules", "size"), [
    (MaskSpec(causal=True), (-1, 0)), (MaskSpec(), (-1, -1)), (MaskSpec(causal=True, window=1), (0, 0)),
    (MaskSpec(window=8), (7, 7)),
])  # fmt: skip
def test_windows_exclude_the_query(rules, size):
    from meshwright.nn.attention.varlen_splash import window_size

    assert window_size(rules) == size


VARLEN_SPECS = [
    MaskSpec(causal=True, documents=((100, 28), (1, 127))), MaskSpec(documents=((64, 64), (128,))),
    MaskSpec(causal=True, window=9), MaskSpec(window=20, documents=((5, 123), (128,))),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("spec", VARLEN_SPECS)
@pytest.mark.parametrize("num_kv_heads", [4, 1])
@pytest.mark.parametrize("backend", ["varlen", "flex", "sdpa", "reference"])
def test_it_agrees_with_the_softmax_on_cuda(spec, num_kv_heads, backend):
    shapes = [(2, 128, heads, 64) for heads in (4, num_kv_heads, num_kv_heads)]
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    expected, _ = softmax_attention(*inputs, dense_batch(spec, 128, 2).cuda())
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, grad)
    found = attention(*inputs, mask=spec, backend=backend)
    assert distance(found, expected) < 2e-2
    for one, other in zip(torch.autograd.grad(found, inputs, grad.bfloat16()), wanted, strict=True):
        assert distance(one, other) < 3e-2
    masks = [one for one in wrong_masks(spec, 128).values() if not one.prefix or backend != "varlen"]
    assert masks
    for wrong in masks:
        assert distance(attention(*inputs, mask=wrong, backend=backend), expected) > 2e-2


def distance(found, expected):
    """Largest difference over the largest value."""
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()
