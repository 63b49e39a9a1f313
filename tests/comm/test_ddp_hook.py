"""DDP with compressed gradients: nothing changes when nothing is lost, and nothing is lost for long."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.comm import compress_ddp
from meshwright.errors import ConfigError, LayoutError
from tests.comm.data import logged

CASES = {
    "plain": {},
    "bucket view": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
}
SMALL = 0.02
"""Megabytes of a bucket, for several of them; after the first step DDP fills them in another order."""


class Model(nn.Module):
    """Odd sizes, a frozen layer, parameters of two types, and a layer that may go unused."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(71, 131), nn.Linear(131, 51)
        self.frozen, self.last = nn.Linear(51, 51).requires_grad_(False), nn.Linear(51, 33).bfloat16()
        self.maybe = nn.Linear(131, 51)

    def forward(self, x, *, skips=False):
        x = torch.relu(self.first(x))
        x = self.second(x) + (0 if skips else self.maybe(x))
        return self.last(self.frozen(x).bfloat16()).float()


def wrapped(**options):
    torch.manual_seed(0)
    return DistributedDataParallel(Model(), bucket_cap_mb=SMALL, **options)


def gradients_of(model):
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def backward(model, rank, step, *, accumulates=True, **kwargs):
    """The gradients of a step of two micro-batches, the first of which is not sent."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(100 * step + rank)
    if accumulates:
        with model.no_sync():
            model(torch.randn(4, 71, generator=generator), **kwargs).square().mean().backward()
    model(torch.randn(4, 71, generator=generator), **kwargs).square().mean().backward()
    return gradients_of(model)


def averaged(rank, world_size, names, num_steps=2):
    """By case and name: the gradients of each step; the second one has other buckets."""
    found = {}
    for case, options in CASES.items():
        for name in names:
            model = wrapped(**options)
            compression = compress_ddp(model, gradients=name)
            skips, accumulates = case == "unused", case != "static graph"
            found[case, name] = []
            for step in range(num_steps):
                found[case, name].append(backward(model, rank, step, skips=skips, accumulates=accumulates))
                compression.commit()
    return found


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_gradients_are_those_of_ddp(gang, num_ranks):
    for found in gang(num_ranks).run(averaged, ["exact", "exact-via-all-to-all", "loco4"]):
        for case in CASES:
            for plain, exact, loco in zip(*(steps for (one, _), steps in found.items() if one == case), strict=True):
                for a, b, c in zip(plain, exact, loco, strict=True):
                    tight = a.dtype is torch.float32
                    torch.testing.assert_close(b, a, rtol=1e-5 if tight else 1e-2, atol=1e-7 if tight else 1e-4)
                    assert (c - a).norm() <= 0.35 * a.norm() + 1e-6


def drifted(rank, world_size, name, num_steps):
    """How far the sum over steps is off, relatively."""
    plain, model = wrapped(), wrapped()
    compression = compress_ddp(model, gradients=name)
    total, got = 0.0, 0.0
    for step in range(num_steps):
        total = total + torch.cat([g.flatten() for g in backward(plain, rank, step, accumulates=False)])
        got = got + torch.cat([g.flatten() for g in backward(model, rank, step, accumulates=False)])
        compression.commit()
    sent = compression.sent()
    return ((got - total).norm() / total.norm()).item(), sent.payload / sent.exact


@pytest.mark.slow
def test_what_a_step_loses_arrives_in_later_ones(gang):
    ((loco, share), *_), ((without, _), *_) = (gang(2).run(drifted, name, 25) for name in ("loco4", "int4"))
    assert loco < without / 2
    assert share < 0.2


def trained(rank, world_size, name, what, **options):
    """Parameters after some steps, and warnings; before the fourth step `what` happens."""
    with logged() as warnings:
        return parameters_of(rank, name, what, **options), warnings


def parameters_of(rank, name, what, *, cap=SMALL, later_cap=None, num_steps=6):
    torch.manual_seed(0)
    model = DistributedDataParallel(Model(), bucket_cap_mb=cap)
    compression = compress_ddp(model, gradients=name)
    for step in range(num_steps):
        if what in ("resume", "thaw") and step == 3:
            weights, state = model.module.state_dict(), compression.state_dict()
            model = Model()
            model.frozen.requires_grad_(what == "thaw")
            model = DistributedDataParallel(model, bucket_cap_mb=later_cap or cap)
            model.module.load_state_dict(weights)
            compression = compress_ddp(model, gradients=name)
            compression.load_state_dict(state)
            assert compression.state_dict().keys() == state.keys()
        if what == "skip" and step == 3:
            backward(model, rank, 99)
            compression.discard()
        backward(model, rank, step, accumulates=False)
        compression.commit()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad if p.grad is not None else 0.0, alpha=0.1)
    return [p.detach().clone() for p in model.parameters()]


def each_trained(rank, world_size, name, whats, cap):
    return [trained(rank, world_size, name, what, cap=cap) for what in whats]


@pytest.mark.parametrize("cap", [SMALL, 25])
@pytest.mark.parametrize("name", ["loco2", pytest.param("int4", marks=pytest.mark.slow)])
def test_a_new_process_and_a_skipped_step_change_no_bit(gang, name, cap):
    results = gang(2).run(each_trained, name, [None, "resume", "skip"], cap)
    for found in results:
        for parameters, warnings in found:
            assert all(torch.equal(a, b) for a, b in zip(results[0][0][0], parameters, strict=True))
            assert warnings == []  # nor of the buckets that DDP has from the second step on


@pytest.mark.parametrize(("what", "later_cap", "num_changed"), [("resume", 25, 1), ("thaw", SMALL, 2)])
def test_saved_errors_of_other_buckets_are_not_used(gang, what, later_cap, num_changed):
    for parameters, warnings in gang(2).run(trained, "loco4", what, later_cap=later_cap):
        assert warnings == [f"the error feedback of {num_changed} buckets starts from zero: DDP rebuilt them"]
        assert all(bool(p.isfinite().all()) for p in parameters)


def refused(rank, world_size):
    """What is said of a second hook, and of a sparse gradient."""
    model = wrapped()
    compress_ddp(model)
    sparse = DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
    compress_ddp(sparse)
    said = []
    for attempt in (lambda: compress_ddp(model), lambda: sparse(torch.tensor([1])).sum().backward()):
        try:
            attempt()
        except LayoutError as error:
            said.append(error.what)
    return said


def test_what_is_refused(gang):
    for second_hook, sparse in gang(2).run(refused):
        assert second_hook.startswith("DDP rejected the communication hook") and sparse.startswith("sparse gradients")
    with pytest.raises(ConfigError, match="gradients cannot be sent as 'loco'"):
        compress_ddp(nn.Linear(2, 2), gradients="loco")
    with pytest.raises(LayoutError, match="a Linear is not wrapped"):
        compress_ddp(nn.Linear(2, 2))
