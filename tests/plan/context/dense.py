"""Small cases of masks and shards, and their masks written out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from meshwright.nn.attention.mask_spec import Documents, MaskSpec, Shard
from meshwright.plan.context.exchange import Intervals, union
from meshwright.plan.context.layers import batch_shards
from meshwright.plan.run_plan import BYTES, LayerSpec, RunPlan


@dataclass(frozen=True)
class Case:
    mask: MaskSpec
    seq_len: int
    shards: tuple[Shard, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.shards)

    @property
    def num_samples(self) -> int:
        return max(len(self.shards[0]), len(self.mask.documents or ((),)))

    def held(self, rank: int, sample: int) -> Intervals:
        shard = self.shards[rank]
        return shard[0] if len(shard) == 1 else shard[sample]


def tokens(intervals: Intervals) -> list[int]:
    return [token for start, stop in intervals for token in range(start, stop)]


def dense(mask: MaskSpec, seq_len: int, sample: int = 0) -> list[list[bool]]:
    """The mask by its definition: rows are queries, columns keys."""
    place = []
    for document, length in enumerate((seq_len,) if mask.documents is None else mask.documents[sample]):
        place += [(document, position) for position in range(length)]
    return [
        [
            their_document == document
            and (not mask.causal or key <= query or key < mask.prefix)
            and (mask.window is None or abs(key - query) < mask.window)
            for their_document, key in place
        ]
        for document, query in place
    ]


def least_bytes(plan: RunPlan, rank: int, kind: LayerSpec, documents: Documents | None) -> int:
    """What a rank must send for a layer and micro-batch so that keys and values meet their queries, and gradients their
    keys, in the plan's order of tokens."""
    layer = kind.attention
    assert layer is not None
    line, shards, num_rows = plan.mesh.line(rank, layer.axes), batch_shards(plan, documents), 0
    own = line.index(rank)
    mask = replace(layer.mask, documents=documents)
    for sample in range(plan.batch.samples):
        visible = dense(mask, plan.batch.tokens, sample if documents else 0)
        held = [set(tokens(shard[min(sample, len(shard) - 1)])) for shard in shards]
        needed = [{key for query in queries for key, seen in enumerate(visible[query]) if seen} for queries in held]
        sent = sum(len(needed[index] & held[own]) for index in range(len(line)) if index != own)
        num_rows += sent * (2 if kind.recompute == "full" else 1) + len(needed[own] - held[own])
    num_kv_heads = layer.num_kv_heads // plan.mesh.size("tp")
    return num_rows * 2 * num_kv_heads * layer.head_dim * BYTES[plan.edge.dtype]


@st.composite
def lengths(draw: st.DrawFn, seq_len: int) -> tuple[int, ...]:
    borders = draw(st.sets(st.integers(1, seq_len - 1), max_size=6)) if seq_len > 1 else set()
    ends = [*sorted(borders), seq_len]
    return tuple(stop - start for start, stop in zip([0, *ends], ends, strict=False))


@st.composite
def masks(draw: st.DrawFn, seq_len: int, *, num_samples: int | None) -> MaskSpec:
    """A mask with documents of so many samples, or without documents."""
    causal = draw(st.booleans())
    mask = MaskSpec(
        causal=causal,
        window=draw(st.none() | st.integers(1, seq_len + 2)),
        prefix=draw(st.integers(0, seq_len // 2)) if causal else 0,
    )
    if num_samples is None:
        return mask
    return replace(mask, documents=tuple(draw(lengths(seq_len)) for _ in range(num_samples)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any mask with any shards of equal size."""
    num_ranks = draw(st.sampled_from([1, 2, 3, 4]))
    seq_len = num_ranks * draw(st.integers(1, 6))
    num_samples = draw(st.integers(1, 2))
    mask = draw(masks(seq_len, num_samples=draw(st.sampled_from([None, num_samples]))))
    by_sample = []
    for _ in range(draw(st.sampled_from([1, num_samples]))):
        order = draw(st.permutations(range(seq_len)))
        size = seq_len // num_ranks
        parts = [order[rank * size : (rank + 1) * size] for rank in range(num_ranks)]
        by_sample.append([union((token, token + 1) for token in part) for part in parts])
    return Case(mask, seq_len, tuple(tuple(one[rank] for one in by_sample) for rank in range(num_ranks)))
