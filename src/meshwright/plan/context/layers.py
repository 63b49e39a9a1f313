"""Attention layers of a plan: over which ranks and by which method their tokens are sharded, the tokens of each rank of
a micro-batch, and the bytes that a rank sends to each other one.

Ranks get equally many tokens, with equal attention work under the masks of all layers. Three orders are tried for each
sample: contiguous, zigzag (as in Megatron), and arcs of equal work. Of those whose slowest rank has at most 5 % more
work than the mean, the one with the fewest received keys is chosen.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from meshwright.errors import ConfigError
from meshwright.models.contract.model_facts import ModelFacts
from meshwright.nn.attention.mask_spec import Documents, Interval, MaskSpec, Shard
from meshwright.plan.context.exchange import Intervals, SampleMask, count, make_exchange, union
from meshwright.plan.context.method import AttentionDims, ContextChoice, choose
from meshwright.plan.run_plan import BYTES, AttentionLayer, ContextMethod, LayerSpec, Mesh, RunPlan


def method_of(
    layer: AttentionLayer, model: ModelFacts, mesh: Mesh, *, dtype: str, packed: bool, recompute: bool
) -> ContextMethod:
    """Return the method that `mesh.cp_method = auto` stands for in a layer.

    Args:
        layer: the layer, without a method.
        model: the family's description of the model.
        mesh: the plan's mesh.
        dtype: dtype of activations.
        packed: whether samples are packed documents.
        recompute: whether the backward repeats the forward, with what it sends.
    """
    shards = context_shards(model.masks, model.tokens, mesh.size(*layer.axes))
    return _choose(layer.mask, shards, model.tokens, attention_dims(layer, mesh, dtype), recompute, packed).method


def _choose(
    mask: MaskSpec, shards: tuple[Shard, ...], seq_len: int, dims: AttentionDims, recompute: bool, packed: bool
) -> ContextChoice:
    exchange = make_exchange(mask, shards, seq_len)
    return choose(exchange, dims, num_tokens=seq_len // len(shards), recompute=recompute, packed=packed)


def explain_method(plan: RunPlan, kind: LayerSpec) -> str:
    """Return why `auto` takes the method of a kind's attention, or that it was requested and what `auto` would take."""
    layer = kind.attention
    assert layer is not None and layer.axes
    dims, again = attention_dims(layer, plan.mesh, plan.edge.dtype), kind.recompute == "full"
    choice = _choose(layer.mask, batch_shards(plan, None), plan.batch.tokens, dims, again, plan.batch.packed)
    if choice.method is layer.method:
        return choice.reason
    return f"{layer.method}, as requested; auto takes {choice.reason}"


def batch_shards(plan: RunPlan, documents: Documents | None) -> tuple[Shard, ...]:
    """Return the tokens of each context-parallel rank of a micro-batch."""
    masks = Counter[MaskSpec]()
    for name, number in Counter(name for stage in plan.stages for name in stage.kinds).items():
        if (layer := plan.kind(name).attention) is not None:
            masks[replace(layer.mask, documents=documents)] += number
    return context_shards(masks, plan.batch.tokens, plan.mesh.size(*plan.mesh.view("cp")))


def imbalance_of_ranks(plan: RunPlan) -> float:
    """Return the attention work of the slowest context-parallel rank, relative to the mean, as if each sample were one
    document. Heads give all ranks the same work, whatever their tokens."""
    found = (plan.kind(name).attention for stage in plan.stages for name in stage.kinds)
    layers = [layer for layer in found if layer is not None]
    rings = [layer.mask for layer in layers if layer.method is ContextMethod.RING]
    if not rings:
        return 1.0
    excess = imbalance(rings, batch_shards(plan, None), plan.batch.tokens) - 1.0
    total = sum(layer.mask.num_pairs(plan.batch.tokens) for layer in layers)
    return 1.0 + excess * sum(mask.num_pairs(plan.batch.tokens) for mask in rings) / total


def attention_dims(layer: AttentionLayer, mesh: Mesh, dtype: str) -> AttentionDims:
    """Return the sizes of an attention layer on a tensor-parallel rank."""
    tp = mesh.size(*mesh.view("tp"))
    return AttentionDims(layer.num_heads // tp, layer.num_kv_heads // tp, layer.head_dim, BYTES[dtype])


NUM_BORDERS = 32
"""Longest documents whose ends an order tries to respect. Short ones cost little when they are split."""
NUM_POINTS = 16
"""Equally spaced tokens at which to look too, since many short documents may have no border among the longest."""
MAX_IMBALANCE = 1.05
"""Work of the slowest rank relative to the mean, up to which orders are compared by what they send."""
TOLERANCE = 0.04
"""Imbalance to which arcs are searched; the rest is for rounding to tokens."""
SIMPLICITY = 0.05
"""Fraction of the received keys that an order must save over a simpler one to be preferred."""
PRECISION = 0.003
"""Deviation from its share at which the search for an arc stops, as a fraction of the share."""


class LayerCosts:
    """Costs of the queries of one sample, summed over layers. FLOPs are proportional to pairs of query and key, if all
    layers have as many heads of the same size."""

    def __init__(self, masks: Iterable[MaskSpec], seq_len: int, sample: int = 0) -> None:
        """Index a sample of `seq_len` tokens; `masks` has one for each layer, or counts."""
        self.seq_len = seq_len
        self._layers = [(SampleMask.make(mask, seq_len, sample), times) for mask, times in Counter(masks).items()]
        self._before: dict[int, int] = {}
        self.num_pairs = self.pairs_before(seq_len)

    def pairs_before(self, token: int) -> int:
        """Return the pairs whose query is before `token`."""
        if (found := self._before.get(token)) is None:
            found = self._before[token] = sum(times * mask.num_pairs_before(token) for mask, times in self._layers)
        return found

    def pairs_of(self, queries: Intervals) -> int:
        """Return the pairs whose query is in the intervals."""
        return sum(self.pairs_before(stop) - self.pairs_before(start) for start, stop in queries)

    def num_received(self, queries: Intervals) -> int:
        """Return the keys that a rank with these tokens must receive from others."""
        return sum(times * (count(mask.keys(queries)) - count(queries)) for mask, times in self._layers)

    def landmarks(self) -> list[int]:
        """Return tokens at which splitting is worth trying, in ascending order: ends of the longest documents, and
        equally spaced tokens."""
        points = {self.seq_len * index // NUM_POINTS for index in range(NUM_POINTS)}
        for starts in {mask.starts for mask, _ in self._layers}:
            documents = list(zip(starts, starts[1:], strict=False))
            documents.sort(key=lambda one: one[0] - one[1])
            points.update(end for one in documents[:NUM_BORDERS] for end in one)
        return sorted(points)


def context_shards(masks: Iterable[MaskSpec], seq_len: int, num_ranks: int) -> tuple[Shard, ...]:
    """Distribute the tokens of each sample over context-parallel ranks.

    Each sample is balanced by itself. If no order is within 5 %, which happens to ranks of a few tokens, the best
    balanced one is returned.

    Args:
        masks: the masks of the model's layers, one for each, or their counts; those with documents have the same.
        seq_len: tokens of a sample.
        num_ranks: number of context-parallel ranks.

    Returns:
        The tokens of each rank in ascending order: an entry for each sample if there are documents, or a single one.

    Raises:
        ConfigError: the ranks don't divide the sample.
    """
    if seq_len % num_ranks:
        what, rule = f"cp = {num_ranks} does not divide {seq_len} tokens", "all ranks hold equally many tokens"
        raise ConfigError(what, where="mesh.cp", rule=rule, fix=f"use {seq_len - seq_len % num_ranks} tokens")
    counts = Counter(masks)
    samples = max((len(mask.documents) for mask in counts if mask.documents is not None), default=1)
    orders = [
        _order(tuple((_of_sample(mask, sample), number) for mask, number in counts.items()), seq_len, num_ranks)
        for sample in range(samples)
    ]
    return tuple(zip(*orders, strict=True))


def imbalance(masks: Sequence[MaskSpec], shards: Sequence[Shard], seq_len: int, sample: int = 0) -> float:
    """Return the attention work of the slowest rank on a sample, relative to the mean over ranks."""
    costs = LayerCosts(masks, seq_len, sample)
    return _imbalance(costs, tuple(shard[min(sample, len(shard) - 1)] for shard in shards))


def contiguous(seq_len: int, num_ranks: int) -> tuple[Intervals, ...]:
    """Give each rank consecutive tokens."""
    size = seq_len // num_ranks
    return tuple(((rank * size, (rank + 1) * size),) for rank in range(num_ranks))


def zigzag(seq_len: int, num_ranks: int) -> tuple[Intervals, ...]:
    """Give each rank a chunk from the start and its mirror image from the end, which balances causal masks."""
    size = seq_len // num_ranks

    def chunk(index: int) -> Interval:
        return index * size // 2, (index + 1) * size // 2

    return tuple(union((chunk(rank), chunk(2 * num_ranks - 1 - rank))) for rank in range(num_ranks))


def _of_sample(mask: MaskSpec, sample: int) -> MaskSpec:
    return mask if mask.documents is None else replace(mask, documents=(mask.documents[sample],))


@lru_cache(maxsize=256)
def _order(counts: tuple[tuple[MaskSpec, int], ...], seq_len: int, num_ranks: int) -> tuple[Intervals, ...]:
    """Choose the order of one sample."""
    costs = LayerCosts(dict(counts), seq_len)
    orders = [contiguous(seq_len, num_ranks), zigzag(seq_len, num_ranks)]
    orders.append(balanced_arcs(costs, num_ranks, tolerance=TOLERANCE))
    balanced = [
        (sum(map(costs.num_received, order)) * (1 + SIMPLICITY * index), index)
        for index, order in enumerate(orders)
        if _imbalance(costs, order) <= MAX_IMBALANCE
    ]
    return orders[min(balanced)[1]] if balanced else min(orders, key=lambda order: _imbalance(costs, order))


def _imbalance(costs: LayerCosts, order: tuple[Intervals, ...]) -> float:
    return max(map(costs.pairs_of, order)) * len(order) / costs.num_pairs


@dataclass(frozen=True)
class _Circle:
    """Tokens that no rank has yet, joined in order, the last with the first. Places on it count these tokens."""

    costs: LayerCosts
    segments: Intervals
    places: list[int]
    """Place of each segment's first token, and the number of tokens."""
    pairs: list[int]
    """Pairs of the queries before each segment, and of all."""

    @staticmethod
    def make(costs: LayerCosts, segments: Intervals) -> _Circle:
        places = accumulate((stop - start for start, stop in segments), initial=0)
        pairs = accumulate((costs.pairs_of((one,)) for one in segments), initial=0)
        return _Circle(costs, segments, list(places), list(pairs))

    def pairs_of_arc(self, place: int, size: int) -> int:
        """Return the pairs of the queries of an arc."""
        last = place + size - self.places[-1]
        wrapped = self.pairs[-1] + self._before(last) if last > 0 else self._before(place + size)
        return wrapped - self._before(place)

    def _before(self, place: int) -> int:
        segment = bisect_right(self.places, place) - 1
        if segment == len(self.segments):
            return self.pairs[-1]
        start = self.segments[segment][0]
        before = self.costs.pairs_before(start + place - self.places[segment])
        return self.pairs[segment] + before - self.costs.pairs_before(start)

    def split(self, place: int, size: int) -> tuple[Intervals, Intervals]:
        """Return the tokens of an arc, and the others."""
        last = place + size - self.places[-1]
        if last <= 0:
            return union(self._between(place, place + size)), union(
                [*self._between(0, place), *self._between(place + size, self.places[-1])]
            )
        arc = [*self._between(0, last), *self._between(place, self.places[-1])]
        return union(arc), union(self._between(last, place))

    def _between(self, place: int, end: int) -> Iterator[tuple[int, int]]:
        for (start, _), first, stop in zip(self.segments, self.places, self.places[1:], strict=False):
            if max(first, place) < min(stop, end):
                yield start + max(first, place) - first, start + min(stop, end) - first

    def starts(self, landmarks: list[int], size: int) -> list[int]:
        """Return the places from which an arc has an end at a landmark or where segments were joined."""
        places = set(self.places[:-1])
        for (start, stop), first in zip(self.segments, self.places, strict=False):
            among = landmarks[bisect_left(landmarks, start) : bisect_left(landmarks, stop)]
            places.update(first + one - start for one in among)
        return sorted(places | {(place - size) % self.places[-1] for place in places})


def balanced_arcs(costs: LayerCosts, num_ranks: int, *, tolerance: float) -> tuple[Intervals, ...]:
    """Divide a sample's tokens and attention work equally among ranks, with few intervals.

    Close the sample to a circle. An arc of a given number of tokens has, on average over all starts, its share of the
    work, so by continuity some arc has exactly that share (Stromquist and Woodall 1985, Sets on which several measures
    agree). It goes to one rank; the rest is joined to a circle again, and divided among the others in the same way. `n`
    ranks get at most `2 n - 1` intervals in all, whatever the mask and the documents; for one causal document, they are
    a zigzag. Often several arcs will do; those within a tolerance that start or end at a document's border are
    candidates too. The one with the fewest keys to receive is taken, on its rank and, as if they were one rank, on the
    others.

    Args:
        costs: the sample.
        num_ranks: number of ranks; it divides the tokens.
        tolerance: fraction by which a rank's pairs may exceed the mean, if it has enough tokens for that.
    """
    size, mean = costs.seq_len // num_ranks, costs.num_pairs / num_ranks
    landmarks, parts = costs.landmarks(), []
    rest: Intervals = ((0, costs.seq_len),)
    for others in range(num_ranks - 1, 0, -1):
        circle = _Circle.make(costs, rest)
        share = circle.pairs[-1] / (others + 1)
        # Enough of the tolerance is left to the others for rounding.
        least = min(share, circle.pairs[-1] - others * mean * (1 + 0.9 * tolerance))
        places = _candidates(circle, size, landmarks, (least, share, max(share, mean * (1 + tolerance))))
        splits = [circle.split(place, size) for place in places]
        # What the others need from this rank counts too.
        part, rest = min(splits, key=lambda one: sum(map(costs.num_received, one)))
        parts.append(part)
    return (*parts, rest)


def _candidates(circle: _Circle, size: int, landmarks: list[int], bounds: tuple[float, float, float]) -> list[int]:
    """Return places from which an arc has its share of the pairs, or is within the bounds and ends at a landmark; the
    best one if there is none. `bounds` are the least, the share and the most."""
    least, share, most = bounds
    places, length = circle.starts(landmarks, size), circle.places[-1]

    def excess(place: int) -> float:
        return circle.pairs_of_arc(place % length, size) - share

    found = [excess(place) for place in places]
    good = [place for place, one in zip(places, found, strict=True) if least <= one + share <= most]
    followers = zip([*places[1:], places[0] + length], [*found[1:], found[0]], strict=True)
    for place, one, (next_place, next_one) in zip(places, found, followers, strict=True):
        if one * next_one < 0:
            good.append(_root(excess, (place, one), (next_place, next_one), PRECISION * share) % length)
    return good or [min(places, key=lambda place: abs(excess(place)))]


def _root(excess: Callable[[int], float], low: tuple[int, float], high: tuple[int, float], precision: float) -> int:
    """Return a place between two where the excess changes sign, by the Illinois variant of false position."""
    (a, at_a), (b, at_b) = low, high
    weight_a = weight_b = 1.0
    while b - a > 1:
        fraction = at_a * weight_a / (at_a * weight_a - at_b * weight_b)
        middle = min(max(int(a + (b - a) * fraction), a + 1), b - 1)
        found = excess(middle)
        if abs(found) <= precision:
            return middle
        if found * at_a > 0:
            a, at_a, weight_a, weight_b = middle, found, 1.0, weight_b / 2
        else:
            b, at_b, weight_b, weight_a = middle, found, 1.0, weight_a / 2
    return a if abs(at_a) <= abs(at_b) else b


def sent_by_attention(
    plan: RunPlan, rank: int, kind: LayerSpec, documents: Documents | None = None
) -> Iterator[tuple[int, int]]:
    """Yield each other rank with the bytes that the attention of one layer sends to it, forward and backward.

    Args:
        plan: plan of the run.
        rank: rank on the mesh.
        kind: kind of the layer.
        documents: documents of the micro-batch's samples; None if each sample is a single document.
    """
    layer = kind.attention
    assert layer is not None, "a kind with attention"
    line, dims = plan.mesh.line(rank, layer.axes), attention_dims(layer, plan.mesh, plan.edge.dtype)
    own, forwards = line.index(rank), 2 if kind.recompute == "full" else 1
    if layer.method is ContextMethod.HEADS:
        row = dims.token_bytes(2 * dims.num_heads + 2 * dims.num_kv_heads) // len(line)
        num_bytes = plan.batch.samples * plan.rank_tokens * row
        yield from ((other, (forwards + 1) * num_bytes) for other in line if other != rank)
        return
    mask = replace(layer.mask, documents=documents)
    exchange = make_exchange(mask, batch_shards(plan, documents), plan.batch.tokens)
    row = dims.token_bytes(2 * dims.num_kv_heads) * (1 if documents else plan.batch.samples)
    for index, other in enumerate(line):
        # Keys and values go where they are needed, and the gradients of those received go back.
        sent, received = exchange.num_tokens(index, own), exchange.num_tokens(own, index)
        if index != own:
            yield other, (forwards * sent + received) * row
