"""A mismatch between the plan and what FSDP2 and DTensor do ends the run, with both sides named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.errors import LayoutError
from meshwright.parallel.apply_plan import FirstGradientCheck, check_placements
from meshwright.parallel.rank_model import StagePart
from meshwright.plan.make_plan import make_plan
from meshwright.plan.run_plan import Shard
from tests.helpers import quick_and_slow
from tests.train.jobs import load_words, make_job

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
    for found in gang(num_ranks).run(check, [*WORDS, *layout, *corpus], case):
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
