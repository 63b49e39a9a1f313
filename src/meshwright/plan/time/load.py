"""Loads that the time of a step depends on and no plan knows: tokens of experts, and lengths of documents. Doesn't
import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, cycle, pairwise, takewhile
from statistics import fmean

from meshwright.errors import InputError
from meshwright.models.contract.operators import OperatorKind
from meshwright.plan.expert_traffic import LoadedExperts, RankLoad, counted_load
from meshwright.plan.run_plan import ExpertLayer, LayerSpec, PlannedKernels, PlannedOperator, RunPlan

Popularity = Callable[[ExpertLayer, int | None], Sequence[float]]
"""Function that returns how often each expert of a layer, given with its number, is chosen, in any unit."""


def loaded(plan: RunPlan, popularity: Popularity | None = None, documents: Sequence[int] = ()) -> RunPlan:
    """Return a plan under a load, for its time: its samples are documents of these lengths, in turn, and the experts of
    all ranks get as many tokens as those of the busiest rank, for which the others wait."""
    kinds = (_with_documents(plan, kind, documents) if documents else kind for kind in plan.kinds)
    return replace(plan, kinds=tuple(_with_experts(plan, kind, popularity) if popularity else kind for kind in kinds))


def describe_load(plan: RunPlan) -> Iterator[str]:
    """Yield what the time of a plan, under a load or not, assumes."""
    busiest = [kind.experts.busiest for kind in plan.kinds if isinstance(kind.experts, LoadedExperts)]
    if busiest:
        yield f"the busiest rank's experts get {max(busiest):.2f} × the mean of tokens"
    if plan.batch.packed and not any(kind.attention and kind.attention.mask.documents for kind in plan.kinds):
        yield "at most: attention as if each sample were one document"


def shares_of(popular: Sequence[float], top_k: int) -> tuple[float, ...]:
    """Return probabilities in proportion to the experts' popularity that add up to `top_k`. A token chooses an expert
    once, so what would be over 1 goes to the others."""
    order, scale = sorted(popular, reverse=True), 0.0
    for full in range(top_k):  # the most popular ones, which get every token
        scale = (top_k - full) / (sum(order[full:]) or 1.0)
        if scale * order[full] <= 1.0:
            break
    return tuple(min(1.0, scale * one) for one in popular)


def _with_experts(plan: RunPlan, kind: LayerSpec, popularity: Popularity) -> LayerSpec:
    """Return a kind with the load of its busiest rank, on average over its layers."""
    layer = kind.experts
    if layer is None or not layer.axes or layer.uniform or layer.capacity is not None:
        return kind
    held = (one for stage in plan.stages for one in plan.held(stage))
    popular = [popularity(layer, number) for one, number in held if one.name == kind.name]
    if not popular:
        return kind
    if any(len(one) != layer.num_experts for one in popular):
        what = f"{layer.num_experts} experts in a layer of {kind.name}, of which the run didn't count all"
        rule, fix = "a run's load is for plans with the same layers and experts", "--experts zipf"
        raise InputError(what, where="command line, --experts", rule=rule, fix=fix)
    shares = [shares_of(one, layer.top_k) for one in popular]
    size, tokens = plan.mesh.size(*layer.axes), plan.rank_tokens
    loads = {one: counted_load(one, top_k=layer.top_k, num_tokens=tokens, num_ranks=size) for one in set(shares)}
    rows, choices = (fmean(max(getattr(loads[one], of)) for one in shares) for of in ("tokens", "choices"))
    busiest = choices * size / (tokens * layer.top_k)
    experts = LoadedExperts(**vars(layer), load=RankLoad((rows,) * size, (choices,) * size), busiest=busiest)
    return replace(kind, experts=experts, operators=tuple(_of_busiest(one, experts) for one in kind.operators))


def _of_busiest(one: PlannedOperator, layer: LoadedExperts) -> PlannedOperator:
    """Return an operator with the rows and bytes of the busiest rank. How its rows are divided among its experts costs
    nothing: a product's time is linear in its rows."""
    if one.kind is not OperatorKind.GROUPED and one.name != layer.experts:
        return one

    def more(kernels: PlannedKernels) -> PlannedKernels:
        return replace(kernels, num_bytes=round(layer.busiest * kernels.num_bytes))

    return replace(
        one, rows=round(layer.busiest * one.rows), forward=more(one.forward), backward=more(one.backward),
        fused_forward=one.fused_forward and more(one.fused_forward),
        fused_backward=one.fused_backward and more(one.fused_backward),
    )  # fmt: skip


def _with_documents(plan: RunPlan, kind: LayerSpec, documents: Sequence[int]) -> LayerSpec:
    if kind.attention is None:
        return kind
    tokens, layer = plan.batch.tokens, kind.attention
    ends = [*takewhile(lambda end: end < tokens, accumulate(cycle(documents))), tokens]
    lengths = tuple(end - start for start, end in pairwise((0, *ends)))
    mask = replace(layer.mask, documents=(lengths,) * plan.batch.samples)
    share = mask.num_pairs(tokens) / layer.mask.num_pairs(tokens)
    operators = (replace(one, attention_flops=round(share * one.attention_flops)) for one in kind.operators)
    return replace(kind, attention=replace(layer, mask=mask), operators=tuple(operators))
