"""Make the run plan from a configuration: stages, kinds, FSDP units, reductions and the schedule.

All layout decisions are made here. `make_kinds` shards parameters according to the family's styles, `make_stages`
makes stages and units, and `pipeline_table` makes the schedule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache

from meshwright.comm.compression.catalogue import EXACT, is_lossy
from meshwright.config.facts_for_family import model_facts, model_version
from meshwright.config.schema import RunConfig
from meshwright.models.contract.model_facts import KindFacts, ModelFacts
from meshwright.optim.planned import planned_optimizer
from meshwright.pipeline.schedule_table import Schedule
from meshwright.pipeline.split_layers import layer_ranges
from meshwright.plan.make_kinds import KindMaker, largest_matrix
from meshwright.plan.pipeline_table import layers_per_stage, lowered_table
from meshwright.plan.run_plan import (
    EXPERTS,
    FORMAT,
    MASTER_DTYPES,
    Atoms,
    BatchShape,
    Edge,
    GradientPlacement,
    Kind,
    Loss,
    Mesh,
    ReducedBy,
    RunPlan,
    Shard,
    Site,
    Stage,
    StepSum,
    Unit,
)


def make_plan(config: RunConfig, *, nodes: int | tuple[int, ...] | None = None) -> RunPlan:
    """Make the plan of a run.

    Args:
        config: configuration that satisfies all rules.
        nodes: number of consecutive ranks per node, or the node of each rank; None for a single node. Ignored if
            `comm.ranks_per_node` is set.
    """
    return _make_plan(config, model_version(config), config.comm.ranks_per_node or nodes)


@lru_cache(maxsize=8)
def _make_plan(config: RunConfig, version: Hashable, nodes: int | tuple[int, ...] | None) -> RunPlan:
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


class StageMaker:
    """Factory that splits a model into stages."""

    def __init__(
        self, config: RunConfig, facts: ModelFacts, mesh: Mesh, table: Schedule, kind_maker: KindMaker
    ) -> None:
        self._config, self._facts, self._mesh, self._table, self._kind_maker = config, facts, mesh, table, kind_maker
        self.edge = self._stream()
        """Tensor sent between stages."""

    def stages(self) -> tuple[Stage, ...]:
        """Return the stages in model order."""
        ranges = layer_ranges(layers_per_stage(self._config))
        return tuple(self._stage(number, layers) for number, layers in enumerate(ranges))

    def _stage(self, number: int, layers: range) -> Stage:
        facts, last = self._facts, self._table.num_stages - 1
        firsts, lasts = facts.first if number == 0 else (), facts.last if number == last else ()
        before = [self._end(kind, firsts, lasts, layers) for kind in firsts]
        before += [self._kind_maker.kind(kind, None) for kind in facts.every]
        blocks = [self._kind_maker.kind(facts.kind_of(n), n, units=self._block_units(facts.kind_of(n))) for n in layers]
        after = [self._end(kind, firsts, lasts, layers) for kind in lasts]
        return Stage(
            pp_rank=self._table.stage_ranks[number],
            layers=(layers.start, layers.stop),
            kinds=tuple(kind.name for kind in blocks),
            before=tuple(kind.name for kind in before),
            after=tuple(kind.name for kind in after),
            root=self._root([*before, *blocks, *after]),
            edge_in=self.edge if number else None,
            edge_out=self.edge if number < last else None,
            splits_backward=self._table.splits_backward,
        )

    def _end(
        self, facts: KindFacts, firsts: tuple[KindFacts, ...], lasts: tuple[KindFacts, ...], layers: range
    ) -> Kind:
        """Return an end. Its vocabulary gets its own unit only if larger than a block; a smaller one isn't worth a
        separate collective. Parameters tied within a stage stay in the root unit, which covers both modules."""
        names = {p.name for kind in (*firsts, *lasts, *self._facts.every) for p in kind.parameters}
        untied = any(p.tied_to in names for p in facts.parameters)
        targets = {p.tied_to for kind in (*firsts, *lasts) for p in kind.parameters}
        is_tied = untied or any(p.name in targets for p in facts.parameters)
        block = max((self._facts.kind_of(n).num_elements for n in layers), default=0)
        units: tuple[Unit, ...] = ()
        if facts.unit and not is_tied and largest_matrix(facts) > block:
            is_lookup = all(p.role.value == "embedding" for p in facts.parameters)
            # The backward starts with the last unit, so keep it unsharded. A lookup's backward needs no weights.
            is_last = facts in lasts
            units = (self._unit(facts.name, facts.unit, freed=None if not is_last else False, backward=not is_lookup),)
        return self._kind_maker.kind(facts, None, untied=untied, units=units)

    def _block_units(self, facts: KindFacts) -> tuple[Unit, ...]:
        """Return the units of a block. Experts that ep shards are stored on fewer ranks, so they form a unit inside the
        block's, and their forward ends first."""
        block, ep = self._unit("block", ("",)), self._mesh.view("ep")
        if facts.experts is None or not ep:
            return (block,)
        sharded = tuple(axis for axis in block.sharded if axis not in ep)
        experts = replace(block, name=EXPERTS, modules=(facts.experts.experts,), sharded=sharded)
        if not sharded and not block.replicas:
            experts = replace(experts, gradients=EXACT, weights=EXACT)  # nothing is sent
        return experts, block

    def _unit(self, name: str, modules: tuple[str, ...], *, freed: bool | None = None, backward: bool = True) -> Unit:
        comm, mesh, train = self._config.comm, self._mesh, self._config.train
        if freed is None:
            kept = comm.secondary_shards or self._config.mesh.reshard_after_forward
        return Unit(
            name=name,
            modules=modules,
            parameters=(),
            sharded=mesh.view("fsdp"),
            replicas=mesh.view("replicas"),
            freed=kept if freed is None else freed,
            in_backward=backward,
            compute=train.precision,
            reduce="float32" if train.precision == "bfloat16" else train.precision,
            gradients=comm.gradients,
            weights=comm.weights,
            inside_node=comm.inside_node,
        )

    def _root(self, kinds: list[Kind]) -> Unit:
        """Return the root unit, which holds all parameters that are not in another unit."""
        left = [
            f"{kind.name}/{parameter.name}"
            for kind in dict.fromkeys(kinds)
            for parameter in kind.parameters
            if not any(parameter.name in unit.parameters for unit in kind.units)
        ]
        unit = self._unit("root", ("",), freed=False)
        return replace(unit, parameters=tuple(left))

    def _stream(self) -> Edge:
        facts, axes = self._facts.edge, self._mesh.view("cp")
        if self._config.mesh.sequence_parallel:
            axes += self._mesh.view("tp")
        shards = () if not axes or facts.sequence_dim is None else (Shard(facts.sequence_dim, axes),)
        return Edge(facts.name, facts.shape, self._config.train.precision, shards)
