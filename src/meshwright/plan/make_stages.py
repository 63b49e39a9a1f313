"""Make a plan's stages, with their layers, ends and FSDP units, and the edges between them."""

from __future__ import annotations

from dataclasses import replace

from meshwright.comm.compression.catalogue import EXACT
from meshwright.config.schema import RunConfig
from meshwright.models.contract.model_facts import KindFacts, ModelFacts
from meshwright.pipeline.schedule_table import Schedule
from meshwright.pipeline.split_layers import layer_ranges
from meshwright.plan.make_kinds import KindMaker, largest_matrix
from meshwright.plan.mesh_views import Mesh
from meshwright.plan.pipeline_table import layers_per_stage
from meshwright.plan.run_plan import EXPERTS, Edge, Kind, Shard, Stage, Unit


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
