"""Make the run plan from a configuration: stages, FSDP units, reductions, and the schedule with its split of layers.

All layout decisions are made here and in `make_kinds`, which shards parameters according to the family's styles. These
are pure functions of the configuration, so the launcher, ranks and plan always agree.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from meshwright.comm.compression.catalogue import EXACT, is_lossy
from meshwright.config.facts_for_family import model_facts, model_version
from meshwright.config.schema import RunConfig
from meshwright.errors import ScheduleError
from meshwright.models.contract.model_facts import KindFacts, ModelFacts
from meshwright.optim.catalogue import planned_optimizer
from meshwright.pipeline.generate import generate, one_f_one_b
from meshwright.pipeline.lower import LowerOptions, lower
from meshwright.pipeline.schedule_table import Schedule, single_stage
from meshwright.pipeline.split_layers import balance_layers, layer_ranges
from meshwright.pipeline.verify import verify
from meshwright.plan.make_kinds import KindMaker
from meshwright.plan.run_plan import (
    EXPERTS,
    FORMAT,
    MASTER_DTYPES,
    Atoms,
    BatchShape,
    Edge,
    GradientPlacement,
    LayerSpec,
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


def make_plan(config: RunConfig, *, nodes: int | tuple[int, ...] | None = None, checked: bool = True) -> RunPlan:
    """Make the plan of a run.

    Args:
        config: configuration that satisfies all rules.
        nodes: number of consecutive ranks per node, or the node of each rank; None for a single node. Ignored if
            `comm.ranks_per_node` is set.
        checked: whether to verify the schedule's table; a search leaves that to those who use its result.
    """
    return _make_plan(config, model_version(config), config.comm.ranks_per_node or nodes, checked)


@lru_cache(maxsize=8)
def _make_plan(config: RunConfig, version: Hashable, nodes: int | tuple[int, ...] | None, checked: bool) -> RunPlan:
    facts = model_facts(config)
    mesh, table = Mesh.of(config.mesh.axes(), ep=config.mesh.ep, nodes=nodes), lowered_table(config, checked=checked)
    ranges = layer_ranges(layers_per_stage(config))
    parts = [(layers, stage == 0, stage == len(ranges) - 1) for stage, layers in enumerate(ranges)]
    return _assemble(config, facts, mesh, table, parts)


StageParts = tuple[Sequence[int], bool, bool]
"""Layers of a stage, and whether the ends before and after them are on it."""


def make_stages(config: RunConfig, parts: Sequence[StageParts], facts: ModelFacts, *, nodes: int) -> RunPlan:
    """Make a plan of given stages of a model, one a pipeline rank, in place of those that a run has, to price them. A
    layer may be given several times, and the schedule has computations only."""
    mesh = Mesh.of(replace(config.mesh.axes(), pp=len(parts)), ep=config.mesh.ep, nodes=nodes)
    table = one_f_one_b(len(parts), config.train.num_microbatches)
    return _assemble(config, facts, mesh, table, parts)


def _assemble(
    config: RunConfig, facts: ModelFacts, mesh: Mesh, table: Schedule, parts: Sequence[StageParts]
) -> RunPlan:
    axes, train = config.mesh.axes(), config.train
    maker = _StageMaker(config, facts, mesh, table)
    stages = maker.stages(parts)
    kinds = maker.kind_maker.kinds()
    shared = _shared(kinds, stages)
    data, pipelines = mesh.view("batch") + mesh.view("cp"), ("pp",) if mesh.sizes["pp"] > 1 else ()
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
        libraries=config.family.library_bytes,
    )


def _shared(kinds: tuple[LayerSpec, ...], stages: tuple[Stage, ...]) -> tuple[tuple[str, tuple[Site, ...]], ...]:
    """Return the parameters with copies on several stages, along with their sites."""
    by_name, sites = {kind.name: kind for kind in kinds}, defaultdict(list)
    for number, stage in enumerate(stages):
        for kind in (by_name[name] for name in (*stage.before, *stage.after)):
            for parameter in kind.parameters:
                sites[kind.key(parameter, None)].append((number, kind.full_name(parameter.name, None)))
    return tuple((key, tuple(found)) for key, found in sorted(sites.items()) if len(found) > 1)


def _sums(config: RunConfig, mesh: Mesh, kinds: tuple[LayerSpec, ...], table: Schedule) -> tuple[StepSum, ...]:
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


def _trained_parameters(kinds: tuple[LayerSpec, ...], axes: Atoms, gradient: GradientPlacement) -> tuple[str, ...]:
    """Return the trained parameters, as kind/name, whose gradient has this placement along any of the axes."""
    return tuple(
        f"{kind.name}/{parameter.name}"
        for kind in kinds
        for parameter in kind.parameters
        if parameter.trained and any(parameter.gradient(axis) is gradient for axis in axes)
    )


class _StageMaker:
    """Factory that splits a model into stages."""

    def __init__(self, config: RunConfig, facts: ModelFacts, mesh: Mesh, table: Schedule) -> None:
        self._config, self._facts, self._mesh, self._table = config, facts, mesh, table
        self.kind_maker = KindMaker(config, facts, mesh)
        axes = mesh.view("cp") + (mesh.view("tp") if config.mesh.sequence_parallel else ())
        one = facts.edge
        shards = () if not axes or one.sequence_dim is None else (Shard(one.sequence_dim, axes),)
        self.edge = Edge(one.name, one.sent, config.train.precision, shards)
        """Tensor sent between stages."""

    def stages(self, parts: Sequence[StageParts]) -> tuple[Stage, ...]:
        """Return the stages in model order."""
        return tuple(self._stage(number, *part) for number, part in enumerate(parts))

    def _stage(self, number: int, layers: Sequence[int], is_first: bool, is_last: bool) -> Stage:
        facts, last = self._facts, self._table.num_stages - 1
        firsts, lasts = facts.first if is_first else (), facts.last if is_last else ()
        before = [self._end(kind, firsts, lasts, layers) for kind in firsts]
        before += [self.kind_maker.kind(kind, None) for kind in facts.every]
        blocks = [self.kind_maker.kind(facts.kind_of(n), n, units=self._block_units(facts.kind_of(n))) for n in layers]
        after = [self._end(kind, firsts, lasts, layers) for kind in lasts]
        return Stage(
            pp_rank=self._table.stage_ranks[number],
            layers=(layers.start, layers.stop) if isinstance(layers, range) else (layers[0], layers[0] + len(layers)),
            kinds=tuple(kind.name for kind in blocks),
            before=tuple(kind.name for kind in before),
            after=tuple(kind.name for kind in after),
            root=self._root([*before, *blocks, *after]),
            edge_in=self.edge if number else None,
            edge_out=self.edge if number < last else None,
            splits_backward=self._table.splits_backward,
        )

    def _end(
        self, facts: KindFacts, firsts: tuple[KindFacts, ...], lasts: tuple[KindFacts, ...], layers: Sequence[int]
    ) -> LayerSpec:
        """Return an end. Its vocabulary gets its own unit only if larger than a block; a smaller one isn't worth a
        separate collective. Parameters tied within a stage stay in the root unit, which covers both modules."""
        names = {p.name for kind in (*firsts, *lasts, *self._facts.every) for p in kind.parameters}
        untied = any(p.tied_to in names for p in facts.parameters)
        targets = {p.tied_to for kind in (*firsts, *lasts) for p in kind.parameters}
        is_tied = untied or any(p.name in targets for p in facts.parameters)
        block = max((self._facts.kind_of(n).num_elements for n in layers), default=0)
        units: tuple[Unit, ...] = ()
        if facts.unit and not is_tied and max((math.prod(p.shape) for p in facts.parameters), default=0) > block:
            is_lookup = all(p.role.value == "embedding" for p in facts.parameters)
            # The backward starts with the last unit, so keep it unsharded. A lookup's backward needs no weights.
            is_last = facts in lasts
            units = (self._unit(facts.name, facts.unit, freed=None if not is_last else False, backward=not is_lookup),)
        return self.kind_maker.kind(facts, None, untied=untied, units=units)

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

    def _unit(self, name: str, modules: tuple[str, ...], *, freed: int | None = None, backward: bool = True) -> Unit:
        comm, mesh, train = self._config.comm, self._mesh, self._config.train
        if freed is None:
            freed = comm.secondary_shards or self._config.mesh.reshard_after_forward
        return Unit(
            name=name,
            modules=modules,
            parameters=(),
            sharded=mesh.view("fsdp"),
            replicas=mesh.view("replicas"),
            freed=freed,
            in_backward=backward,
            compute=train.precision,
            reduce="float32" if train.precision == "bfloat16" else train.precision,
            gradients=comm.gradients,
            weights=comm.weights,
            inside_node=comm.inside_node,
        )

    def _root(self, kinds: list[LayerSpec]) -> Unit:
        """Return the root unit, which holds all parameters that are not in another unit."""
        left = [
            f"{kind.name}/{parameter.name}"
            for kind in {kind.name: kind for kind in kinds}.values()
            for parameter in kind.parameters
            if not any(parameter.name in unit.parameters for unit in kind.units)
        ]
        return replace(self._unit("root", ("",), freed=False), parameters=tuple(left))


def is_table_file(schedule: str) -> bool:
    """Return whether `pipeline.schedule` is the path of a table file rather than the name of a schedule."""
    return "/" in schedule or schedule.endswith(".csv")


def has_stages(config: RunConfig) -> bool:
    """Return whether the model is split into several stages, across ranks or as chunks on one rank."""
    return config.mesh.pp > 1 or (config.pipeline.chunks or 1) > 1


def schedule_name(config: RunConfig) -> str:
    """Return `pipeline.schedule` with `auto` resolved."""
    if config.pipeline.schedule != "auto":
        return config.pipeline.schedule
    return "interleaved" if (config.pipeline.chunks or 1) > 1 else "1f1b"


def compute_table(config: RunConfig) -> Schedule:
    """Return the schedule before lowering; without pipeline parallelism, it has a single stage.

    Raises:
        ScheduleError: the schedule is unknown, or its file is invalid.
    """
    if not has_stages(config):
        return single_stage(config.train.num_microbatches)
    chosen = schedule_name(config)
    if is_table_file(chosen):
        return read_table(chosen)
    return _generated(chosen, config.mesh.pp, config.train.num_microbatches, config.pipeline.chunks)


@lru_cache(maxsize=8)
def _generated(kind: str, num_stages: int, num_microbatches: int, num_chunks: int | None) -> Schedule:
    return generate(kind, num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks)


def read_table(path: str) -> Schedule:
    """Read and verify a schedule from a CSV file.

    Raises:
        ScheduleError: the file can't be read, is not a schedule, or fails verification.
    """
    try:
        source = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"can't read {path}: {getattr(error, 'strerror', None) or error}"
        rule = "a schedule is a name or the path to a CSV table"
        raise ScheduleError(what, where="pipeline.schedule", rule=rule, fix="pipeline.schedule=1f1b") from None
    table = Schedule.from_csv(source, where=path, kind=path)
    try:
        verify(table)
    except ScheduleError as error:
        raise ScheduleError(error.what, where=f"{path}, {error.where}", rule=error.rule, fix=error.fix) from None
    return table


def layers_per_stage(config: RunConfig) -> tuple[int, ...]:
    """Return the number of layers per stage, as configured or balanced by FLOPs including the ends.

    FLOPs are those of samples that are one document. Packed ones take fewer, by as much in each block with the same
    mask, so blocks are overrated beside the ends.

    Raises:
        ScheduleError: there are more stages than layers.
    """
    if config.pipeline.layers_per_stage is not None and has_stages(config):
        return config.pipeline.layers_per_stage
    facts = model_facts(config)
    return balance_layers(
        [facts.kind_of(layer).flops for layer in range(facts.num_layers)],
        compute_table(config).num_stages,
        before=sum(kind.flops for kind in facts.first),
        after=sum(kind.flops for kind in facts.last),
        allow_empty=config.pipeline.allow_empty_stages,
    )


def lowered_table(config: RunConfig, *, checked: bool = True) -> Schedule:
    """Return the lowered schedule that a run executes, verified unless said otherwise."""
    table, mesh = compute_table(config), config.mesh
    reduces = mesh.axes().num_ranks() > mesh.pp or config.train.precision == "bfloat16"
    options = LowerOptions(
        release=config.pipeline.release,
        reduces=reduces,
        keeps_unsharded=reduces and has_stages(config) and not mesh.reshard_after_forward,
        shared=_shared_stages(config, table.num_stages),
    )
    lowered = lower(table, options)
    if checked:
        verify(lowered, shared=options.shared)
    return lowered


def _shared_stages(config: RunConfig, num_stages: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of stages that share parameters: all stages if the family has ends on every stage, and the
    first and last if parameters are tied to some that only the first has."""
    if num_stages == 1:
        return ()
    facts = model_facts(config)
    on_every = {parameter.name for kind in facts.every for parameter in kind.parameters}
    groups = {tuple(range(num_stages))} if on_every else set()
    if {parameter.tied_to for kind in facts.last for parameter in kind.parameters} - {None, *on_every}:
        groups.add((0, num_stages - 1))
    return tuple(sorted(groups))
