"""The two methods of context-parallel attention and the bytes that each rank sends for a layer.

Ring (Liu et al. 2023, Ring Attention): queries stay, each rank receives the keys and values that they see, and returns
the gradients. Heads (Jacobs et al. 2023, DeepSpeed-Ulysses): all-to-alls turn shards of tokens into shards of heads
and back. Causality, windows and grouped key/value heads make the ring cheaper; more ranks make the heads cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.plan.context.exchange import Exchange
from meshwright.plan.run_plan import ContextMethod
from meshwright.units import format_bytes


@dataclass(frozen=True)
class AttentionDims:
    """Sizes of a layer's attention on a tensor-parallel rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int
    """Bytes of an element of activations and their gradients."""

    def token_bytes(self, num_heads: int) -> int:
        """Return the bytes of so many heads of a token."""
        return num_heads * self.head_dim * self.element_bytes


@dataclass(frozen=True)
class SentBytes:
    """Bytes that a rank sends for a layer."""

    forward: int
    backward: int
    recomputed: int = 0
    """In the forward that a backward repeats, if the layer is recomputed."""

    @property
    def total(self) -> int:
        """All bytes of a training step."""
        return self.forward + self.backward + self.recomputed


@dataclass(frozen=True)
class ContextChoice:
    """The method of a layer that `auto` stands for, and the bytes of both."""

    method: ContextMethod
    ring: tuple[SentBytes, ...]
    """By rank."""
    heads: tuple[SentBytes, ...] | None
    """By rank; None if the method is unavailable."""
    reason: str
    """One sentence."""

    @property
    def sent(self) -> tuple[SentBytes, ...]:
        """Bytes of the chosen method, by rank."""
        return self.heads if self.method is ContextMethod.HEADS and self.heads is not None else self.ring


def ring_bytes(exchange: Exchange, dims: AttentionDims, *, recompute: bool = False) -> tuple[SentBytes, ...]:
    """Return the bytes that each rank sends for a layer on the samples of an exchange, as a ring.

    Each needed key and value is sent once in the forward. Its gradient takes the way back, so a rank returns as many
    rows as it received.
    """
    row = dims.token_bytes(2 * dims.num_kv_heads)
    found = []
    for rank in range(exchange.num_ranks):
        forward = exchange.num_sent(rank) * row
        found.append(SentBytes(forward, exchange.num_received(rank) * row, forward if recompute else 0))
    return tuple(found)


def heads_bytes(
    num_tokens: int, num_ranks: int, dims: AttentionDims, *, recompute: bool = False
) -> tuple[SentBytes, ...]:
    """Return the bytes that each rank sends for a layer with `num_tokens` tokens on each rank, by all-to-alls.

    Each other rank gets its share of the heads of queries, keys, values, and later of the outputs.
    """
    row = dims.token_bytes(2 * dims.num_heads + 2 * dims.num_kv_heads)
    forward = num_tokens * row * (num_ranks - 1) // num_ranks
    return (SentBytes(forward, forward, forward if recompute else 0),) * num_ranks


def why_no_heads(num_ranks: int, dims: AttentionDims) -> str:
    """Return why the heads can't be distributed over ranks, or an empty string if they can."""
    for number, name in ((dims.num_kv_heads, "key/value heads"), (dims.num_heads, "heads")):
        if number % num_ranks:
            return f"cp = {num_ranks} does not divide {number} {name}"
    return ""


def choose(
    exchange: Exchange, dims: AttentionDims, *, num_tokens: int, recompute: bool = False, packed: bool = False
) -> ContextChoice:
    """Choose the method whose busiest rank sends less for a layer; the ring for equal bytes and for packed documents.

    A ring sends each key and value to the ranks that need it and to no others, whatever the documents of a sample are.
    Heads send every token, even where no document reaches another rank. Documents are not known to a plan, so a choice
    of heads by the price of one document would have no bound on what documents need.

    Args:
        exchange: tokens that ranks need under the layer's mask.
        dims: sizes of the layer's attention.
        num_tokens: tokens of a sample on a rank.
        recompute: whether the backward repeats the forward.
        packed: whether samples will consist of documents that the exchange doesn't know.
    """
    ring = ring_bytes(exchange, dims, recompute=recompute)
    sample = "sample of one document" if packed else "sample"
    if why := why_no_heads(exchange.num_ranks, dims):
        reason = f"ring: {_sent(ring)} per layer and {sample}; heads is unavailable, since {why}"
        return ContextChoice(ContextMethod.RING, ring, None, reason)
    heads = heads_bytes(num_tokens * exchange.num_entries, exchange.num_ranks, dims, recompute=recompute)
    if packed:
        reason = (
            f"ring: {_sent(ring)} per layer and {sample}, and never more than packed documents need"
            f"; heads sends {format_bytes(_most(heads))} whatever they are"
        )
        return ContextChoice(ContextMethod.RING, ring, heads, reason)
    if _most(heads) < _most(ring):
        reason = f"heads: {_sent(heads)} per layer and sample against {format_bytes(_most(ring))} for ring"
        return ContextChoice(ContextMethod.HEADS, ring, heads, reason)
    reason = f"ring: {_sent(ring)} per layer and sample against {format_bytes(_most(heads))} for heads"
    return ContextChoice(ContextMethod.RING, ring, heads, reason)


def _most(sent: Sequence[SentBytes]) -> int:
    return max(one.total for one in sent)


def _sent(sent: Sequence[SentBytes]) -> str:
    who = "each rank" if len({one.total for one in sent}) == 1 else "the busiest rank"
    return f"{who} sends {format_bytes(_most(sent))}"
