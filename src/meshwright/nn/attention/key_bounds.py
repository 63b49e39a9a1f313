"""Bounds of an attention mask as tensors: the positions of the keys that each query may attend to, which are one
interval for every `MaskSpec`.

Their shapes depend on the numbers of samples and tokens only, not on the documents, and they describe any part of a
sample in any order: key t is visible to query s if first[s] <= position[t] < last[s].

Shapes: b samples, or 1 if all are alike; s queries, t keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.errors import LayoutError
from meshwright.nn.attention.mask_spec import Interval, MaskSpec
from meshwright.nn.attention.token_layout import Shard
from meshwright.units import counted


@dataclass(frozen=True, eq=False)
class KeyBounds:
    """Visible keys of each query, as positions in the sample; int32."""

    first_bs: Tensor
    last_bs: Tensor
    positions_bt: Tensor
    """Positions of the keys."""

    def visible(self) -> Tensor:
        """Return the dense mask [b, s, t]: True for visible keys."""
        positions = self.positions_bt[:, None]
        return (self.first_bs[..., None] <= positions) & (positions < self.last_bs[..., None])

    def to(self, device: torch.device) -> KeyBounds:
        """Return the bounds on a device."""
        return KeyBounds(*(x.to(device) for x in (self.first_bs, self.last_bs, self.positions_bt)))


def key_bounds(spec: MaskSpec, seq_len: int, queries: Shard, keys: Shard) -> KeyBounds:
    """Return the bounds of a mask for the queries and keys at given positions, on CPU.

    Raises:
        LayoutError: documents, queries and keys have different numbers of samples, or don't fit the sample's length.
    """
    num_samples = _num_samples(spec, queries, keys)
    parts = []
    for sample in range(num_samples):
        query = _positions(queries[sample % len(queries)], seq_len)
        first, last = _visible_keys(spec, spec.lengths(sample, seq_len), seq_len)
        parts.append((first[query], last[query], _positions(keys[sample % len(keys)], seq_len)))
    return KeyBounds(*(torch.stack(rows).int() for rows in zip(*parts, strict=True)))


def _visible_keys(spec: MaskSpec, lengths: Sequence[int], seq_len: int) -> tuple[Tensor, Tensor]:
    """Return the first visible key and the one after the last, for all tokens of a sample."""
    if sum(lengths) != seq_len or min(lengths) < 1:
        shown = ", ".join(map(str, lengths[:8])) + (", …" if len(lengths) > 8 else "")
        raise LayoutError(
            f"documents of {shown} tokens in a sample of {seq_len}",
            rule="the lengths of a sample's documents are positive and add up to its length",
            fix="count padding as a document of its own",
        )
    lengths_by_document = torch.tensor(lengths)
    ends = lengths_by_document.cumsum(0).repeat_interleave(lengths_by_document)
    starts = ends - lengths_by_document.repeat_interleave(lengths_by_document)
    query = torch.arange(seq_len)
    first, last = starts, ends
    if spec.causal:
        last = torch.maximum(query + 1, torch.minimum(starts + spec.prefix, ends))
    if spec.window is not None:
        first, last = torch.maximum(first, query - spec.window + 1), torch.minimum(last, query + spec.window)
    return first, last


def _positions(intervals: Sequence[Interval], seq_len: int) -> Tensor:
    for first, last in intervals:
        if not 0 <= first <= last <= seq_len:
            raise LayoutError(
                f"tokens {first} to {last} of a sample of {seq_len}",
                rule="the intervals of a shard lie inside the sample",
                fix=f"use intervals in 0 … {seq_len}",
            )
    return torch.cat([torch.arange(first, last) for first, last in intervals])


def _num_samples(spec: MaskSpec, queries: Shard, keys: Shard) -> int:
    counts = {len(queries), len(keys), 1 if spec.documents is None else len(spec.documents)} - {1}
    if len(counts) > 1:
        documents = "no" if spec.documents is None else len(spec.documents)
        raise LayoutError(
            f"queries of {counted(len(queries), 'sample')}, keys of {len(keys)}, documents of {documents}",
            rule="queries, keys and documents describe the same samples, or are a single entry for all",
            fix="pass an entry per sample, or one for all",
        )
    return counts.pop() if counts else 1
