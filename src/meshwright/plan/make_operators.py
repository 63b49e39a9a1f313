"""Operators of a kind as a rank runs them: a family's description, sharded by tensor, context and expert parallelism.

The sharding of a parameter while it is used says which dim of its product a rank has. Attention is counted for the
context-parallel rank with the most work, and experts get equally many rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from meshwright.models.contract.model_facts import KindFacts, ModelFacts, Saved
from meshwright.models.contract.operators import Kernels, Operator, OperatorKind, Rerun
from meshwright.plan.run_plan import (
    BYTES,
    AttentionLayer,
    ContextMethod,
    ExpertLayer,
    Mesh,
    Parameter,
    PlannedKernels,
    PlannedOperator,
)

if TYPE_CHECKING:
    from meshwright.nn.attention.mask_spec import MaskSpec

WIDE = 4
"""Bytes of float32."""


class OperatorMaker:
    """Factory of a plan's operators."""

    def __init__(self, facts: ModelFacts, mesh: Mesh, *, dtype: str, tokens: int, stream: float, drops: bool) -> None:
        """`tokens` are those of a sample on a rank, `stream` is the part of the stream's tokens that it holds, and
        `drops` says whether blocks have dropout."""
        self._facts, self._mesh, self._dtype, self._tokens, self._stream = facts, mesh, dtype, tokens, stream
        self._tp, self._drops = mesh.size(*mesh.view("tp")), drops

    def of_kind(
        self,
        facts: KindFacts,
        parameters: Sequence[Parameter],
        experts: ExpertLayer | None,
        attention: AttentionLayer | None,
        *,
        compiled: bool,
    ) -> tuple[PlannedOperator, ...]:
        """Return the operators of a kind, given its parameters, experts and attention on a rank."""
        # Dropout saves the tokens' numbers; a compiler sees that nothing needs to be computed again for them.
        ends = self._drops and not compiled and facts.operators[-1:] and facts.operators[-1].dropped != Kernels()
        operators = _run_to_the_end(facts.operators) if ends else facts.operators
        return tuple(self._operator(one, parameters, experts, attention) for one in operators)

    def _operator(
        self,
        one: Operator,
        parameters: Sequence[Parameter],
        experts: ExpertLayer | None,
        attention: AttentionLayer | None,
    ) -> PlannedOperator:
        weight = _weight_of(one, parameters)
        is_trained = weight is not None and weight.trained
        more = one.dropped if self._drops else Kernels()
        backward = one.backward if is_trained or one.input_gradient else Kernels()
        made = PlannedOperator(
            one.name,
            one.kind,
            attention_flops=self._attention_flops(one, attention),
            forward=self._kernels(one.forward),
            backward=self._kernels(backward + more),
            fused_forward=None if one.fused_forward is None else self._kernels(one.fused_forward + more),
            fused_backward=None if one.fused_backward is None else self._kernels(one.fused_backward + more),
            fused_on_cuda=one.fused_on_cuda,
            rerun=one.rerun,
            rate=self._wide if one.wide else self._dtype,
        )
        if one.kind not in (OperatorKind.PRODUCT, OperatorKind.GROUPED):
            return made
        rows, inner, columns = self._sharded(one, weight)
        groups = one.groups if experts is None or one.kind is not OperatorKind.GROUPED else experts.num_experts
        return replace(
            made,
            rows=round(rows * self._tokens),
            inner=inner,
            columns=columns,
            groups=groups // (1 if experts is None or groups == 1 else self._mesh.size(*experts.axes)),
            weights=int(is_trained or one.second_gradient),
            inputs=int(one.input_gradient),
        )

    def kept_bytes(self, operators: Sequence[Operator], on_rank: Sequence[PlannedOperator], *, compiled: bool) -> int:
        """Return the bytes per sample of the results that selective recomputation keeps (`nn/kept_results.py`): all
        that products return but, in a compiled block, what no backward reads, and those of attention."""
        products = (
            one.rows * one.columns * BYTES[one.rate] for one in on_rank if not (compiled and one.rerun is Rerun.NEVER)
        )
        others = sum((one.kept for one in operators), Saved())
        return sum(products) + round(self._tokens * self._num_bytes(others, BYTES[self._dtype]))

    @property
    def _wide(self) -> str:
        return "float32" if BYTES[self._dtype] < WIDE else self._dtype

    def _sharded(self, one: Operator, weight: Parameter | None) -> tuple[float, int, int]:
        """Return rows per token, inner dim and columns of a product on a rank."""
        rows, inner, columns = one.rows, one.inner, one.columns
        tp = self._mesh.view("tp")
        for shard in weight.used if weight is not None else ():
            if shard.axes != tp or not tp:
                continue
            behind = len(weight.shape) - shard.dim if weight is not None else 0
            if behind > 2:
                rows /= self._tp  # experts of other ranks take the others
            elif weight is not None and weight.shape[shard.dim] == (columns if behind == 2 else inner):
                inner, columns = (inner, columns // self._tp) if behind == 2 else (inner // self._tp, columns)
            else:  # stored as [inner, columns]
                inner, columns = (inner // self._tp, columns) if behind == 2 else (inner, columns // self._tp)
        return rows, inner, columns

    def _attention_flops(self, one: Operator, attention: AttentionLayer | None) -> int:
        """Return the operations of a sample's attention on the rank with the most, as if it were one document."""
        found = one.attention_flops * self._tokens / self._tp
        if attention is not None and attention.method is ContextMethod.RING:
            masks, num_ranks = tuple(self._facts.masks.items()), self._mesh.size(*self._mesh.view("cp"))
            found *= _imbalance(masks, attention.mask, self._facts.tokens, num_ranks)
        return round(found)

    def _kernels(self, kernels: Kernels) -> PlannedKernels:
        narrow = BYTES[self._dtype]
        casts = narrow < WIDE
        launches = kernels.launches + (kernels.casts if casts else 0)
        per_token = self._num_bytes(kernels.moved, narrow)
        if casts:
            per_token += self._num_bytes(kernels.cast, narrow + WIDE)
        return PlannedKernels(
            math.ceil(launches), round(self._tokens * per_token), round(self._num_bytes(kernels.moved_once, narrow))
        )

    def _num_bytes(self, moved: Saved, element_bytes: int) -> float:
        return moved.num_bytes(element_bytes=element_bytes, tp=self._tp, stream=self._stream)


def _run_to_the_end(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """Return a block's operators whose last one saves something, so that a recomputed forward runs to its end."""
    found = list(operators)
    for at in reversed(range(len(found))):
        if found[at].rerun is not Rerun.NEVER:
            break
        found[at] = replace(found[at], rerun=Rerun.ALWAYS if found[at].kind is OperatorKind.MEMORY else Rerun.FULL)
    return tuple(found)


def _weight_of(one: Operator, parameters: Sequence[Parameter]) -> Parameter | None:
    """Return the weight of an operator: the parameter of its name, or the first matrix of its module."""
    own = [p for p in parameters if p.name == one.name or p.name.rpartition(".")[0] == one.name]
    return next((p for p in own if len(p.shape) > 1), None)


@lru_cache(maxsize=256)
def _imbalance(masks: tuple[tuple[MaskSpec, int], ...], mask: MaskSpec, tokens: int, num_ranks: int) -> float:
    """Return the work of the busiest of the ranks that share samples, in layers with a mask, relative to the mean."""
    from meshwright.plan.context.layers import context_shards, imbalance  # only where cp shards tokens

    return imbalance([mask], context_shards(dict(masks), tokens, num_ranks), tokens)
