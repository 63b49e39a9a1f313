"""Verify that stages cover all layers and ends once, edges match between neighbors, and the schedule is valid and
matches the stages."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from meshwright.errors import ScheduleError
from meshwright.pipeline.actions import ActionKind
from meshwright.pipeline.split_layers import stage_groups
from meshwright.pipeline.verify import verify as verify_schedule
from meshwright.plan.run_plan import Edge, RunPlan, Stage
from meshwright.plan.verify.names import PlanError, join_names
from meshwright.units import counted

ONCE = "each block and each end is on one stage, except for ends that are on all stages"


def stage_faults(plan: RunPlan) -> Iterator[PlanError]:
    """Yield faults in stages and their schedule."""
    start = 0
    for number, stage in enumerate(plan.stages):
        first, stop = stage.layers
        if first != start or stop < first:
            what = f"stage {number} has layers {first} to {stop}, but the previous stages end at layer {start}"
            rule = "stages cover all layers once, in order"
            yield PlanError(what, rule, f"stages[{number}].layers", stages=(number,))
        if len(stage.kinds) != stop - first:
            what = f"stage {number} lists {counted(len(stage.kinds), 'kind')} for {counted(stop - first, 'layer')}"
            yield PlanError(what, "each layer has a kind", f"stages[{number}].kinds", stages=(number,))
        start = stop
    yield from _kinds(plan)
    yield from _edges(plan)
    yield from _schedule(plan)


def _kinds(plan: RunPlan) -> Iterator[PlanError]:
    for kind in plan.kinds:
        at = [n for n, stage in enumerate(plan.stages) if kind.name in (*stage.before, *stage.kinds, *stage.after)]
        ends = sum((*stage.before, *stage.after).count(kind.name) for stage in plan.stages)
        missing = tuple(number for number in range(len(plan.stages)) if number not in at)
        field, first = f"kinds[{kind.name}]", next((f"{kind.name}/{p.name}" for p in kind.parameters), None)
        if not kind.is_block and (kind.compiled or kind.recompute != "none"):
            what = f"{kind.name} is an end, but is {'compiled' if kind.compiled else 'recomputed'}"
            yield PlanError(what, "only blocks can be compiled or recomputed", field)
        if not at:
            yield PlanError(f"{kind.name} is on no stage", ONCE, field, parameter=first)
        elif kind.everywhere and missing:
            what = f"{kind.name} must be on every stage, but is missing here"
            yield PlanError(what, ONCE, field, parameter=first, stages=missing)
        elif kind.everywhere and kind.is_block:
            yield PlanError(f"{kind.name} is a block, but marked as an end of all stages", ONCE, f"{field}.everywhere")
        elif not kind.is_block and ends > (len(plan.stages) if kind.everywhere else 1):
            yield PlanError(f"{kind.name} is an end, but occurs {ends} times on stages", ONCE, field, stages=tuple(at))
        for number in at:
            stage = plan.stages[number]
            if (kind.name in stage.kinds) is not kind.is_block or (kind.is_block and ends):
                what = f"{kind.name} is {'a block' if kind.is_block else 'an end'}, but the stage lists it as the other"
                yield PlanError(what, "a block has {layer} in its path, an end does not", field, stages=(number,))
            if kind.compiled and stage.splits_backward:
                what = f"{kind.name} is compiled, but on a stage that splits its backward"
                rule = "a compiled block can't defer the gradients of its weights"
                yield PlanError(what, rule, f"{field}.compiled", stages=(number,))


def _edges(plan: RunPlan) -> Iterator[PlanError]:
    last = len(plan.stages) - 1
    for number, stage in enumerate(plan.stages):
        for edge, name, due in (
            (stage.edge_in, "edge_in", plan.edge if number else None),
            (stage.edge_out, "edge_out", plan.edge if number < last else None),
        ):
            if edge != due:
                other = number - 1 if name == "edge_in" else number + 1
                what = f"stage {number} {'receives' if name == 'edge_in' else 'sends'} {_edge(edge)}, not {_edge(due)}"
                if edge is not None and due is not None:
                    what += f" like stage {other}"
                rule = "a stage receives what the previous one sends; the first receives none, the last sends none"
                yield PlanError(what, rule, f"stages[{number}].{name}", axis=_axis(edge, due), stages=(number,))
    local = list(plan.edge.shape)
    for shard in plan.edge.shards:
        ranks = plan.mesh.size(*shard.axes)
        if local[shard.dim] % ranks:
            over = f"{local[shard.dim]} over {counted(ranks, 'rank')}"
            what = f"{plan.edge.name}: {join_names(shard.axes)} shard dim {shard.dim} of {over}"
            yield PlanError(what, "edges must be sharded evenly", "edge.shards", axis=shard.axes[0])
        local[shard.dim] //= ranks
    cp, tp = plan.mesh.view("cp"), plan.mesh.view("tp") or (("tp",) if plan.sequence_parallel else ())
    for axis in (*cp, *tp):
        sharded = any(axis in shard.axes for shard in plan.edge.shards)
        if sharded is not (axis in cp or plan.sequence_parallel):
            what = f"{plan.edge.name} is {'' if sharded else 'not '}sharded over {axis}"
            having = "with" if plan.sequence_parallel else "without"
            rule = f"the plan is {having} sequence parallelism, which shards the stream between blocks"
            rule = rule if axis in tp else "cp shards the stream between blocks"
            yield PlanError(what, rule, "edge.shards", axis=axis)
    if prod(plan.edge.shape) < 1:
        yield PlanError(f"{plan.edge.name} has shape {plan.edge.shape}", "an edge must not be empty", "edge.shape")


def _edge(edge: Edge | None) -> str:
    if edge is None:
        return "nothing"
    shards = "".join(f", dim {shard.dim} sharded over {join_names(shard.axes)}" for shard in edge.shards)
    return f"{edge.name} {edge.shape} {edge.dtype}{shards}"


def _axis(one: Edge | None, two: Edge | None) -> str | None:
    """Return an axis that shards only one of the two edges, if any."""
    sets = [{axis for shard in edge.shards for axis in shard.axes} if edge else set() for edge in (one, two)]
    return min(sets[0] ^ sets[1], default=None) if one and two else None


def _schedule(plan: RunPlan) -> Iterator[PlanError]:
    table, ranks = plan.schedule, plan.mesh.size("pp")
    if table.num_ranks != ranks:
        what = f"the schedule is for {counted(table.num_ranks, 'rank')}, but pp = {ranks}"
        yield PlanError(what, "a schedule has one row per pp rank", "schedule", axis="pp", error=ScheduleError)
    if table.num_stages != len(plan.stages):
        what = f"the schedule is for {counted(table.num_stages, 'stage')}, but the plan has {len(plan.stages)}"
        yield PlanError(what, "the stages must match the schedule", "schedule", axis="pp", error=ScheduleError)
        return
    for number, stage in enumerate(plan.stages):
        yield from _stage(plan, number, stage)
    try:
        verify_schedule(table, shared=stage_groups(plan.shared_parameters()))
    except ScheduleError as error:
        field = f"schedule, {error.where}" if error.where else "schedule"
        yield PlanError(error.what, error.rule, field, fix=error.fix, axis="pp", error=ScheduleError)
        return
    if table.num_ranks > 1 and not table.is_lowered:
        what = "the schedule has only computations, and no sends between its ranks"
        yield PlanError(what, "a plan's schedule is lowered", "schedule", axis="pp", error=ScheduleError)
    reduces = any(part.kind is ActionKind.REDUCE for _, _, part in table.positions())
    if (plan.has_units or plan.sums) and not reduces:
        what = "the schedule has no REDUCE, so gradients are never reduced"
        rule = "a stage's gradients are reduced once, after its last backward"
        yield PlanError(what, rule, "schedule", axis=min(plan.mesh.in_stage(), default=None), error=ScheduleError)


def _stage(plan: RunPlan, number: int, stage: Stage) -> Iterator[PlanError]:
    rank, field = plan.schedule.stage_ranks[number], f"stages[{number}]"
    if stage.pp_rank != rank:
        what = f"stage {number} is on pp rank {stage.pp_rank}, but on {rank} in the schedule"
        rule = "stages are on the ranks that the schedule assigns"
        yield PlanError(what, rule, f"{field}.pp_rank", axis="pp", stages=(number,))
    if stage.splits_backward is not plan.schedule.splits_backward:
        splits = "splits" if stage.splits_backward else "does not split"
        what = f"stage {number} {splits} its backward, unlike the schedule"
        rule = "a stage must split its backward if and only if the schedule does"
        yield PlanError(what, rule, f"{field}.splits_backward", stages=(number,))
