"""Attention kernels that take documents packed one after the other: PyTorch's `varlen_attn`, FlashAttention (Dao 2023)
on CUDA, and torch_xla's splash attention on TPU.

Splash is not run on hardware: torch_xla is imported when a mask asks for this backend, and tests use a stand-in.
Written for the interface of torch_xla 2.7 to 2.9, `torch_xla.experimental.splash_attention`.

Shapes: b samples, s tokens, n heads, m key/value heads, h head_dim.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from meshwright.errors import ConfigError, LayoutError
from meshwright.nn.attention.mask_spec import Documents, MaskSpec
from meshwright.units import counted

LANES = 128
"""Blocks are multiples of this many tokens."""
MAX_BLOCK = 2048
BLOCK_FIELDS = (
    "sa_block_q", "sa_block_kv", "sa_block_kv_compute", "sa_block_q_dkv", "sa_block_kv_dkv", "sa_block_kv_dkv_compute",
    "sa_block_q_dq", "sa_block_kv_dq",
)  # fmt: skip
AXES = ("data", "fsdp")
"""Mesh axes that torch_xla's wrapper expects the batch to be sharded over."""


def document_numbers(documents: Documents) -> Tensor:
    """Return the number of each token's document in its sample, [b, s], int32."""
    rows = [torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)) for lengths in documents]
    return torch.stack(rows).int()


def splash_attention(
    q_bsnh: Tensor, k_bsmh: Tensor, v_bsmh: Tensor, *, segments_bs: Tensor | None, rules: MaskSpec, scale: float
) -> Tensor:
    """Return outputs [b, s, n, h]. The segments are the number of each token's document; None if each sample is one.

    Raises:
        ConfigError: torch_xla is not installed, or does not import.
        LayoutError: the number of tokens is not a multiple of 128.
    """
    splash, runtime = _torch_xla("torch_xla.experimental.splash_attention"), _torch_xla("torch_xla.runtime")
    config = splash.SplashAttentionConfig(**config_fields(rules, q_bsnh.shape[1], device=runtime.global_ordinal()))
    groups = q_bsnh.shape[2] // k_bsmh.shape[2]
    # The kernel neither scales scores nor shares keys among heads.
    q_bnsh = (q_bsnh * scale).transpose(1, 2)
    k_bnsh, v_bnsh = (x.repeat_interleave(groups, 2).transpose(1, 2) for x in (k_bsmh, v_bsmh))
    out_bnsh: Tensor = splash.splash_attention(
        q_bnsh, k_bnsh, v_bnsh, config.to_json(), decoder_segment_ids=segments_bs, causal=rules.causal
    )
    return out_bnsh.transpose(1, 2)


def config_fields(rules: MaskSpec, seq_len: int, *, device: int) -> dict[str, Any]:
    """Return the fields of torch_xla's `SplashAttentionConfig`.

    Raises:
        LayoutError: the number of tokens is not a multiple of 128.
    """
    if seq_len % LANES:
        raise LayoutError(
            f"splash attention on {counted(seq_len, 'token')}",
            rule=f"the kernel's blocks are multiples of {LANES} tokens that divide the sequence",
            fix=f"use {-(-seq_len // LANES) * LANES} tokens, or the reference backend",
        )
    block = max(size for size in range(LANES, MAX_BLOCK + 1, LANES) if seq_len % size == 0)
    # A process computes on its own device, so the mesh is that device. The text is what `Mesh.from_str` reads.
    mesh = {"device_ids": [device], "mesh_shape": (1, 1), "axis_names": AXES}
    fields: dict[str, Any] = dict.fromkeys(BLOCK_FIELDS, block)
    fields |= {"mesh": str(mesh), "qkv_partition_spec": (AXES, None, None, None),
               "segment_ids_partition_spec": (AXES, None)}  # fmt: skip
    if rules.window is not None:
        # The kernel counts keys on each side without the query; MaskSpec's window counts the query.
        fields |= {"attentiontype_local_sliding": True, "slide_window_size": rules.window - 1}
    return fields


def _torch_xla(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"attention backend splash needs {name}: {error}",
            rule="splash is torch_xla's, for TPU; its last release is 2.9",
            fix="install torch_xla with its version of PyTorch, or use the reference backend",
        ) from error


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
    """Return outputs [b, s, n, h]. The starts are those of `document_starts`; None if each sample is one document."""
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
