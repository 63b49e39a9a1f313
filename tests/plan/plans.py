"""Helpers that make plans of many layouts, change one field in a plan, and check that the fault is found."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from meshwright.errors import LayoutError, ScheduleError
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.plan.verify import faults, verify
from tests.plan.fake_family import fake_plan

ALL = {"tp": 2, "dp_shard": 2, "dp_replicate": 2, "pp": 2}
"""The mesh of a `fake` plan with every axis."""
NORM, QUERY = "block/attention_norm.weight", "block/attention.wq.weight"

PRESETS = ("dit-digits", "dit-digits-video", "dit-xl-2", "llama-tiny", "llama3-405b", "llama3-70b", "llama3-8b",
           "video-dit-xl")  # fmt: skip
LARGEST = "llama3-405b mesh.pp=16 mesh.dp_shard=128 mesh.tp=8 train.global_batch=2048 train.num_microbatches=16"
TIED = (
    "llama-tiny mesh.pp=2 mesh.dp_replicate=2 mesh.dp_shard=2 mesh.tp=2 model.tie_embeddings=true "
    "train.num_microbatches=4 comm.gradients=loco4 comm.weights=int8 train.precision=bfloat16"
)
PLAIN = "llama-tiny mesh.dp_shard=2 mesh.tp=2 mesh.sequence_parallel=false"
FROZEN = "llama-tiny mesh.dp_shard=2 mesh.tp=2 train.freeze=['*_norm.weight','embed.weight']"
DIT = "dit-digits mesh.pp=2 mesh.tp=2 mesh.sequence_parallel=false train.num_microbatches=4 mesh.dp_replicate=2"
LAYOUTS = (
    *PRESETS,
    TIED,
    PLAIN,
    FROZEN,
    DIT,
    "llama-tiny mesh.pp=2 train.num_microbatches=4",
    "llama-tiny mesh.tp=4 model.num_kv_heads=4",
    "llama-tiny mesh.tp=2 train.precision=bfloat16",
    "llama-tiny train.precision=float64 mesh.dp_replicate=2",
    "llama-tiny model.tie_embeddings=true mesh.dp_replicate=2 mesh.dp_shard=2",
    "llama-tiny mesh.pp=4 train.num_microbatches=8 pipeline.layers_per_stage=[0,2,2,0] "
    "pipeline.allow_empty_stages=true",
    "llama-tiny mesh.pp=2 pipeline.schedule=zb-v train.num_microbatches=4 model.tie_embeddings=true "
    "train.freeze=['*norm*']",
    "llama-tiny mesh.pp=2 pipeline.schedule=zb-h1 train.num_microbatches=4 mesh.dp_shard=2 train.freeze=['blocks.*']",
    "llama-tiny mesh.dp_shard=4 comm.secondary_shards=2 recompute.policy=full train.freeze=['blocks.1.*']",
    "llama-tiny mesh.dp_shard=4 comm.gradients=int4 comm.ranks_per_node=2 mesh.reshard_after_forward=false",
    "llama-tiny pipeline.chunks=2 train.num_microbatches=2",
    "dit-digits mesh.pp=2 pipeline.schedule=dualpipe-v train.num_microbatches=4 mesh.dp_shard=2",
    "dit-digits-video mesh.tp=2 mesh.sequence_parallel=false comm.gradients=bf16 mesh.dp_shard=2",
    "llama3-70b mesh.pp=4 mesh.dp_replicate=2 mesh.dp_shard=8 mesh.tp=8 train.num_microbatches=8 "
    "train.global_batch=128 pipeline.schedule=interleaved pipeline.chunks=2",
)


@cache
def plan_of(words):
    """Make the plan of a preset and overrides."""
    source, *overrides = words.split()
    return make_plan(load(source, overrides))


@cache
def fake(**mesh):
    """The plan of the family of `fake_family` on a mesh."""
    return fake_plan(**mesh)


def with_kind(plan, name, **changes):
    """The plan with other fields of a kind."""
    return replace(plan, kinds=tuple(replace(kind, **changes) if kind.name == name else kind for kind in plan.kinds))


def with_parameter(plan, ref, **changes):
    """The plan with other fields of a parameter, named kind/name."""
    kind, name = ref.split("/")
    found = tuple(replace(p, **changes) if p.name == name else p for p in plan.kind(kind).parameters)
    assert found != plan.kind(kind).parameters
    return with_kind(plan, kind, parameters=found)


def with_unit(plan, kind, **changes):
    """The plan with other fields of a kind's first unit."""
    first, *others = plan.kind(kind).units
    return with_kind(plan, kind, units=(replace(first, **changes), *others))


def with_buffer(plan, kind, **changes):
    """The plan with other fields of a kind's first buffer."""
    first, *others = plan.kind(kind).buffers
    return with_kind(plan, kind, buffers=(replace(first, **changes), *others))


def with_stage(plan, number, **changes):
    """The plan with other fields of a stage."""
    return replace(plan, stages=tuple(replace(s, **changes) if n == number else s for n, s in enumerate(plan.stages)))


def with_root(plan, number, **changes):
    """The plan with other fields of a stage's root unit."""
    return with_stage(plan, number, root=replace(plan.stages[number].root, **changes))


def with_sum(plan, op, **changes):
    """The plan with other fields of its sum, or its mean."""
    assert any(one.op == op for one in plan.sums)
    return replace(plan, sums=tuple(replace(one, **changes) if one.op == op else one for one in plan.sums))


def without(plan, op):
    """The plan without its sum, or its mean."""
    return replace(plan, sums=tuple(one for one in plan.sums if one.op != op))


def without_action(plan, kind):
    """The plan without the schedule's actions of a kind."""
    rows = plan.schedule.actions
    rows = tuple(tuple(a for a in row if all(part.kind is not kind for part in a.parts())) for row in rows)
    return replace(plan, schedule=replace(plan.schedule, actions=rows))


def assert_found(base, plant, parameter, axis, words):
    """Assert that a fault planted in a correct plan is found, with its parameter, axis and message."""
    right = plan_of(base) if isinstance(base, str) else fake(**base)
    wrong = plant(right)
    assert faults(right) == [] and wrong != right
    found = faults(wrong)
    matching = [fault for fault in found if words in fault.what]
    assert matching, "\n".join(map(str, found))
    assert any(parameter in (None, fault.parameter) and fault.axis == axis for fault in matching), matching
    assert all(fault.rule and fault.fix and fault.where() for fault in found)
    with pytest.raises((LayoutError, ScheduleError)) as error:
        verify(wrong, where="plan.json")
    assert error.value.where.startswith("plan.json, ") and error.value.rule and error.value.fix


def with_update(plan, **changes):
    """Change how parameters of all roles are updated."""
    (update,) = plan.optimizer.updates
    return replace(plan, optimizer=replace(plan.optimizer, updates=(replace(update, **changes),)))
