"""Attention masks and attention itself, spelled out pair by pair, and random masks for property tests."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from hypothesis import strategies as st

from meshwright.nn.attention.mask_spec import MaskSpec


def sees(spec, starts, query, key):
    """Whether a query of a sample may attend to a key, by the rules as they are written.

    `starts` is the start of each token's document.
    """
    if starts[query] != starts[key]:
        return False
    if spec.causal and key > query and key - starts[key] >= spec.prefix:
        return False
    return spec.window is None or abs(query - key) < spec.window


def dense(spec, seq_len, sample=0):
    """The mask of a sample, [queries][keys]."""
    lengths = (seq_len,) if spec.documents is None else spec.documents[sample]
    starts = [sum(lengths[:number]) for number, length in enumerate(lengths) for _ in range(length)]
    return [[sees(spec, starts, query, key) for key in range(seq_len)] for query in range(seq_len)]


def dense_batch(spec, seq_len, batch):
    """The masks of a batch as a tensor [b, s, t]."""
    return torch.tensor([dense(spec, seq_len, sample) for sample in range(batch)])


def softmax_attention(q_bsnh, k_btmh, v_btmh, visible_bst, scale=None, kept_bnst=None):
    """Attention head by head in float64: outputs and lse, zero and -inf for rows without keys.

    With `kept_bnst`, weights are multiplied by it, as by dropout.
    """
    scale = 1 / math.sqrt(q_bsnh.shape[-1]) if scale is None else scale
    groups = q_bsnh.shape[2] // k_btmh.shape[2]
    outs, lses = [], []
    for head in range(q_bsnh.shape[2]):
        q, k, v = (
            q_bsnh[:, :, head].double(),
            k_btmh[:, :, head // groups].double(),
            v_btmh[:, :, head // groups].double(),
        )
        weights = torch.where(visible_bst, (scale * q @ k.mT).exp(), 0.0)
        total = weights.sum(-1, keepdim=True)
        weights = torch.where(total > 0, weights / total.clamp(min=1e-300), 0.0)
        outs.append((weights if kept_bnst is None else weights * kept_bnst[:, head]) @ v)
        lses.append(torch.where(total > 0, total.clamp(min=1e-300).log(), -math.inf).squeeze(-1))
    return torch.stack(outs, 2), torch.stack(lses, 1)


@st.composite
def partitions(draw, total):
    """Lengths of documents that add up to `total`."""
    inner = draw(st.lists(st.integers(1, total - 1), max_size=5, unique=True)) if total > 1 else []
    ends = [0, *sorted(inner), total]
    return tuple(last - first for first, last in zip(ends, ends[1:], strict=False))


@st.composite
def masks(draw, seq_len, batch=1):
    """Masks of all kinds and their intersections."""
    causal = draw(st.booleans())
    return MaskSpec(
        causal=causal,
        window=draw(st.none() | st.integers(1, seq_len + 2)),
        prefix=draw(st.integers(0, seq_len + 1)) if causal else 0,
        documents=draw(st.none() | st.tuples(*[partitions(seq_len)] * batch)),
    )


@st.composite
def shards(draw, seq_len):
    """Disjoint intervals of a sample in any order, as a rank may hold them."""
    ends = sorted(draw(st.sets(st.integers(0, seq_len), min_size=2, max_size=6)))
    intervals = list(zip(ends, ends[1:], strict=False))
    kept = draw(st.lists(st.sampled_from(intervals), min_size=1, unique=True))
    return tuple(kept)


def wrong_masks(spec, seq_len):
    """Masks that differ from a mask by a typical mistake, by name."""
    found = {}
    if spec.window is not None:
        found["window off by one"] = replace(spec, window=spec.window + 1)
    if spec.causal:
        found["not causal"] = replace(spec, causal=False, prefix=0)
        found["other prefix"] = replace(spec, prefix=0 if spec.prefix else 3)
    else:
        found["causal"] = replace(spec, causal=True)
    if spec.documents is not None:
        found["documents dropped"] = replace(spec, documents=None)
        found["a document missing"] = replace(spec, documents=tuple(_joined(one) for one in spec.documents))
        found["samples swapped"] = replace(spec, documents=spec.documents[::-1])
    samples = range(len(spec.documents or [0]))
    right = [dense(spec, seq_len, i) for i in samples]
    return {name: wrong for name, wrong in found.items() if [dense(wrong, seq_len, i) for i in samples] != right}


def _joined(lengths):
    """Join the first two documents."""
    return (sum(lengths[:2]), *lengths[2:])


def num_pairs_in(mask: MaskSpec, queries: tuple[int, int], seq_len: int, sample: int = 0) -> int:
    """Return the number of pairs whose query is in an interval of a sample."""
    found = start = 0
    for length in mask.lengths(sample, seq_len):
        first, last = (min(max(query - start, 0), length) for query in queries)
        found += mask.num_pairs_before(last, length) - mask.num_pairs_before(first, length)
        start += length
    return found
