"""Counts that follow from a diffusion transformer's spec are those of the real module."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meshwright.models.build import build_model
from meshwright.models.dit import DiT
from meshwright.models.dit_spec import DiTSpec
from tests.models.dits import PICTURES, VIDEOS, make_batch

small = st.integers(1, 3)


@st.composite
def specs(draw):
    patch, patch_frames = draw(small), draw(st.integers(1, 2))
    return DiTSpec(num_layers=draw(small), dim=draw(st.integers(1, 24)), num_heads=draw(small), head_dim=draw(small),
                   ffn_dim=draw(st.integers(1, 30)), image_size=patch * draw(small), patch_size=patch,
                   num_channels=draw(small), num_classes=draw(small), num_frames=patch_frames * draw(small),
                   patch_frames=patch_frames)  # fmt: skip


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


@given(specs())
def test_parameter_counts(spec):
    model = build_model(spec, dtype=torch.float32)
    assert count(model) == spec.num_params()
    assert count(model.blocks["0"]) == spec.params_per_layer()
    assert (count(model.embed), count(model.final)) == (spec.first_params(), spec.last_params())
    embedders = [child for name, child in model.named_children() if name.endswith("_embed")]
    assert sum(map(count, embedders)) == spec.embedder_params()
    names = dict(model.named_parameters())
    assert {name for name in names if name.split(".")[0].endswith("_embed")} == set(spec.shared_names())


@settings(max_examples=15)
@given(specs(), small)
def test_flops_of_the_forward(spec, batch):
    model, tokens = DiT(spec), spec.num_tokens()
    inputs = make_batch(spec, batch, dtype=torch.float32)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        found = model(*inputs)
    assert found.shape == inputs[0].shape
    per_token = {name: sum(flops.values()) / (batch * tokens) for name, flops in counter.get_flop_counts().items()}
    assert per_token["DiT"] == pytest.approx(spec.flops_per_token(tokens) / 3, rel=1e-12)
    assert per_token["DiT.blocks.0"] == pytest.approx(spec.layer_flops(tokens), rel=1e-12)
    assert per_token["DiT.final"] == pytest.approx(spec.head_flops(), rel=1e-12)
    assert per_token["DiT.embed"] == pytest.approx(spec.embedding_flops(), rel=1e-12)


def test_the_published_size():
    """DiT-XL/2 has 675 M parameters (Peebles and Xie 2023, table 4).

    Theirs also predicts a variance for each number, for which the final projection has 18,448 parameters more, and
    has a bias of the keys, which changes nothing: 32,256 more.
    """
    xl = DiTSpec(num_layers=28, dim=1152, num_heads=16, head_dim=72, ffn_dim=4608, image_size=32, patch_size=2,
                 num_channels=4, num_classes=1000)  # fmt: skip
    assert xl.num_params() == 674_784_016
    assert xl.num_tokens() == 256


@pytest.mark.parametrize("spec", [PICTURES, VIDEOS], ids=["pictures", "videos"])
def test_what_is_shared(spec):
    assert spec.shared_parameters(1) == ()
    shared = spec.shared_parameters(3)
    assert tuple(p.key for p in shared) == spec.shared_names()
    assert all(p.sites == tuple((stage, p.key) for stage in range(3)) for p in shared)


def test_identity_tells_models_apart_by_all_but_their_start():
    changes = {"num_layers": 3, "dim": 32, "num_heads": 1, "head_dim": 8, "ffn_dim": 16, "image_size": 16,
               "patch_size": 4, "num_channels": 3, "num_classes": 6, "num_frames": 4, "patch_frames": 2}  # fmt: skip
    assert {*changes, "zero_init"} == set(PICTURES.__dataclass_fields__)
    others = [replace(PICTURES, **{name: value}).identity() for name, value in changes.items()]
    assert all(other != PICTURES.identity() for other in others) and PICTURES.identity()["kind"] == "dit"
    assert replace(PICTURES, zero_init=True).identity() == PICTURES.identity()
