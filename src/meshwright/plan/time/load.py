"""Loads that the time of a step depends on and no plan knows: tokens of experts, and lengths of documents. Doesn't
import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from statistics import fmean

from meshwright.errors import InputError
from meshwright.models.contract.operators import OperatorKind
from meshwright.plan.expert_traffic import LoadedExperts, RankLoad, counted_load
from meshwright.plan.run_plan import ExpertLayer, LayerSpec, PlannedKernels, PlannedOperator, RunPlan


@dataclass(frozen=True)
class Load:
    """What a step gets. By default, experts get equally many tokens, and each sample is one document."""

    exponent: float | None = None
    """Exponent of Zipf's law: a layer's i-th expert is chosen in proportion to 1 / i ** exponent."""
    counts: Mapping[int | None, Sequence[int]] = field(default_factory=dict, hash=False)
    """Tokens of each expert by layer, as a run has counted them."""
    documents: tuple[int, ...] = ()
    """Lengths of documents, which are repeated until a sample is full."""

    def shares(self, layer: ExpertLayer, number: int | None) -> tuple[float, ...]:
        """Return the probability that a token chooses each expert of a layer; empty if all are alike."""
        if self.exponent is not None:
            return shares_of([expert**-self.exponent for expert in range(1, layer.num_experts + 1)], layer.top_k)
        counts = self.counts.get(number, ())
        if self.counts and len(counts) != layer.num_experts:
            what = f"{layer.num_experts} experts in layer {number}, of which the run counted {len(counts)}"
            rule, fix = "a run's load is for plans with the same layers and experts", "--experts zipf"
            raise InputError(what, where="command line, --experts", rule=rule, fix=fix)
        return shares_of(counts, layer.top_k) if any(counts) else ()


def loaded(plan: RunPlan, load: Load) -> RunPlan:
    """Return a plan under a load, for its time: its masks have documents, and the experts of all ranks get as many
    tokens as those of the busiest rank, for which the others wait."""
    kinds = (_with_documents(plan, kind, load) for kind in plan.kinds)
    return replace(plan, kinds=tuple(_with_experts(plan, kind, load) for kind in kinds))


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


def _with_experts(plan: RunPlan, kind: LayerSpec, load: Load) -> LayerSpec:
    """Return a kind with the load of its busiest rank, on average over its layers."""
    layer = kind.experts
    if layer is None or not layer.axes or layer.uniform or layer.capacity is not None:
        return kind
    held = (one for stage in plan.stages for one in plan.held(stage))
    shares = [load.shares(layer, number) for one, number in held if one.name == kind.name]
    if not shares or not all(shares):
        return kind
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


def _with_documents(plan: RunPlan, kind: LayerSpec, load: Load) -> LayerSpec:
    if kind.attention is None or not load.documents:
        return kind
    lengths, left, each = list[int](), plan.batch.tokens, cycle(load.documents)
    while left:
        lengths.append(min(left, next(each)))
        left -= lengths[-1]
    mask = replace(kind.attention.mask, documents=(tuple(lengths),) * plan.batch.samples)
    return replace(kind, attention=replace(kind.attention, mask=mask))
