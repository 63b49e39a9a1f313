"""Attention with any mask by any backend (Vaswani et al. 2017; grouped queries: Ainslie et al. 2023).

The chosen backend supports all of a call, or the call raises; a mask or an option is never dropped.

Shapes: b batch, s queries, t keys, n heads, m key/value heads, h head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.errors import LayoutError
from meshwright.nn.attention.attention_mask import AttentionMask
from meshwright.nn.attention.backend import AttentionRequest, Backend, choose_backend
from meshwright.nn.attention.backends.cpu_blocks import block_attention
from meshwright.nn.attention.backends.reference import reference_attention
from meshwright.nn.attention.backends.sdpa import sdpa_attention
from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.units import counted


def attention(
    q_bsnh: Tensor, k_btmh: Tensor, v_btmh: Tensor, *, mask: MaskSpec | AttentionMask, scale: float | None = None,
    dropout_p: float = 0.0, backend: Backend | str = Backend.AUTO,
) -> Tensor:  # fmt: skip
    """Return outputs [b, s, n, h]; 0 for queries without visible keys.

    Args:
        q_bsnh: queries.
        k_btmh: keys; the number of their heads divides that of the queries'.
        v_btmh: values.
        mask: a mask prepared for all layers, or a `MaskSpec` of whole samples, which is prepared for this call.
        scale: factor of the scores; None for 1 / sqrt(h).
        dropout_p: probability of dropping a weight, by PyTorch's generator.
        backend: the backend; of a prepared mask, the one it is prepared for.

    Raises:
        ConfigError: the backend does not support the call; names those that do.
        LayoutError: the mask is of other shapes.
    """
    mask, request = _checked(q_bsnh, k_btmh, v_btmh, mask, backend, dropout_p, needs_lse=False)
    exact_scale = q_bsnh.shape[-1] ** -0.5 if scale is None else scale
    if mask.backend is Backend.SDPA:
        if mask.is_dense or request.device == "cuda":
            causal, visible = mask.rules.causal, mask.visible_bst
            return sdpa_attention(q_bsnh, k_btmh, v_btmh, causal=causal, visible_bst=visible, scale=scale)
        return _by_blocks(q_bsnh, k_btmh, v_btmh, mask, exact_scale)[0]
    if mask.backend is Backend.VARLEN:
        from meshwright.nn.attention.backends.varlen import varlen_attention

        return varlen_attention(q_bsnh, k_btmh, v_btmh, starts=mask.starts, rules=mask.rules, scale=scale)
    if mask.backend is Backend.SPLASH:
        from meshwright.nn.attention.backends.splash import splash_attention

        segments = mask.segments_bt
        return splash_attention(q_bsnh, k_btmh, v_btmh, segments_bs=segments, rules=mask.rules, scale=exact_scale)
    if mask.backend is Backend.FLEX:
        from meshwright.nn.attention.backends.flex import flex

        return flex(q_bsnh, k_btmh, v_btmh, mask.blocks, scale=exact_scale)
    return _by_reference(q_bsnh, k_btmh, v_btmh, mask, exact_scale, dropout_p)[0]


def attention_with_lse(
    q_bsnh: Tensor, k_btmh: Tensor, v_btmh: Tensor, *, mask: MaskSpec | AttentionMask, scale: float | None = None,
    backend: Backend | str = Backend.AUTO,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return outputs [b, s, n, h], and the logarithm of each softmax' denominator [b, n, s] in at least float32.

    Both are differentiable. A query without visible keys has outputs of 0, an lse of -inf and no gradients. `merge`
    combines the results for disjoint keys. Arguments and errors are those of `attention`.
    """
    mask, _ = _checked(q_bsnh, k_btmh, v_btmh, mask, backend, dropout_p=0.0, needs_lse=True)
    scale = q_bsnh.shape[-1] ** -0.5 if scale is None else scale
    if mask.backend is Backend.SDPA:
        return _by_blocks(q_bsnh, k_btmh, v_btmh, mask, scale)
    if mask.backend is Backend.FLEX:
        from meshwright.nn.attention.backends.flex import flex_with_lse

        return flex_with_lse(q_bsnh, k_btmh, v_btmh, mask.blocks, scale=scale)
    return _by_reference(q_bsnh, k_btmh, v_btmh, mask, scale, dropout_p=0.0)


def _by_blocks(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> tuple[Tensor, Tensor]:
    bounds = mask.bounds
    out: tuple[Tensor, Tensor] = block_attention(q, k, v, bounds.first_bs, bounds.last_bs, bounds.positions_bt, scale)
    return out


def _by_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    assert mask.visible_bst is not None, "the mask is prepared for the reference"
    return reference_attention(q, k, v, mask.visible_bst, scale=scale, dropout_p=dropout_p)


def _checked(
    q_bsnh: Tensor, k_btmh: Tensor, v_btmh: Tensor, mask: MaskSpec | AttentionMask, backend: Backend | str,
    dropout_p: float, *, needs_lse: bool,
) -> tuple[AttentionMask, AttentionRequest]:  # fmt: skip
    """Return the prepared mask and what is asked of its backend, which supports it."""
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q_bsnh, k_btmh, v_btmh))
    inputs: dict[str, Any] = {
        "device": q_bsnh.device.type, "dtype": str(q_bsnh.dtype).removeprefix("torch."),
        "num_heads": q_bsnh.shape[2], "num_kv_heads": k_btmh.shape[2], "head_dim": q_bsnh.shape[3],
        "dropout_p": dropout_p, "needs_grad": needs_grad, "needs_lse": needs_lse,
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
    _check_shapes(q_bsnh, k_btmh, mask)
    request = AttentionRequest(mask=mask.rules, whole=mask.whole, **inputs)
    choose_backend(mask.backend, request)
    return mask, request


def _check_shapes(q_bsnh: Tensor, k_btmh: Tensor, mask: AttentionMask) -> None:
    samples_fit = mask.num_samples in (1, q_bsnh.shape[0])
    if not samples_fit or (mask.num_queries, mask.num_keys) != (q_bsnh.shape[1], k_btmh.shape[1]):
        raise LayoutError(
            f"a mask of {mask.num_samples} × {mask.num_queries} queries and {mask.num_keys} keys for "
            f"{q_bsnh.shape[0]} × {counted(q_bsnh.shape[1], 'query')} and {counted(k_btmh.shape[1], 'key')}",
            rule="a mask has the shapes of its queries and keys; documents are given for each sample of the batch",
            fix="prepare the mask for this micro-batch; for a part of the keys or queries, use AttentionMask.at",
        )
