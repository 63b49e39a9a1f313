"""Owners of whole matrices: their shares of the cost, and bytes against a bound worked out from the shards."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.checkpoint import save_load
from meshwright.comm.collective_log import EXCHANGE, count_collectives
from meshwright.mesh.layout import Layout
from meshwright.mesh.local_shards import local_box, to_local
from meshwright.mesh.shard_intervals import Split
from meshwright.optim.contract import MatrixOptimizer
from meshwright.optim.owner_updates import rank_moves
from meshwright.optim.whole_matrix import WholeMatrix
from meshwright.plan import matrix_owners
from meshwright.plan.make_plan import make_plan
from meshwright.plan.matrix_owners import bytes_moved_by_rank, cost_of, moved_bytes, whole_matrices
from meshwright.plan.rules import load
from meshwright.plan.traffic import Purpose, predict_traffic
from meshwright.reshard.run_transfer import RankTransfer
from meshwright.reshard.transfer_plan import plan_transfer
from meshwright.train.optimizer import named_state
from tests.helpers import quick_and_slow, small_corpus
from tests.train.jobs import load_words, make_job

MUON = "train.optimizer=muon"
ZB_V = ("mesh.pp=2", "pipeline.schedule=zb-v", "train.num_microbatches=4", "model.num_layers=4")
UNEVEN = ("model.dim=28", "model.num_heads=2", "model.ffn_dim=25")
LAYOUTS = {
    "dp_shard 3, uneven": (*UNEVEN, "mesh.dp_shard=3", "train.global_batch=6"),
    "dp_shard 2 × tp 2": ("mesh.dp_shard=2", "mesh.tp=2"),
    "zb-v × dp_shard 2": (*ZB_V, "mesh.dp_shard=2"),
    "uneven replicas": (*UNEVEN, "mesh.dp_replicate=3", "mesh.dp_shard=2", "train.global_batch=6"),
    "experts on cp": ("moe-tiny", "mesh.dp_shard=2", "mesh.cp=2", "mesh.ep=2"),
}
QUICK = [("dp_shard 3, uneven",)]


def share_of_cost(plan, pipeline_rank):
    """Return the cost of the rank that owns the most, relative to an equal share of its stage's ranks."""
    owned = Counter()
    for one in whole_matrices(plan, pipeline_rank):
        owned[one.owner] += cost_of(plan, one)
    ranks = plan.mesh.size(*plan.mesh.in_stage())
    return max(owned.values(), default=0) * ranks / max(1, sum(owned.values()))


def moved(rank, world_size, words):
    """What a rank sends for updates in a step, and its box of every parameter that Muon updates."""
    job, step = make_job(rank, world_size, words)
    with count_collectives() as sent:
        step(1)
    boxes = {
        (one.site, tuple(one.parameter.shape)): local_box(one.parameter)
        for group in job.optimizer.groups
        if isinstance(group.optimizer, MatrixOptimizer)
        for one in group.members
    }
    return sum(size for (op, _), size in sent.items() if op == EXCHANGE), boxes


def lower_bound(boxes_by_rank):
    """Elements that ranks must receive in all: for each matrix, what the rank with the most of it lacks, then every
    other rank its shard. Counted on matrices of flags, from the boxes of PyTorch's own tensors."""
    holders = defaultdict(list)
    for boxes in boxes_by_rank:
        for (site, shape), box in boxes.items():
            mask = torch.zeros(shape, dtype=torch.bool)
            mask[box.slices()] = True
            for index, matrix in enumerate(mask.view(-1, *shape[-2:])):
                if matrix.any():
                    holders[site, index].append(matrix)
    total = 0
    for masks in holders.values():
        union = torch.stack(masks).any(0)
        assert union.all(), "every element is on some rank"
        sizes = [int(mask.sum()) for mask in masks]
        total += union.numel() - max(sizes) + sum(sizes) - max(sizes)
    return total


@pytest.mark.parametrize("name", quick_and_slow([(name,) for name in LAYOUTS], QUICK))
def test_bytes_are_at_the_lower_bound_and_those_predicted(gang, tmp_path, name):
    preset, *words = LAYOUTS[name] if "=" not in LAYOUTS[name][0] else ("llama-tiny", *LAYOUTS[name])
    words = [preset, *words, MUON, *small_corpus(tmp_path)]
    plan = make_plan(load_words(words))
    found = gang(plan.mesh.num_ranks()).run(moved, words)
    sent = [num_bytes for num_bytes, _ in found]
    assert sent == [sum(moved_bytes(plan, rank).values()) for rank in range(len(sent))], "to the byte"
    by_rank = Counter()
    for place in range(plan.mesh.size("pp")):
        by_rank.update(bytes_moved_by_rank(plan, place))
    assert sent == [by_rank[rank] for rank in range(len(sent))]
    assert sum(sent) <= 1.05 * 4 * lower_bound([boxes for _, boxes in found])
    assert predict_traffic(plan).of(Purpose.OPTIMIZER).sent.total() == max(sent)
    if "uneven" not in name:
        assert max(sent) <= 1.05 * sum(sent) / len(sent), "no rank sends more than the others"


@pytest.mark.parametrize("words", [
    ("llama-tiny", "mesh.dp_shard=4"), ("llama-tiny", *ZB_V, "mesh.dp_shard=2"),
    ("llama-tiny", "mesh.dp_shard=2", "mesh.tp=2", "mesh.dp_replicate=2", "model.num_layers=8"),
    ("moe-tiny", "mesh.dp_shard=4", "mesh.ep=2"),
])  # fmt: skip
def test_no_rank_computes_more_than_its_share(words):
    plan = make_plan(load(words[0], [*words[1:], MUON]))
    for place in range(plan.mesh.size("pp")):
        assert share_of_cost(plan, place) <= 1.1
        owners = Counter(one.owner for one in whole_matrices(plan, place))
        assert set(owners) == set(plan.mesh.line(next(iter(owners)), plan.mesh.in_stage())), "every rank of the stage"


@pytest.mark.parametrize("num_layers", [1, 3, 5])
def test_the_next_matrix_goes_to_the_rank_with_the_least_to_compute(num_layers):
    """Otherwise the busiest rank has been given its last matrix while another had less."""
    plan = make_plan(load("llama-tiny", ["mesh.dp_shard=4", f"model.num_layers={num_layers}", MUON]))
    costs = defaultdict(list)
    for one in whole_matrices(plan, 0):
        costs[one.owner].append(matrix_owners.cost_of(plan, one))
    loads = {rank: sum(costs[rank]) for rank in range(4)}
    assert max(loads[rank] - min(costs[rank]) for rank in costs) <= min(loads.values())


def planned_moves(matrix):
    """Both moves as `reshard` plans them between any two layouts."""
    splits = tuple(tuple(Split(axis) for axis in axes) for axes in matrix.splits)
    sharded = Layout(matrix.shape, matrix.axis_sizes, splits, (None,) * len(matrix.axis_sizes))
    whole = Layout(matrix.shape, (), ((), ()), ())
    owner = (matrix.owner,)
    there = plan_transfer(sharded, whole, src_ranks=matrix.ranks, dst_ranks=owner, dtype="fp32")
    return there, plan_transfer(whole, sharded, src_ranks=owner, dst_ranks=matrix.ranks, dtype="fp32")


@st.composite
def geometries(draw):
    """A matrix on up to three axes, of which some shard a side, unevenly or into empty shards, and some replicate."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    sides = [draw(st.sampled_from((0, 1, None))) for _ in sizes]
    splits = tuple(tuple(axis for axis, side in enumerate(sides) if side == which) for which in (0, 1))
    shape = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    ranks = tuple(range(5, 5 + math.prod(sizes)))
    return WholeMatrix(0, "w", None, shape, tuple(sizes), splits, ranks, owner=draw(st.sampled_from(ranks)))


@given(geometries())
@settings(max_examples=150, deadline=None)
def test_moves_are_those_that_reshard_plans(matrix):
    plans = planned_moves(matrix)
    for rank in matrix.ranks:
        assert rank_moves(matrix, rank) == tuple(RankTransfer.of(plan, rank) for plan in plans)
        sent = Counter()
        for move in (move for plan in plans for move in plan.sends(rank)):
            sent[move.receiver] += move.stop - move.start
        assert sent == +matrix.elements_sent(rank)
    assert plans[0].lower_bound_bytes == plans[0].bytes_received, "the owner receives what it lacks, once"


def test_every_matrix_has_one_owner_among_its_ranks():
    plan = make_plan(load("moe-tiny", ["mesh.dp_shard=4", "mesh.ep=2", MUON]))
    found = whole_matrices(plan, 0)
    assert len({(one.stage, one.name, one.index) for one in found}) == len(found)
    assert all(one.owner in one.ranks for one in found)
    expected = sum(
        parameter.shape[0] if len(parameter.shape) == 3 else 1
        for stage in plan.stages
        for _, _, parameter in plan.parameters(stage)
        if parameter.role in ("matrix", "experts")
    )
    assert len(found) == expected


def saved_and_loaded(rank, world_size, words, folder):
    """Train two steps and save, or load into another layout; this rank's shards of the optimizer's states."""
    job, step = make_job(rank, world_size, words)
    tensors = named_state(job.model, job.optimizer)
    if folder.exists():
        save_load.load(folder / "00000002", tensors)
    else:
        step(1), step(2)
        save_load.save(folder, 2, tensors, model={}, run={}, keep=1)
    kept = {name: tensor for name, tensor in tensors.items() if name.startswith("optimizer.")}
    return {name: (local_box(tensor).slices(), to_local(tensor).clone()) for name, tensor in kept.items()}


@pytest.mark.slow
def test_momentum_is_bitwise_the_same_on_another_layout(gang, tmp_path):
    corpus, folder = small_corpus(tmp_path), tmp_path / "saved"
    there, back = ("mesh.dp_shard=2", "mesh.tp=2"), ("mesh.pp=2", "mesh.dp_replicate=2", "train.num_microbatches=2")
    before, after = (
        gang(4).run(saved_and_loaded, ["llama-tiny", *words, MUON, *corpus], folder) for words in (there, back)
    )
    stored = save_load.read_tensors(folder / "00000002", sorted({name for shards in before for name in shards}))
    assert any("momentum" in name for name in stored) and any("exp_avg" in name for name in stored)
    for shards in (*before, *after):
        for name, (index, values) in shards.items():
            assert torch.equal(stored[name][index], values), name


def updated_in_buckets(rank, world_size, words, elements):
    """Parameters after a step, with buckets of so many elements."""
    real, matrix_owners.BUCKET_ELEMENTS = matrix_owners.BUCKET_ELEMENTS, elements
    whole_matrices.cache_clear()
    try:
        job, step = make_job(rank, world_size, words)
        assert job.optimizer._owners is not None
        num_buckets = len(job.optimizer._owners._buckets)
        step(1)
        return num_buckets, {name: to_local(p.detach()).clone() for name, p in job.model.named_parameters()}
    finally:
        matrix_owners.BUCKET_ELEMENTS = real
        whole_matrices.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("words", [("llama-tiny", "mesh.dp_shard=2"), ("moe-tiny", "mesh.dp_shard=2", "mesh.ep=2")])
def test_buckets_change_nothing(gang, tmp_path, words):
    words = [*words, MUON, *small_corpus(tmp_path)]
    one, several = (gang(2).run(updated_in_buckets, words, elements) for elements in (2**25, 3000))
    for (few, parameters), (many, again) in zip(one, several, strict=True):
        assert few == 1 and many > 2
        assert all(torch.equal(parameters[name], again[name]) for name in parameters)


def without_gradients(rank, world_size, words):
    """Matrices and their momentum after a step and one in which a rank has no gradient of a matrix."""
    job, step = make_job(rank, world_size, words)
    step(1)
    members = [one for group in job.optimizer.groups for one in group.members]
    first = next(one for one in members if "momentum" in one.state)
    before = to_local(first.state["momentum"]).clone()
    for one in members:
        one.parameter.grad = None if rank == 0 else torch.zeros_like(one.parameter)
    job.optimizer.step(0.01)
    return bool(before.any()), torch.equal(to_local(first.state["momentum"]), 0.95 * before)


def test_a_rank_without_a_gradient_takes_part(gang, tmp_path):
    found = gang(2).run(without_gradients, ["llama-tiny", MUON, "mesh.dp_shard=2", *small_corpus(tmp_path)])
    assert found == [(True, True)] * 2


def row_states(rank, world_size, words, folder):
    """Save states with a number per row, or load them; this rank's shards, with where they lie."""
    job, step = make_job(rank, world_size, words)
    tensors = named_state(job.model, job.optimizer)
    if folder.exists():
        save_load.load(folder / "00000001", tensors)
    else:
        step(1)
        save_load.save(folder, 1, tensors, model={}, run={}, keep=1)
    # Of matrices whose columns tp shards, the sums would be those of a rank's columns: such layouts are refused.
    rows = {f"optimizer.total.{name}.weight" for name in ("blocks.0.ffn.up", "blocks.1.attention.wk", "head", "norm")}
    return {name: (local_box(tensors[name]).slices(), to_local(tensors[name]).clone()) for name in rows}


@pytest.mark.slow
def test_a_state_per_row_is_sharded_as_its_rows(gang, tmp_path):
    corpus, folder = small_corpus(tmp_path), tmp_path / "saved"
    optimizer = "train.optimizer=tests.optim.own:Rows"
    layouts = ("mesh.tp=2",), ("mesh.dp_shard=3",)
    before, after = (
        gang(ranks).run(row_states, ["llama-tiny", *words, optimizer, *corpus, "train.global_batch=12"], folder)
        for ranks, words in zip((2, 3), layouts, strict=True)
    )
    stored = save_load.read_tensors(folder / "00000001", sorted(before[0]))
    assert stored["optimizer.total.blocks.0.ffn.up.weight"].dim() == 1
    whole = row_states(0, 1, ["llama-tiny", optimizer, *corpus, "train.global_batch=12"], tmp_path / "whole")
    for name, (_, values) in whole.items():
        assert values.any()
        # Rows in another order would be in the same order everywhere else.
        torch.testing.assert_close(stored[name], values, rtol=1e-3, atol=1e-6)
    for shards in (*before, *after):
        for name, (index, values) in shards.items():
            assert torch.equal(stored[name][index], values), name


def test_a_group_has_its_share_of_the_rate(tmp_path):
    words = ["llama-tiny", "train.optimizer=sgd", "train.lr=0.5", "train.parameter_groups=vector:lr=0.25"]
    job, _ = make_job(0, 1, [*words, "train.weight_decay=0", *small_corpus(tmp_path)])
    before = {name: p.detach().clone() for name, p in job.model.named_parameters()}
    for p in job.model.parameters():
        p.grad = torch.ones_like(p)
    job.optimizer.step(0.1)
    for name, p in job.model.named_parameters():
        torch.testing.assert_close(before[name] - p.detach(), torch.full_like(p, 0.05 if p.dim() == 1 else 0.1))
