"""Parallelized models: placements, gradients, number of collectives; a mismatch with the plan names both sides."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.errors import LayoutError
from meshwright.nn.experts.layer import MixtureOfExperts
from meshwright.parallel.apply_plan import FirstGradientCheck, check_placements, compile_block
from meshwright.parallel.data_parallel import fsdp_modules
from meshwright.parallel.rank_model import StagePart
from meshwright.plan.make_plan import make_plan
from meshwright.plan.run_plan import Shard
from tests.helpers import quick_and_slow, small_corpus
from tests.train.jobs import load_words, make_job, pieces, run_on

TIED = "model.tie_embeddings=true"
LAYOUTS = [
    pytest.param(2, ["mesh.tp=2"], marks=pytest.mark.slow),
    (2, ["mesh.tp=2", "mesh.sequence_parallel=false"]),
    pytest.param(2, ["mesh.tp=2", TIED], marks=pytest.mark.slow),
    pytest.param(2, ["mesh.dp_shard=2", "train.num_microbatches=2"], marks=pytest.mark.slow),
    (2, ["mesh.dp_shard=2", "train.num_microbatches=2", TIED]),
    pytest.param(4, ["mesh.tp=2", "mesh.dp_shard=2", "train.num_microbatches=2"], marks=pytest.mark.slow),
    pytest.param(4, ["mesh.tp=2", "mesh.dp_replicate=2", TIED], marks=pytest.mark.slow),
    pytest.param(4, ["mesh.dp_replicate=2", "mesh.dp_shard=2"], marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return [*small_corpus(tmp_path_factory.mktemp("parallel")), "train.precision=float64", "model.num_layers=1"]


def gradients(rank, world_size, words):
    job, step = make_job(rank, world_size, words)
    step.accumulate(1)
    return pieces(job, gradients=True)


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS)
def test_every_gradient_is_that_of_one_process(gang, corpus, world_size, layout):
    expected = gradients(0, 1, [*corpus, *(word for word in layout if word == TIED)])
    for found in run_on(gang, world_size, gradients, [*corpus, *layout]):
        assert found.keys() == expected.keys()
        for name, piece in found.items():
            whole = expected[name].values
            assert (piece.values - piece.of(whole)).abs().max() <= 1e-12 * whole.abs().max(), name


def frozen(rank, world_size, words):
    job, _ = make_job(rank, world_size, words)
    return [name for name, parameter in job.model.named_parameters() if not parameter.requires_grad]


@pytest.mark.parametrize("whole", ["true", "false"])
def test_what_is_frozen_stays_so_under_tensor_parallel(gang, corpus, whole):
    words = [*corpus, "mesh.tp=2", f"mesh.sequence_parallel={whole}", "train.freeze=['*norm*','embed.*']"]
    expected = ["embed.weight", "blocks.0.attention_norm.weight", "blocks.0.ffn_norm.weight", "norm.weight"]
    assert gang(2).run(frozen, words) == [expected] * 2


def structure(rank, world_size, words):
    job, _ = make_job(rank, world_size, words)
    placements = {name: str(p.placements) for name, p in job.model.named_parameters() if isinstance(p, DTensor)}
    units = [name for name, module in job.parts()[0].module.named_modules() if isinstance(module, FSDPModule)]
    return len(list(job.model.parameters())), placements, units


def test_what_tensor_parallel_divides(gang, corpus):
    count, placements, units = gang(2).run(structure, [*corpus, "mesh.tp=2"])[0]
    assert len(placements) == count and not units
    by_columns = ("wo.weight", "down.weight")
    for name, found in placements.items():
        whole = "Replicate()" if "norm" in name else f"Shard(dim={1 if name.endswith(by_columns) else 0})"
        assert found == f"({whole},)", name


@pytest.mark.parametrize(
    ("vocab_size", "tied", "by_itself"), [(256, "false", False), (4096, "false", True), (4096, "true", False)]
)
def test_what_fsdp_gathers_together(gang, corpus, vocab_size, tied, by_itself):
    """An embedding has its own FSDP unit if it is larger than a block and not tied to the head."""
    words = [*corpus, "mesh.dp_shard=2", f"model.tie_embeddings={tied}", f"model.vocab_size={vocab_size}"]
    count, placements, units = gang(2).run(structure, words)[0]
    assert len(placements) == count and set(placements.values()) == {"(Shard(dim=0),)"}
    assert {"", "blocks.0"} <= set(units) and ("embed" in units) is by_itself


def reductions(rank, world_size, words):
    """Count the gradient-reducing collectives of a step."""
    job, step = make_job(rank, world_size, words)
    with torch.profiler.profile() as profile:
        step.accumulate(1)
    names = Counter(event.name for event in profile.events())
    return {name: n for name, n in names.items() if name.startswith("c10d::") and "reduce" in name}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["mesh.dp_shard=2"], marks=pytest.mark.slow),
        ["mesh.dp_replicate=2"],
        pytest.param(["mesh.dp_replicate=2", "mesh.dp_shard=2"], marks=pytest.mark.slow),
    ],
)
def test_gradients_are_reduced_once_a_step_not_once_a_part(gang, corpus, layout):
    world_size = 2 ** len(layout)
    found = [
        gang(world_size).run(reductions, [*corpus, *layout, f"train.num_microbatches={parts}"])[0] for parts in (1, 2)
    ]
    assert found[0] == found[1] and sum(found[0].values()) > 0


def test_a_plain_model_has_no_units(corpus):
    job, _ = make_job(0, 1, corpus)
    assert fsdp_modules(job.model) == [] and job.mesh is None
    assert all(type(p) is torch.nn.Parameter for p in job.model.parameters())


WORDS = ("model.num_layers=2",)
TP, BOTH = ("mesh.tp=2",), ("mesh.tp=2", "mesh.dp_shard=2")


def edited(plan, name, **fields):
    """Return the plan with fields of one parameter replaced."""
    block = next(kind for kind in plan.kinds if any(p.name == name for p in kind.parameters))
    parameters = tuple(replace(p, **fields) if p.name == name else p for p in block.parameters)
    return with_block(plan, replace(block, parameters=parameters))


def with_block(plan, block):
    return replace(plan, kinds=tuple(block if kind.name == block.name else kind for kind in plan.kinds))


def freed(plan, value):
    block = next(kind for kind in plan.kinds if kind.is_block)
    return with_block(plan, replace(block, units=(replace(block.units[0], freed=value),)))


def moved(plan):
    """Return the plan with one of the block's norms moved to the root unit."""
    block, (stage,) = next(kind for kind in plan.kinds if kind.is_block), plan.stages
    unit = block.units[0]
    plan = with_block(plan, replace(block, units=(replace(unit, parameters=unit.parameters[1:]),)))
    root = replace(stage.root, parameters=(*stage.root.parameters, f"block/{unit.parameters[0]}"))
    return replace(plan, stages=(replace(stage, root=root),))


NORM, COLUMN = "attention_norm.weight", "attention.wq.weight"
PLACED = {
    "a column by columns": (TP, lambda p: edited(p, COLUMN, used=(Shard(1, ("tp",)),)), "tp along dim 1"),
    "a column replicated": (BOTH, lambda p: edited(p, COLUMN, used=()), f"{COLUMN} is sharded over"),
    "a norm sharded": (BOTH, lambda p: edited(p, NORM, used=(Shard(0, ("tp",)),)), f"{NORM} is sharded over"),
    "stored along another dim": (BOTH, lambda p: edited(p, COLUMN, stored_dim=1), "dp_shard along dim 1"),
    "kept": (BOTH, lambda p: freed(p, False), "reshard_after_forward=True for blocks.0, but the plan says False"),
    "kept among two": (("mesh.dp_shard=4",), lambda p: freed(p, 2), "but the plan says 2"),
    "in another unit": (BOTH, moved, NORM),
}


def check(rank, world_size, words, case):
    job, _ = make_job(rank, world_size, words)  # which checks the right plan
    plan = PLACED[case][1](job.plan)
    try:
        check_placements(StagePart(plan, 0, job.parts()[0].module))
    except LayoutError as error:
        return error.what, error.rule, error.fix
    return None


@pytest.mark.parametrize(
    "case", quick_and_slow(((name,) for name in PLACED), [("a column by columns",), ("kept",), ("in another unit",)])
)
def test_other_placements_and_units_are_named(gang, corpus, case):
    layout, _, words = PLACED[case]
    num_ranks = 4 if layout != TP else 2
    for found in gang(num_ranks).run(check, [*layout, *corpus, *WORDS], case):
        assert found is not None and words in found[0] and "but the plan says" in found[0] and found[1] and found[2]


def first_gradients(rank, world_size, words, name, work):
    """Run a step with a plan that has another placement for a parameter's gradient over tp."""
    job, step = make_job(rank, world_size, words)
    (stage,) = step.pipeline.stages.values()
    if name:
        stage._first = FirstGradientCheck(StagePart(edited(job.plan, name, work=work), 0, job.parts()[0].module))
    try:
        step(1)
        step(2)
    except LayoutError as error:
        return error.what
    return "" if stage._first is None else "never checked"


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TP, BOTH], ids=["DTensor alone", "FSDP2 over tp"])
def test_other_partial_gradients_are_named_in_the_first_step(gang, corpus, layout):
    words, num_ranks = ["model.num_layers=1", *layout, "train.num_microbatches=2", *corpus], 2 * len(layout)
    data = ("dp_shard",) if layout == BOTH else ()
    assert gang(num_ranks).run(first_gradients, words, "", ()) == [""] * num_ranks
    said = f"DTensor's gradient of blocks.0.{NORM} is partial over tp, but the plan says not partial over tp"
    assert gang(num_ranks).run(first_gradients, words, NORM, data) == [said] * num_ranks
    if layout == BOTH:  # the root's unit is kept after its forward
        said = "DTensor's gradient of norm.weight is partial over tp, but the plan says not partial over tp"
        assert gang(num_ranks).run(first_gradients, words, "norm.weight", data) == [said] * num_ranks
    whole = [*words, "mesh.sequence_parallel=false"]
    said = f"DTensor's gradient of blocks.0.{NORM} is not partial over tp, but the plan says partial over tp"
    assert gang(num_ranks).run(first_gradients, whole, NORM, (*data, "tp")) == [said] * num_ranks


def test_the_plan_of_a_run_is_what_is_checked(corpus):
    plan = make_plan(load_words([*WORDS, *BOTH]))
    assert edited(plan, NORM, work=()) != plan and moved(plan) != plan and freed(plan, False) != plan


class Inner(nn.Module):
    def __init__(self, runs_eagerly):
        super().__init__()
        self.runs_eagerly, self.was_compiled = runs_eagerly, None

    def forward(self, x):
        self.was_compiled = torch.compiler.is_compiling()
        return x * 2


@pytest.mark.parametrize("runs_eagerly", [True, False])
def test_a_compiled_block_leaves_out_modules_that_run_eagerly(runs_eagerly):
    inner, x = Inner(runs_eagerly), torch.ones(3)
    block = nn.Sequential(nn.Linear(3, 3), inner)
    expected = block(x)
    with mock.patch("torch.compile", partial(torch.compile, backend="eager")):
        compile_block(block)
    assert torch.equal(block(x), expected) and inner.was_compiled is not runs_eagerly
    assert MixtureOfExperts.runs_eagerly
