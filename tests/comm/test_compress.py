"""Compressed models: they train as without it where nothing is lost, stay near where it is, and refuse bad input."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from meshwright.comm import Compression, Placement, compress
from meshwright.comm.codecs import Codec
from meshwright.comm.compressed import CompressedReduceScatter
from meshwright.comm.error_state import ErrorLayout
from meshwright.errors import ConfigError, LayoutError
from meshwright.mesh.shards import to_local

OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "premul": dist.ReduceOp.PREMUL_SUM(0.3)}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


class Model(nn.Module):
    """Odd sizes, a frozen layer, and one that a step may not use."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(71, 131), nn.Linear(131, 51)
        self.frozen, self.unused = nn.Linear(51, 51), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.second(torch.relu(self.first(x))))


def trained(rank, world_size, gradients, weights, policy=None, steps=3):
    """Parameters after some steps of two micro-batches, and how many bytes were sent."""
    torch.manual_seed(0)
    model = Model()
    for layer in (model.first, model.second):
        fully_shard(layer, **({"mp_policy": policy} if policy else {}))
    fully_shard(model, **({"mp_policy": policy} if policy else {}))
    compression = compress(model, gradients=gradients, weights=weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1)
            model(torch.randn(4, 71, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        compression.commit()
    sent = compression.sent()
    return [to_local(p.detach()).clone() for p in model.parameters()], (sent.payload, sent.exact)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_model_trains_as_without_it_when_nothing_is_lost(gang, num_ranks):
    ours = gang(num_ranks).run(trained, "exact-via-all-to-all", "exact")
    theirs = gang(num_ranks).run(trained, "exact", "exact")
    for (parameters, _), (expected, _) in zip(ours, theirs, strict=True):
        for a, b in zip(parameters, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("gradients", "weights", "share"), [("loco4", "exact", 0.6), ("int8", "int8", 0.4)])
def test_a_lossy_training_stays_near_and_sends_less(gang, gradients, weights, share):
    ours = gang(2).run(trained, gradients, weights)
    theirs = gang(2).run(trained, "exact", "exact")
    for (parameters, (payload, exact)), (expected, _) in zip(ours, theirs, strict=True):
        assert payload < share * exact
        for a, b in zip(parameters, expected, strict=True):
            assert (a - b).abs().max() < 0.02 if a.numel() else True


POLICIES = [
    pytest.param(MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype), id=str(dtype), marks=pytest.mark.slow)
    for dtype in (torch.bfloat16, torch.float16)
]


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_of_halves_are_as_without_it_when_nothing_is_lost(gang, policy):
    """FSDP2 divides halves before it sums them, with another `op`."""
    ours, theirs = (gang(3).run(trained, way, "exact", policy) for way in ("exact-via-all-to-all", "exact"))
    for (parameters, _), (expected, _) in zip(ours, theirs, strict=True):
        for a, b in zip(parameters, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


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
        warnings = []
        handler = logging.Handler()
        handler.emit = lambda record, kept=warnings: kept.append(record.getMessage())
        logging.getLogger("meshwright").addHandler(handler)
        torch.manual_seed(0)
        model = fully_shard(Sometimes())
        model.set_reduce_scatter_unused_params(includes)
        compression, steps = compress(model, gradients=name), []
        for step in range(4):
            x = torch.randn(4, 31, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x, step).square().mean().backward()
            steps.append([None if p.grad is None else to_local(p.grad).clone() for p in model.parameters()])
            model.zero_grad()
            compression.commit()
        logging.getLogger("meshwright").removeHandler(handler)
        found[name] = steps, warnings
    return found


@pytest.mark.parametrize("includes", [False, True])
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


def mixed(rank, world_size):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return trained(rank, world_size, "loco4", "int8", policy)[0]


def test_bfloat16_gradients_and_weights(gang):
    for parameters in gang(2).run(mixed):
        assert all(bool(p.isfinite().all()) and p.dtype == torch.float32 for p in parameters)


def test_bad_input():
    with pytest.raises(ConfigError, match="gradients cannot be sent as 'loco'") as caught:
        compress(Model(), gradients="loco")
    assert caught.value.fix == "gradients='loco4'"
    with pytest.raises(LayoutError, match="no FSDP2 module"):
        compress(Model(), gradients="loco4")
    with pytest.raises(ConfigError, match="gradients inside a node cannot be sent as 'int16'") as caught:
        compress(Model(), gradients="loco4", inside_node="int16")
    assert caught.value.fix == "inside_node='int8'"
    with pytest.raises(ConfigError, match="nodes and placement both"):
        compress(Model(), gradients="loco4", nodes=[0], placement=Placement((0,), {}))


def test_a_state_is_of_exactly_the_module_that_it_names():
    names = ("layers", "layers.1", "layers.1.norm")
    comms = {name: CompressedReduceScatter(name, Codec.INT4, feedback=True) for name in names}
    comms["layers.1"]._feedback.error_of(ErrorLayout(2, 8), torch.device("cpu"))
    saved = Compression(comms, {}).state_dict()
    fresh = {name: mock.Mock() for name in names}
    Compression(fresh, {}).load_state_dict(saved)
    states = {name: set(comm.load_state_dict.call_args.args[0]) for name, comm in fresh.items()}
    found = {"error", "layout", "num_steps", "loss_scale"}
    assert states == {"layers": set(), "layers.1": found, "layers.1.norm": set()}


def test_saved_errors_of_modules_that_are_not_there_are_told(caplog):
    comms = {name: CompressedReduceScatter(name, Codec.INT4, feedback=True) for name in ("", "a", "b")}
    for comm in comms.values():
        comm._feedback.error_of(ErrorLayout(2, 8), torch.device("cpu"))
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
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("meshwright").addHandler(handler)
    torch.manual_seed(0)
    model = Odd()
    for module in (model.root, model.none, model.two, model):
        fully_shard(module)
    compression = compress(model, gradients="loco4", weights="int8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, losses = torch.randn(4, 31, generator=torch.Generator().manual_seed(rank)), []
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
    logging.getLogger("meshwright").removeHandler(handler)
    state = compression.state_dict()
    return {name.rpartition("/")[0] for name in state}, warnings, losses, state["root/loss_scale"].item()


def test_odd_modules_and_a_loss_scale(gang):
    for names, warnings, losses, scale in gang(2).run(odd):
        assert names == {"", "root", "two"} and scale == 2.0**12
        assert len(warnings) == 1 and "weights of two are gathered as they are, not as int8" in warnings[0]
        assert losses[-1] < losses[0] / 3


def seen_weights(rank, world_size):
    """A layer's weight in the forward, and the gradients on both sides of it; two ranks keep it in between."""
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh, reshard_after_forward=2)
    fully_shard(model, mesh=mesh)
    compress(model, weights="int8")
    seen = []
    model.second.register_forward_pre_hook(lambda module, args: seen.append(module.weight.detach().clone()))
    model.second.register_full_backward_hook(lambda module, into, out: seen.extend((into[0], out[0])))
    model(torch.randn(4, 71, generator=torch.Generator().manual_seed(rank))).square().mean().backward()
    return seen


@pytest.mark.slow
def test_weights_that_neighbours_keep_are_the_same_in_the_backward(gang):
    for weight, into, out in gang(4).run(seen_weights):
        torch.testing.assert_close(into, out @ weight, rtol=1e-6, atol=1e-8)
