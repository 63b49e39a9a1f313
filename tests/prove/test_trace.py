"""The second pass: no difference on right layouts, and the place and cause of wrong values, made up from right ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.config.schema import RunConfig
from meshwright.mesh.axes import Axes
from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.plan.make_plan import make_plan
from meshwright.prove.conclude import sides_of
from meshwright.prove.judge.tensors import Array, LayoutCounts, to_arrays
from meshwright.prove.placement import ExpertPlacement, context_placement_of, expert_placement_of, stage_placement_of
from meshwright.prove.record.definitions import plain_attention, rotate, visible_pairs
from meshwright.prove.record.layout_run import gather_evidence
from meshwright.prove.result import FaultKind
from meshwright.prove.trace.conclude import Step, find_place, locate
from meshwright.prove.trace.expert_layer import INPUTS, ExpertLayer
from meshwright.prove.trace.first_difference import Trace
from meshwright.prove.trace.probe import ReferenceTrace, trace_reference
from tests.gangs.gang import GangPool
from tests.helpers import open_data
from tests.prove.proofs import (
    FEW_STEPS,
    RIGHT,
    few_pictures,
    on_ranks,
    plain_model,
    records_of,
    small_config,
    small_dit_config,
    small_expert_config,
    trace_on_rank,
)

LAYOUTS = {
    "dp_shard": small_config("mesh.dp_shard=2", "train.num_microbatches=2"),
    "pp, tied": small_config("mesh.pp=2", "train.num_microbatches=2", "model.tie_embeddings=true"),
    "zb-v": small_config("mesh.pp=2", "pipeline.schedule=zb-v", "model.num_layers=4", "train.num_microbatches=4"),
    "pp, embedders of each stage": small_dit_config("mesh.pp=2", "train.num_microbatches=2"),
    "tp": small_config("mesh.tp=2", "recompute.policy=full"),
    "cp, ring": small_config("mesh.cp=2", "mesh.cp_method=ring", "train.dropout=0.25"),
    "cp, heads": small_config("mesh.cp=2", "mesh.cp_method=heads", "model.window=6"),
    "ep": small_expert_config("mesh.dp_shard=2", "mesh.ep=2"),
}
QUICK = ("pp, tied", "tp", "cp, ring")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in LAYOUTS])
def test_a_right_layout_has_no_first_difference(gang: GangPool, name: str) -> None:
    config = LAYOUTS[name]
    plan, data, plain = make_plan(config), few_pictures(config) or open_data(config), plain_model(config)
    evidence = gather_evidence(config, plan, records_of(gang, config))
    ranks = on_ranks(gang, config, trace_on_rank, RIGHT, FEW_STEPS, few_pictures(config))
    sides = sides_of(config, evidence, plain, as_run=False)
    assert find_place(config, plan, ranks, data, plain, sides, step=FEW_STEPS) is None
    values = ranks[-1].values[0]
    name = next(
        name for name in values if name.startswith("output of blocks") and name.endswith((".ffn", ".moe", ".mlp"))
    )
    values[name] = 1.5 * values[name]
    found = find_place(config, plan, ranks, data, plain, sides, step=FEW_STEPS)
    assert found is not None and name in found.symptom and "1.500 ×" in found.cause


# ---- made-up values


Wrong = Callable[[int, Mapping[str, Array]], Array]
"""Returns a full value, given its cell and that cell's right values."""


@dataclass(frozen=True)
class Made:
    """A reference's values, of which ranks hold what a test makes of them."""

    config: RunConfig
    source: ReferenceTrace
    values: list[dict[str, Array]]

    def place(self, name: str, wrong: Wrong, ranks: set[int] | None = None) -> str:
        """What is said if ranks, or all, have another full value of a name: what `wrong` returns of a cell's values."""
        axes = self.config.mesh.axes()
        tokens = {cell: [one.numpy() for one in found] for cell, found in self.source.tokens.items()}
        num_micro, held = len(self.values) // axes.data_parallel(), []
        for rank in range(axes.num_ranks()):
            mine: dict[int, dict[str, Array]] = {}
            for microbatch in range(num_micro):
                cell = axes.data_index(rank) * num_micro + microbatch
                full = dict(self.values[cell])
                if ranks is None or rank in ranks:
                    full[name] = wrong(cell, full)
                own = tokens[cell][axes.coordinate(rank)["cp"]] if cell in tokens else np.arange(16)
                mine[microbatch] = {n: value[:, own] if value.ndim > 2 else value for n, value in full.items()}
            held.append(mine)
        trace = Trace(held, self.source, axes)
        plan = make_plan(self.config)
        counts = LayoutCounts(axes, num_micro, self.config.train.global_batch)
        step = Step(1, stage_placement_of(plan), expert_placement_of(plan), counts)
        found = locate(trace, step)
        assert found is not None and name in found.symptom, found
        is_gradient = name.startswith("gradient")
        assert found.kind is (FaultKind.BACKWARD if is_gradient else FaultKind.FORWARD)
        return found.text


@cache
def made(make: Any, *words: str) -> Made:
    config = make(*words)
    plain, placement = plain_model(config), context_placement_of(make_plan(config))
    source = trace_reference(plain, open_data(config), step=1, weights=[plain.initial], context=placement)
    return Made(config, source, [to_arrays(values) for values in source.values])


PLAIN = ("mesh.dp_shard=2", "train.num_microbatches=2")
FFN, QUERIES, LOGITS = "output of blocks.0.ffn", "queries of blocks.0.attention.core", "gradient of the output of head"


def of(name: str) -> Wrong:
    return lambda cell, values: values[name]


def changed(name: str, change: Callable[[Array], Array]) -> tuple[str, Wrong]:
    return name, lambda cell, values: change(values[name])


def turned(steps: int) -> Callable[[Array], Array]:
    """Rotate by further positions."""

    def change(x: Array) -> Array:
        angles = steps * 10000.0 ** (-torch.arange(0, x.shape[-1], 2).double() / x.shape[-1])
        turns = torch.polar(torch.ones_like(angles), angles).expand(x.shape[1], -1)
        return rotate(torch.from_numpy(x), turns).numpy()

    return change


def noisy(x: Array) -> Array:
    return x + 1e-3 * np.random.default_rng(0).random(x.shape)


def other_epsilon(cell: int, values: Mapping[str, Array]) -> Array:
    x, right = values["input of norm"], values["output of norm"]
    square = (x * x).mean(-1, keepdims=True)
    return right * np.sqrt((square + 1e-5) / (square + 0.01))


RELATIONS = {
    "it is zero": changed(FFN, lambda x: 0 * x),
    "it has NaN or infinite entries": changed(FFN, lambda x: np.where(x == x.max(), np.inf, x)),
    "it is 1.500 × the right one; what blocks.0.ffn takes is right, so the fault is in it": changed(
        FFN, lambda x: 1.5 * x),
    "layers are exchanged": ("output of blocks.0.attention_norm", of("output of blocks.1.attention_norm")),
    "the module does nothing": ("output of blocks.0", of("input of blocks.0")),
    "each token has the value of the token 1 earlier": changed("output of embed", lambda x: np.roll(x, 1, 1)),
    "samples are exchanged": changed("output of embed", lambda x: x[::-1]),
    "heads are exchanged: they are in the order": changed(QUERIES, lambda x: x[:, :, ::-1]),
    "features are exchanged": changed("output of blocks.0.attention.wq", lambda x: x[..., ::-1]),
    "RoPE uses positions that are 2 too large": changed(QUERIES, turned(2)),
    "RoPE is not applied": (QUERIES, lambda cell, values:
        values["output of blocks.0.attention.wq"].reshape(2, 16, 4, 8)),
    "the norm's epsilon is 0.01 instead of 1e-05": ("output of norm", other_epsilon),
    "a bias is missing or added twice": changed("output of blocks.0.attention.wo", lambda x: x + 0.1),
    "blocks.0.ffn_add adds 0.500 × what it should to its input": ("output of blocks.0.ffn_add", lambda cell, values:
        0.5 * (values["output of blocks.0.ffn_add"] + values["input of blocks.0.ffn_add"])),
    "it is rounded to float32": changed("output of norm", lambda x: x.astype(np.float32).astype(np.float64)),
    "at positions 3 of 16 and in features 0…3 of 32": changed(FFN, lambda x: x + 0.1 * np.pad(
        np.random.default_rng(0).random((2, 1, 4)), ((0, 0), (3, 12), (0, 28)))),
    "the gradient that blocks.0.ffn is given is right, so the fault is in its backward": changed(
        "gradient of the input of blocks.0.ffn", noisy),
    "all values of the forward are right: the loss, its targets or its divisor": changed(LOGITS, noisy),
    "each token has the target of the previous one": (LOGITS, lambda cell, values:
        shifted_targets(cell, values[LOGITS])),
}  # fmt: skip


def shifted_targets(cell: int, gradient: Array) -> Array:
    """Softmax − onehot of the targets of the tokens before."""
    targets = made(small_config, *PLAIN).source.targets[cell].numpy()
    weight, found = 1.0 / (8 * 16), gradient.copy()
    np.put_along_axis(found, targets[..., None], np.take_along_axis(found, targets[..., None], -1) + weight, -1)
    other = np.roll(targets, 1, 1)[..., None]
    np.put_along_axis(found, other, np.take_along_axis(found, other, -1) - weight, -1)
    return found


@pytest.mark.parametrize("says", RELATIONS)
def test_a_wrong_value_is_related_to_the_right_one(says: str) -> None:
    name, wrong = RELATIONS[says]
    text = made(small_config, *PLAIN).place(name, wrong)
    assert says in text and "on every rank" in text


@pytest.mark.parametrize("name", [QUERIES, LOGITS, FFN])
def test_rounding_is_no_exchange_and_no_factor(name: str) -> None:
    text = made(small_config, *PLAIN).place(*changed(name, lambda x: x.astype(np.float32).astype(np.float64)))
    assert "rounded to float32" in text


def test_a_micro_batch_has_the_value_of_another() -> None:
    one = made(small_config, *PLAIN)
    text = one.place("output of embed", lambda cell, values: one.values[0]["output of embed"], ranks={0})
    assert "micro-batch 1 has the value of micro-batch 0: a stale or exchanged buffer" in text
    assert "only on rank 0" in text and "in the micro-batch of samples 2, 3" in text


def test_what_a_stage_receives_is_told_from_what_is_sent() -> None:
    one = made(small_config, "mesh.pp=2", "train.num_microbatches=2")
    text = one.place("input of blocks.1", lambda cell, values: values["input of blocks.1"] + np.random.rand(4, 16, 32))
    assert "what stage 1 (pp rank 1) receives is not what stage 0 (pp rank 0) returns" in text


# ---- attention


CORE = "blocks.0.attention.core"


def attention(change: Callable[[torch.Tensor, Any], torch.Tensor], factor: float = 1.0) -> Any:
    """The output of attention with another mask than the right one, [b, q, k], given that and the cell's tokens."""

    def place(one: Made, spec: MaskSpec, ranks: set[int] | None = None) -> str:
        def wrong(cell: int, values: Mapping[str, Array]) -> Array:
            q, k, v = (torch.from_numpy(values[f"{what} of {CORE}"]) for what in ("queries", "keys", "values"))
            seen = visible_pairs(spec, (16,)).expand(len(q), -1, -1)
            scale = factor * q.shape[-1] ** -0.5
            return plain_attention(q, k, v, change(seen, one.source.tokens.get(cell)), scale).numpy()

        return one.place(f"output of {CORE}", wrong, ranks)

    return place


def same_rank(tokens: Any) -> torch.Tensor:
    rank = torch.zeros(16)
    rank[tokens[1]] = 1
    return rank[:, None] == rank[None, :]


def at_places(seen: torch.Tensor, tokens: Any) -> torch.Tensor:
    index = torch.empty(16, dtype=torch.int64)
    for one in tokens:
        index[one] = torch.arange(8)
    return seen[:, index][:, :, index]


OFF = torch.diag(torch.ones(15, dtype=torch.bool), 1)
CAUSAL, WINDOW = MaskSpec(causal=True), MaskSpec(causal=True, window=6)
ATTENTION = {
    "queries see later tokens": ((), CAUSAL, attention(lambda seen, _: torch.ones_like(seen))),
    "queries don't see their own token": ((), CAUSAL, attention(lambda seen, _: seen & ~torch.eye(16).bool())),
    "queries see the next token": ((), CAUSAL, attention(lambda seen, _: seen | OFF)),
    "scores are not scaled by 1 / √head_dim": ((), CAUSAL, attention(lambda seen, _: seen, 8**0.5)),
    "scores are scaled twice": ((), CAUSAL, attention(lambda seen, _: seen, 8**-0.5)),
    "the window is ignored": (("model.window=6",), CAUSAL, attention(lambda seen, _: seen)),
    "the window is one too large": (("model.window=6",), replace(WINDOW, window=7), attention(lambda seen, _: seen)),
    "queries miss the keys of other cp ranks": (("mesh.cp=2",), CAUSAL,
        attention(lambda seen, tokens: seen & same_rank(tokens))),
    "keys of other cp ranks are not masked": (("mesh.cp=2",), CAUSAL,
        attention(lambda seen, tokens: seen | ~same_rank(tokens))),
    "the mask is evaluated at local positions": (("mesh.cp=2",), CAUSAL, attention(at_places)),
}  # fmt: skip


@pytest.mark.parametrize("says", ATTENTION)
def test_a_wrong_attention_is_run_again_by_other_masks(says: str) -> None:
    words, spec, place = ATTENTION[says]
    assert says in place(made(small_config, *words), spec)


@pytest.mark.parametrize(
    ("factor", "says"), [(0.0, "not returned"), (2.0, "returned twice"), (0.5, "0.500 × returned")]
)
def test_gradients_of_values_are_fitted_by_queries_of_the_own_and_other_ranks(factor: float, says: str) -> None:
    one = made(small_config, "mesh.cp=2")

    def wrong(cell: int, values: Mapping[str, Array]) -> Array:
        q, k, v = (torch.from_numpy(values[f"{what} of {CORE}"]) for what in ("queries", "keys", "values"))
        gradient = torch.from_numpy(values[f"gradient of the output of {CORE}"])
        seen, same = visible_pairs(CAUSAL, (16,)).expand(len(q), -1, -1), same_rank(one.source.tokens[cell])
        scores = torch.einsum("bqnh,bknh->bnqk", q, k.repeat_interleave(2, 2)) * 8**-0.5
        weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) * torch.where(same, 1.0, factor)
        return torch.einsum("bnqk,bqnh->bknh", weights, gradient).unflatten(2, (2, 2)).sum(3).numpy()

    says_all = one.place(f"gradient of the values of {CORE}", wrong)
    assert f"gradients of values are {says} to the cp rank that owns them" in says_all


# ---- experts


MOE = "blocks.0.moe"
CAPACITY = "model.drop=over-capacity model.capacity_factor=1.0"
EXPERTS = {
    "routing weights are applied twice": ("", lambda right: {"weights": right.weights**2}),
    "routing weights are not applied": ("", lambda right: {"weights": right.kept.double()}),
    "applied to the experts' inputs instead of their outputs": ("", lambda right: {
        "routed": right.combine(right.table, at_input=True)}),
    "shared experts are left out": ("model.num_shared_experts=1", lambda right: {"shared": 0.0 * right.shared}),
    "the part of the shared experts is 0.500 × the right one": ("model.num_shared_experts=1", lambda right: {
        "shared": 0.5 * right.shared}),
    "rows of other ranks are lost on their way back": ("", lambda right: {"table": right.table * ~right.remote}),
    "rows from ep rank 1 are lost": ("", lambda right: {"table": right.table * (torch.arange(8) < 4)}),
    "the experts of ep ranks 0 and 1 are swapped": ("", lambda right: sent(right, [4, 5, 6, 7, 0, 1, 2, 3])),
    "the offset of the experts' indices is wrong by 1": ("", lambda right: sent(right, [1, 2, 3, 4, 5, 6, 7, 0])),
    "128 tokens get experts that are not theirs": ("", lambda right: sent(right, [3, 0, 1, 2, 6, 7, 5, 4])),
    "gate and up are exchanged in experts 0…3 (ep rank 0)": ("", lambda right: {
        "routed": right.combine(right.table, exchanged=range(4))}),
    "gets their outputs once for each of them": ("", lambda right: {"weights": right.weights * (
        1 + (right.experts[..., :1] // 4 == right.experts[..., 1:] // 4))}),
    "each token gets the outputs of the previous one": ("", lambda right: {
        "routed": right.routed.view(2, -1, 16).roll(1, 1).view_as(right.x)}),
    "tokens over an expert's capacity are computed": (CAPACITY, lambda right: {"kept": right.kept | True}),
    "an expert has 3 slots per sample instead of 4": (CAPACITY, lambda right: {"kept": right.slots(right.experts, 3)}),
    "the choices with the lowest scores are dropped": (CAPACITY, lambda right: {"kept": best_kept(right)}),
    "the routing weight of the row after it on ep rank 1": (CAPACITY, lambda right: {
        "table": right.with_rows(lambda expert_r, weight_r: (expert_r, weight_r.roll(-1)), [1])}),
}  # fmt: skip


def sent(right: ExpertLayer, other: list[int]) -> dict[str, torch.Tensor]:
    """Let other experts compute."""
    return {"table": right.table_of(torch.tensor(other)[right.experts])}


def best_kept(right: ExpertLayer) -> torch.Tensor:
    """The 4 choices of each expert with the best scores in a sample."""
    found = torch.zeros_like(right.kept)
    for sample, expert in itertools.product(range(len(found)), range(8)):
        score = right.chosen[sample].masked_fill(right.experts[sample] != expert, -1.0).flatten()
        best = score.topk(4)
        found[sample].view(-1)[best.indices[best.values > 0]] = True
    return found


def layer_of(one: Made) -> ExpertLayer:
    layer = dict(one.source.plain.module.named_modules())[MOE]
    placement = expert_placement_of(make_plan(one.config))
    assert placement is not None
    x_cbtd = torch.from_numpy(np.stack([values[f"input of {MOE}"] for values in one.values]))
    return ExpertLayer(layer, x_cbtd, placement, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("says", EXPERTS)
def test_a_wrong_layer_of_experts_is_run_again(says: str) -> None:
    words, other = EXPERTS[says]
    one = made(small_expert_config, "mesh.dp_shard=2", "mesh.ep=2", *words.split())
    right = layer_of(one)
    with torch.no_grad():
        due, out = (layer.out.view_as(right.x_cbtd).numpy() for layer in (right, right.but(**other(right))))
    for found, values in zip(due, one.values, strict=True):
        np.testing.assert_allclose(found, values[f"output of {MOE}"], rtol=1e-9, atol=1e-12)
    assert says in one.place(f"output of {MOE}", lambda cell, values: out[cell])


@pytest.mark.parametrize(
    ("lost", "says"),
    [(("router_x",), "the router's gradient comes from each rank's own experts only"),
     (("rows_x",), "gradients of rows are not returned"),
     (("rows_x", "router_x"), "experts get gradients of their own rank's tokens only")],
)  # fmt: skip
def test_lost_gradients_of_experts_are_told(lost: tuple[str, ...], says: str) -> None:
    one = made(small_expert_config, "mesh.dp_shard=2", "mesh.ep=2")
    right = layer_of(one)
    xs = {name: right.x.clone().requires_grad_() for name in INPUTS}
    run = right.but(**xs)
    gradient = torch.from_numpy(np.concatenate([values[f"gradient of the output of {MOE}"] for values in one.values]))
    of_others = torch.autograd.grad(run.combine(run.table * right.remote), [xs[name] for name in lost], gradient)
    missing = sum(of_others).view_as(right.x_cbtd).numpy()  # type: ignore[union-attr]
    name = f"gradient of the input of {MOE}"
    assert says in one.place(name, lambda cell, values: values[name] - missing[cell])


# ---- experts of transformers


class ForeignExperts(torch.nn.Module):
    """Experts that take tokens, choices and routing weights, beside a gate."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = torch.nn.Parameter(torch.randn(4, 8, 8, dtype=torch.float64))

    def forward(self, x_nd: torch.Tensor, chosen_nk: torch.Tensor, weights_nk: torch.Tensor) -> torch.Tensor:
        outs_nke = torch.einsum("nd,nkde->nke", x_nd, self.up[chosen_nk])
        return (weights_nk[..., None] * outs_nke.tanh()).sum(1)


@pytest.mark.parametrize("says", ["routing weights are not normalised over a token's 2 experts", "first expert also"])
@torch.no_grad()
def test_experts_of_transformers_are_run_again(says: str) -> None:
    experts = ForeignExperts()
    module = torch.nn.ModuleDict({"gate": torch.nn.Linear(8, 4, bias=False).double(), "experts": experts})
    x_nd = torch.randn(16, 8, dtype=torch.float64)
    best_nk, chosen_nk = module["gate"](x_nd).softmax(-1).topk(2)
    weights_nk = best_nk / best_nk.sum(-1, keepdim=True)
    right = {"input of mlp.experts": x_nd, "output of mlp.experts": experts(x_nd, chosen_nk, weights_nk)}
    source: Any = SimpleNamespace(plain=SimpleNamespace(module=torch.nn.ModuleDict({"mlp": module})), values=[right],
                                  tokens={}, layouts=[None], targets=[torch.zeros(2, 8)], earlier=())  # fmt: skip
    held = []
    for rank in range(2):
        mine_nk = chosen_nk // 2 == rank
        parts = experts(x_nd, torch.where(mine_nk, chosen_nk, 2 * rank), weights_nk)
        if "first" not in says:
            parts = experts(x_nd, chosen_nk, best_nk * mine_nk)
        held.append({0: to_arrays({**right, "output of mlp.experts": parts})})
    axes = Axes(tp=2)
    placement = ExpertPlacement(frozenset({"mlp.experts.up"}), 4, 1, 1)
    found = locate(Trace(held, source, axes), Step(1, None, placement, LayoutCounts(axes, 1, 2)))
    assert found is not None and says in found.text
