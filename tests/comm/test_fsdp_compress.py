"""Compression of any model under FSDP2: modules of every kind, parameters that come and go, and what a state names."""

from __future__ import annotations

import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from meshwright.comm import Compression, compress
from meshwright.comm.collective_log import CollectiveError
from meshwright.comm.compression.catalogue import find_method
from meshwright.comm.compression.fsdp_collectives import CompressedReduceScatter, ErrorLayout
from meshwright.errors import ConfigError
from meshwright.mesh.local_shards import to_local
from tests.comm.data import logged


class Sometimes(nn.Module):
    """A unit of which each step leaves one of two layers of different sizes unused."""

    def __init__(self):
        super().__init__()
        self.even, self.odd = nn.Linear(31, 5), nn.Linear(31, 7)

    def forward(self, x, step):
        return (self.even if step % 2 == 0 else self.odd)(x)


def unused(rank, world_size, includes, names):
    """By name: the gradients of each step, and warnings."""
    found = {}
    for name in names:
        torch.manual_seed(0)
        model = fully_shard(Sometimes())
        if includes:
            model.set_reduce_scatter_unused_params(True)
        compression, steps = compress(model, gradients=name), []
        with logged() as warnings:
            for step in range(4):
                x = torch.randn(4, 31, generator=torch.Generator().manual_seed(10 * step + rank))
                model(x, step).square().mean().backward()
                steps.append([None if p.grad is None else to_local(p.grad).clone() for p in model.parameters()])
                model.zero_grad()
                compression.commit()
        found[name] = steps, warnings
    return found


KNOWS_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")


@pytest.mark.parametrize(
    "includes", [False, pytest.param(True, marks=pytest.mark.skipif(not KNOWS_UNUSED, reason="needs torch 2.13"))]
)
def test_parameters_that_a_step_does_not_use(gang, includes):
    for found in gang(2).run(unused, includes, ["exact", "exact-via-all-to-all", "loco4"]):
        (plain, _), (exact, _), (loco, warnings) = found.values()
        for expected, same, near in zip(plain, exact, loco, strict=True):
            for a, b, c in zip(expected, same, near, strict=True):
                assert len({one is None for one in (a, b, c)}) == 1 and (a is not None or not includes)
                if a is not None:
                    torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-7)
                    assert (c - a).norm() <= 0.35 * a.norm() + 5e-2  # what was left of a step goes into the next
        assert len(warnings) == (0 if includes else 3)


def test_a_state_is_of_exactly_the_module_that_it_names():
    names = ("layers", "layers.1", "layers.1.norm")
    comms = {name: CompressedReduceScatter(name, find_method("loco4")) for name in names}
    comms["layers.1"]._feedback.state_for(ErrorLayout(2, 8), torch.device("cpu"))
    saved = Compression(comms, {}).state_dict()
    fresh = {name: mock.Mock() for name in names}
    Compression(fresh, {}).load_state_dict(saved)
    states = {name: set(comm.load_state_dict.call_args.args[0]) for name, comm in fresh.items()}
    found = {"error", "layout", "num_steps", "loss_scale"}
    assert states == {"layers": set(), "layers.1": found, "layers.1.norm": set()}


def test_saved_errors_of_modules_that_are_not_there_are_told(caplog):
    comms = {name: CompressedReduceScatter(name, find_method("loco4")) for name in ("", "a", "b")}
    for comm in comms.values():
        comm._feedback.state_for(ErrorLayout(2, 8), torch.device("cpu"))
    saved = Compression(comms, {}).state_dict()
    Compression(comms, {}).load_state_dict(saved)
    Compression({}, {}).load_state_dict(saved)
    assert not caplog.text
    Compression({"a": comms["a"]}, {}).load_state_dict(saved)
    assert "error feedback of b, the root is not used" in caplog.text


class TwoTypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.trained = nn.Linear(31, 9).bfloat16().requires_grad_(False), nn.Linear(9, 5)

    def forward(self, x):
        return self.trained(self.frozen(x.bfloat16()).float())


class Odd(nn.Module):
    """A child that is called root, a sharded module without parameters, and one whose weights have two types."""

    def __init__(self):
        super().__init__()
        self.root, self.none, self.two, self.last = nn.Linear(31, 31), nn.ReLU(), TwoTypes(), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.two(self.none(self.root(x))))


def odd(rank, world_size):
    """Names in the state, warnings, and the fall of the loss under a loss scale that changes."""
    torch.manual_seed(0)
    model = Odd()
    for module in (model.root, model.none, model.two, model):
        fully_shard(module)
    compression = compress(model, gradients="loco4", weights="int8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, losses = torch.randn(4, 31, generator=torch.Generator().manual_seed(rank)), []
    with logged() as warnings:
        for step in range(12):
            scale = 2.0 ** (10 + step % 3)
            compression.follow_loss_scale(scale)
            loss = (model(x) - 1).square().mean()
            (loss * scale).backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= scale
            optimizer.step()
            optimizer.zero_grad()
            compression.commit()
            losses.append(loss.item())
    state = compression.state_dict()
    return {name.rpartition("/")[0] for name in state}, warnings, losses, state["root/loss_scale"].item()


def test_odd_modules_and_a_loss_scale(gang):
    for names, warnings, losses, scale in gang(2).run(odd):
        assert names == {"", "root", "two"} and scale == 2.0**12
        assert len(warnings) == 1 and "weights of two are gathered uncompressed, not as int8" in warnings[0]
        assert losses[-1] < losses[0] / 3


def mappings(rank, world_size):
    """What `compress` says of mappings that don't fit the model, and how it runs with one that does."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model[1])
    fully_shard(model)
    told = []
    for options in (
        {"gradients": {"1": "loco4"}},
        {"gradients": {"": "loco4", "1": "loco4", "0": "loco4"}},
        {"weights": {"": "int8", "one": "int8"}},
        {"inside_node": {}},
    ):
        try:
            compress(model, **options)
            told.append(None)
        except ConfigError as error:
            told.append((error.what, error.where, error.rule, error.fix))
    for _, where, _, fix in filter(None, told):
        if "inside_node" not in where:
            compress(model, **eval(f"dict({fix})"))
    return told


def test_a_mapping_that_does_not_fit_names_the_units(gang):
    for told in gang(2).run(mappings):
        whats, wheres, rules, fixes = zip(*told, strict=True)
        assert whats == (
            "the root has no method in gradients", "0 is not an FSDP2 module", "1 has no method in weights",
            "the root has no method in inside_node",
        )  # fmt: skip
        assert wheres[0] == "meshwright.comm.compress, gradients" and wheres[2].endswith("weights")
        assert all(rule.endswith("FSDP2 module of the model: '', '1'") for rule in rules)
        assert fixes[0] == "gradients={'': 'exact', '1': 'loco4'}"
        assert fixes[1] == "gradients={'': 'loco4', '1': 'loco4'}"


def without_rank_1(rank, world_size):
    model = fully_shard(nn.Linear(8, 8))
    store = dist.group.WORLD.get_group_store()
    dist.barrier()
    if rank == 1:
        while not store.check(["rank 0 is told"]):
            time.sleep(0.01)
        return None
    before = store.timeout
    store.set_timeout(timedelta(seconds=1))
    try:
        compress(model, gradients="int8")
        told = None
    except CollectiveError as error:
        told = error.what
    store.set_timeout(before)
    store.set("rank 0 is told", "")
    return told


def test_ranks_that_do_not_call_it_are_named(gang):
    told, _ = gang(2).run(without_rank_1)
    assert told == "rank 1 did not call compress or place within 1 s"
