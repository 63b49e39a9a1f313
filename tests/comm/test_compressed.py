"""FSDP2 with compressed collectives: exact ones are FSDP2's own, lossy ones are as far off as their codec says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from meshwright.comm.codecs import GROUP, Codec
from meshwright.comm.compress import GRADIENTS, WEIGHTS
from meshwright.comm.compressed import CompressedAllGather, CompressedReduceScatter

OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "premul": dist.ReduceOp.PREMUL_SUM(0.3)}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def reduce_scattered(rank, world_size, sizes, codec, dtype):
    """By op and number of elements: what this rank gets, and what every rank put in."""
    found = {}
    for n in sizes:
        generator = torch.Generator().manual_seed(1000 * n + rank)
        x = torch.randn(world_size * n, generator=generator).to(dtype)
        everyone = [torch.empty_like(x) for _ in range(world_size)]
        dist.all_gather(everyone, x)
        for name, op in OPS.items():
            out = torch.full((n,), torch.nan, dtype=dtype)
            CompressedReduceScatter("x", codec)(out, x.clone(), dist.group.WORLD, op)
            found[name, n] = (out, torch.stack(everyone).view(world_size, world_size, n)[:, rank])
    return found


FACTORS = {"sum": lambda ranks: 1.0, "avg": lambda ranks: 1 / ranks, "premul": lambda ranks: 0.3}


@pytest.mark.parametrize(
    ("num_ranks", "dtype"),
    [pytest.param(n, d, marks=() if (n, d) == (2, torch.float32) else pytest.mark.slow)
     for n in range(2, 8) for d in DTYPES],
)  # fmt: skip
def test_an_exact_reduce_scatter_is_the_sum_to_rounding(gang, num_ranks, dtype):
    for found in gang(num_ranks).run(reduce_scattered, (1, 3, 130, 1001), Codec.EXACT, dtype):
        for (name, _), (out, put_in) in found.items():
            wide = put_in.to(torch.promote_types(dtype, torch.float32))
            expected = sum(wide[1:], wide[0]) * FACTORS[name](num_ranks)
            assert torch.equal(out, expected.to(dtype))


@pytest.mark.parametrize(("codec", "limit"), [(Codec.BF16, 4e-3), (Codec.INT8, 1e-2), (Codec.INT4, 0.12)])
def test_a_lossy_reduce_scatter_is_as_far_off_as_its_codec(gang, codec, limit):
    for found in gang(2).run(reduce_scattered, (1001,), codec, torch.float32):
        for (name, _), (out, put_in) in found.items():
            expected = put_in.sum(0) * FACTORS[name](2)
            error = (out - expected).norm() / expected.norm()
            assert 1e-4 < error < limit


def gathered(rank, world_size, codec, dtype):
    n = 300
    mine = torch.randn(n, generator=torch.Generator().manual_seed(rank)).to(dtype)
    out = torch.zeros(world_size * n, dtype=dtype)
    own = out[rank * n : (rank + 1) * n]  # as FSDP2 has it: the input lies in the output
    own.copy_(mine)
    CompressedAllGather("x", codec)(out, own, dist.group.WORLD)
    return mine, out


@pytest.mark.parametrize(("codec", "limit"), [(Codec.EXACT, 0.0), (Codec.INT8, 1e-2)])
def test_all_ranks_gather_the_same_weights(gang, codec, limit):
    results = gang(3).run(gathered, codec, torch.float32)
    whole = torch.cat([mine for mine, _ in results])
    assert all(torch.equal(out, results[0][1]) for _, out in results)
    assert (results[0][1] - whole).norm() <= limit * whole.norm()


def resumed(rank, world_size, breaks):
    """Two sums with feedback and a state saved between them, in one object or in two."""
    generator = torch.Generator().manual_seed(rank)
    comm = CompressedReduceScatter("x", Codec.INT2, feedback=True)
    outs = []
    for step in range(4):
        out = torch.empty(200)
        comm(out, torch.randn(400, generator=generator), dist.group.WORLD, dist.ReduceOp.SUM)
        comm.commit()
        outs.append(out)
        if breaks and step == 1:
            state = comm.state_dict()
            comm = CompressedReduceScatter("x", Codec.INT2, feedback=True)
            comm.load_state_dict(state)
    return outs


def test_a_saved_error_goes_on_bitwise(gang):
    for whole, broken in zip(gang(2).run(resumed, False), gang(2).run(resumed, True), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(whole, broken, strict=True))


def poisoned(rank, world_size):
    """By way, value and type: whether the poisoned element came as one, and whether any did in other groups."""
    found = {}
    for name, way in GRADIENTS.items():
        for value in (torch.inf, -torch.inf, torch.nan):
            for dtype in DTYPES[1:]:
                x, out = torch.ones(600, dtype=dtype), torch.empty(300, dtype=dtype)
                if rank == 0:
                    x[400] = value  # element 100 of rank 1's piece
                comm = CompressedReduceScatter("x", way.codec, rotate=way.rotate, feedback=way.feedback)
                comm(out, x, dist.group.WORLD, dist.ReduceOp.AVG)
                found[name, str(value), dtype] = bool(out[100].isfinite()), bool(out[GROUP:].isfinite().all())
    for name, codec in WEIGHTS.items():
        out = torch.ones(600)
        own = out[300 * rank :][:300]
        own[100] = torch.nan if rank == 0 else 1.0
        CompressedAllGather("x", codec, rotate=codec.is_quantised)(out, own, dist.group.WORLD)
        found[name] = bool(out[100].isfinite()), bool(out[GROUP:].isfinite().all())
    return found


def test_what_is_not_finite_arrives_so(gang):
    first, second = gang(2).run(poisoned)
    weights = first.keys() & WEIGHTS.keys()
    assert all(found == (key not in weights, True) for key, found in first.items())
    assert all(found == (False, True) for found in second.values())


def alone(rank, world_size):
    """By codec: what a group of one rank gets, and what it put in."""
    groups = [dist.new_group([one]) for one in range(world_size)]
    x = torch.randn(301, generator=torch.Generator().manual_seed(rank))
    found = {}
    for codec in Codec:
        for name, op in OPS.items():
            out = torch.empty_like(x)
            CompressedReduceScatter("x", codec)(out, x.clone(), groups[rank], op)
            found[codec, name] = out, x * FACTORS[name](1)
    return found


def test_a_group_of_one_rank_has_its_own_gradient(gang):
    limits = {Codec.EXACT: 1e-7, Codec.BF16: 4e-3, Codec.INT8: 1e-2, Codec.INT4: 0.12, Codec.INT2: 0.5}
    for found in gang(2).run(alone):
        for (codec, _), (out, expected) in found.items():
            assert (out - expected).norm() <= limits[codec] * expected.norm()


