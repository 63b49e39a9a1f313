"""Compressed all-reduce: the same bits on all ranks, as far off as its codec, and with feedback not for long."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from meshwright.comm.compression.catalogue import EXACT, Codec, find_method
from meshwright.comm.compression.fsdp_collectives import AllReduceHook, CompressedAllReduce
from meshwright.comm.compression.fsdp_compress import Compression
from meshwright.errors import InputError
from meshwright.mesh.local_shards import to_local
from tests.comm.data import logged, method_of

SIZES = (0, 1, 2, 5, 130, 1000, 1001)
"""Among them are fewer elements than ranks, and shards that nothing is left for."""


def randn(n, seed, dtype=torch.float32):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reduced(rank, world_size, codec, dtypes, factor):
    """By type and size: what this rank gets, and what all ranks put in."""
    found = {}
    for dtype in dtypes:
        for n in SIZES:
            x = randn(n, 1000 * n + rank, dtype)
            CompressedAllReduce("x", method_of(codec))(x, group=dist.group.WORLD, factor=factor)
            found[dtype, n] = x, torch.stack([randn(n, 1000 * n + one, dtype) for one in range(world_size)])
    return found


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("num_ranks", [2, 3, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_an_exact_all_reduce_is_the_sum_to_rounding(gang, num_ranks, factor):
    results = gang(num_ranks).run(reduced, Codec.EXACT, [torch.float64, *DTYPES], factor)
    for found in results:
        for (dtype, n), (x, put_in) in found.items():
            wide = put_in.to(torch.promote_types(dtype, torch.float32))
            expected = sum(wide[1:], wide[0]) * factor
            assert torch.equal(x, expected.to(dtype))
            assert torch.equal(x, results[0][dtype, n][0])


@pytest.mark.parametrize(
    ("codec", "limit"), [(Codec.BF16, 6e-3), (Codec.INT8, 2e-2), (Codec.INT4, 0.15), (Codec.INT2, 0.6)]
)
def test_a_lossy_all_reduce_is_as_far_off_as_its_codec(gang, codec, limit):
    results = gang(3).run(reduced, codec, DTYPES, 1 / 3)
    for found in results:
        for (dtype, n), (x, put_in) in found.items():
            assert torch.equal(x, results[0][dtype, n][0])
            expected = put_in.float().mean(0)
            if n >= 1000:
                assert 1e-4 < (x - expected).norm() / expected.norm() < limit


def summed(rank, world_size, codec, feedback, rotate, num_steps=100, n=999):
    """Relative error of the sum over the steps, and bytes sent: a direction that stays, and noise."""
    comm = CompressedAllReduce("x", method_of(codec, feedback=feedback, rotate=rotate))
    got, total = torch.zeros(n), torch.zeros(n)
    for step in range(num_steps):
        gradients = [0.1 * randn(n, 1) + randn(n, 2 + step * world_size + one) for one in range(world_size)]
        x = gradients[rank].clone()
        comm(x, group=dist.group.WORLD, factor=1 / world_size)
        comm.commit()
        got, total = got + x, total + sum(gradients) / world_size
    return ((got - total).norm() / total.norm()).item(), (comm.sent.payload, comm.sent.exact)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_feedback_makes_up_for_both_encodings(gang, num_ranks):
    ((without, _), *_) = gang(num_ranks).run(summed, Codec.INT4, False, True)
    ((loco, (payload, exact)), *_) = gang(num_ranks).run(summed, Codec.INT4, True, False)
    assert loco < 0.025 < 0.04 < without  # 0.06 if only the first encoding had feedback
    assert exact == 100 * (2 * 999 * 4 * (num_ranks - 1) // num_ranks)
    assert payload < 0.2 * exact


def poisoned(rank, world_size, feedback, codec):
    """Whether what came is finite, in the poisoned step and in the next one."""
    comm = CompressedAllReduce("x", method_of(codec, feedback=feedback))
    x, clean = torch.ones(600), torch.ones(600)
    if rank == 1:
        x[77] = torch.inf
    comm(x, group=dist.group.WORLD)
    comm.commit()
    comm(clean, group=dist.group.WORLD)
    return bool(x[77].isfinite()), bool(x[-128:].isfinite().all()), bool(clean.isfinite().all())


@pytest.mark.parametrize(("codec", "feedback"), [(Codec.EXACT, False), (Codec.INT4, False), (Codec.INT4, True)])
def test_what_is_not_finite_arrives_so_on_all_ranks_and_is_gone_in_the_next_step(gang, codec, feedback):
    assert gang(2).run(poisoned, feedback, codec) == [(False, True, True)] * 2


def interrupted(rank, world_size, what):
    """Five sums with feedback; after the second a state is saved and loaded, or a step is taken back."""
    comm = CompressedAllReduce("x", find_method("loco2"))
    sums = []
    for step in range(5):
        x = randn(201, 10 * step + rank)
        comm(x, group=dist.group.WORLD)
        comm.commit()
        sums.append(x)
        if what == "resume" and step == 1:
            state = comm.state_dict()
            comm = CompressedAllReduce("x", find_method("loco2"))
            comm.load_state_dict(state)
            assert comm.state_dict().keys() == state.keys()  # also before the sizes are known
        if what == "skip" and step == 1:
            comm(randn(201, 999), group=dist.group.WORLD)
            comm.discard()
    return sums


@pytest.mark.parametrize("what", ["resume", "skip"])
def test_a_saved_error_and_a_skipped_step_change_no_bit(gang, what):
    for whole, broken in zip(gang(2).run(interrupted, None), gang(2).run(interrupted, what), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(whole, broken, strict=True))


def resized(rank, world_size):
    """Warnings of a change of size, and whether the errors started from zero."""
    first, second = (CompressedAllReduce("x", find_method("loco4")) for _ in range(2))
    results = [randn(300, 2), randn(300, 2)]
    with logged() as warnings:
        first(randn(100, 1), group=dist.group.WORLD)
        first.commit()
        for comm, x in zip((first, second), results, strict=True):
            comm(x, group=dist.group.WORLD)
    return warnings, torch.equal(*results)


def test_an_error_of_another_size_is_not_used(gang):
    for warnings, is_fresh in gang(2).run(resized):
        assert is_fresh
        assert [text.split(" starts")[0] for text in warnings] == [
            "the error feedback of the shards of x", "the error feedback of the sum of x",
        ]  # fmt: skip


def test_a_world_of_one_loses_nothing():
    x = randn(10, 1)
    expected = x * 0.5
    CompressedAllReduce("x", find_method("loco4"))(x, group=None, factor=0.5)
    assert torch.equal(x, expected)


def test_bad_input():
    comm = CompressedAllReduce("x", find_method("int4"))
    for x in (torch.zeros(3, 4), torch.zeros(8)[::2]):
        with pytest.raises(InputError, match="cannot be all-reduced in place"):
            comm(x, group=None)


def sharded(mesh, is_native, is_sum, policy):
    """A model over two shards, and its hooks over two replicas if it isn't native HSDP."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(31, 17), nn.ReLU(), nn.Linear(17, 5))
    model[2].bias.requires_grad_(False)
    hooks = {}
    for name, module in (("first", model[0]), ("root", model)):
        fully_shard(module, mesh=mesh if is_native else mesh["dp_shard"], mp_policy=policy)
        if is_sum:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        if not is_native:
            hooks[name] = CompressedAllReduce(name, find_method(EXACT))
            factor = 1.0 if is_sum else 1 / 2
            module.set_all_reduce_hook(AllReduceHook(hooks[name], mesh.get_group("dp_replicate"), factor))
    return model, Compression(hooks, {})


def accumulated(rank, world_size, cases):
    """The gradients of two micro-batches twice, the first of which is not sent, natively and by the hook."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    found = []
    for is_sum, dtype in cases:
        policy = MixedPrecisionPolicy(reduce_dtype=dtype)
        for is_native in (True, False):
            model, compression = sharded(mesh, is_native, is_sum, policy)
            for step in range(2):
                for microbatch in range(2):
                    model.set_requires_gradient_sync(microbatch == 1)
                    x = randn(4 * 31, 100 * step + 10 * microbatch + rank).view(4, 31)
                    model(x).square().mean().backward()
                compression.commit()
            found.append([to_local(p.grad).clone() for p in model.parameters() if p.requires_grad])
            assert is_native or compression.sent().payload > 0
    return found


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_a_sharded_model_with_the_hook_has_the_gradients_of_hsdp(gang, dtype):
    cases = [(is_sum, dtype) for is_sum in (False, True)]
    for found in gang(4).run(accumulated, cases):
        for native, ours in zip(found[::2], found[1::2], strict=True):
            tight = dtype is torch.float32
            for a, b in zip(native, ours, strict=True):
                assert a.abs().max() > 0 if a.numel() else True
                torch.testing.assert_close(b, a, rtol=1e-5 if tight else 4e-3, atol=1e-7 if tight else 1e-4)
