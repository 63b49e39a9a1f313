"""Parameter counts and FLOPs of a diffusion transformer's description against the module."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meshwright.models.dit.description import DiTSpec, describe
from meshwright.models.dit.module import DiT
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from tests.models.dit.dits import IMAGES, VIDEOS, make_batch, words_of
from tests.models.specs import build

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
    model, facts = build(spec, dtype=torch.float32), describe(spec)
    (first,), (every,), (last,) = facts.first, facts.every, facts.last
    assert count(model) == facts.num_params()
    assert count(model.blocks["0"]) == facts.kinds[0].num_elements
    assert (count(model.embed), count(model.final)) == (first.num_elements, last.num_elements)
    embedders = [child for name, child in model.named_children() if name.endswith("_embed")]
    assert sum(map(count, embedders)) == every.num_elements
    names = dict(model.named_parameters())
    assert {name for name in names if name.split(".")[0].endswith("_embed")} == {p.name for p in every.parameters}


@settings(max_examples=15)
@given(specs(), small)
def test_flops_of_the_forward(spec, batch):
    model, tokens, facts = DiT(spec), spec.num_tokens(), describe(spec)
    inputs = make_batch(spec, batch, dtype=torch.float32)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        found = model(*inputs)
    assert found.shape == inputs[0].shape
    per_token = {name: sum(flops.values()) / (batch * tokens) for name, flops in counter.get_flop_counts().items()}
    assert per_token["DiT"] == pytest.approx(facts.flops_per_token / 3, rel=1e-12)
    assert per_token["DiT.blocks.0"] == pytest.approx(facts.kinds[0].flops, rel=1e-12)
    assert per_token["DiT.final"] == pytest.approx(facts.last[0].flops, rel=1e-12)
    assert per_token["DiT.embed"] == pytest.approx(facts.first[0].flops, rel=1e-12)


def test_the_published_size():
    """DiT-XL/2 has 675 M parameters (Peebles and Xie 2023, table 4).

    Theirs also predicts a variance for each number, for which the final projection has 18,448 parameters more, and
    has a bias of the keys, which changes nothing: 32,256 more.
    """
    xl = DiTSpec(num_layers=28, dim=1152, num_heads=16, head_dim=72, ffn_dim=4608, image_size=32, patch_size=2,
                 num_channels=4, num_classes=1000)  # fmt: skip
    assert describe(xl).num_params() == 674_784_016
    assert xl.num_tokens() == 256


@pytest.mark.parametrize("spec", [IMAGES, VIDEOS], ids=["images", "videos"])
def test_what_is_shared(spec):
    assert make_plan(load("dit-digits", words_of(spec))).shared_parameters() == ()
    shared = make_plan(load("dit-digits", words_of(spec, layers=(2, 1, 1)))).shared_parameters()
    (every,) = describe(spec).every
    assert [p.key for p in shared] == sorted(p.name for p in every.parameters)
    assert all(p.sites == tuple((stage, p.key) for stage in range(3)) for p in shared)


def test_identity_tells_models_apart_by_all_but_their_start():
    changes = {"num_layers": 3, "dim": 32, "num_heads": 1, "head_dim": 8, "ffn_dim": 16, "image_size": 16,
               "patch_size": 4, "num_channels": 3, "num_classes": 6, "num_frames": 4, "patch_frames": 2}  # fmt: skip
    assert {*changes, "zero_init"} == set(IMAGES.__dataclass_fields__)
    others = [replace(IMAGES, **{name: value}).identity() for name, value in changes.items()]
    assert all(other != IMAGES.identity() for other in others) and IMAGES.identity()["kind"] == "dit"
    assert replace(IMAGES, zero_init=True).identity() == IMAGES.identity()
