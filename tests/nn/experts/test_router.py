"""The router against one that goes token by token: choices, weights, capacity, losses, load and bias."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.nn.experts.router import Router, balance_loss, drop_over_capacity, sample_counts
from meshwright.nn.experts.router_config import RouterConfig, Score
from meshwright.nn.recompute import recompute
from meshwright.nn.step_handles import handles, step_buffers
from tests.nn.experts import routing as slow

B, T, D = 2, 6, 5
PLAIN = RouterConfig(8, 2)
DEEPSEEK = RouterConfig(8, 3, score=Score.SIGMOID, scale=2.5, num_groups=4, top_groups=2, bias_rate=0.1)
CONFIGS = {
    "mixtral": PLAIN,
    "not normalized": replace(PLAIN, normalize=False, scale=1.5),
    "sigmoid": replace(PLAIN, score=Score.SIGMOID, top_k=3),
    "deepseek": DEEPSEEK,
    "groups of one": replace(PLAIN, num_groups=8, top_groups=3),
    "all experts": RouterConfig(4, 4),
    "one expert": RouterConfig(1, 1),
    "capacity": replace(PLAIN, capacity_factor=0.8),
    "no room": replace(DEEPSEEK, capacity_factor=0.1),
    "uniform": replace(PLAIN, uniform=True, top_k=3),
    "uniform, capacity": replace(PLAIN, uniform=True, capacity_factor=0.5),
}


def make(config, *, seed=0):
    torch.manual_seed(seed)
    router = Router(D, config).double()
    torch.nn.init.normal_(router.gate.weight, std=0.8)
    if router.load.bias is not None:
        router.load.bias.copy_(torch.linspace(-0.4, 0.4, config.num_experts))
    return router, torch.randn(B, T, D, dtype=torch.float64)


def logits_of(router, x_btd):
    return x_btd @ router.gate.weight.T


def assert_routes_as_the_slow_one(router, x_btd):
    config, routing = router.config, router(x_btd)
    expected = [token for sample in slow.route(logits_of(router, x_btd), config, router.load.bias) for token in sample]
    for n, token in enumerate(expected):
        due = {e: w.item() for e, w, kept in zip(*token, strict=True) if kept}
        experts, weights = routing.experts_nk[n].tolist(), routing.weights_nk[n].tolist()
        found = {e: w for e, w in zip(experts, weights, strict=True) if e < config.num_experts}
        assert found.keys() == due.keys() and found == pytest.approx(due, rel=1e-12)
        dropped = [w for e, w in zip(experts, weights, strict=True) if e == config.num_experts]
        assert len(dropped) == config.top_k - len(due) and not any(dropped)
    assert (routing.num_samples, routing.capacity) == (B, config.capacity(T))


@pytest.mark.parametrize("name", list(CONFIGS))
def test_experts_and_weights_are_those_of_the_slow_router(name):
    for seed in range(3):
        assert_routes_as_the_slow_one(*make(CONFIGS[name], seed=seed))


@st.composite
def configs(draw):
    groups, size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    top_groups = draw(st.integers(1, groups))
    return RouterConfig(
        groups * size,
        draw(st.integers(1, top_groups * size)),
        score=draw(st.sampled_from(Score)),
        normalize=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        num_groups=groups,
        top_groups=top_groups,
        bias_rate=draw(st.sampled_from([0.0, 0.1])),
        capacity_factor=draw(st.sampled_from([None, 0.3, 1.0, 1.25])),
        uniform=draw(st.booleans()),
    )


@settings(max_examples=25)
@given(configs(), st.integers(0, 10**6))
def test_any_settings_do(config, seed):
    assert_routes_as_the_slow_one(*make(config, seed=seed))


def test_the_bias_changes_the_choice_and_not_the_weights():
    router, x_btd = make(replace(PLAIN, bias_rate=0.1, normalize=False, top_k=1))
    before = router(x_btd)
    router.load.bias.zero_()
    router.load.bias[3] = 100.0
    routing = router(x_btd)
    assert (routing.experts_nk == 3).all() and not (before.experts_nk == 3).all()
    scores_be = logits_of(router, x_btd).softmax(-1).flatten(0, 1)
    torch.testing.assert_close(routing.weights_nk[:, 0], scores_be[:, 3], rtol=0, atol=1e-14)
    assert not router.load.bias.requires_grad and "load.bias" in router.state_dict()


def test_a_sample_is_routed_the_same_alone_and_among_others():
    """Capacity and losses depend on nothing but the sample."""
    router, x_btd = make(replace(CONFIGS["capacity"], balance_loss=1.0))
    together = router(x_btd)
    total = router.balance_loss.take()
    apart = [router(x_td[None]) for x_td in x_btd]
    assert torch.equal(together.experts_nk, torch.cat([routing.experts_nk for routing in apart]))
    torch.testing.assert_close(router.balance_loss.take(), total)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 5), st.integers(0, 10**6))
def test_capacity_drops_the_later_tokens_of_a_sample(top_k, num_experts, capacity, seed):
    top_k = min(top_k, num_experts)
    generator = torch.Generator().manual_seed(seed)
    experts_btk = torch.rand(2, 7, num_experts, generator=generator).argsort(-1)[..., :top_k]
    kept_btk = drop_over_capacity(experts_btk, num_experts, capacity)
    for sample, kept in zip(experts_btk.flatten(1).tolist(), kept_btk.flatten(1).tolist(), strict=True):
        for e in range(num_experts):
            flags = [flag for expert, flag in zip(sample, kept, strict=True) if expert == e]
            assert flags == [n < capacity for n in range(len(flags))]


def test_slots_per_expert():
    config = RouterConfig(8, 2, capacity_factor=1.25)
    assert [config.capacity(t) for t in (1, 16, 17, 64)] == [1, 5, 6, 20] and PLAIN.capacity(64) is None


# Losses


LOSSES = {
    "mixtral": PLAIN,
    "sigmoid": CONFIGS["sigmoid"],
    "groups": replace(DEEPSEEK, bias_rate=0.0),
    "capacity": CONFIGS["capacity"],
}


@pytest.mark.parametrize("over_batch", [False, True])
@pytest.mark.parametrize("name", list(LOSSES))
def test_losses_and_their_gradients_are_the_formulas(name, over_batch):
    config = replace(LOSSES[name], balance_loss=0.3, z_loss=0.2, over_batch=over_batch)
    router, x_btd = make(config)
    router.balance_loss.scale = router.z_loss.scale = 0.125
    routing = router(x_btd)
    taken = [loss.take() for loss in (router.balance_loss, router.z_loss)]
    (found,) = torch.autograd.grad(routing.weights_nk.sum() * 0, router.gate.weight)
    logits_bte = logits_of(router, x_btd)
    expected = [
        0.3 * 0.125 * slow.balance_loss(logits_bte, config, over_batch=over_batch),
        0.2 * 0.125 * slow.z_loss(logits_bte),
    ]
    torch.testing.assert_close(taken, [loss.detach() for loss in expected], rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(sum(expected), router.gate.weight)
    torch.testing.assert_close(found, gradient, rtol=0, atol=1e-13)


def test_the_batch_s_load_is_summed_by_whoever_knows_the_ranks():
    """Here as if another rank had the same micro-batch with every token on the first expert."""
    config = replace(PLAIN, balance_loss=1.0, over_batch=True, top_k=1)
    router, x_btd = make(config)
    others = torch.tensor([B * T, *[0] * 7])
    router.batch_counts.reduce = lambda counts: counts + others
    router(x_btd)
    logits_bte = logits_of(router, x_btd)
    counts_e = sample_counts(logits_bte.argmax(-1, keepdim=True), 8).sum(0) + others
    expected = balance_loss((counts_e / (2 * B)).expand(B, -1), logits_bte.softmax(-1), top_k=1)
    torch.testing.assert_close(router.balance_loss.take(), expected.detach())
    router.eval()
    router.batch_counts.reduce = None  # an evaluation enters no collective
    router(x_btd)


@pytest.mark.parametrize("name", ["mixtral", "not normalized", "deepseek", "capacity"])
def test_gradients_of_the_weights(name):
    router, x_btd = make(CONFIGS[name])

    def weights(x_btd, weight):
        return torch.func.functional_call(router, {"gate.weight": weight}, (x_btd,)).weights_nk

    inputs = (x_btd.requires_grad_(), router.gate.weight.detach().requires_grad_())
    assert torch.autograd.gradcheck(weights, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_logits_are_computed_in_float32_at_least(dtype):
    router, x_btd = make(PLAIN)
    router, x_btd = router.to(dtype), x_btd.to(dtype).requires_grad_()
    routing, wide = router(x_btd), torch.promote_types(dtype, torch.float32)
    assert routing.weights_nk.dtype == wide
    logits_bte = x_btd.detach().to(wide) @ router.gate.weight.detach().to(wide).T
    expected = logits_bte.softmax(-1).topk(2).values
    expected = (expected / expected.sum(-1, keepdim=True)).flatten(0, 1)
    torch.testing.assert_close(routing.weights_nk, expected, rtol=0, atol=1e-6)
    routing.weights_nk.square().sum().backward()
    assert x_btd.grad.dtype == router.gate.weight.grad.dtype == dtype


# Load


def counts_of(router, x_btd):
    samples = slow.route(logits_of(router, x_btd), router.config, router.load.bias)
    return torch.tensor([slow.counts_of(sample, router.config.num_experts) for sample in samples]).sum(0)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "deepseek", "capacity", "uniform"])
def test_the_load_is_counted_once_per_micro_batch(name, recomputes):
    """Choices over capacity are load, too."""
    router, x_btd = make(CONFIGS[name])
    expected = counts_of(router, x_btd) + counts_of(router, -x_btd)
    if recomputes:
        recompute(router)
    for x in (x_btd, -x_btd):
        router(x.requires_grad_()).weights_nk.square().sum().backward()
    assert torch.equal(router.load.pending(), expected) and not router.load.value.any()
    ((_, buffer),) = step_buffers(router)
    buffer.commit(buffer.pending())
    assert torch.equal(router.load.value, expected) and not router.load.pending().any()


@pytest.mark.parametrize(("load", "signs"), [([9, 3, 6, 6], [-1, 1, 0, 0]), ([2, 3, 2, 3], [1, -1, 1, -1])])
def test_the_bias_moves_once_a_step_against_the_load(load, signs):
    """Also against an uneven mean: 10 choices of 4 experts, and 2.5 is between 2 and 3."""
    router, _ = make(replace(PLAIN, bias_rate=0.1, num_experts=4))
    before = router.load.bias.clone()
    router.load.commit(torch.tensor(load))
    torch.testing.assert_close(router.load.bias - before, 0.1 * torch.tensor(signs).double())
    assert router.load.value.tolist() == load


@pytest.mark.parametrize("how", ["eval", "no_grad"])
def test_outside_training_nothing_is_counted_and_no_loss_recorded(how):
    router, x_btd = make(replace(DEEPSEEK, balance_loss=0.3, z_loss=0.2))
    bias = router.load.bias.clone()
    router.train(how != "eval")
    with torch.set_grad_enabled(how == "eval"):
        router(x_btd)
    assert not router.load.pending().any() and torch.equal(router.load.bias, bias)
    assert router.balance_loss.take() is None and router.z_loss.take() is None


def test_a_recomputed_router_recalls_its_choice():
    """Whatever has become of the bias."""
    router, x_btd = make(replace(DEEPSEEK, balance_loss=0.3, z_loss=0.2))
    plain = copy.deepcopy(router)
    recompute(router)
    found = []
    for one in (plain, router):
        x = x_btd.clone().requires_grad_()
        loss = one(x).weights_nk.square().sum()
        one.load.bias.neg_()
        loss.backward()
        losses = [one.balance_loss.take(), one.z_loss.take()]
        found.append([loss.detach(), x.grad, one.gate.weight.grad, *losses, one.load.pending()])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_no_handle_keeps_anything_after_a_step():
    router, x_btd = make(DEEPSEEK)
    recompute(router)
    router(x_btd.requires_grad_()).weights_nk.sum().backward()
    for _, handle in handles(router):
        assert not getattr(handle, "sinks", ()) and getattr(handle, "source", None) is None
        assert not handle.recomputing
