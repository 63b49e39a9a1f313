"""Attention by PyTorch's `varlen_attn`: FlashAttention (Dao 2023) on the documents of a flattened batch, on CUDA.

Shapes: b samples, s tokens, n heads, m key/value heads, h head_dim.
"""

from __future__ import annotations

import inspect
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from meshwright.nn.attention.mask_spec import Documents, MaskSpec

GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""Argument that allows fewer key/value heads, which PyTorch before 2.12 allows always."""
MIN_CAPACITY = 64
"""Documents for which there is always room. Their number is rounded up to a power of two, so that shapes in compiled
code rarely change; unused places are empty documents at the end."""


def document_starts(documents: Documents) -> Tensor:
    """Return the starts of the documents in the flattened batch, and its end for each unused place; int32."""
    lengths = [length for sample in documents for length in sample]
    capacity = max(MIN_CAPACITY, 1 << (len(lengths) - 1).bit_length())
    lengths += [0] * (capacity - len(lengths))
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def varlen_attention(
    q_bsnh: Tensor, k_bsmh: Tensor, v_bsmh: Tensor, *, starts: Tensor | None, rules: MaskSpec, scale: float | None
) -> Tensor:
    """Return outputs [b, s, n, h].

    Args:
        q_bsnh: queries.
        k_bsmh: keys.
        v_bsmh: values.
        starts: starts of the documents, from `document_starts`; None if each sample is one.
        rules: causality and window.
        scale: factor of the scores; None for 1 / sqrt(h).
    """
    b, s = q_bsnh.shape[:2]
    if starts is None:
        starts = torch.arange(0, (b + 1) * s, s, dtype=torch.int32, device=q_bsnh.device)
    # `s` instead of the longest document, which would be a number that compiled code guards on.
    out = varlen_attn(
        q_bsnh.flatten(0, 1), k_bsmh.flatten(0, 1), v_bsmh.flatten(0, 1), starts, starts, s, s,
        scale=scale, window_size=window_size(rules), **GROUPED,
    )  # fmt: skip
    assert isinstance(out, Tensor), "no auxiliary results were requested"
    return out.view(q_bsnh.shape)


def window_size(rules: MaskSpec) -> tuple[int, int]:
    """Return the numbers of visible keys before and after a query; -1 for all."""
    side = -1 if rules.window is None else rules.window - 1
    return side, 0 if rules.causal else side
