"""Attention mask prepared once for a micro-batch, for all layers of a stage, with the tensors that its backend needs.

Everything is made at construction. Compiled blocks receive tensors of fixed shapes and static fields only, so they
don't recompile for other documents.

Shapes: b samples, or 1 if all are alike; s queries, t keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import LayoutError
from meshwright.nn.attention.backend import AttentionRequest, Backend, choose_backend
from meshwright.nn.attention.mask_spec import Interval, MaskSpec, Shard
from meshwright.units import counted


class AttentionMask:
    """Mask of the queries and keys of a micro-batch.

    Attributes:
        backend: the chosen backend, never `auto`.
        rules: the mask without its documents, only `()` if there are any: the same value for all micro-batches.
        whole: True if queries and keys are the whole samples, in order.
        num_samples: samples that the tensors describe; 1 if all are alike.
        bounds: visible keys of each query.
        visible_bst: dense mask, if the backend needs one.
        blocks: flex_attention's block mask, if it is the backend.
        starts: starts of all documents in the flattened batch, if varlen is the backend and there are documents.
        segments_bt: number of each token's document, if splash is the backend and there are documents.
    """

    def __init__(
        self, spec: MaskSpec, seq_len: int, *, device: torch.device, backend: Backend | str = Backend.AUTO,
        request: AttentionRequest | None = None, queries: Shard | None = None, keys: Shard | None = None,
    ) -> None:  # fmt: skip
        """Prepare the mask of whole samples, or of some `queries` and `keys`, as intervals of each sample.

        Args:
            request: dtype, heads, dropout and gradients of the calls, for the choice of `auto`; its mask and device are
                set here. By default, float32 without lse, which passes over backends of half precision.

        Raises:
            ConfigError: the backend does not support the mask on this device.
            LayoutError: documents, queries and keys don't fit each other.
        """
        everything = (((0, seq_len),),)
        queries, keys = queries or everything, keys or everything
        self.whole = queries == keys == everything
        window = None if spec.window is None or spec.window >= seq_len else spec.window
        self.rules = replace(spec, window=window, documents=None if spec.documents is None else ())
        request = request or AttentionRequest(device.type, "float32", needs_grad=False)
        request = replace(request, device=device.type, mask=self.rules, whole=self.whole)
        self.backend = choose_backend(Backend(backend), request)
        bounds = key_bounds(spec, seq_len, queries, keys)
        self.bounds = KeyBounds(*(x.to(device) for x in bounds.tensors()))
        self.num_samples, self.num_queries = self.bounds.first_bs.shape
        self.num_keys = self.bounds.positions_bt.shape[1]
        self.is_dense = request.is_dense
        self.visible_bst: Tensor | None = None
        self.blocks: Any = None
        self.starts: Tensor | None = None
        self.segments_bt: Tensor | None = None
        self._prepare(spec, seq_len, bounds, device)

    @classmethod
    def at(
        cls, spec: MaskSpec, seq_len: int, queries: Shard, keys: Shard, *, device: torch.device,
        backend: Backend | str = Backend.AUTO, request: AttentionRequest | None = None,
    ) -> AttentionMask:  # fmt: skip
        """Prepare the mask of queries and keys at given positions of the samples, as under context parallelism."""
        return cls(spec, seq_len, device=device, backend=backend, request=request, queries=queries, keys=keys)

    def _prepare(self, spec: MaskSpec, seq_len: int, bounds: KeyBounds, device: torch.device) -> None:
        """Make the tensors of the backend. Backends are imported when they are used."""
        dense_sdpa = self.backend is Backend.SDPA and device.type == "cuda" and not self.is_dense
        if self.backend is Backend.REFERENCE or dense_sdpa:
            self.visible_bst = self.bounds.visible()
        elif self.backend is Backend.FLEX:
            from meshwright.nn.attention.flex import flex_mask

            self.blocks = flex_mask(bounds.tensors(), seq_len, device)
        elif self.backend is Backend.VARLEN and spec.documents is not None:
            from meshwright.nn.attention.varlen_splash import document_starts

            self.starts = document_starts(spec.documents).to(device)
        elif self.backend is Backend.SPLASH and spec.documents is not None:
            from meshwright.nn.attention.varlen_splash import document_numbers

            self.segments_bt = document_numbers(spec.documents).to(device)


@dataclass(frozen=True, eq=False)
class KeyBounds:
    """Visible keys of each query, as positions in the sample, int32: key t is visible to query s if first[s] <=
    position[t] < last[s], which holds for every `MaskSpec`, on any part of a sample in any order."""

    first_bs: Tensor
    last_bs: Tensor
    positions_bt: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the fields."""
        return self.first_bs, self.last_bs, self.positions_bt

    def visible(self) -> Tensor:
        """Return the dense mask [b, s, t]: True for visible keys."""
        positions = self.positions_bt[:, None]
        return (self.first_bs[..., None] <= positions) & (positions < self.last_bs[..., None])


def key_bounds(spec: MaskSpec, seq_len: int, queries: Shard, keys: Shard) -> KeyBounds:
    """Return the bounds of a mask for the queries and keys at given positions, on CPU.

    Raises:
        LayoutError: documents, queries and keys have different numbers of samples, or don't fit the sample's length.
    """
    counts = {len(queries), len(keys), 1 if spec.documents is None else len(spec.documents)} - {1}
    if len(counts) > 1:
        documents = "no" if spec.documents is None else len(spec.documents)
        raise LayoutError(
            f"queries of {counted(len(queries), 'sample')}, keys of {len(keys)}, documents of {documents}",
            rule="queries, keys and documents describe the same samples, or are a single entry for all",
            fix="pass an entry per sample, or one for all",
        )
    parts = []
    for sample in range(counts.pop() if counts else 1):
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
