"""Attention with any mask by any backend (Vaswani et al. 2017; grouped queries: Ainslie et al. 2023), and the part of
an attention layer between its projections, which context parallelism replaces.

The chosen backend supports all of a call, or the call raises; a mask or an option is never dropped.

Shapes: b batch, s queries, t keys, n heads, m key/value heads, g queries per key/value head, h head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.errors import LayoutError
from meshwright.nn.attention.attention_mask import AttentionMask
from meshwright.nn.attention.backend import AttentionRequest, Backend, choose_backend
from meshwright.nn.attention.cpu_blocks import block_attention
from meshwright.nn.attention.mask_spec import MaskSpec, TokenLayout
from meshwright.units import counted


@dataclass(frozen=True, eq=False)
class ScoreRules:
    """Rules of a layer's scores besides their mask."""

    scale: float | None = None
    """Factor of the products; None for 1 / sqrt(h)."""
    soft_cap: float | None = None
    """Cap c of scores, which become c · tanh(score / c) (Gemma Team 2024, "Gemma 2", section 2)."""
    sinks_n: Tensor | None = None
    """Score per head that belongs to no key, and takes its share of the softmax (OpenAI 2025, "gpt-oss", section 2)."""


PLAIN = ScoreRules()


def attention(
    q_bsnh: Tensor, k_btmh: Tensor, v_btmh: Tensor, *, mask: MaskSpec | AttentionMask, scores: ScoreRules = PLAIN,
    dropout_p: float = 0.0, backend: Backend | str = Backend.AUTO,
) -> Tensor:  # fmt: skip
    """Return outputs [b, s, n, h]; 0 for queries without visible keys.

    Args:
        q_bsnh, k_btmh, v_btmh: queries, keys and values; the number of key/value heads divides that of the queries'.
        mask: a mask prepared for all layers, or a `MaskSpec` of whole samples, which is prepared for this call.
        scores: scale, cap and sinks of the scores.
        dropout_p: probability of dropping a weight, by PyTorch's generator.
        backend: the backend; of a prepared mask, the one it is prepared for.

    Raises:
        ConfigError: the backend does not support the call; names those that do.
        LayoutError: the mask is of other shapes.
    """
    if scores.sinks_n is not None:
        out, lse = attention_with_lse(q_bsnh, k_btmh, v_btmh, mask=mask, scores=scores, backend=backend)
        return with_sinks(out, lse, scores.sinks_n)
    mask, request = _checked(q_bsnh, k_btmh, v_btmh, mask, backend, scores, dropout_p)
    scale = scores.scale
    exact_scale = q_bsnh.shape[-1] ** -0.5 if scale is None else scale
    if mask.backend is Backend.SDPA:
        if mask.is_dense or request.device == "cuda":
            return _sdpa(q_bsnh, k_btmh, v_btmh, mask, scale)
        return _by_blocks(q_bsnh, k_btmh, v_btmh, mask, exact_scale)[0]
    if mask.backend is Backend.VARLEN:
        from meshwright.nn.attention.varlen_splash import varlen_attention

        return varlen_attention(q_bsnh, k_btmh, v_btmh, starts=mask.starts, rules=mask.rules, scale=scale)
    if mask.backend is Backend.SPLASH:
        from meshwright.nn.attention.varlen_splash import splash_attention

        segments = mask.segments_bt
        return splash_attention(q_bsnh, k_btmh, v_btmh, segments_bs=segments, rules=mask.rules, scale=exact_scale)
    if mask.backend is Backend.FLEX:
        from meshwright.nn.attention.flex import flex

        return flex(q_bsnh, k_btmh, v_btmh, mask.blocks, scale=exact_scale, soft_cap=scores.soft_cap)
    return _by_reference(q_bsnh, k_btmh, v_btmh, mask, exact_scale, scores.soft_cap, dropout_p)[0]


def attention_with_lse(
    q_bsnh: Tensor, k_btmh: Tensor, v_btmh: Tensor, *, mask: MaskSpec | AttentionMask, scores: ScoreRules = PLAIN,
    backend: Backend | str = Backend.AUTO,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return outputs [b, s, n, h], and the logarithm of each softmax' denominator [b, n, s] in at least float32, both
    without sinks, which belong to no part of the keys.

    Both are differentiable. A query without visible keys has outputs of 0, an lse of -inf and no gradients. `merge` in
    `parallel.context_attention` combines the results for disjoint keys. Arguments and errors are those of `attention`.
    """
    mask, _ = _checked(q_bsnh, k_btmh, v_btmh, mask, backend, scores, needs_lse=True)
    scale = q_bsnh.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    if mask.backend is Backend.SDPA:
        return _by_blocks(q_bsnh, k_btmh, v_btmh, mask, scale)
    if mask.backend is Backend.FLEX:
        from meshwright.nn.attention.flex import flex_with_lse

        return flex_with_lse(q_bsnh, k_btmh, v_btmh, mask.blocks, scale=scale, soft_cap=scores.soft_cap)
    return _by_reference(q_bsnh, k_btmh, v_btmh, mask, scale, scores.soft_cap)


def with_sinks(out_bsnh: Tensor, lse_bns: Tensor, sinks_n: Tensor) -> Tensor:
    """Return attention's outputs, given those without sinks and their lse."""
    share_bns = torch.sigmoid(lse_bns - sinks_n.to(lse_bns.dtype)[:, None])
    return (out_bsnh * share_bns.transpose(1, 2)[..., None]).to(out_bsnh.dtype)


def _by_blocks(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = block_attention(q, k, v, *mask.bounds.tensors(), scale)
    return out


def _by_reference(
    q_bsnh: Tensor, k_btmh: Tensor, v_btmh: Tensor, mask: AttentionMask, scale: float, soft_cap: float | None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return outputs and lse by plain operations in at least float32, with memory for all scores: the oracle of the
    other backends."""
    assert mask.visible_bst is not None, "the mask is prepared for the reference"
    exact = torch.promote_types(q_bsnh.dtype, torch.float32)
    q_bsmgh = torch.unflatten(q_bsnh.to(exact), 2, (k_btmh.shape[2], -1))
    scores = torch.einsum("bsmgh,btmh->bmgst", q_bsmgh * scale, k_btmh.to(exact))
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~mask.visible_bst[:, None, None], -math.inf)
    # A constant shift: it cancels in the result, so it needs no gradient.
    shift = scores.detach().amax(-1, keepdim=True)
    shift = shift.masked_fill(shift == -math.inf, 0)
    weights = (scores - shift).exp()
    total = weights.sum(-1, keepdim=True)
    hidden = total == 0
    total = total.masked_fill(hidden, 1)
    lse_bmgs = (shift + total.log()).masked_fill(hidden, -math.inf).squeeze(-1)
    out = torch.einsum("bmgst,btmh->bsmgh", F.dropout(weights / total, dropout_p), v_btmh.to(exact))
    return out.flatten(2, 3).to(q_bsnh.dtype), lse_bmgs.flatten(1, 2)


def _sdpa(q_bsnh: Tensor, k_btmh: Tensor, v_btmh: Tensor, mask: AttentionMask, scale: float | None) -> Tensor:
    """Return outputs of PyTorch's `scaled_dot_product_attention`. Causal and full masks need no mask tensor."""
    visible = mask.visible_bst
    out_bnsh = F.scaled_dot_product_attention(
        q_bsnh.transpose(1, 2), k_btmh.transpose(1, 2), v_btmh.transpose(1, 2),
        attn_mask=None if visible is None else visible[:, None], is_causal=mask.rules.causal and visible is None,
        scale=scale, enable_gqa=q_bsnh.shape[2] != k_btmh.shape[2],
    )  # fmt: skip
    return out_bnsh.transpose(1, 2)


def _checked(
    q_bsnh: Tensor, k_btmh: Tensor, v_btmh: Tensor, mask: MaskSpec | AttentionMask, backend: Backend | str,
    scores: ScoreRules, dropout_p: float = 0.0, *, needs_lse: bool = False,
) -> tuple[AttentionMask, AttentionRequest]:  # fmt: skip
    """Return the prepared mask and what is asked of its backend, which supports it."""
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q_bsnh, k_btmh, v_btmh))
    inputs: dict[str, Any] = {
        "device": q_bsnh.device.type, "dtype": str(q_bsnh.dtype).removeprefix("torch."),
        "num_heads": q_bsnh.shape[2], "num_kv_heads": k_btmh.shape[2], "head_dim": q_bsnh.shape[3],
        "dropout_p": dropout_p, "needs_grad": needs_grad, "needs_lse": needs_lse,
        "soft_cap": scores.soft_cap is not None,
    }  # fmt: skip
    if isinstance(mask, MaskSpec):
        request = AttentionRequest(**inputs)
        mask = AttentionMask(mask, k_btmh.shape[1], device=q_bsnh.device, backend=backend, request=request)
    elif Backend(backend) not in (Backend.AUTO, mask.backend):
        raise LayoutError(
            f"backend {backend} with a mask that is prepared for {mask.backend}",
            rule="a prepared mask holds the tensors of one backend",
            fix=f"AttentionMask(..., backend={str(backend)!r}), or leave out `backend` here",
        )
    samples_fit = mask.num_samples in (1, q_bsnh.shape[0])
    if not samples_fit or (mask.num_queries, mask.num_keys) != (q_bsnh.shape[1], k_btmh.shape[1]):
        raise LayoutError(
            f"a mask of {mask.num_samples} × {mask.num_queries} queries and {mask.num_keys} keys for "
            f"{q_bsnh.shape[0]} × {counted(q_bsnh.shape[1], 'query')} and {counted(k_btmh.shape[1], 'key')}",
            rule="a mask has the shapes of its queries and keys; documents are given for each sample of the batch",
            fix="prepare the mask for this micro-batch; for a part of the keys or queries, use AttentionMask.at",
        )
    request = AttentionRequest(mask=mask.rules, whole=mask.whole, **inputs)
    choose_backend(mask.backend, request)
    return mask, request


@runtime_checkable
class AttentionCore(Protocol):
    """Scaled dot-product attention over the tokens of a micro-batch."""

    backend: str
    """Name of a backend, see `attention`."""

    def prepare(
        self, mask: MaskSpec, layout: TokenLayout, device: torch.device, request: AttentionRequest | None = None
    ) -> Any:
        """Return the mask of a micro-batch in the form that this core takes; made once for all layers of a stage.

        The backend is chosen by `request`, the dtype and heads of the calls; float32 by default.
        """

    def __call__(self, q_bsnh: Tensor, k_bsnh: Tensor, v_bsnh: Tensor, mask: Any, scores: ScoreRules = PLAIN) -> Tensor:
        """Return the output [b, s, n, h]; keys and values may have fewer heads."""


@dataclass(frozen=True)
class LocalAttention(AttentionCore):
    """Attention over tokens that are all on this rank."""

    backend: str = "auto"

    def prepare(
        self, mask: MaskSpec, layout: TokenLayout, device: torch.device, request: AttentionRequest | None = None
    ) -> AttentionMask:
        """Return the prepared mask. Tokens of a shard attend to that shard alone."""
        own = None if layout.shards is None else layout.shard
        return AttentionMask(
            mask, layout.seq_len, device=device, backend=self.backend, request=request, queries=own, keys=own
        )

    def __call__(
        self, q_bsnh: Tensor, k_bsnh: Tensor, v_bsnh: Tensor, mask: AttentionMask, scores: ScoreRules = PLAIN
    ) -> Tensor:
        """Return the output [b, s, n, h]."""
        return attention(q_bsnh, k_bsnh, v_bsnh, mask=mask, scores=scores, backend=self.backend)
