"""Attention backends: their names, what each supports, and the choice among them. Doesn't import torch, so that a plan
can ask what would run where.

`auto` depends on the device, the kind of mask and the inputs, never on lengths of documents, so all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from meshwright.errors import ConfigError
from meshwright.nn.attention.mask_spec import MaskSpec


class Backend(StrEnum):
    """Implementation of attention."""

    AUTO = "auto"
    """The first of `PREFERENCE` that supports the request."""
    REFERENCE = "reference"
    """Plain operations in at least float32."""
    SDPA = "sdpa"
    """PyTorch's `scaled_dot_product_attention`; on CPU, its kernel on the blocks that the mask leaves."""
    FLEX = "flex"
    """PyTorch's `flex_attention`, compiled, which skips empty blocks."""
    VARLEN = "varlen"
    """PyTorch's `varlen_attn`: FlashAttention on packed documents."""
    SPLASH = "splash"
    """torch_xla's splash attention on TPU; not run on hardware."""


PREFERENCE = {
    "cuda": (Backend.SDPA, Backend.VARLEN, Backend.FLEX, Backend.REFERENCE),
    "xla": (Backend.SPLASH, Backend.REFERENCE),
}
"""Order of choice by device type; sdpa on CUDA is passed over for masks with empty blocks."""
DEFAULT_PREFERENCE = (Backend.SDPA, Backend.REFERENCE)

HALF = ("bfloat16", "float16")
CPU_LIKE = ("cpu", "meta")
MAX_FLASH_HEAD_DIM = 256


@dataclass(frozen=True)
class AttentionRequest:
    """What a call of attention asks of a backend; shapes as they are on this rank."""

    device: str
    """Type of the device, as in `torch.device.type`."""
    dtype: str
    """Name of the inputs' dtype, such as `bfloat16`."""
    mask: MaskSpec = MaskSpec()
    """The mask; of `documents`, only whether there are any matters."""
    whole: bool = True
    """Queries and keys are the whole sample in order; False under context parallelism."""
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 64
    dropout_p: float = 0.0
    """Dropout of attention weights."""
    needs_grad: bool = True
    needs_lse: bool = False
    """The logarithm of the softmax' denominator is needed, with gradient."""
    soft_cap: bool = False
    """Scores are capped before the mask."""

    @property
    def is_dense(self) -> bool:
        """True for plain causal and full masks, which leave a block-sparse kernel nothing to skip but a triangle."""
        return self.whole and self.mask.documents is None and self.mask.window is None and not self.mask.prefix


def refusal(backend: Backend, request: AttentionRequest) -> str:
    """Return why a backend does not support a request; empty if it does."""
    if request.num_heads % request.num_kv_heads:
        return f"num_kv_heads = {request.num_kv_heads} does not divide num_heads = {request.num_heads}"
    if request.dropout_p and backend is not Backend.REFERENCE:
        return "has no dropout of attention weights"
    if request.soft_cap and backend not in (Backend.REFERENCE, Backend.FLEX):
        return "has no cap of scores"
    return _REFUSALS[backend](request)


def supporting(request: AttentionRequest) -> list[Backend]:
    """Return the backends that support a request."""
    return [backend for backend in _REFUSALS if not refusal(backend, request)]


def choose_backend(backend: Backend, request: AttentionRequest) -> Backend:
    """Return the backend for a request: `backend`, or with `auto` the preferred one.

    Raises:
        ConfigError: the backend does not support the request.
    """
    if backend is Backend.AUTO:
        # On CUDA, sdpa skips no block, so only dense masks go there.
        skipped = Backend.SDPA if request.device == "cuda" and not request.is_dense else None
        preferred = (one for one in PREFERENCE.get(request.device, DEFAULT_PREFERENCE) if one is not skipped)
        backend = next((one for one in preferred if not refusal(one, request)), Backend.REFERENCE)
    if reason := refusal(backend, request):
        others = ", ".join(supporting(request)) or "none"
        raise ConfigError(
            f"attention backend {backend}: {reason}",
            where=_described(request),
            rule="a mask or an option that a backend lacks is never dropped",
            fix=f"use a backend that supports it: {others}",
        )
    return backend


def _sdpa(request: AttentionRequest) -> str:
    if request.device not in (*CPU_LIKE, "cuda"):
        return f"not on {request.device}"
    if request.device == "cuda" and request.needs_lse:
        return "has no differentiable lse on CUDA"
    if request.device == "cuda" and not request.whole:
        return "takes whole samples only on CUDA, where a query without keys is undefined"
    return ""


def _flex(request: AttentionRequest) -> str:
    if request.device not in ("cpu", "cuda"):
        return f"not on {request.device}"
    if request.device == "cpu" and (request.needs_grad or request.needs_lse):
        return "has no backward and no lse on CPU"
    if request.dtype not in ("float32", *HALF):
        return f"has no {request.dtype}"
    if request.device == "cuda" and request.head_dim < 16:
        return f"head_dim {request.head_dim} is below 16"
    return ""


def _varlen(request: AttentionRequest) -> str:
    if request.device != "cuda":
        return f"not on {request.device}"
    if request.dtype not in HALF:
        return f"has no {request.dtype}, only {' and '.join(HALF)}"
    if request.mask.prefix:
        return "has no prefix"
    if not request.whole:
        return "takes whole samples only"
    if request.needs_lse:
        return "has no gradient of lse"
    if request.head_dim % 8 or request.head_dim > MAX_FLASH_HEAD_DIM:
        return f"head_dim {request.head_dim} is not a multiple of 8 up to {MAX_FLASH_HEAD_DIM}"
    return ""


def _splash(request: AttentionRequest) -> str:
    if request.device != "xla":
        return f"not on {request.device}"
    if request.dtype not in ("float32", "bfloat16"):
        return f"has no {request.dtype}"
    if request.mask.prefix:
        return "has no prefix"
    if not request.whole:
        return "takes whole samples only"
    if request.needs_lse:
        return "returns no lse"
    if request.head_dim % 128:
        return f"head_dim {request.head_dim} is not a multiple of 128"
    return ""


_REFUSALS: dict[Backend, Callable[[AttentionRequest], str]] = {
    Backend.REFERENCE: lambda request: "",
    Backend.SDPA: _sdpa,
    Backend.FLEX: _flex,
    Backend.VARLEN: _varlen,
    Backend.SPLASH: _splash,
}


def _described(request: AttentionRequest) -> str:
    mask = request.mask
    kinds = ["causal" if mask.causal else "full"]
    kinds += [name for name, present in (
        (f"window {mask.window}", mask.window), (f"prefix {mask.prefix}", mask.prefix),
        ("documents", mask.documents is not None), ("part of the sample", not request.whole),
        (f"dropout {request.dropout_p}", request.dropout_p), ("with gradient", request.needs_grad),
        ("with lse", request.needs_lse), ("with a cap of scores", request.soft_cap),
    ) if present]  # fmt: skip
    heads = f"{request.num_heads} / {request.num_kv_heads} heads of {request.head_dim}"
    return f"attention on {request.device}, {request.dtype}, {heads}, {', '.join(kinds)}"
