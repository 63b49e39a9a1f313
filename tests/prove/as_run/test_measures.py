"""The measures of a proof as run: rounding grids, codecs' errors, the optimizer's rule, and fits within rounding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from meshwright.comm.compression.catalogue import find_method
from meshwright.comm.compression.codecs import decode, encode
from meshwright.mesh.axes import Axes
from meshwright.nn.experts.router import Router
from meshwright.nn.experts.router_config import RouterConfig
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.prove.as_run.conclude import (
    CODEC_FACTOR,
    LAYER_NORM_ROUNDINGS,
    MeasuredTolerances,
    Shares,
    as_run_notes,
    is_on_grid,
    is_summed,
    looks_rounded,
)
from meshwright.prove.as_run.rounding import (
    Growth,
    PlainCodec,
    Rounded,
    flatten,
    has_choices,
    multiply_by_shards,
    quantise,
    relative_codec_errors,
    turned_ties,
    unflatten,
)
from meshwright.prove.explain.gradients import GradientContext, diagnose_gradient
from meshwright.prove.judge.tensors import LayoutCounts, assemble
from meshwright.prove.judge.verdicts import SuspectTensor
from meshwright.prove.record.evidence import RecordedShard
from meshwright.prove.result import Feedback, ProofResult
from tests.prove.as_run.proofs import as_run_config


@pytest.mark.parametrize("num", [2, 4, 8])
def test_a_float32_sum_is_told_from_a_bfloat16_one(num: int) -> None:
    torch.manual_seed(num)
    parts = torch.randn(num, 10_000).bfloat16()
    right, wrong = parts.float().sum(0), parts.sum(0, dtype=torch.bfloat16).float()
    chosen = is_summed(parts.double())
    assert chosen.float().mean() > 0.5
    assert is_on_grid(right[chosen]).float().mean() < 0.6, "by chance"
    assert not looks_rounded(int(is_on_grid(right[chosen]).sum()), int(chosen.sum()))
    assert looks_rounded(int(is_on_grid(wrong[chosen]).sum()), int(chosen.sum()))


@pytest.mark.parametrize("low", ["", "dp_shard", "the micro-batches"])
def test_one_of_several_sums_in_bfloat16_is_told(low: str) -> None:
    torch.manual_seed(3)
    parts, shares = torch.randn(2, 2, 4, 3000).bfloat16().float(), Shares()
    dims = {"": (), "dp_shard": (1, 2), "the micro-batches": (2,)}[low]
    value = parts.sum(dims, keepdim=True).bfloat16().float() if dims else parts
    shares.add(value.sum((0, 1, 2)), parts.double())
    assert shares.low_sum() == low


def test_a_mean_is_scaled_back_and_one_contribution_is_no_sum() -> None:
    parts = torch.randn(3, 1000).bfloat16()
    mean = parts.sum(0, dtype=torch.bfloat16).float() / 3
    assert is_on_grid(mean).float().mean() < 0.5 and is_on_grid(mean, (1, 3)).float().mean() > 0.9
    alone = torch.zeros(3, 10)
    alone[0] = 1.0
    assert not is_summed(alone).any() and not is_summed(parts[:1]).any()


@pytest.mark.parametrize("name", ["int8", "int4", "loco4", "int2", "bf16"])
def test_the_plain_quantiser_errs_as_the_codec_does(name: str) -> None:
    torch.manual_seed(0)
    method, x = find_method(name), torch.randn(2, 1000)
    code = encode(x, method.codec, rotate=method.rotate)
    decoded = decode(code, method.codec, num_elements=1000, dtype=torch.float32, rotate=method.rotate)
    plain, square = quantise(x.double(), method)
    error, expected = (decoded - x).norm(), (plain - x).norm()
    assert 0.9 < error / expected < 1.1
    assert 0.8 < square.sum().sqrt() / expected < 1.6
    if name != "bf16":
        assert torch.equal(quantise(torch.zeros(1, 130), method)[0], torch.zeros(1, 130))


def test_choices_near_ties_are_turned_and_back() -> None:
    router = Router(2, RouterConfig(num_experts=4, top_k=2))
    scores = torch.tensor([[[4.0, 3.0, 2.99, 0.0], [4.0, 3.0, 2.0, 0.0]]])
    with turned_ties(router, 0.01):
        assert router.best(scores).tolist() == [[[0, 2], [0, 1]]]
    assert router.best(scores).tolist() == [[[0, 1], [0, 1]]]
    assert has_choices(router) and not has_choices(torch.nn.Linear(2, 2))


def test_shards_are_flattened_and_back() -> None:
    tensors = {"a": torch.randn(5, 3), "b": torch.randn(4), "c": torch.randn(1, 2)}
    flat = flatten(list(tensors.values()), 2)
    assert len(flat) == 2
    found = unflatten(flat, {name: value.shape for name, value in tensors.items()})
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


def test_feedback_keeps_errors_from_growing() -> None:
    config = load("llama-tiny", ["comm.gradients=loco4", "mesh.dp_shard=2", "model.num_layers=1"])
    plan = make_plan(config)
    names = {"blocks.0.ffn.up.weight"}
    found = {}
    for feedback in (True, False):
        codec, growth = PlainCodec(config, plan, feedback), Growth()
        torch.manual_seed(0)
        for _ in range(12):
            parts = {name: torch.randn(2, 1, 64, 32, dtype=torch.float64) for name in names}
            growth.add(codec.reduce(parts)[0], {name: value.sum((0, 1)) for name, value in parts.items()}, names)
        found[feedback] = growth.value()
    assert found[True] < 2.0 and found[False] > 3.0


def test_each_tensor_parallel_rank_sends_its_shards() -> None:
    config = load("llama-tiny", ["comm.gradients=int8", "mesh.dp_shard=2", "mesh.tp=2", "model.num_layers=1"])
    plan, name = make_plan(config), "blocks.0.attention.wo.weight"
    small, large = torch.randn(2, 1, 128, 128, dtype=torch.float64), 1e4 * torch.randn(2, 1, 128, 128).double()
    found = PlainCodec(config, plan).reduce({name: torch.cat((small, large), 3)[..., ::2], "x": small})[0][name]
    assert float((found[:, :64] - small.sum((0, 1))[:, ::2]).norm() / small.norm()) < 0.01, "no scale in common"


def test_an_error_of_few_elements_may_be_larger_by_chance() -> None:
    """The run's values differ by rounding from those of the plain quantiser, and fall elsewhere between integers."""
    method, draw, over = find_method("loco4"), torch.Generator().manual_seed(0), dict.fromkeys((1, 4, 100), 0)
    for _ in range(200):
        x = torch.randn(1, 128, generator=draw, dtype=torch.float64)
        run = x + 0.05 * torch.randn(1, 128, generator=draw, dtype=torch.float64)
        errors = (quantise(run, method)[0] - run, quantise(x, method)[1])
        for size in over:
            error, square = (one[:, :size] for one in errors)
            limit = CODEC_FACTOR * relative_codec_errors({"w": 0 * x}, {"w": square}, {"w": x[:, :size]})["w"]
            over[size] += float(error.norm() / x[:, :size].norm()) > limit
    assert not any(over.values()), over
    assert relative_codec_errors({"w": torch.zeros(0)}, {"w": torch.zeros(0)}, {"w": torch.ones(1)})["w"] == 0.0


def test_elements_that_are_alike_are_rounded_alike() -> None:
    """Their errors are all on one side, as those of a bias whose ranks have nearly the same gradients."""
    one = {"w": torch.full((4,), 3.0)}
    assert relative_codec_errors({"w": torch.full((4,), 0.5)}, {"w": torch.full((4,), 1 / 12)}, one)[
        "w"
    ] == pytest.approx(0.5 / 3)


def test_shards_are_sent_over_replicas_in_pieces() -> None:
    """A group of elements ends where a replica's piece does: a small tensor may share it with other ones."""
    config = as_run_config("mesh.dp_replicate=2", "comm.gradients=int8", "comm.ranks_per_node=1")
    codec, method = PlainCodec(config, make_plan(config)), find_method("int8")
    values = torch.cat([torch.full((1, 100), 100.0), torch.full((1, 100), 0.1)], 1).double()
    whole, _ = codec._send(values, method, ((0, 0), 0, "sum"))
    pieces, _ = codec._send(values, method, ((0, 0), 0, "sum"), 2)
    off_whole, off_pieces = ((sent - values)[0, 101:110].abs().max() for sent in (whole, pieces))
    assert off_whole > 0.03 and off_pieces < 1e-3


@pytest.mark.parametrize("dim", [0, 1])
def test_sharded_matrices_are_multiplied_shard_by_shard(dim: int) -> None:
    """Partial sums are rounded by themselves: outputs of a row-wise layer, gradients of a column-wise one."""
    config = load("llama-tiny", ["mesh.tp=2", "model.num_layers=1"])
    name = "blocks.0.attention.wo.weight" if dim else "blocks.0.attention.wq.weight"
    plan, model = make_plan(config), torch.nn.Module()
    layer = torch.nn.Linear(128, 128, bias=False, dtype=torch.bfloat16)
    model.add_module("blocks", torch.nn.ModuleList([torch.nn.Module()]))
    model.get_submodule("blocks.0").add_module("attention", torch.nn.Module())
    model.get_submodule("blocks.0.attention").add_module(name.split(".")[3], layer)
    multiply_by_shards(model, plan)
    x = torch.randn(7, 128, dtype=torch.bfloat16, requires_grad=True)
    out = layer(x)
    seed = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, x, seed)
    weight = layer.weight.detach()
    if dim:
        (a, b), (v, w) = x.detach().chunk(2, -1), weight.chunk(2, 1)
        assert torch.equal(out, a @ v.T + b @ w.T) and not torch.equal(out, x.detach() @ weight.T)
    else:
        (a, b), (v, w) = seed.chunk(2, -1), weight.chunk(2, 0)
        assert torch.equal(gradient, a @ v + b @ w) and not torch.equal(gradient, seed @ weight)


@pytest.mark.parametrize("num_tokens", [8, 64, 512])
def test_a_layer_norm_adds_up_gradients_in_the_precision_of_the_run(num_tokens: int) -> None:
    torch.manual_seed(0)
    layer, eps = torch.nn.LayerNorm(256, dtype=torch.bfloat16), torch.finfo(torch.bfloat16).eps
    gradient = (torch.randn(num_tokens, 256) * 0.01).bfloat16()
    layer(torch.randn(num_tokens, 256).bfloat16()).backward(gradient)
    due = gradient.double().sum(0)
    assert layer.bias.grad is not None
    error = float((layer.bias.grad.double() - due).norm() / due.norm())
    assert error < LAYER_NORM_ROUNDINGS * eps * num_tokens**0.5


def test_a_gradient_that_rounding_changes_by_its_size_tells_nothing() -> None:
    def tolerance(deviation: float, sums: float = 0.0) -> float:
        rounded = Rounded({}, {"w": deviation}, 0.0, {})
        return MeasuredTolerances([rounded], 1e-7, [{}], {"w": sums}).gradient("w", 1)

    assert tolerance(0.1) == pytest.approx(0.3) and tolerance(0.1, 0.2) == pytest.approx(0.5)
    assert tolerance(0.34) == tolerance(0.1, 0.8) == float("inf")


CONTRIBUTIONS = np.random.default_rng(0).standard_normal((2, 2, 40, 6)) + 0.5
COUNTS = LayoutCounts(Axes(dp_shard=2), 2, 8)


def suspect(shards: list[RecordedShard]) -> SuspectTensor:
    assembly, expected = assemble("w", shards, (40, 6), COUNTS.axes), CONTRIBUTIONS.sum((0, 1))
    return SuspectTensor(assembly, expected, 1.0, 0.06, COUNTS, noisy=True, find_contributions=lambda: CONTRIBUTIONS)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (np.full((2, 2), 2.0), "2.000 × the reference"),
        (np.array([[1.0, 1.0], [0.0, 0.0]]), "the contribution of data-parallel rank 1 is missing"),
        (np.array([[0.0, 1.0], [0.0, 1.0]]), "only the last micro-batch"),
        (np.full((2, 2), -1.0), "−1.000 × the reference"),
    ],
)
def test_causes_are_named_within_rounding(weights: np.ndarray, words: str) -> None:
    noise = np.random.default_rng(1).standard_normal((40, 6))
    value = np.einsum("dm,dmij->ij", weights, CONTRIBUTIONS)
    value = value + 0.02 * noise * np.linalg.norm(value) / np.linalg.norm(noise)
    shards = [RecordedShard(rank, (20 * rank, 0), torch.from_numpy(value[20 * rank :][:20])) for rank in (0, 1)]
    gradient = suspect(shards)
    assert gradient.error().relative > 0.06
    found = diagnose_gradient(gradient, GradientContext({}))
    assert words in found.text, found


def test_a_tensor_may_be_wrong_where_no_shard_alone_is() -> None:
    """A shard that has less than its share of the whole may err by that share: errors then add up to more than allowed.
    The shards that add most are told, and a cause is looked for in them."""
    contributions = CONTRIBUTIONS * np.where(np.arange(40) < 20, 1.0, 0.01)[:, None]
    value, noise = contributions.sum((0, 1)), np.random.default_rng(3).standard_normal((40, 6))
    for rank, size in enumerate((np.linalg.norm(value[:20]), np.linalg.norm(value) / 2**0.5)):
        noise[20 * rank :][:20] *= 0.95 * 0.06 * size / np.linalg.norm(noise[20 * rank :][:20])
    shards = [RecordedShard(r, (20 * r, 0), torch.from_numpy((value + noise)[20 * r :][:20])) for r in (0, 1)]
    scale = float(np.abs(value).max())
    whole = replace(suspect(shards), expected=value, scale=scale, find_contributions=lambda: contributions)
    assert whole.error().relative > whole.tolerance and whole.wrong_ranks == [0, 1]
    assert diagnose_gradient(whole, GradientContext({})).symptom == "not recognised"


def test_noise_has_no_cause() -> None:
    value = CONTRIBUTIONS.sum((0, 1)) + 3 * np.random.default_rng(2).standard_normal((40, 6))
    shards = [RecordedShard(rank, (20 * rank, 0), torch.from_numpy(value[20 * rank :][:20])) for rank in (0, 1)]
    assert diagnose_gradient(suspect(shards), GradientContext({})).symptom == "not recognised"


def test_feedback_is_judged_where_it_can_be_told() -> None:
    """What else is rounded may outweigh the codec's errors, whose growth then says nothing."""
    right, lost = Feedback("loco4", 1.4, 1.3, 3.6), Feedback("loco4", 3.5, 1.3, 3.6)
    hidden = Feedback("loco4", 3.9, 2.6, 2.6)
    assert (right.tells, right.ok) == (lost.tells, not lost.ok) == (True, True)
    assert not hidden.tells and hidden.ok
    config = as_run_config("mesh.dp_shard=2", "comm.gradients=loco4")
    plan = make_plan(config)
    result = ProofResult(config.mesh.axes(), 1, 2, "bfloat16", (), (), (), (), feedback=hidden, as_run=True)
    assert any("error feedback" in note for note in as_run_notes(config, plan, result))
    told = as_run_notes(config, plan, replace(result, feedback=right))
    assert not any("feedback" in note for note in told)
