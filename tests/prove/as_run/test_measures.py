"""The measures of a proof as run: rounding grids, codecs' errors, the optimizer's rule, and fits within rounding."""

from __future__ import annotations

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
from meshwright.prove.as_run.conclude import Shares, is_on_grid, is_summed, looks_rounded
from meshwright.prove.as_run.rounding import (
    Growth,
    PlainCodec,
    flatten,
    has_choices,
    quantise,
    turned_ties,
    unflatten,
)
from meshwright.prove.explain.gradients import GradientContext, diagnose_gradient
from meshwright.prove.judge.counts import LayoutCounts
from meshwright.prove.judge.tensors import assemble
from meshwright.prove.judge.verdicts import SuspectTensor
from meshwright.prove.record.evidence import RecordedShard


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


def test_noise_has_no_cause() -> None:
    value = CONTRIBUTIONS.sum((0, 1)) + 3 * np.random.default_rng(2).standard_normal((40, 6))
    shards = [RecordedShard(rank, (20 * rank, 0), torch.from_numpy(value[20 * rank :][:20])) for rank in (0, 1)]
    assert diagnose_gradient(suspect(shards), GradientContext({})).symptom == "not recognised"
