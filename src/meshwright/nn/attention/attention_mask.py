"""Attention mask prepared once for a micro-batch, for all layers of a stage, with the tensors that its backend needs.

Everything is made at construction. Compiled blocks receive tensors of fixed shapes and static fields only, so they
don't recompile for other documents.

Shapes: b samples, or 1 if all are alike; s queries, t keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshwright.nn.attention.backend import AttentionRequest, Backend, choose_backend
from meshwright.nn.attention.key_bounds import key_bounds
from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.nn.attention.token_layout import Shard


class AttentionMask:
    """Mask of the queries and keys of a micro-batch.

    Attributes:
        backend: the chosen backend, never `auto`.
        rules: the mask without its documents, only `()` if there are any: the same value for all micro-batches.
        whole: True if queries and keys are the whole samples, in order.
        num_samples: samples that the tensors describe; 1 if all are alike.
        num_queries: queries of a sample.
        num_keys: keys of a sample.
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
        """Prepare a mask.

        Args:
            spec: the mask of whole samples.
            seq_len: tokens of a whole sample.
            device: device of the queries.
            backend: the backend.
            request: dtype, heads, dropout and gradients of the calls, for the choice of `auto`; its mask and device are
                set here. By default, float32 without lse, which passes over backends of half precision.
            queries: the queries as intervals of each sample; None for all, in order.
            keys: the keys, likewise.

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
        self.bounds = key_bounds(spec, seq_len, queries, keys).to(device)
        self.num_samples, self.num_queries = self.bounds.first_bs.shape
        self.num_keys = self.bounds.positions_bt.shape[1]
        self.is_dense = request.is_dense
        self.visible_bst: Tensor | None = None
        self.blocks: Any = None
        self.starts: Tensor | None = None
        self.segments_bt: Tensor | None = None
        self._prepare(spec, seq_len, queries, keys)

    @classmethod
    def at(
        cls, spec: MaskSpec, seq_len: int, queries: Shard, keys: Shard, *, device: torch.device,
        backend: Backend | str = Backend.AUTO, request: AttentionRequest | None = None,
    ) -> AttentionMask:  # fmt: skip
        """Prepare the mask of queries and keys at given positions of the samples, as under context parallelism."""
        return cls(spec, seq_len, device=device, backend=backend, request=request, queries=queries, keys=keys)

    def _prepare(self, spec: MaskSpec, seq_len: int, queries: Shard, keys: Shard) -> None:
        """Make the tensors of the backend. Backends are imported when they are used."""
        device = self.bounds.first_bs.device
        dense_sdpa = self.backend is Backend.SDPA and device.type == "cuda" and not self.is_dense
        if self.backend is Backend.REFERENCE or dense_sdpa:
            self.visible_bst = self.bounds.visible()
        elif self.backend is Backend.FLEX:
            from meshwright.nn.attention.backends.flex import flex_mask

            self.blocks = flex_mask(spec, seq_len, queries, keys, self.bounds)
        elif self.backend is Backend.VARLEN and spec.documents is not None:
            from meshwright.nn.attention.backends.varlen import document_starts

            self.starts = document_starts(spec.documents).to(device)
        elif self.backend is Backend.SPLASH and spec.documents is not None:
            from meshwright.nn.attention.backends.splash import document_numbers

            self.segments_bt = document_numbers(spec.documents).to(device)
