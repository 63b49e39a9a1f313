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

from collections.abc import Iterator, Mapping, Sequence
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
from meshwright.models.contract.model_facts import AuxiliaryLoss, KindFacts, ModelFacts, ParameterFacts, Role, Saved
from meshwright.models.contract.tp_styles import LOSS_REDUCTIONS, Style, StyleKind
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.plan.context.layers import make_attention_layer
from meshwright.plan.expert_traffic import predicted_load
from meshwright.plan.run_plan import (
    BYTES,
    Atoms,
    AttentionLayer,
    Auxiliary,
    Buffer,
    Collective,
    ExpertLayer,
    Kind,
    Mesh,
    Parameter,
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
        self._tp = mesh.view("tp")
        self._styles = config.family.styles(run_facts(config)) if self._tp else {}
        self._shards_stream = bool(self._tp) and config.mesh.sequence_parallel
        self._roles = {name: one.role for name, one in facts.named_parameters()}
        self._ep = mesh.view("ep")
        self._data = mesh.view("batch") + mesh.view("cp")
        self._tokens = facts.tokens // mesh.size(*mesh.view("cp"))
        """Tokens per sample in a tp group."""
        self._features = plan_features(config=config)
        self._kinds: dict[tuple[object, ...], Kind] = {}

    def kinds(self) -> tuple[Kind, ...]:
        """Return all kinds in order of first use."""
        return tuple(self._kinds.values())

    def kind(self, facts: KindFacts, layer: int | None, *, untied: bool = False, units: tuple[Unit, ...] = ()) -> Kind:
        """Return the kind of a block or an end.

        Args:
            facts: the family's description.
            layer: index of the block, or None for an end.
            untied: whether to omit tied parameters because their targets are on the same stage.
            units: FSDP units of the kind; all other parameters belong to the root.
        """
        own = [self._like_original(p) for p in facts.parameters if not (untied and p.tied_to is not None)]
        names = [p.tied_to or facts.full_name(p.name, layer) for p in own]
        freeze = self._config.train.freeze
        frozen = [p.frozen or any(fnmatchcase(name, one) for one in freeze) for p, name in zip(own, names, strict=True)]
        trained = tuple(not one for one in frozen)
        policy = RecomputePolicy.NONE if layer is None else policy_of(self._config.recompute, layer)
        made = ((one, one.make(self._config, self._facts, facts, layer)) for one in self._features)
        parts = {part: feature for feature, part in made if part is not None}
        identity = (facts.name, facts.path, trained, untied, units, policy, *parts)
        if identity not in self._kinds:
            taken = sum(kind.described == facts.name for kind in self._kinds.values())
            name = facts.name if not taken else f"{facts.name}.{taken + 1}"
            parameters = tuple(
                self._parameter(facts, p, is_trained) for p, is_trained in zip(own, trained, strict=True)
            )
            tied = tuple(p.name for p in facts.parameters if untied and p.tied_to is not None)
            kind, attention = self._kind(name, facts, parameters, units, parts, layer), self._attention(facts, policy)
            self._kinds[identity] = replace(kind, tied=tied, recompute=policy, attention=attention)
        return self._kinds[identity]

    def _like_original(self, one: ParameterFacts) -> ParameterFacts:
        """Give a tied parameter the role of what it is tied to, or copies on two stages would diverge."""
        return one if one.tied_to is None else replace(one, role=self._roles[one.tied_to])

    def _kind(
        self,
        name: str,
        facts: KindFacts,
        parameters: tuple[Parameter, ...],
        units: tuple[Unit, ...],
        parts: Mapping[KindPart, PlanFeature[Any]],
        layer: int | None,
    ) -> Kind:
        is_block, tp = layer is not None, self._mesh.size(*self._tp)
        output = facts.output / (tp if facts.output_divided else 1)
        collectives = tuple(self._kind_collectives(facts)) if self._tp else ()
        return Kind(
            name=name,
            described=facts.name,
            path=facts.path,
            parameters=parameters,
            units=_with_members(units, parameters),
            buffers=tuple(self._buffer(facts, number) for number in range(len(facts.buffers))),
            styles=tuple(self._styles.get(facts.name, {}).items()),
            collectives=collectives,
            auxiliary=tuple(
                Auxiliary(one.name, self._mesh.view("cp") + self._loss_axes(one), in_region=one.in_region)
                for one in facts.auxiliary
            ),
            experts=self._experts(facts),
            parts=tuple(parts),
            compiled=self._config.train.compile and is_block,
            saved=saved_bytes(
                facts,
                self._experts(facts),
                collectives,
                [one for part, feature in parts.items() for one in feature.saved(facts, part, tp=tp)],
                element_bytes=BYTES[self._config.train.precision],
                tokens=self._tokens,
                tp=tp,
                ep=self._mesh.size(*self._ep),
                stream=self.stream_part(),
                width=prod(self._facts.edge.shape) // self._facts.tokens,
            ),
            output_elements=int(self._tokens * output),
            everywhere=facts in self._facts.every,
        )

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
            sample_counted=self._mesh.view("cp") if layer.over_sample else (),
            num_groups=layer.num_groups,
            top_groups=layer.top_groups,
            capacity=layer.capacity,
            uniform=layer.uniform,
        )

    def _attention(self, facts: KindFacts, policy: RecomputePolicy) -> AttentionLayer | None:
        if facts.attention is None:
            return None
        config = self._config
        return make_attention_layer(
            facts.attention,
            self._facts,
            self._mesh,
            dtype=config.train.precision,
            packed=config.data.packing != "none",
            recompute=policy is RecomputePolicy.FULL,
            method=config.mesh.cp_method,
        )

    def stream_part(self) -> float:
        """Return the fraction of the stream's tokens held by a rank."""
        return 1 / self._mesh.size(*self._tp) if self._shards_stream else 1.0

    def _style_of(self, facts: KindFacts, name: str) -> Style | None:
        """Return the style of the module that owns a parameter or buffer."""
        module = name.rpartition(".")[0]
        styles = self._styles.get(facts.name, {})
        return next((style for glob, style in styles.items() if fnmatchcase(module, glob)), None)

    def _parameter(self, facts: KindFacts, one: ParameterFacts, trained: bool) -> Parameter:
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
        is_expert = one.role is Role.EXPERTS
        if is_expert and self._ep:
            used = (Shard(0, self._ep), *used)
        data = tuple(axis for axis in self._data if not is_expert or axis not in self._ep)
        is_partial = self._has_sharded_input(kind) or (kind is StyleKind.LOCAL and not used)
        work = data + (self._tp if is_partial else ())
        stored = self._stored_dim(one, used) if is_expert else 0
        return Parameter(one.name, one.shape, one.role.value, used, work, stored, trained=trained, key=one.tied_to)

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

    def _buffer(self, facts: KindFacts, number: int) -> Buffer:
        one = facts.buffers[number]
        style = self._style_of(facts, one.name)
        parts = self._tp if self._has_sharded_input(None if style is None else style.kind) else ()
        work = self._data + parts if one.updated else ()
        return Buffer(one.name, one.shape, one.dtype, work=work, summed=work, saved=one.saved, load=one.load)

    def _kind_collectives(self, facts: KindFacts) -> Iterator[Collective]:
        """Yield the collectives implied by a kind's styles, module by module."""
        styles = self._styles.get(facts.name, {})
        gathering = [path for path, style in styles.items() if style.kind is StyleKind.GATHER]
        for path, style in styles.items():
            if style.kind is StyleKind.REGION:
                width = self._facts.edge.shape[-1]
                yield from self._gather_input(width)
                yield from self._reduce_output(width, recomputed=style.kept)
                continue
            if style.kind is StyleKind.GATHER:
                inside = [p for p in facts.parameters if fnmatchcase(p.name, f"{path}.*") and len(p.shape) == 2]
                columns = [p for p in inside if self._is(facts, p, StyleKind.COLUMN)]
                if not columns:
                    raise _style_without_matrix(
                        facts,
                        path,
                        "gather() applies to modules that contain column-parallel layers",
                        "no column-parallel layer inside",
                    )
                yield from self._gather_input(columns[0].shape[1])
                continue
            if style.kind is StyleKind.EXPERTS:
                yield from self._gather_input(self._facts.edge.shape[-1])
                yield from self._gather_input(style.top_k)
                yield from self._reduce_output(self._facts.edge.shape[-1], recomputed=style.kept)
                continue
            for width in (style.partial_tail, style.summed_input):
                if width:
                    yield from self._gather_input(width)
            if style.reduced_output:
                yield from self._reduce_output(style.reduced_output, recomputed=style.kept)
            weights = [p for p in facts.parameters if fnmatchcase(p.name, f"{path}.weight") and len(p.shape) == 2]
            if style.kind in SHARDED_DIM and not weights:
                raise _style_without_matrix(
                    facts,
                    path,
                    f"the style {style.kind.value} applies to modules with a weight matrix",
                    "no weight matrix",
                )
            for weight in weights:
                if style.kind is StyleKind.HEAD:
                    yield from self._gather_input(weight.shape[1])
                    yield self._collective("all_reduce", 1, self._reduce_dtype(), forward=LOSS_REDUCTIONS)
                elif style.kind in (StyleKind.ROW, StyleKind.VOCABULARY):
                    width = weight.shape[0 if style.kind is StyleKind.ROW else 1]
                    yield from self._reduce_output(width, recomputed=style.kept)
                    if style.gathered:
                        yield self._collective("all_gather", weight.shape[1], None, backward=1)
                elif style.kind is StyleKind.COLUMN and not any(fnmatchcase(weight.name, f"{g}.*") for g in gathering):
                    yield from self._gather_input(weight.shape[1])  # the head gathers its own input
                    if style.gathered:
                        yield self._collective("all_gather", weight.shape[0], None, forward=1, recomputed=1)

    def _is(self, facts: KindFacts, parameter: ParameterFacts, kind: StyleKind) -> bool:
        style = self._style_of(facts, parameter.name)
        return style is not None and style.kind is kind

    def _gather_input(self, width: int) -> Iterator[Collective]:
        """Yield the collectives that gather an input from the stream."""
        if self._shards_stream:
            yield self._collective("all_gather", width, None, forward=1, recomputed=1)
            yield self._collective("reduce_scatter", width, None, backward=1)
        else:
            yield self._collective("all_reduce", width, None, backward=1)

    def _reduce_output(self, width: int, *, recomputed: bool) -> Iterator[Collective]:
        """Yield the collectives that reduce an output into the stream."""
        again = int(recomputed)
        if self._shards_stream:
            yield self._collective("reduce_scatter", width, None, forward=1, recomputed=again)
            yield self._collective("all_gather", width, None, backward=1)
        else:
            yield self._collective("all_reduce", width, None, forward=1, recomputed=again)

    def _reduce_dtype(self) -> str:
        return "float32" if self._config.train.precision == "bfloat16" else self._config.train.precision

    def _collective(
        self, op: str, width: int, dtype: str | None, *, forward: int = 0, backward: int = 0, recomputed: int = 0
    ) -> Collective:
        elements = self._tokens * width
        dtype = dtype or self._config.train.precision
        return Collective(TENSOR, op, self._tp, elements, dtype, forward, backward, recomputed)


def _style_without_matrix(facts: KindFacts, path: str, rule: str, found: str) -> LayoutError:
    return LayoutError(
        f"the style of {path} in kind {facts.name} has {found}",
        where=f"Family.styles, {facts.name}, {path}",
        rule=rule,
        fix="use the path of such a module inside the kind, or a glob over such paths",
    )


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


def largest_matrix(facts: KindFacts) -> int:
    """Return the number of elements of a kind's largest parameter."""
    return max((prod(parameter.shape) for parameter in facts.parameters), default=0)


def saved_bytes(
    facts: KindFacts,
    experts: ExpertLayer | None,
    collectives: tuple[Collective, ...],
    changes: Sequence[Saved] = (),
    *,
    element_bytes: int,
    tokens: int,
    tp: int,
    ep: int,
    stream: float,
    width: int,
) -> SavedBytes | None:
    """Return the bytes per rank and sample, or None if nothing is saved.

    Args:
        facts: the family's description.
        experts: layer of experts of the kind.
        collectives: collectives of the kind's operators.
        changes: what features change about the tensors that are saved.
        element_bytes: size of an element of the compute dtype.
        tokens: tokens per sample in a tp group.
        tp: size of tp.
        ep: size of ep.
        stream: fraction of the stream that a rank holds.
        width: elements of the stream per token, a block's input.
    """
    if facts.saved == Saved():
        return None
    order, rows = _dispatched(experts, tokens, ep)
    recalled = Saved(full=rows * (experts.width if experts else 0), wide_full=_weights(experts, tokens) if rows else 0)
    returned = Saved(full=recalled.full)
    inputs = Saved(stream=width) + facts.recalled + order + recalled
    kept = facts.saved if facts.kept is None else facts.kept + returned

    def total(*parts: Saved) -> int:
        sizes = (one.num_bytes(element_bytes=element_bytes, tp=tp, stream=stream) for one in parts)
        return round(tokens * sum(sizes))

    results = sum(one.forward * _result_elements(one, tp) * BYTES[one.dtype] for one in collectives)
    return SavedBytes(total(facts.saved, order, *changes), total(inputs, kept) + results, total(inputs))


def _result_elements(one: Collective, ranks: int) -> int:
    """Return the elements of a collective's result on a rank."""
    return one.elements // ranks if one.op == "reduce_scatter" else one.elements


def _weights(layer: ExpertLayer | None, tokens: int) -> float:
    """Return the routing weights per token that a rank receives."""
    if layer is None:
        return 0.0
    return float(layer.top_k) if layer.capacity is None else layer.capacity * layer.num_experts / tokens


def _dispatched(layer: ExpertLayer | None, tokens: int, ep: int) -> tuple[Saved, float]:
    """Return the indices of a dispatch over ep beyond those of a local one, and the rows per token that a rank
    receives, and gets back, under a uniform load."""
    if layer is None or not layer.axes:
        return Saved(), 0.0
    rows = sum(predicted_load(layer, tokens, ep).tokens) / tokens
    # Rows by token and by rank, and choices by row; slots of a capacity have a fixed order instead.
    indices = 2.0 * layer.top_k + rows + 1.0 if layer.capacity is None else 0.0
    return Saved(fixed_bytes=8.0 * indices), rows
