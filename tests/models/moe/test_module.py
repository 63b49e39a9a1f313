"""The description of a mixture-of-experts model is its module; presets have the published sizes and plan."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.models.contract.build_module import build_part
from meshwright.models.contract.family import find_family
from meshwright.models.contract.model_facts import Part
from meshwright.models.decoder.decoder_family import INIT_STD
from meshwright.models.moe.module import MoeBlock
from meshwright.nn.experts.layer import MixtureOfExperts
from meshwright.nn.step_handles import auxiliary_losses
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.plan.verify import faults
from meshwright.train.build_job import initialize

MOE = "moe-tiny"
DEEPSEEK = ["model.num_dense_layers=1", "model.num_shared_experts=1", "model.score=sigmoid", "model.route_scale=2.5",
            "model.num_groups=4", "model.top_groups=2", "model.balance_bias=true", "model.z_loss=0.01"]  # fmt: skip


def build(config, part=None):
    """On the meta device; raises where the module and its description differ."""
    return build_part(config.family, run_facts(config), dtype=torch.float32, part=part)


small = st.integers(1, 4)


@st.composite
def words(draw):
    """Overrides of a small model with any of its parts."""
    layers, experts = draw(small), 2 * draw(small)
    sizes = {
        "num_layers": layers,
        "num_dense_layers": draw(st.integers(0, layers - 1)),
        "num_experts": experts,
        "num_groups": draw(st.sampled_from([1, 2])),
        "top_k": 1,
        "expert_dim": draw(st.integers(1, 9)),
        "num_shared_experts": draw(st.integers(0, 2)),
        "balance_bias": draw(st.sampled_from(["true", "false"])),
        "balance_loss": draw(st.sampled_from(["0", "0.1"])),
        "z_loss": draw(st.sampled_from(["0", "0.1"])),
        "tie_embeddings": draw(st.sampled_from(["true", "false"])),
        "dim": 16,
    }
    return [f"model.{key}={value}" for key, value in sizes.items()]


@settings(max_examples=20)
@given(words())
def test_parameters_buffers_and_losses_are_those_described(words):
    """`build_part` compares names, shapes and dtypes."""
    config = load(MOE, words)
    model, facts = build(config), model_facts(config)
    assert sum(p.numel() for p in model.parameters()) == facts.num_params()
    weights = {name.rpartition(".")[2]: loss.weight for name, loss in auxiliary_losses(model)}
    assert all(weights[key] == getattr(config.model, key) for key in weights)
    assert set(weights) == {key for key in ("balance_loss", "z_loss") if getattr(config.model, key)}
    biases = [b.dtype for name, b in model.named_buffers() if name.endswith("load.bias")]
    num_moe = config.model.num_layers - config.model.num_dense_layers
    assert biases == [torch.float32] * (num_moe if config.model.balance_bias else 0)


def test_blocks_are_dense_first():
    config = load(MOE, DEEPSEEK)
    model = build(config)
    assert [isinstance(block, MoeBlock) for block in model.blocks.values()] == [False, True, True, True]
    assert model_facts(config).layers == ("block", "moe_block", "moe_block", "moe_block")


@pytest.mark.parametrize("given", [[], DEEPSEEK], ids=["plain", "deepseek"])
def test_parts_of_stages_are_the_model(given):
    config = load(MOE, given)
    whole = {name: tuple(x.shape) for name, x in build(config).state_dict().items()}
    parts = [Part(layers, stage, 3) for stage, layers in enumerate((range(2), range(2, 3), range(3, 4)))]
    found = {}
    for part in parts:
        tensors = build(config, part).state_dict()
        assert not found.keys() & tensors.keys()
        found |= {name: tuple(x.shape) for name, x in tensors.items()}
    assert found == whole


def test_flops_count_the_experts_that_a_token_passes():
    """Twice the active matrices, and the half of attention's square on and below the diagonal."""
    config = load(MOE, [*DEEPSEEK, "model.top_k=3"])
    model, spec = build(config), config.model.spec()
    block = model.blocks["1"]
    dense = sum(p.numel() for name, p in block.named_parameters() if p.dim() == 2)
    expert = sum(p[0].numel() for p in block.moe.experts.parameters())
    attention = 2 * spec.num_heads * spec.head_dim * (config.train.seq_len + 1)
    (kind,) = (kind for kind in model_facts(config).kinds if kind.name == "moe_block")
    assert kind.flops == 2 * (dense + 3 * expert) + attention


def initialized(config, seed=0):
    model = build(config).to_empty(device="cpu")
    f = run_facts(load(config.name, [f"train.seed={seed}"])) if seed else run_facts(config)
    initialize([*model.named_parameters(), *model.named_buffers()], find_family("moe"), f)
    return model


def test_initial_deviations():
    model = initialized(load(MOE, ["model.num_shared_experts=1", "model.balance_bias=true"]))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name:
            assert (tensor == 1).all()
        elif ".load." in name:
            assert not tensor.any()
        else:
            narrow = name.endswith(("wo.weight", "down.weight", "experts.down"))
            expected = INIT_STD / math.sqrt(2 * 4) if narrow else INIT_STD
            assert tensor.mean().abs() < 5 * expected / math.sqrt(tensor.numel()), name
            assert tensor.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * tensor.numel())), name


def test_experts_of_a_layer_start_differently():
    model = initialized(load(MOE))
    (first, second) = (model.blocks[n].moe.experts.gate for n in "01")
    assert not torch.equal(first[0], first[1]) and not torch.equal(first, second)


def test_a_later_token_never_changes_an_earlier_logit():
    model = initialized(load(MOE, DEEPSEEK)).double()
    tokens = torch.arange(10)[None] % 7
    before = model(tokens)
    for t in range(10):
        changed = tokens.clone()
        changed[0, t] = 20
        after = model(changed)
        torch.testing.assert_close(after[:, :t], before[:, :t], rtol=0, atol=1e-12)
        assert (after[:, t:] != before[:, t:]).any(-1).all()


# Presets


def attention(dim, heads, kv_heads, head_dim):
    """And both norms of a block."""
    return 2 * dim * heads * head_dim + 2 * dim * kv_heads * head_dim + 2 * dim


def moe(dim, experts, hidden, shared=0):
    """Router, experts and shared experts."""
    return dim * experts + 3 * dim * hidden * (experts + shared)


def ends(dim, vocabulary):
    """Embedding, head and last norm."""
    return 2 * dim * vocabulary + dim


COUNTS = {
    "moe-tiny": 4 * (attention(128, 4, 2, 32) + moe(128, 8, 192)) + ends(128, 256),
    "mixtral-8x7b": 32 * (attention(4096, 32, 8, 128) + moe(4096, 8, 14336)) + ends(4096, 32000),
    "deepseek-v3-like": 61 * attention(7168, 128, 8, 128) + 3 * 3 * 7168 * 18432 + 58 * moe(7168, 256, 2048, 1)
    + ends(7168, 129280),
}  # fmt: skip


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_presets_have_the_parameters_of_the_formulas_and_a_plan(name, count):
    config = load(name)
    facts, model = model_facts(config), build(config)
    assert facts.num_params() == count == sum(p.numel() for p in model.parameters())
    layers = [one for one in model.modules() if isinstance(one, MixtureOfExperts)]
    assert len(layers) == facts.layers.count("moe_block") and faults(make_plan(config)) == []


def test_mixtral_has_its_published_size():
    """46.7 billion parameters (Jiang et al. 2024), of which a token passes 12.9."""
    assert COUNTS["mixtral-8x7b"] == 46_702_792_704
    active = COUNTS["mixtral-8x7b"] - 32 * 6 * 3 * 4096 * 14336
    assert active == pytest.approx(12.9e9, rel=0.005)


def test_deepseek_v3_s_experts_have_their_published_size():
    """DeepSeek-V3 has 671 billion parameters; only its attention is another."""
    latent = 7168 * 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 * 128 * 256 + 128 * 128 * 7168
    ours = attention(7168, 128, 8, 128) - 2 * 7168
    assert COUNTS["deepseek-v3-like"] + 61 * (latent - ours) == pytest.approx(671e9, rel=0.002)
