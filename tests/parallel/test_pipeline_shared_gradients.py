"""Shared parameters: gradients are summed over all copies, and ranks that disagree stop immediately."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshwright.errors import LayoutError
from meshwright.mesh.local_shards import to_local
from meshwright.parallel.pipeline_shared_gradients import SharedGradients, pipelines_on
from meshwright.pipeline.split_layers import SharedParameter, stage_groups

PP, CHUNKS = 4, 2
RANKS = tuple(range(PP)) * CHUNKS
"""Stage s is chunk s // 4 of rank s % 4."""
EVERYWHERE = SharedParameter("cond", tuple((stage, "cond") for stage in range(PP * CHUNKS)))
TIED = SharedParameter("embed.weight", ((0, "embed"), (PP * CHUNKS - 1, "head")))


class Stage(nn.Module):
    """One shared parameter, one of the same name that nobody declares, and the ends of a tied embedding."""

    def __init__(self, stage, *, rows=5, columns=3, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        make = lambda: nn.Parameter(torch.randn(rows, columns, generator=generator).to(dtype))  # noqa: E731
        self.cond, self.own = make(), make()
        if stage == 0:
            self.embed = make()
        if stage == PP * CHUNKS - 1:
            self.head = make()
        self.odd = nn.Parameter(torch.zeros(2 * stage + 1))  # what only this stage has, of a size like no other's


def stages_of(rank, **options):
    return {stage: Stage(stage, **options) for stage, owner in enumerate(RANKS) if owner == rank}


def make(stages, shared=(EVERYWHERE, TIED), pipelines=(tuple(range(PP)),)):
    return SharedGradients(shared, stages, pipelines=pipelines, stage_ranks=RANKS, timeout_s=20)


def reference_case(rank, world_size):
    stages = stages_of(rank)
    shared = make(stages)
    started = {stage: module.cond.detach().clone() for stage, module in stages.items()}
    tied = [module.get_parameter(name) for stage, name in TIED.sites if (module := stages.get(stage)) is not None]
    tied = [p.detach().clone() for p in tied]
    for stage, module in stages.items():
        for parameter in (module.cond, module.own):
            parameter.grad = torch.full_like(parameter, 10.0 * rank + stage // PP)
    shared.sync_all()
    assert shared.duplicates == {p for stage, module in stages.items() if stage > 0
                              for name, p in module.named_parameters() if name in ("cond", "head")}  # fmt: skip
    found = {stage: (module.cond.grad, module.own.grad) for stage, module in stages.items()}
    return started, tied, found


def test_the_reference_case(gang):
    """pp 4, two chunks, gradient 10·r + i of chunk i on rank r: 124 on every copy, whatever is undeclared untouched."""
    results = gang(PP).run(reference_case)
    first = results[0][0][0]
    for rank, (started, _, found) in enumerate(results):
        for stage, (shared, own) in found.items():
            assert torch.equal(shared, torch.full_like(shared, 124.0))
            assert torch.equal(own, torch.full_like(own, 10.0 * rank + stage // PP))
            assert torch.equal(started[stage], first)
    assert torch.equal(results[0][1][0], results[PP - 1][1][0])


def one_rank(rank, world_size):
    stages = {0: Stage(0), 1: Stage(1), 2: Stage(2)}
    declared = (SharedParameter("cond", ((0, "cond"), (2, "own"))),)
    shared = SharedGradients(declared, stages, stage_ranks=(0, 0, 0))
    stages[0].cond.grad = torch.full((5, 3), 2.0)
    stages[2].own.grad = torch.full((5, 3), 3.0)
    stages[1].cond.grad = torch.full((5, 3), 7.0)
    shared.sync(0)
    return stages


def test_chunks_of_one_rank_are_added_up_without_a_group():
    stages = one_rank(0, 1)
    assert torch.equal(stages[0].cond, stages[2].own)
    assert stages[0].cond.grad.unique().tolist() == stages[2].own.grad.unique().tolist() == [5.0]
    assert stages[1].cond.grad.unique().tolist() == [7.0]


def missing_and_frozen(rank, world_size):
    """Rank 1's copies get no gradient; the tied embedding is frozen everywhere."""
    stages = stages_of(rank)
    for stage, name in TIED.sites:
        if stage in stages:
            stages[stage].get_parameter(name).requires_grad_(False)
    shared = make(stages)
    for module in stages.values():
        if rank != 1:
            module.cond.grad = torch.ones_like(module.cond)
    for number in range(shared.num_groups):
        shared.sync(number)
    frozen = [stages[stage].get_parameter(name).grad for stage, name in TIED.sites if stage in stages]
    return {stage: module.cond.grad for stage, module in stages.items()}, frozen


def test_a_missing_gradient_is_zero_and_a_frozen_parameter_has_none(gang):
    for found, frozen in gang(PP).run(missing_and_frozen):
        assert all(gradient.unique().tolist() == [6.0] for gradient in found.values())
        assert all(gradient is None for gradient in frozen)


def sharded(rank, world_size, dp, dtype):
    """pp 2 × dp, a row count that no number of shards divides: shards of what FSDP2 holds are added up."""
    mesh = init_device_mesh("cpu", (2, dp), mesh_dim_names=("pp", "dp"))
    pp = rank // dp
    module = Stage(pp, rows=7, dtype=dtype)
    fully_shard(module, mesh=mesh["dp"])
    declared = (SharedParameter("cond", ((0, "cond"), (1, "cond"))), SharedParameter("b", ((0, "own"), (1, "own"))))
    pipelines = pipelines_on(mesh)
    assert pipelines == [[column, dp + column] for column in range(dp)]
    shared = SharedGradients(declared, {pp: module}, pipelines=pipelines)
    generator = torch.Generator().manual_seed(100 + pp)
    gradients = {name: torch.randn(7, 3, generator=generator).to(dtype) for name in ("cond", "own")}
    for name, value in gradients.items():
        parameter = module.get_parameter(name)
        parameter.grad = torch.zeros_like(parameter)
        rows = to_local(parameter).shape[0]
        start = min(7, (rank % dp) * -(-7 // dp))
        to_local(parameter.grad).copy_(value[start : start + rows])
    shared.sync(0)
    whole = {name: module.get_parameter(name).grad.full_tensor() for name in gradients}
    return gradients, whole, module.cond.full_tensor()


@pytest.mark.parametrize(("dp", "dtype"), [(2, torch.float32), (2, torch.bfloat16)])
def test_shards_line_up_whatever_else_a_stage_has(gang, dp, dtype):
    results = gang(2 * dp).run(sharded, dp, dtype)
    for name in ("cond", "own"):
        total = results[0][0][name] + results[dp][0][name]
        assert all(torch.equal(whole[name], total) for _, whole, _ in results)
    assert all(torch.equal(start, results[0][2]) for _, _, start in results)


DISAGREEMENTS = {
    "a key": (r"rank 0 declares shared parameter cond, but rank 2 doesn't", "rank 2"),
    "a key more": (r"rank 2 declares shared parameter more, but rank 0 doesn't", "rank 0"),
    "sites": (r"ranks 0 and 2 declare embed.weight at 0: embed, 7: head and at 0: embed, 6: head", "rank 2"),
    "order": (r"ranks 0 and 2 declare cond in a different order", "rank 2"),
    "a parameter": (r"stage 2 has no parameter cond, the declared copy of cond", "rank 2"),
    "shape": (r"cond has shape \[5, 3\] on rank 1 \(stage 1\) and \[5, 4\] on rank 2 \(stage 2\)", "ranks 1 and 2"),
    "dtype": (r"cond has dtype float32 on rank 1 .* and float64 on rank 2", "ranks 1 and 2"),
    "requires_grad": (r"cond has requires_grad True on rank 1 .* and False on rank 2", "ranks 1 and 2"),
    "a stage": (r"a copy of cond is declared on stage 2, but rank 2 has \[6\]", "cond on stage 2"),
    "a stage more": (r"a copy of more is declared on stage 8, but there are 8 stages", "more on stage 8"),
    "layout": (r"cond has shard layout unsharded.* on rank 1 .* and dp=1 S.* on rank 2", "ranks 1 and 2"),
}


def disagree(rank, world_size, what):
    stages, declared = stages_of(rank), [EVERYWHERE, TIED]
    if what == "layout":  # a mesh for each rank, made by all
        meshes = init_device_mesh("cpu", (PP, 1), mesh_dim_names=("pp", "dp"))
    if rank == 2:
        if what in ("shape", "dtype"):
            stages = stages_of(rank, **({"columns": 4} if what == "shape" else {"dtype": torch.float64}))
        elif what == "layout":
            for module in stages.values():
                fully_shard(module, mesh=meshes["dp"])
        elif what == "requires_grad":
            for module in stages.values():
                module.cond.requires_grad_(False)
        elif what == "a parameter":
            del stages[2].cond
        elif what == "a stage":
            del stages[2]
        declared = {
            "a key": [TIED],
            "a key more": [EVERYWHERE, TIED, SharedParameter("more", ((2, "own"),))],
            "sites": [EVERYWHERE, SharedParameter("embed.weight", ((0, "embed"), (6, "head")))],
            "order": [TIED, EVERYWHERE],
        }.get(what, declared)
    if what == "a stage more":
        declared = [*declared, SharedParameter("more", ((0, "own"), (PP * CHUNKS, "own")))]
    try:
        make(stages, declared)
    except LayoutError as error:
        return error.what, error.where, error.fix
    return None


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree_stop_alike_and_at_once(gang, what):
    """No rank hangs in a collective, which would exceed the gang's timeout."""
    words, where = DISAGREEMENTS[what]
    results = gang(PP).run(disagree, what)
    assert all(result == results[0] for result in results)
    what, place, fix = results[0]
    assert re.search(words, what) and place.endswith(where) and fix


@pytest.mark.parametrize(
    ("sites", "words"),
    [
        ([("a", (0, "tied")), ("a", (1, "tied"))], "a at 0: tied and a at 1: tied are the same tensor"),
        ([("a", (0, "own")), ("a", (1, "own")), ("b", (0, "own")), ("b", (1, "odd"))],
         "a at 0: own and b at 0: own are the same tensor"),
        ([("a", (0, "own")), ("a", (0, "odd"))], r"a has shape \[5, 3\] on rank 0 \(stage 0\) and \[1\] on rank 0"),
    ],
)  # fmt: skip
def test_copies_that_are_one_tensor_or_on_one_stage(sites, words):
    """Autograd already accumulates the gradient of one tensor: summed as two copies it would count twice."""
    stages = {0: Stage(0), 1: Stage(1)}
    stages[0].tied = stages[1].tied = nn.Parameter(torch.zeros(2))
    shared = [SharedParameter(key, tuple(site for k, site in sites if k == key)) for key in dict(sites)]
    with pytest.raises(LayoutError, match=words) as caught:
        SharedGradients(shared, stages, stage_ranks=(0, 0))
    assert caught.value.fix


def test_a_key_that_is_declared_twice():
    twice = [SharedParameter("a", ((0, name), (1, name))) for name in ("own", "cond")]
    with pytest.raises(LayoutError, match="rank 0 declares shared parameter a twice"):
        SharedGradients(twice, {0: Stage(0), 1: Stage(1)}, stage_ranks=(0, 0))


def test_groups_are_the_sets_of_stages():
    assert stage_groups((EVERYWHERE, TIED, SharedParameter("alone", ((3, "x"),)))) == ((0, 1, 2, 3, 4, 5, 6, 7), (0, 7))
    assert stage_groups(()) == ()
