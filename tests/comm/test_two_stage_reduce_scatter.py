"""Two stages over four ranks on two nodes, as they are told: exact ones are PyTorch's reduce-scatter."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from meshwright.comm import Compression, place
from meshwright.comm.collectives import reduce_scatter_sum
from meshwright.comm.compression.catalogue import GROUP, Codec
from meshwright.comm.compression.fsdp_collectives import CompressedAllGather, CompressedReduceScatter, ErrorLayout
from meshwright.comm.compression.fsdp_compress import TwoStageReduceScatter
from tests.comm.data import method_of
from tests.comm.test_fsdp_collectives import FACTORS, OPS, assert_equal_parameters, assert_near, trained

PLACEMENTS = [[0, 0, 1, 1], [0, 1, 0, 1], [5, 2, 2, 5]]


def stages_on(nodes):
    """The placement of four ranks on `nodes`, and its stages of the whole group."""
    found = place([fully_shard(nn.Linear(2, 2))], nodes=nodes)
    return found, found.two_stage_groups(dist.group.WORLD)


def new_comm(nodes, codec, *, inside=Codec.INT8, on=None, **options):
    """The reduce-scatter of four ranks; `on` is what `stages_on` has given for the nodes, if it was asked before."""
    found, stages = on or stages_on(nodes)
    return TwoStageReduceScatter("x", method_of(codec, **options), inside=inside, stages=stages, nodes=found.nodes)


def reduce_scattered(rank, world_size, cases):
    """By case: what this rank gets, and what every rank put in for it."""
    found, placed = [], {}
    for nodes, inside, codec, dtype, n in cases:
        on = placed[tuple(nodes)] = placed.get(tuple(nodes)) or stages_on(nodes)
        comm = new_comm(nodes, codec, inside=inside, on=on, rotate=codec is Codec.INT8)
        x = torch.randn(world_size * n, generator=torch.Generator().manual_seed(1000 * n + rank)).to(dtype)
        everyone = [torch.empty_like(x) for _ in range(world_size)]
        dist.all_gather(everyone, x)
        put_in = torch.stack(everyone).view(world_size, world_size, n)[:, rank]
        for name, op in OPS.items():
            out = torch.full((n,), torch.nan, dtype=dtype)
            comm(out, x.clone(), dist.group.WORLD, op)
            found.append((name, out, put_in.to(torch.promote_types(dtype, torch.float32))))
    return found


def test_exact_stages_are_the_sum_to_rounding(gang):
    """float64 would show a sum in float32; bfloat16 is rounded at each stage."""
    limits = {torch.float64: 1e-14, torch.float32: 3e-7, torch.bfloat16: 1e-2}
    cases = [(nodes, Codec.EXACT, Codec.EXACT, dtype, n) for nodes in PLACEMENTS for dtype in limits for n in (1, 131)]
    for found in gang(4).run(reduce_scattered, cases):
        for name, out, put_in in found:
            expected = put_in.sum(0) * FACTORS[name](4)
            assert (out - expected).norm() <= limits[out.dtype] * put_in.norm()


def built_in(rank, world_size):
    """By placement, whether ours and PyTorch's are equal: of whole numbers every sum is exact."""
    x = torch.randint(-1000, 1000, (4 * 67,), generator=torch.Generator().manual_seed(rank)).float()
    ours, theirs = torch.empty(67), reduce_scatter_sum(x)
    equal = []
    for nodes in PLACEMENTS:
        new_comm(nodes, Codec.EXACT, inside=Codec.EXACT)(ours, x.clone(), dist.group.WORLD, dist.ReduceOp.SUM)
        equal.append(torch.equal(ours, theirs))
    return equal


def test_exact_stages_are_the_built_in_reduce_scatter(gang):
    assert gang(4).run(built_in) == [[True] * 3] * 4


def test_lossy_stages_are_as_far_off_as_their_codecs(gang):
    limits = {
        (Codec.EXACT, Codec.BF16): (1e-3, 4e-3),
        (Codec.BF16, Codec.BF16): (1e-3, 5e-3),
        (Codec.INT8, Codec.INT8): (3e-3, 1.2e-2),
        (Codec.INT8, Codec.EXACT): (3e-3, 1e-2),
        (Codec.INT8, Codec.INT4): (5e-2, 0.12),
        (Codec.INT4, Codec.INT4): (8e-2, 0.16),
    }
    cases = [(PLACEMENTS[1], *codecs, torch.float32, 1001) for codecs in limits]
    for found in gang(4).run(reduce_scattered, cases):
        for (name, out, put_in), (low, high) in zip(found, [one for one in limits.values() for _ in OPS], strict=True):
            expected = put_in.sum(0) * FACTORS[name](4)
            assert low < (out - expected).norm() / expected.norm() < high


def with_feedback(rank, world_size, inside, dtype, num_steps=24):
    """The error of the sum over steps with feedback and without, and the layout of the state."""
    n = 300
    generator = torch.Generator().manual_seed(rank)
    mean = torch.randn(4 * n, generator=generator)
    on = stages_on(PLACEMENTS[0])
    comms = [new_comm(PLACEMENTS[0], Codec.INT2, on=on, inside=inside, feedback=feedback) for feedback in (True, False)]
    totals, exact = [torch.zeros(n), torch.zeros(n)], torch.zeros(n)
    for _ in range(num_steps):
        x = (mean + torch.randn(4 * n, generator=generator) * 0.1).to(dtype)
        everyone = [torch.empty_like(x) for _ in range(4)]
        dist.all_gather(everyone, x)
        exact += torch.stack(everyone).float().sum(0).view(4, n)[rank]
        for comm, total in zip(comms, totals, strict=True):
            out = torch.empty(n, dtype=dtype)
            comm(out, x, dist.group.WORLD, dist.ReduceOp.SUM)
            total += out.float()
        comms[0].commit()
    return [((total - exact).norm() / exact.norm()).item() for total in totals], comms[0].state_dict()["layout"], len(x)


@pytest.mark.parametrize(("inside", "dtype"), [(Codec.INT8, torch.float32), (Codec.EXACT, torch.float16)])
def test_feedback_makes_up_between_nodes_with_an_lth_of_the_gradient(gang, inside, dtype):
    for (loco, without), layout, num_elements in gang(4).run(with_feedback, inside, dtype):
        assert loco < without / 3
        num_blocks, num_in_block = layout.tolist()[:2]
        assert num_blocks * num_in_block * 2 == num_elements


def resumed(rank, world_size, nodes, later_nodes):
    """Four sums with feedback, and a state saved in the middle for an object of another placement or of the same."""
    generator = torch.Generator().manual_seed(rank)
    comm, outs = new_comm(nodes, Codec.INT2, feedback=True), []
    for step in range(4):
        out = torch.empty(200)
        comm(out, torch.randn(800, generator=generator), dist.group.WORLD, dist.ReduceOp.SUM)
        comm.commit()
        outs.append(out)
        if later_nodes is not None and step == 1:
            state = comm.state_dict()
            comm = new_comm(later_nodes, Codec.INT2, feedback=True)
            comm.load_state_dict(state)
            started = comm._feedback.state_for(ErrorLayout(2, 200, comm._shards), torch.device("cpu"))
            error = bool(started.state_dict()["error"].any())
    return outs, later_nodes is None or error


def test_a_saved_error_goes_on_bitwise_on_the_same_placement_only(gang):
    same, other = PLACEMENTS[0], PLACEMENTS[1]
    whole = gang(4).run(resumed, same, None)
    for (expected, _), (outs, has_error) in zip(whole, gang(4).run(resumed, same, same), strict=True):
        assert has_error and all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))
    # Blocks of as many elements, but of other shards.
    assert [has_error for _, has_error in gang(4).run(resumed, same, other)] == [False, False, False, False]


def poisoned(rank, world_size):
    """By codecs: how many elements came that are not finite."""
    on, found = stages_on(PLACEMENTS[1]), []
    for inside in (Codec.EXACT, Codec.BF16, Codec.INT8):
        for codec, options in ((Codec.INT4, {"feedback": True}), (Codec.INT8, {"rotate": True}), (Codec.EXACT, {})):
            x, out = torch.ones(4 * 300), torch.empty(300)
            if rank == 0:
                x[700] = torch.inf  # element 100 of rank 2's shard
            comm = new_comm(PLACEMENTS[1], codec, inside=inside, on=on, **options)
            comm(out, x, dist.group.WORLD, dist.ReduceOp.SUM)
            found.append(int((~out.isfinite()).sum()))
    return found


def test_what_is_not_finite_arrives_so(gang):
    none, poison = [0] * 9, [GROUP, GROUP, 1, GROUP, GROUP, 1, GROUP, GROUP, GROUP]
    assert gang(4).run(poisoned) == [none, none, poison, none]


def counted(rank, world_size):
    """Bytes of one call each: in two stages, in one, and a gather; shards of 256 elements."""
    found, stages = stages_on([0, 0, 1, 1])
    two = new_comm([0, 0, 1, 1], Codec.INT4, on=(found, stages), feedback=True)
    one = CompressedReduceScatter("x", method_of(Codec.INT4), nodes=found.nodes)
    gather = CompressedAllGather("x", method_of(Codec.INT8), nodes=found.nodes)
    for comm in (two, one):
        comm(torch.empty(256), torch.ones(1024), dist.group.WORLD, dist.ReduceOp.SUM)
    gather(torch.empty(1024), torch.ones(256), dist.group.WORLD)
    sent = Compression({"two": two, "one": one}, {"gather": gather}).sent()
    return [(c.inside, c.between, c.exact_inside, c.exact_between) for c in (two.sent, one.sent, gather.sent, sent)]


def test_bytes_are_counted_by_the_links_they_take(gang):
    int8, int4 = Codec.INT8.encoded_bytes(256), Codec.INT4.encoded_bytes(256)
    # A ring of four hands on three shards, and one rank of two to the other node.
    exact = 3 * 1024 // 2
    expected = [
        (2 * int8, int4, exact, exact),  # two shards to the neighbour, then one sum to the other node
        (int4, 2 * int4, exact, exact),  # a shard to everyone
        (3 * int8 // 2, 3 * int8 // 2, exact, exact),
    ]
    expected.append(tuple(sum(column) for column in zip(*expected, strict=True)))
    assert gang(4).run(counted) == [expected] * 4


def test_a_model_trains_as_without_it_when_nothing_is_lost(gang):
    ours = gang(4).run(trained, gradients="exact-via-all-to-all", nodes=PLACEMENTS[2])
    assert all(0 < sent.between < sent.inside for _, sent, _ in ours)
    assert_equal_parameters(ours, gang(4).run(trained))


def test_a_training_with_loco_stays_near_and_sends_a_tenth_between_nodes(gang):
    options = {"num_microbatches": 1, "gradients": "loco4"}
    ours = gang(4).run(trained, **options, nodes=PLACEMENTS[1])
    in_one_stage = gang(4).run(trained, **options, nodes=[0, 1, 2, 3])
    for (_, sent, (error, gradient)), (_, one, (whole, _)) in zip(ours, in_one_stage, strict=True):
        # One sum of int4 for 1.5 shards of float32; three quarters of all shards without the first stage.
        assert sent.between < 0.12 * sent.exact_between and sent.between < 0.4 * one.between
        assert (error * 2, whole) == (gradient, gradient)
    assert_near(ours, gang(4).run(trained, num_microbatches=1))
