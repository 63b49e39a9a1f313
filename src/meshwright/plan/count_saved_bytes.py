"""Bytes that a kind keeps between forward and backward under each recomputation policy, from the family's description,
the collectives of its styles, and the dispatch to its experts.

Counted are the tensors that autograd saves on the CPU, where attention and norms run as in eager mode on a GPU, except
that GPUs fuse RMS norms, which then save no normalized input. Parameters, and tables that all blocks share, such as
rotary angles, are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.models.contract.model_facts import KindFacts, Saved
from meshwright.nn.float8.recipe import Float8Recipe
from meshwright.plan.block_layers import ExpertLayer, Float8Layers
from meshwright.plan.expert_traffic import predicted_load
from meshwright.plan.run_plan import BYTES, Collective
from meshwright.plan.saved_bytes import SavedBytes


def saved_bytes(
    facts: KindFacts,
    experts: ExpertLayer | None,
    collectives: tuple[Collective, ...],
    float8: Float8Layers | None = None,
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
        float8: linear layers that run in float8.
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
    saved = [facts.saved, order, *_float8(facts, float8, tp)]
    return SavedBytes(total(*saved), total(inputs, kept) + results, total(inputs))


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


def _float8(facts: KindFacts, float8: Float8Layers | None, tp: int) -> Iterator[Saved]:
    """Yield what float8 layers change: each saves its input in float8, and none the original.

    torchao's layer saves the original.
    """
    if float8 is None or float8.recipe is Float8Recipe.TORCHAO:
        return
    for one in facts.linear_inputs:
        copies = sum(layer in float8.layers for layer in one.layers)
        yield Saved(fixed_bytes=copies * one.width / (tp if one.divided else 1))
        if copies == len(one.layers):
            yield Saved(**{name: -value for name, value in vars(one.freed).items()})
