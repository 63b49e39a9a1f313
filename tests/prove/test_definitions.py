"""The reference's definitions are right, used, and apart from the shared modules, whose faults a proof so finds."""

from __future__ import annotations

import copy
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from meshwright.nn import transformer_block
from meshwright.nn.attention import attention_mask, positions
from meshwright.nn.attention.attention import LocalAttention, attention
from meshwright.nn.attention.mask_spec import MaskSpec, TokenLayout
from meshwright.nn.attention.positions import RopeScaling, RotaryEmbedding, apply_rotary_emb
from meshwright.nn.dropout_add.module import DropoutAdd
from meshwright.nn.experts import layer as expert_layer
from meshwright.nn.experts import router as router_module
from meshwright.nn.experts.layer import MixtureOfExperts
from meshwright.nn.experts.router import Router
from meshwright.nn.experts.router_config import RouterConfig
from meshwright.plan.make_plan import make_plan
from meshwright.prove.as_run.rounding import RoundedReference
from meshwright.prove.record import definitions
from meshwright.prove.record.definitions import PlainAttention, PlainRotary, rotate, use_definitions
from meshwright.prove.record.reference_run import PlainModel
from meshwright.prove.report import render
from tests.prove.as_run.proofs import as_run_config
from tests.prove.proofs import data_of, proof, restored, small_config
from tests.prove.proofs import small_expert_config as experts_config
from tests.prove.seeded_faults import giving, taking

CPU, DOCUMENTS = torch.device("cpu"), ((5, 7), (12,))
TWO_SAMPLES = TokenLayout(12, DOCUMENTS)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def assert_same(found: Tensor, due: Tensor, inputs: list[Tensor]) -> None:
    """Two computations have the same values, and the same gradients of what they are of."""
    weight = torch.randn_like(due)
    gradients = [torch.autograd.grad((x * weight).sum(), inputs, retain_graph=True) for x in (found, due)]
    torch.testing.assert_close((found, *gradients[0]), (due, *gradients[1]), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize(
    "mask",
    [MaskSpec(), MaskSpec(causal=True), MaskSpec(window=3), MaskSpec(causal=True, window=4),
     MaskSpec(causal=True, prefix=6), MaskSpec(causal=True, prefix=4, window=3)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("most", [definitions.MAX_SCORES, 1])
def test_attention_is_that_of_the_backends(mask: MaskSpec, documents, most: int) -> None:
    """With grouped queries; and where a sample is too long for its scores, by the core itself."""
    torch.manual_seed(0)
    inputs = [randn(2, 12, 4, 6), randn(2, 12, 2, 6), randn(2, 12, 2, 6)]
    mask, core = replace(mask, documents=documents), PlainAttention(LocalAttention())
    with mock.patch.object(definitions, "MAX_SCORES", most):
        found = core(*inputs, core.prepare(mask, TokenLayout(12, documents), CPU))
    for backend in ("reference", "sdpa"):
        assert_same(found, attention(*inputs, mask=mask, backend=backend), inputs)


@pytest.mark.parametrize("scaling", [None, RopeScaling(8.0, 1.0, 4.0, 32)])
@pytest.mark.parametrize("layout", [TokenLayout(12), TWO_SAMPLES])
def test_rotations_are_those_of_complex_numbers(scaling: RopeScaling | None, layout: TokenLayout) -> None:
    torch.manual_seed(0)
    x, settings = randn(2, 12, 3, 8), (8, 50.0, scaling)
    cos, sin = RotaryEmbedding(*settings).tables(layout, device=CPU, dtype=torch.float64)
    tables = PlainRotary(*settings).tables(layout, device=CPU, dtype=torch.float64)
    torch.testing.assert_close(tables, (cos, sin), rtol=1e-13, atol=1e-14)
    assert_same(rotate(x, torch.complex(*tables)), apply_rotary_emb(x, cos, sin), [x])


ROUTERS = {
    "softmax": RouterConfig(8, 2),
    "sigmoid, groups": RouterConfig(8, 3, score="sigmoid", num_groups=4, top_groups=2, scale=2.5),
    "bias": RouterConfig(8, 2, score="sigmoid", bias_rate=0.1),
    "bias, groups": RouterConfig(8, 2, num_groups=2, bias_rate=0.1, normalize=False),
    "capacity": RouterConfig(8, 2, capacity_factor=0.75),
    "losses": RouterConfig(8, 2, balance_loss=0.1, z_loss=0.01),
}


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("shared_dim", [0, 5])
def test_experts_and_their_choice_are_those_of_the_layer(name: str, shared_dim: int) -> None:
    torch.manual_seed(0)
    layer = MixtureOfExperts(6, ROUTERS[name], expert_dim=5, shared_dim=shared_dim).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    if layer.router.load.bias is not None:
        layer.router.load.bias.normal_()
    plain = copy.deepcopy(layer)
    use_definitions(plain)
    scores, x = torch.rand(2, 12, 8), randn(2, 12, 6)
    assert torch.equal(plain.router.best(scores).sort(-1).values, layer.router.best(scores).sort(-1).values)
    found, due = plain(x), layer(x)
    torch.testing.assert_close(plain.router.load.pending(), layer.router.load.pending())
    weight = torch.randn_like(due)
    gradients = [
        torch.autograd.grad((out * weight).sum(), dict(sorted(one.named_parameters())).values(), retain_graph=True)
        for one, out in ((plain, found), (layer, due))
    ]
    assert_same(found, due, [x])
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dropout_is_that_of_the_layer(dtype: torch.dtype) -> None:
    layer = DropoutAdd(0.3, seed=7, site=2)
    plain = copy.deepcopy(layer)
    use_definitions(plain)
    x, residual = (torch.randn(2, 5, 12, dtype=dtype, requires_grad=True) for _ in range(2))
    rows, weight = torch.randint(0, 2**40, (2, 5)), torch.randn(2, 5, 12, dtype=dtype)
    outs = [one(x, residual, rows) for one in (plain, layer)]
    gradients = [torch.autograd.grad(out, [x, residual], weight) for out in outs]
    torch.testing.assert_close((outs[0], *gradients[0]), (outs[1], *gradients[1]), rtol=0, atol=0)
    assert torch.equal(plain(x, residual), layer.eval()(x, residual))


def test_attention_in_bfloat16_is_rounded_like_a_kernel() -> None:
    """Within a few roundings of the float64 result, and not of sums in bfloat16."""
    torch.manual_seed(0)
    wide = [torch.randn(1, 64, 4, 16, dtype=torch.float64) for _ in range(3)]
    narrow = [x.bfloat16() for x in wide]
    seen = definitions.visible_pairs(MaskSpec(causal=True), (64,))[None]
    due = definitions.plain_attention(*(x.double() for x in narrow), seen, 0.25)
    found = definitions.plain_attention(*narrow, seen, 0.25)
    assert found.dtype is torch.bfloat16
    kernel = attention(*narrow, mask=MaskSpec(causal=True), backend="sdpa").double()
    error, of_kernel = ((x.double() - due).norm() / due.norm() for x in (found, kernel))
    assert of_kernel / 2 < error < 2 * of_kernel < torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_the_reference_computes_by_the_definitions(precision: str) -> None:
    """Also in the precision of a run; and nothing of the shared code that they stand for runs."""
    config = as_run_config("train.dropout=0.1", preset="moe-tiny", precision=precision)
    shared = [(transformer_block, "apply_rotary_emb"), (router_module.Router, "best"), (DropoutAdd, "forward"),
              (expert_layer, "grouped_linear"), (LocalAttention, "__call__")]  # fmt: skip
    shared += [(positions, "rope_tables")] * (precision == "float64")
    names = ("plain_attention", "rotate", "one_expert", "best_experts", "_dropout_add")
    with restored(*(owner for owner, _ in shared), definitions):
        for owner, name in shared:
            setattr(owner, name, mock.Mock(side_effect=AssertionError(name)))
        used = {name: mock.Mock(wraps=getattr(definitions, name)) for name in names}
        for name, spy in used.items():
            setattr(definitions, name, spy)
        plain = PlainModel(config, data_of(config))
        if precision == "float64":
            plain.step(1, plain.initial)
        else:
            rounded = RoundedReference(plain, make_plan(config))
            rounded._evaluate(rounded._rounded, plain.initial, 1)
    assert all(spy.called for spy in used.values())


SHARED = {
    "a window is one too wide": (small_config, ("model.window=6",), attention_mask, "key_bounds",
        taking(lambda _, spec, *more: (replace(spec, window=spec.window + 1), *more)), "the window is one too large"),
    "bounds of keys are one off": (small_config, ("model.window=6",), attention_mask, "key_bounds",
        giving(lambda _, found: replace(found, first_bs=(found.first_bs - 1).clamp_min(0))),
        "the output of blocks.0.attention.core"),
    "rotations go the other way": (small_config, (), transformer_block, "apply_rotary_emb",
        taking(lambda _, x, cos, sin: (x, cos, -sin)), "the queries of blocks.0.attention.core"),
    "angles have another base": (small_config, (), positions, "rope_tables",
        lambda _, real: lambda *one, theta, **others: real(*one, theta=2 * theta, **others), "RoPE has another base"),
    "tokens are numbered by their place in the micro-batch": (small_config, ("train.dropout=0.25",
        "train.num_microbatches=2"), transformer_block, "token_rows", lambda _, real: lambda layout, **others:
        real(replace(layout, samples=tuple(range(len(layout.samples)))), **others), ""),
    "the worst experts are chosen": (experts_config, (), Router, "best", taking(lambda _, one, scores: (one, -scores)),
        "the output of blocks.0.moe"),
    "groups of rows are one off": (experts_config, (), expert_layer, "sort_by_expert",
        giving(lambda _, found: (found[0].roll(1), found[1])), "the output of blocks.0.moe"),
}  # fmt: skip
QUICK = ("a window is one too wide", "rotations go the other way", "angles have another base")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in SHARED])
def test_a_fault_of_code_that_both_sides_import_is_found(gang, monkeypatch, name):
    make, words, owner, attribute, change, says = SHARED[name]
    monkeypatch.setattr(owner, attribute, change(None, getattr(owner, attribute)))
    result = proof(gang, make(*words))
    assert not result.passed
    assert says in " ".join(" ".join(render(result)).split())
