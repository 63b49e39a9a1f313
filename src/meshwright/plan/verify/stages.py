"""Verify stages: they have every layer and every end once, what one sends is what the next takes, and they are those of
the schedule, which is right in itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from meshwright.errors import ScheduleError
from meshwright.pipeline.actions import ActionKind
from meshwright.pipeline.shared_parameters import stage_groups
from meshwright.pipeline.verify import verify as verify_schedule
from meshwright.plan.run_plan import Edge, RunPlan, Stage
from meshwright.plan.verify.error import Fault, words

ONCE = "every block and every end is on one stage, and an end that all stages have is on all"


def stage_faults(plan: RunPlan) -> Iterator[Fault]:
    """What is wrong with stages and their schedule."""
    yield from _layers(plan)
    yield from _kinds(plan)
    yield from _edges(plan)
    yield from _schedule(plan)


def _layers(plan: RunPlan) -> Iterator[Fault]:
    start = 0
    for number, stage in enumerate(plan.stages):
        first, stop = stage.layers
        if first != start or stop < first:
            what = f"stage {number} has layers {first} to {stop}, and the stages before it have those to {start}"
            rule = "stages have all layers once, in the model's order"
            yield Fault(what, rule, f"stages[{number}].layers", stages=(number,))
        if len(stage.kinds) != stop - first:
            what = f"stage {number} has kinds of {len(stage.kinds)} blocks for {stop - first} layers"
            yield Fault(what, "every layer has a kind", f"stages[{number}].kinds", stages=(number,))
        start = stop


def _kinds(plan: RunPlan) -> Iterator[Fault]:
    for kind in plan.kinds:
        at = [n for n, stage in enumerate(plan.stages) if kind.name in (*stage.before, *stage.kinds, *stage.after)]
        ends = sum((*stage.before, *stage.after).count(kind.name) for stage in plan.stages)
        missing = tuple(number for number in range(len(plan.stages)) if number not in at)
        field = f"kinds[{kind.name}]"
        if not kind.is_block and (kind.compiled or kind.recompute != "none"):
            what = f"{kind.name} is an end, and {'compiled' if kind.compiled else 'recomputed'}"
            yield Fault(what, "blocks are compiled and recomputed, and nothing else", field)
        if not at:
            yield Fault(f"{kind.name} is on no stage", ONCE, field, parameter=_first(plan, kind.name))
        elif kind.everywhere and missing:
            what = f"{kind.name} is an end of every stage, and not on this one"
            yield Fault(what, ONCE, field, parameter=_first(plan, kind.name), stages=missing)
        elif kind.everywhere and kind.is_block:
            yield Fault(f"{kind.name} is a block, and an end of every stage", ONCE, f"{field}.everywhere")
        elif not kind.is_block and ends > (len(plan.stages) if kind.everywhere else 1):
            yield Fault(f"{kind.name} is an end, and {ends} times on stages", ONCE, field, stages=tuple(at))
        for number in at:
            stage = plan.stages[number]
            if (kind.name in stage.kinds) is not kind.is_block or (kind.is_block and ends):
                what = f"{kind.name} is {'a block' if kind.is_block else 'an end'}, and the stage has it as the other"
                yield Fault(what, "a block has {layer} in its path, an end has not", field, stages=(number,))
            if kind.compiled and stage.splits_backward:
                what = f"{kind.name} is compiled, on a stage whose backward comes in two parts"
                rule = "a compiled block can't defer the gradients of its weights"
                yield Fault(what, rule, f"{field}.compiled", stages=(number,))


def _first(plan: RunPlan, kind: str) -> str | None:
    return next((f"{kind}/{parameter.name}" for parameter in plan.kind(kind).parameters), None)


def _edges(plan: RunPlan) -> Iterator[Fault]:
    last = len(plan.stages) - 1
    for number, stage in enumerate(plan.stages):
        for edge, name, due in (
            (stage.edge_in, "edge_in", plan.edge if number else None),
            (stage.edge_out, "edge_out", plan.edge if number < last else None),
        ):
            if edge != due:
                other = number - 1 if name == "edge_in" else number + 1
                what = f"stage {number} {'takes' if name == 'edge_in' else 'sends'} {_edge(edge)}, and not {_edge(due)}"
                if edge is not None and due is not None:
                    what += f" as stage {other}"
                rule = "what a stage sends is what the next takes; the first takes none, and the last sends none"
                axis = _axis(edge, due)
                yield Fault(what, rule, f"stages[{number}].{name}", axis=axis, stages=(number,))
    local = list(plan.edge.shape)
    for shard in plan.edge.shards:
        ranks = plan.mesh.size(*shard.axes)
        if local[shard.dim] % ranks:
            size = local[shard.dim]
            what = f"{plan.edge.name}: {words(shard.axes)} shard dim {shard.dim} of {size} over {ranks} ranks"
            yield Fault(what, "what is sent is sharded evenly", "edge.shards", axis=shard.axes[0])
        local[shard.dim] //= ranks
    cp, tp = plan.mesh.view("cp"), plan.mesh.view("tp") or (("tp",) if plan.sequence_parallel else ())
    for axis in (*cp, *tp):
        sharded = any(axis in shard.axes for shard in plan.edge.shards)
        if sharded is not (axis in cp or plan.sequence_parallel):
            what = f"{plan.edge.name} is {'' if sharded else 'not '}sharded over {axis}"
            having = "with" if plan.sequence_parallel else "without"
            rule = f"the plan is {having} sequence parallel, which shards what goes between blocks"
            rule = rule if axis in tp else "cp shards what goes between blocks"
            yield Fault(what, rule, "edge.shards", axis=axis)
    if prod(plan.edge.shape) < 1:
        yield Fault(f"{plan.edge.name} has the shape {plan.edge.shape}", "what is sent has elements", "edge.shape")


def _edge(edge: Edge | None) -> str:
    if edge is None:
        return "nothing"
    shards = "".join(f", dim {shard.dim} sharded over {words(shard.axes)}" for shard in edge.shards)
    return f"{edge.name} {edge.shape} {edge.dtype}{shards}"


def _axis(one: Edge | None, two: Edge | None) -> str | None:
    """An axis over which one is sharded and not the other."""
    sets = [{axis for shard in edge.shards for axis in shard.axes} if edge else set() for edge in (one, two)]
    return min(sets[0] ^ sets[1], default=None) if one and two else None


def _schedule(plan: RunPlan) -> Iterator[Fault]:
    table, ranks = plan.schedule, plan.mesh.size("pp")
    if table.num_ranks != ranks:
        what = f"the schedule is for {table.num_ranks} ranks, and pp has {ranks}"
        yield Fault(what, "a schedule has a row for each rank of pp", "schedule", axis="pp", error=ScheduleError)
    if table.num_stages != len(plan.stages):
        what = f"the schedule is for {table.num_stages} stages, and there are {len(plan.stages)}"
        yield Fault(what, "stages are those of the schedule", "schedule", axis="pp", error=ScheduleError)
        return
    for number, stage in enumerate(plan.stages):
        yield from _stage(plan, number, stage)
    try:
        verify_schedule(table, shared=stage_groups(plan.shared_parameters()))
    except ScheduleError as error:
        field = f"schedule, {error.where}" if error.where else "schedule"
        yield Fault(error.what, error.rule, field, fix=error.fix, axis="pp", error=ScheduleError)
        return
    if table.num_ranks > 1 and not table.is_lowered:
        what = "the schedule has computations only, and nothing is sent between its ranks"
        yield Fault(what, "a plan's schedule is lowered", "schedule", axis="pp", error=ScheduleError)
    reduces = any(part.kind is ActionKind.REDUCE for _, _, part in table.positions())
    if (plan.has_units or plan.sums) and not reduces:
        what = "the schedule has no REDUCE, so gradients are never reduced"
        rule = "a stage's gradients are reduced once, after its last backward"
        yield Fault(what, rule, "schedule", axis=min(plan.mesh.in_stage(), default=None), error=ScheduleError)


def _stage(plan: RunPlan, number: int, stage: Stage) -> Iterator[Fault]:
    rank, field = plan.schedule.stage_ranks[number], f"stages[{number}]"
    if stage.pp_rank != rank:
        what = f"stage {number} is on rank {stage.pp_rank} of pp, and in the schedule on {rank}"
        rule = "stages are where the schedule has them"
        yield Fault(what, rule, f"{field}.pp_rank", axis="pp", stages=(number,))
    if stage.splits_backward is not plan.schedule.splits_backward:
        how = "in two parts" if stage.splits_backward else "whole"
        what = f"backward of stage {number} comes {how}, and in the schedule it does not"
        rule = "a stage's backward is split where the schedule splits it"
        yield Fault(what, rule, f"{field}.splits_backward", stages=(number,))
