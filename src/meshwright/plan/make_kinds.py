"""Make a plan's kinds from a family's description and styles: how tensor parallelism shards each parameter, over which
axes its gradient is partial, and which collectives its operators run.

With sequence parallelism, the inputs of column-parallel layers are all-gathered and the outputs of row-parallel layers
reduce-scattered, and vice versa in the backward; without it, both become all-reduces (Korthikanti et al. 2022).

The bytes that a kind keeps between forward and backward, under each recomputation policy, come from the family's
description, the collectives of its styles and the dispatch to its experts. Counted are the tensors that autograd saves
on the CPU, where attention and norms run as in eager mode on a GPU, except that GPUs fuse RMS norms, which then save no
normalized input. Parameters, and tables that all blocks share, such as rotary angles, are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from meshwright.config.facts_for_family import run_facts
from meshwright.config.resolve import policy_of
from meshwright.config.schema import RunConfig
from meshwright.errors import LayoutError
from meshwright.features.contract import KindPart, PlanFeature
from meshwright.features.registry import plan_features
from meshwright.models.contract.model_facts import (
    AuxiliaryLoss,
    BufferFacts,
    KindFacts,
    ModelFacts,
    ParameterFacts,
    Role,
    Saved,
)
from meshwright.models.contract.tp_styles import LossReductions, Style, StyleKind
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.plan.make_operators import OperatorMaker
from meshwright.plan.run_plan import (
    BYTES,
    Atoms,
    AttentionLayer,
    Auxiliary,
    Buffer,
    Collective,
    ContextMethod,
    ExpertLayer,
    LayerSpec,
    Mesh,
    Parameter,
    PlannedOperator,
    SavedBytes,
    Shard,
    Unit,
)

TENSOR = "tensor"
SHARDED_DIM = {StyleKind.COLUMN: 0, StyleKind.ROW: 1, StyleKind.VOCABULARY: 0, StyleKind.HEAD: 0}
"""Sharded dim of the weight, by style."""


class KindMaker:
    """Factory that makes each kind once; blocks with different frozen parameters or policies become different kinds."""

    def __init__(self, config: RunConfig, facts: ModelFacts, mesh: Mesh) -> None:
        self._config, self._facts, self._mesh = config, facts, mesh
        self._tp, self._ep, self._cp = mesh.view("tp"), mesh.view("ep"), mesh.view("cp")
        self._tp_size, self._data = mesh.size(*self._tp), mesh.view("batch") + self._cp
        self._styles = config.family.styles(run_facts(config)) if self._tp else {}
        drops = facts.has_dropout and config.train.dropout > 0
        if drops and not config.train.compile:  # a recomputed forward runs to its end
            kept = [{path: replace(one, kept=True) for path, one in found.items()} for found in self._styles.values()]
            self._styles = dict(zip(self._styles, kept, strict=True))
        self._shards_stream = bool(self._tp) and config.mesh.sequence_parallel
        self._tokens = facts.tokens // mesh.size(*self._cp)
        """Tokens per sample in a tp group."""
        self._dtype, self._features = config.train.precision, plan_features(config=config)
        self._operators = OperatorMaker(
            facts,
            mesh,
            dtype=self._dtype,
            tokens=self._tokens,
            stream=1 / self._tp_size if self._shards_stream else 1.0,
            drops=drops,
        )
        self._kinds: dict[tuple[object, ...], LayerSpec] = {}

    def kinds(self) -> tuple[LayerSpec, ...]:
        """Return all kinds in order of first use."""
        return tuple(self._kinds.values())

    def kind(
        self, facts: KindFacts, layer: int | None, *, untied: bool = False, units: tuple[Unit, ...] = ()
    ) -> LayerSpec:
        """Return the kind of a block or an end.

        Args:
            facts: the family's description.
            layer: index of the block, or None for an end.
            untied: whether to omit tied parameters because their targets are on the same stage.
            units: FSDP units of the kind; all other parameters belong to the root.
        """
        globs = self._config.train.freeze
        trained = tuple(
            not (p.frozen or any(fnmatchcase(p.tied_to or facts.full_name(p.name, layer), one) for one in globs))
            for p in facts.parameters
        )
        omitted = [untied and p.tied_to is not None for p in facts.parameters]
        policy = RecomputePolicy.NONE if layer is None else policy_of(self._config.recompute, layer)
        made = [(one, one.make(self._config, self._facts, facts, layer)) for one in self._features]
        parts = tuple(part for _, part in made if part is not None)
        identity = (facts.name, facts.path, trained, untied, units, policy, *parts)
        if identity not in self._kinds:
            taken = sum(kind.described == facts.name for kind in self._kinds.values())
            used = [self._parameter(facts, p, one) for p, one in zip(facts.parameters, trained, strict=True)]
            parameters = tuple(one for one, out in zip(used, omitted, strict=True) if not out)
            experts = self._experts(facts)
            collectives = tuple(self._kind_collectives(facts, LossReductions.of(parts))) if self._tp else ()
            compiled = self._config.train.compile and layer is not None
            changes = self._changes(facts, made, compiled)
            attention = self._attention(facts, policy)
            operators = self._operators.of_kind(facts, used, experts, attention, compiled=compiled)
            self._kinds[identity] = LayerSpec(
                name=f"{facts.name}.{taken + 1}" if taken else facts.name,
                described=facts.name,
                path=facts.path,
                parameters=parameters,
                units=_with_members(units, parameters),
                buffers=tuple(self._buffer(facts, one) for one in facts.buffers),
                styles=tuple(self._styles.get(facts.name, {}).items()),
                collectives=collectives,
                auxiliary=tuple(
                    Auxiliary(one.name, self._cp + self._loss_axes(one), one.in_region, one.num_counts)
                    for one in facts.auxiliary
                ),
                recompute=policy,
                compiled=compiled,
                saved=self._saved(facts, experts, collectives, changes, operators, compiled=compiled),
                output_elements=int(self._tokens * (facts.output / (self._tp_size if facts.output_divided else 1))),
                experts=experts,
                attention=attention,
                operators=self._changed(facts, made, operators),
                parts=parts,
                tied=tuple(p.name for p, out in zip(facts.parameters, omitted, strict=True) if out),
                everywhere=facts in self._facts.every,
            )
        return self._kinds[identity]

    def _changes(
        self, facts: KindFacts, made: list[tuple[PlanFeature[Any], KindPart | None]], compiled: bool
    ) -> list[Saved]:
        """Return what features change about the tensors that a kind saves."""
        found = ((feature, part) for feature, part in made if part is not None)
        return [
            saved
            for feature, part in found
            for saved in feature.saved(facts, part, tp=self._tp_size, compiled=compiled)
        ]

    def _changed(
        self,
        facts: KindFacts,
        made: list[tuple[PlanFeature[Any], KindPart | None]],
        operators: tuple[PlannedOperator, ...],
    ) -> tuple[PlannedOperator, ...]:
        """Return the operators of a kind with features; those of an unknown kind stay unknown."""
        config = self._config
        samples = config.train.global_batch // (config.mesh.axes().data_parallel() * config.train.num_microbatches)
        for feature, part in made if operators else ():
            if part is not None:
                operators = feature.operators(facts, part, operators, samples=samples)
        return operators

    def _loss_axes(self, loss: AuxiliaryLoss) -> Atoms:
        """Return the tp axis if an auxiliary loss is partial over it."""
        return self._tp if loss.in_region or (loss.on_stream and self._shards_stream) else ()

    def _experts(self, facts: KindFacts) -> ExpertLayer | None:
        layer = facts.experts
        if layer is None:
            return None
        return ExpertLayer(
            layer.module,
            layer.experts,
            layer.num_experts,
            layer.top_k,
            layer.width,
            axes=self._ep,
            counted=self._data if layer.over_batch else (),
            sample_counted=self._cp if layer.over_sample else (),
            num_groups=layer.num_groups,
            top_groups=layer.top_groups,
            capacity=layer.capacity,
            uniform=layer.uniform,
        )

    def _attention(self, facts: KindFacts, policy: RecomputePolicy) -> AttentionLayer | None:
        one = facts.attention
        if one is None:
            return None
        layer = AttentionLayer(one.module, one.mask, one.num_heads, one.num_kv_heads, one.head_dim, axes=self._cp)
        if not self._cp:
            return layer
        if self._config.mesh.cp_method != "auto":
            return replace(layer, method=ContextMethod(self._config.mesh.cp_method))
        from meshwright.plan.context.layers import method_of  # only where cp shards tokens

        recompute, packed = policy is RecomputePolicy.FULL, self._config.data.packing != "none"
        method = method_of(layer, self._facts, self._mesh, dtype=self._dtype, packed=packed, recompute=recompute)
        return replace(layer, method=method)

    def _style_of(self, facts: KindFacts, name: str) -> Style | None:
        """Return the style of the module that owns a parameter or buffer."""
        module = name.rpartition(".")[0]
        styles = self._styles.get(facts.name, {})
        return next((style for glob, style in styles.items() if fnmatchcase(module, glob)), None)

    def _parameter(self, facts: KindFacts, one: ParameterFacts, trained: bool) -> Parameter:
        # A tied parameter has the role of what it is tied to, or copies on two stages would diverge.
        role = one.role if one.tied_to is None else dict(self._facts.named_parameters())[one.tied_to].role
        style = self._style_of(facts, one.name)
        kind = None if style is None else style.kind
        used: tuple[Shard, ...] = ()
        if kind in SHARDED_DIM:
            is_bias = len(one.shape) == 1
            # The bias of a row-parallel layer is added after the reduction, so it is replicated.
            used = () if is_bias and kind is StyleKind.ROW else (Shard(0 if is_bias else SHARDED_DIM[kind], self._tp),)
        if style is not None and kind is StyleKind.LOCAL:
            dim = dict(style.dims).get(one.name.rpartition(".")[2])
            used = () if dim is None else (Shard(dim, self._tp),)
        if kind is StyleKind.EXPERTS:
            used = (Shard(0, self._tp),)
        is_sent = facts.experts is not None and one.name.startswith(f"{facts.experts.experts}.")
        """Whether tokens are sent to it: experts' biases have the role vector."""
        if is_sent and self._ep:
            used = (Shard(0, self._ep), *used)
        data = tuple(axis for axis in self._data if not is_sent or axis not in self._ep)
        is_partial = self._has_sharded_input(kind) or (kind is StyleKind.LOCAL and not used)
        work = data + (self._tp if is_partial else ())
        stored = self._stored_dim(one, used) if is_sent or role is Role.EXPERTS else 0
        return Parameter(one.name, one.shape, role.value, used, work, stored, trained=trained, key=one.tied_to)

    def _stored_dim(self, one: ParameterFacts, used: tuple[Shard, ...]) -> int:
        """Return the dim of experts that FSDP shards: the first one that is even, since there may be fewer experts than
        ranks; dim 0 if there is none, which FSDP2 pads."""
        ranks = self._mesh.size(*(axis for axis in self._mesh.view("fsdp") if axis not in self._ep))
        local = list(one.shape)
        for shard in used:
            local[shard.dim] //= self._mesh.size(*shard.axes)
        return next((dim for dim, size in enumerate(local) if size % ranks == 0), 0)

    def _has_sharded_input(self, kind: StyleKind | None) -> bool:
        """Return whether the input of a module with replicated parameters is sharded over tp."""
        return kind is StyleKind.DIVIDED or (kind is StyleKind.STREAM and self._shards_stream)

    def _buffer(self, facts: KindFacts, one: BufferFacts) -> Buffer:
        style = self._style_of(facts, one.name)
        parts = self._tp if self._has_sharded_input(None if style is None else style.kind) else ()
        work = self._data + parts if one.updated else ()
        return Buffer(one.name, one.shape, one.dtype, work=work, summed=work, saved=one.saved, load=one.load)

    def _kind_collectives(self, facts: KindFacts, reductions: LossReductions) -> Iterator[Collective]:
        """Yield the collectives implied by a kind's styles, module by module."""
        styles, stream = self._styles.get(facts.name, {}), self._facts.edge.shape[-1]
        gathering = [path for path, style in styles.items() if style.kind is StyleKind.GATHER]
        for path, style in styles.items():
            if style.kind is StyleKind.REGION:
                yield from self._gather_input(stream)
                yield from self._reduce_output(stream, recomputed=style.kept)
            elif style.kind is StyleKind.GATHER:
                inside = [p for p in facts.parameters if fnmatchcase(p.name, f"{path}.*") and len(p.shape) == 2]
                found = [(p, self._style_of(facts, p.name)) for p in inside]
                columns = [p for p, one in found if one is not None and one.kind is StyleKind.COLUMN]
                if not columns:
                    rule = "gather() applies to modules that contain column-parallel layers"
                    raise _style_without_matrix(facts, path, rule, "no column-parallel layer inside")
                yield from self._gather_input(columns[0].shape[1])
            elif style.kind is StyleKind.EXPERTS:
                yield from self._gather_input(stream)
                yield from self._gather_input(style.top_k)
                yield from self._reduce_output(stream, recomputed=style.kept)
            else:
                yield from self._matrix_collectives(facts, path, style, gathering, reductions)

    def _matrix_collectives(
        self, facts: KindFacts, path: str, style: Style, gathering: list[str], reductions: LossReductions
    ) -> Iterator[Collective]:
        """Yield the collectives of a module with a weight matrix; `gathering` modules gather the input of others."""
        for width in (style.partial_tail, style.summed_input):
            if width:
                yield from self._gather_input(width)
        if style.reduced_output:
            yield from self._reduce_output(style.reduced_output, recomputed=style.kept)
        weights = [p for p in facts.parameters if fnmatchcase(p.name, f"{path}.weight") and len(p.shape) == 2]
        if style.kind in SHARDED_DIM and not weights:
            rule = f"the style {style.kind.value} applies to modules with a weight matrix"
            raise _style_without_matrix(facts, path, rule, "no weight matrix")
        for weight in weights:
            if style.kind is StyleKind.HEAD:
                yield from self._gather_input(weight.shape[1])
                dtype = "float32" if self._dtype == "bfloat16" else self._dtype
                for values, times in Counter(reductions.values).items():
                    found = self._collective("all_reduce", values, dtype, forward=times)
                    yield replace(found, tokens=reductions.tokens)
            elif style.kind in (StyleKind.ROW, StyleKind.VOCABULARY):
                width = weight.shape[0 if style.kind is StyleKind.ROW else 1]
                yield from self._reduce_output(width, recomputed=style.kept)
                if style.gathered:
                    yield self._collective("all_gather", weight.shape[1], backward=1)
            elif style.kind is StyleKind.COLUMN and not any(fnmatchcase(weight.name, f"{g}.*") for g in gathering):
                yield from self._gather_input(weight.shape[1])  # the head gathers its own input
                if style.gathered:
                    yield self._collective("all_gather", weight.shape[0], forward=1, recomputed=1)

    def _gather_input(self, width: int) -> Iterator[Collective]:
        """Yield the collectives that gather an input from the stream."""
        if self._shards_stream:
            yield self._collective("all_gather", width, forward=1, recomputed=1)
            yield self._collective("reduce_scatter", width, backward=1)
        else:
            yield self._collective("all_reduce", width, backward=1)

    def _reduce_output(self, width: int, *, recomputed: bool) -> Iterator[Collective]:
        """Yield the collectives that reduce an output into the stream."""
        op = "reduce_scatter" if self._shards_stream else "all_reduce"
        yield self._collective(op, width, forward=1, recomputed=int(recomputed))
        if self._shards_stream:
            yield self._collective("all_gather", width, backward=1)

    def _collective(
        self, op: str, width: int, dtype: str | None = None, *, forward: int = 0, backward: int = 0, recomputed: int = 0
    ) -> Collective:
        elements = self._tokens * width
        return Collective(TENSOR, op, self._tp, elements, dtype or self._dtype, forward, backward, recomputed)

    def _saved(
        self,
        facts: KindFacts,
        experts: ExpertLayer | None,
        collectives: tuple[Collective, ...],
        changes: list[Saved],
        operators: tuple[PlannedOperator, ...],
        *,
        compiled: bool,
    ) -> SavedBytes | None:
        """Return the bytes saved for the backward per rank and sample, or None if nothing is saved; `changes` are what
        features change about the tensors."""
        if facts.saved == Saved():
            return None
        order, recalled = _dispatched(experts, self._tokens, self._mesh.size(*self._ep))
        width = prod(self._facts.edge.shape) // self._facts.tokens
        """Elements of the stream per token, a block's input."""
        inputs = Saved(stream=width) + facts.recalled + order + recalled
        plain, fused = facts.saved, facts.fused
        if compiled:
            plain, fused = facts.compiled or fused or plain, None
        size, tp = BYTES[self._dtype], self._tp_size
        stream = 1 / tp if self._shards_stream else 1.0
        """Fraction of the stream's tokens that a rank holds."""

        def total(*parts: Saved) -> int:
            sizes = (one.num_bytes(element_bytes=size, tp=tp, stream=stream) for one in parts)
            return round(self._tokens * sum(sizes))

        if facts.kept is None and operators:
            kept = self._operators.kept_bytes(facts.operators, operators, compiled=compiled)
        else:
            kept = total(plain if facts.kept is None else facts.kept)
        results = total(Saved(full=recalled.full))
        for one in collectives:
            elements = one.elements // tp if one.op == "reduce_scatter" else one.elements
            results += one.forward * elements * BYTES[one.dtype]
        on_cuda = None if fused is None else total(fused, order, *changes)
        return SavedBytes(total(plain, order, *changes), total(inputs) + kept + results, total(inputs), on_cuda)


def _style_without_matrix(facts: KindFacts, path: str, rule: str, found: str) -> LayoutError:
    what, where = f"the style of {path} in kind {facts.name} has {found}", f"Family.styles, {facts.name}, {path}"
    fix = "use the path of such a module inside the kind, or a glob over such paths"
    return LayoutError(what, where=where, rule=rule, fix=fix)


def _with_members(units: tuple[Unit, ...], parameters: tuple[Parameter, ...]) -> tuple[Unit, ...]:
    """Return the units with their parameters: each belongs to the innermost unit that wraps its module."""
    members: dict[str, list[str]] = {unit.name: [] for unit in units}
    for parameter in parameters:
        wrapping = [
            (len(module), unit.name)
            for unit in units
            for module in unit.modules
            if len(units) == 1 or not module or parameter.name.startswith(f"{module}.")
        ]
        if wrapping:
            members[max(wrapping)[1]].append(parameter.name)
    return tuple(replace(unit, parameters=tuple(members[unit.name])) for unit in units)


def _dispatched(layer: ExpertLayer | None, tokens: int, ep: int) -> tuple[Saved, Saved]:
    """Return, per token, the indices of a dispatch over ep beyond those of a local one, and the rows and weights that a
    rank receives, and gets back, under a uniform load."""
    if layer is None or not layer.axes:
        return Saved(), Saved()
    from meshwright.plan.expert_traffic import predicted_load  # only where ep shards experts

    rows = sum(predicted_load(layer, tokens, ep).tokens) / tokens
    # Rows by token and by rank, and choices by row; slots of a capacity have a fixed order instead.
    indices = 2.0 * layer.top_k + rows + 1.0 if layer.capacity is None else 0.0
    weights = float(layer.top_k) if layer.capacity is None else layer.capacity * layer.num_experts / tokens
    return Saved(fixed_bytes=8.0 * indices), Saved(full=rows * layer.width, wide_full=weights if rows else 0)
