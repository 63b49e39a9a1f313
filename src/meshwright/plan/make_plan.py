"""Make the run plan from a configuration: stages, kinds, FSDP units, reductions and the schedule.

All layout decisions are made here. `make_kinds` shards parameters according to the family's styles, `make_stages`
makes stages and units, and `pipeline_table` makes the schedule.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache

from meshwright.comm.compression.catalogue import is_lossy
from meshwright.config.facts_for_family import model_facts
from meshwright.config.schema import RunConfig
from meshwright.optim.planned import planned_optimizer
from meshwright.pipeline.schedule_table import Schedule
from meshwright.plan.make_kinds import KindMaker
from meshwright.plan.make_stages import StageMaker
from meshwright.plan.mesh_views import Atoms, Mesh
from meshwright.plan.pipeline_table import lowered_table
from meshwright.plan.run_plan import (
    FORMAT,
    MASTER_DTYPES,
    BatchShape,
    GradientPlacement,
    Kind,
    Loss,
    ReducedBy,
    RunPlan,
    Site,
    Stage,
    StepSum,
)


def make_plan(config: RunConfig, *, nodes: int | tuple[int, ...] | None = None) -> RunPlan:
    """Make the plan of a run.

    Args:
        config: configuration that satisfies all rules.
        nodes: number of consecutive ranks per node, or the node of each rank; None for a single node. Ignored if
            `comm.ranks_per_node` is set.
    """
    return _make_plan(config, config.comm.ranks_per_node or nodes)


@lru_cache(maxsize=8)
def _make_plan(config: RunConfig, nodes: int | tuple[int, ...] | None) -> RunPlan:
    facts, axes, train = model_facts(config), config.mesh.axes(), config.train
    mesh, table = Mesh.of(axes, ep=config.mesh.ep, nodes=nodes), lowered_table(config)
    kind_maker = KindMaker(config, facts, mesh)
    maker = StageMaker(config, facts, mesh, table, kind_maker)
    stages = maker.stages()
    kinds = kind_maker.kinds()
    shared = _shared(kinds, stages)
    data, pipelines = mesh.view("batch") + mesh.view("cp"), ("pp",) if axes.pp > 1 else ()
    return RunPlan(
        format=FORMAT,
        mesh=mesh,
        masters=MASTER_DTYPES[train.precision],
        sequence_parallel=config.mesh.sequence_parallel and axes.tp > 1,
        edge=maker.edge,
        kinds=kinds,
        stages=stages,
        shared=shared,
        norm_omits=tuple((stage, key) for key, sites in shared for stage, _ in sites[1:]),
        sums=_sums(config, mesh, kinds, table),
        loss=Loss(pipelines + data, mesh.view("tp"), units=None),
        batch=BatchShape(
            train.global_batch,
            train.num_microbatches,
            train.global_batch // (axes.data_parallel() * train.num_microbatches),
            facts.tokens,
            packed=config.data.packing != "none",
        ),
        schedule=table,
        optimizer=planned_optimizer(train.optimizer, masters=MASTER_DTYPES[train.precision], moved=train.precision),
    )


def _shared(kinds: tuple[Kind, ...], stages: tuple[Stage, ...]) -> tuple[tuple[str, tuple[Site, ...]], ...]:
    """Return the parameters with copies on several stages, along with their sites."""
    by_name, sites = {kind.name: kind for kind in kinds}, defaultdict(list)
    for number, stage in enumerate(stages):
        for kind in (by_name[name] for name in (*stage.before, *stage.after)):
            for parameter in kind.parameters:
                sites[kind.key(parameter, None)].append((number, kind.full_name(parameter.name, None)))
    return tuple((key, tuple(found)) for key, found in sorted(sites.items()) if len(found) > 1)


def _sums(config: RunConfig, mesh: Mesh, kinds: tuple[Kind, ...], table: Schedule) -> tuple[StepSum, ...]:
    """Return sums for gradients that are partial over tp, and means for replicas that diverge under a lossy codec."""
    tp, train, mean_over = mesh.view("tp"), config.train, mesh.view("batch") + mesh.view("cp")
    wraps = bool(mean_over) or MASTER_DTYPES[train.precision] != train.precision
    reduced = MASTER_DTYPES[train.precision]
    # FSDP2 accumulates gradients over micro-batches, and until deferred ones are computed, in the reduction dtype.
    dtype = reduced if train.num_microbatches > 1 or table.splits_backward else train.precision
    partial = _trained_parameters(kinds, tp, GradientPlacement.PARTIAL)
    found = [StepSum(partial, tp, "sum", ReducedBy.FSDP if wraps else ReducedBy.DTENSOR, dtype)] if partial else []
    if mean_over and (is_lossy(config.comm.gradients) or is_lossy(config.comm.weights)):
        drifting = (*partial, *_trained_parameters(kinds, tp, GradientPlacement.EQUAL))
        if tp and drifting:
            found.append(StepSum(tuple(sorted(drifting)), tp, "mean", ReducedBy.OURS, reduced))
    return tuple(found)


def _trained_parameters(kinds: tuple[Kind, ...], axes: Atoms, gradient: GradientPlacement) -> tuple[str, ...]:
    """Return the trained parameters, as kind/name, whose gradient has this placement along any of the axes."""
    return tuple(
        f"{kind.name}/{parameter.name}"
        for kind in kinds
        for parameter in kind.parameters
        if parameter.trained and any(parameter.gradient(axis) is gradient for axis in axes)
    )
