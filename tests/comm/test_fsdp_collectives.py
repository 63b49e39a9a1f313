"""FSDP2 with compressed collectives: exact ones are FSDP2's own, lossy ones are as far off as their codec says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from meshwright.comm import Placement, compress
from meshwright.comm.compression.catalogue import GROUP, Codec, Use, find_method, names
from meshwright.comm.compression.fsdp_collectives import CompressedAllGather, CompressedReduceScatter
from meshwright.errors import ConfigError, LayoutError
from meshwright.mesh.local_shards import to_local
from tests.comm.data import method_of

# FSDP2 makes its product-and-sum by this function in torch 2.11, and by calling the operation in 2.13.
premul_sum = getattr(dist, "_make_nccl_premul_sum", None) or dist.ReduceOp.PREMUL_SUM
OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "premul": premul_sum(0.3)}
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
            CompressedReduceScatter("x", method_of(codec))(out, x.clone(), dist.group.WORLD, op)
            found[name, n] = (out, torch.stack(everyone).view(world_size, world_size, n)[:, rank])
    return found


FACTORS = {"sum": lambda ranks: 1.0, "avg": lambda ranks: 1 / ranks, "premul": lambda ranks: 0.3}


@pytest.mark.parametrize(
    ("num_ranks", "dtype"),
    [
        (2, torch.float32),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in zip((3, 7, 2, 4), DTYPES, strict=True)),
    ],
)
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
    CompressedAllGather("x", method_of(codec))(out, own, dist.group.WORLD)
    return mine, out


@pytest.mark.parametrize(("codec", "limit"), [(Codec.EXACT, 0.0), (Codec.INT8, 1e-2)])
def test_all_ranks_gather_the_same_weights(gang, codec, limit):
    results = gang(3).run(gathered, codec, torch.float32)
    whole = torch.cat([mine for mine, _ in results])
    assert all(torch.equal(out, results[0][1]) for _, out in results)
    assert (results[0][1] - whole).norm() <= limit * whole.norm()


class Model(nn.Module):
    """Odd sizes, a frozen layer, and one that a step may not use."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(71, 131), nn.Linear(131, 51)
        self.frozen, self.unused = nn.Linear(51, 51), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.second(torch.relu(self.first(x))))


def trained(rank, world_size, policy=None, num_microbatches=2, **options):
    """Parameters after some steps of some micro-batches, bytes sent, and elements of error and of padded gradients."""
    torch.manual_seed(0)
    model = Model()
    for layer in (model.first, model.second, model):
        fully_shard(layer, **({"mp_policy": policy} if policy else {}))
    compression = compress(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        for microbatch in range(num_microbatches):
            model.set_requires_gradient_sync(microbatch + 1 == num_microbatches)
            model(torch.randn(4, 71, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        compression.commit()
    layouts = [value[:2].prod() for key, value in compression.state_dict().items() if key.endswith("layout")]
    used = [*model.first.parameters(), *model.second.parameters()]
    padded = sum(-(-p.shape[0] // world_size) * world_size * p[:1].numel() for p in used)
    parameters = [to_local(p.detach()).clone() for p in model.parameters()]
    return parameters, compression.sent(), (int(sum(layouts)), padded)


def assert_equal_parameters(ours, theirs, *, rtol=1e-5, atol=1e-7):
    for (parameters, *_), (expected, *_) in zip(ours, theirs, strict=True):
        for a, b in zip(parameters, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def assert_near(ours, theirs):
    for (parameters, *_), (expected, *_) in zip(ours, theirs, strict=True):
        for a, b in zip(parameters, expected, strict=True):
            assert (a - b).abs().max() < 0.02 if a.numel() else True


def test_a_model_trains_as_without_it_when_nothing_is_lost(gang):
    assert_equal_parameters(gang(2).run(trained, gradients="exact-via-all-to-all"), gang(2).run(trained))


@pytest.mark.parametrize(("gradients", "weights", "share"), [("loco4", "exact", 0.6), ("int8", "int8", 0.4)])
def test_a_lossy_training_stays_near_and_sends_less(gang, gradients, weights, share):
    ours = gang(2).run(trained, gradients=gradients, weights=weights)
    assert all(sent.payload < share * sent.exact for _, sent, _ in ours)
    assert_near(ours, gang(2).run(trained))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_halves_are_as_without_it_when_nothing_is_lost(gang, dtype):
    """FSDP2 divides halves before it sums them, with another `op`."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    ours, theirs = (gang(3).run(trained, policy, gradients=way) for way in ("exact-via-all-to-all", "exact"))
    assert_equal_parameters(ours, theirs, rtol=1e-3, atol=1e-4)


def test_bfloat16_gradients_and_weights(gang):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for parameters, *_ in gang(2).run(trained, policy, gradients="loco4", weights="int8"):
        assert all(bool(p.isfinite().all()) and p.dtype == torch.float32 for p in parameters)


def poisoned(rank, world_size):
    """By method, value and type: whether the poisoned element came as one, and whether any did in other groups."""
    found = {}
    for method in map(find_method, names(Use.GRADIENTS)[1:]):
        for value in (torch.inf, -torch.inf, torch.nan):
            for dtype in DTYPES[1:]:
                x, out = torch.ones(600, dtype=dtype), torch.empty(300, dtype=dtype)
                if rank == 0:
                    x[400] = value  # element 100 of rank 1's shard
                comm = CompressedReduceScatter("x", method)
                comm(out, x, dist.group.WORLD, dist.ReduceOp.AVG)
                found[method.name, str(value), dtype] = bool(out[100].isfinite()), bool(out[GROUP:].isfinite().all())
    for method in map(find_method, names(Use.WEIGHTS)[1:]):
        out = torch.ones(600)
        own = out[300 * rank :][:300]
        own[100] = torch.nan if rank == 0 else 1.0
        CompressedAllGather("x", method)(out, own, dist.group.WORLD)
        found[method.name] = bool(out[100].isfinite()), bool(out[GROUP:].isfinite().all())
    return found


def test_what_is_not_finite_arrives_so(gang):
    first, second = gang(2).run(poisoned)
    weights = first.keys() & set(names(Use.WEIGHTS))
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
            CompressedReduceScatter("x", method_of(codec))(out, x.clone(), groups[rank], op)
            found[codec, name] = out, x * FACTORS[name](1)
    return found


def test_a_group_of_one_rank_has_its_own_gradient(gang):
    limits = {Codec.EXACT: 1e-7, Codec.BF16: 4e-3, Codec.INT8: 1e-2, Codec.INT4: 0.12, Codec.INT2: 0.5}
    for found in gang(2).run(alone):
        for (codec, _), (out, expected) in found.items():
            assert (out - expected).norm() <= limits[codec] * expected.norm()


def test_bad_input():
    with pytest.raises(ConfigError, match="gradients cannot be sent as 'loco'") as caught:
        compress(Model(), gradients="loco")
    assert caught.value.fix == "gradients='loco4'"
    with pytest.raises(LayoutError, match="no FSDP2 module"):
        compress(Model(), gradients="loco4")
    with pytest.raises(ConfigError, match="gradients inside a node cannot be sent as 'int16'") as caught:
        compress(Model(), gradients="loco4", inside_node="int16")
    assert caught.value.fix == "inside_node='int8'"
    with pytest.raises(ConfigError, match="nodes and placement both define"):
        compress(Model(), gradients="loco4", nodes=[0], placement=Placement((0,), {}))


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
