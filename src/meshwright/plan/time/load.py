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

    def shares(self, experts: ExpertLayer, layer: int | None) -> tuple[float, ...]:
        """Return the probability that a token chooses each expert of a layer; empty if all are alike."""
        if self.exponent is not None:
            return shares_of([number**-self.exponent for number in range(1, experts.num_experts + 1)], experts.top_k)
        counts = self.counts.get(layer, ())
        if self.counts and len(counts) != experts.num_experts:
            what = f"{experts.num_experts} experts in layer {layer}, of which the run counted {len(counts)}"
            rule, fix = "a run's load is for plans with the same layers and experts", "--experts zipf"
            raise InputError(what, where="command line, --experts", rule=rule, fix=fix)
        return shares_of(counts, experts.top_k) if any(counts) else ()


def loaded(plan: RunPlan, load: Load) -> RunPlan:
    """Return a plan under a load, for its time: with the documents in its masks, and with as many tokens for all ranks'
    experts as the busiest rank gets, for which the others wait."""
    return replace(plan, kinds=tuple(_with_documents(plan, _with_experts(plan, kind, load), load) for kind in plan.kinds))


def describe_load(plan: RunPlan) -> Iterator[str]:
    """Yield what a loaded plan's time assumes."""
    layers = [kind.experts for kind in plan.kinds if isinstance(kind.experts, LoadedExperts)]
    if layers:
        yield f"busiest experts' rank {max(one.busiest for one in layers):.2f} × the mean of its tokens"
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
    numbers = [number for stage in plan.stages for held, number in plan.held(stage) if held is kind]
    shares = [load.shares(layer, number) for number in numbers]
    if not shares or not all(shares):
        return kind
    size, tokens = plan.mesh.size(*layer.axes), plan.rank_tokens
    loads = {one: counted_load(one, top_k=layer.top_k, num_tokens=tokens, num_ranks=size) for one in set(shares)}
    found = [loads[one] for one in shares]
    rows, choices = fmean(max(one.tokens) for one in found), fmean(max(one.choices) for one in found)
    busiest = choices * size / (tokens * layer.top_k)
    experts = LoadedExperts(**vars(layer), load=RankLoad((rows,) * size, (choices,) * size), busiest=busiest)
    return replace(kind, experts=experts, operators=tuple(_loaded(one, experts) for one in kind.operators))


def _loaded(one: PlannedOperator, layer: LoadedExperts) -> PlannedOperator:
    """Return an operator with the rows and bytes of the busiest experts. How a rank's rows are divided among its
    experts costs nothing: a product's time is linear in its rows."""
    if one.kind is not OperatorKind.GROUPED and one.name != layer.experts:
        return one

    def more(kernels: PlannedKernels) -> PlannedKernels:
        return replace(kernels, num_bytes=round(layer.busiest * kernels.num_bytes))

    names = ("forward", "backward", "fused_forward", "fused_backward")
    kernels = {name: more(found) for name in names if (found := getattr(one, name)) is not None}
    return replace(one, rows=round(layer.busiest * one.rows), **kernels)


def _with_documents(plan: RunPlan, kind: LayerSpec, load: Load) -> LayerSpec:
    if kind.attention is None or not load.documents:
        return kind
    lengths, left, each = list[int](), plan.batch.tokens, cycle(load.documents)
    while left:
        lengths.append(min(left, next(each)))
        left -= lengths[-1]
    mask = replace(kind.attention.mask, documents=(tuple(lengths),) * plan.batch.samples)
    return replace(kind, attention=replace(kind.attention, mask=mask))
