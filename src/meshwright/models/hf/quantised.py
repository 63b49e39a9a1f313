"""Quantised weights of a folder: multiplied by their scales, left to transformers, or refused.

A float8 matrix has a scale for all of it, for each row, or for each block of rows and columns; the last blocks may be
smaller. `quantization_config` of config.json says which: numbers without it have no known meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import CheckpointError

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MULTIPLIED = ("fp8", "fbgemm_fp8", "compressed-tensors")
"""Methods whose float8 weights are multiplied by their scales."""
BY_TRANSFORMERS = "mxfp4"
"""Method that transformers undoes on any device, without other packages."""
RULE = "weights are numbers by themselves, or float8 or mxfp4 with the scales that quantization_config describes"
FIX = "the folder of the model that was quantised, or model.weights=random"


def dequantised(tensors: Mapping[str, Tensor], quantization: Mapping[str, Any], *, where: str) -> dict[str, Tensor]:
    """Return a folder's tensors with float8 weights multiplied by their scales, in float32, without these scales.

    Args:
        tensors: the tensors by name.
        quantization: `quantization_config` of config.json; empty without one.
        where: the folder, for errors.

    Raises:
        CheckpointError: the method is another one, or a scale doesn't fit its weight.
    """
    method = quantization.get("quant_method")
    if quantization and method not in (*MULTIPLIED, BY_TRANSFORMERS):
        what = f"config.json has a quantization_config with the method {method}, which can't be undone"
        raise refusal(what, where, f"{FIX}; if the weights aren't quantised, config.json without quantization_config")
    found = dict(tensors)
    if method not in MULTIPLIED:
        return found
    for name, weight in tensors.items():
        scale = next((one for one in _scale_names(name) if one in tensors), None)
        if weight.dtype in FLOAT8 and scale is not None:
            found[name] = _multiplied(weight, found.pop(scale), quantization.get("weight_block_size"), name, where)
    return found


def _scale_names(name: str) -> tuple[str, ...]:
    return f"{name}_scale_inv", f"{name}_scale", f"{name.removesuffix('.weight')}.scale"


def _multiplied(weight: Tensor, scale: Tensor, block: list[int] | None, name: str, where: str) -> Tensor:
    """Return a weight times its scale: one number for all of it or, in each dim, for all, each index or each block."""
    full, by_dim = scale.float(), scale.dim() == weight.dim()
    fits = scale.is_floating_point() and (by_dim or (scale.numel() == 1 and block is None))
    if by_dim:
        widths = [0] * weight.dim() if block is None else [1] * (weight.dim() - len(block)) + block
        for dim, (size, width) in enumerate(zip(weight.shape, widths, strict=True)):
            if width and scale.shape[dim] == ceil(size / width):
                full = full.repeat_interleave(width, dim).narrow(dim, 0, size)
            fits &= full.shape[dim] == size or (scale.shape[dim] == 1 and not width)
    if not fits:
        what = f"the scale of {name}, {list(weight.shape)}, is {scale.dtype} of shape {list(scale.shape)}"
        raise refusal(f"{what}, where weight_block_size is {block}", where, FIX)
    return weight.float() * full


def refusal(what: str, where: str, fix: str) -> CheckpointError:
    """Return the error for weights that can't be used as they are stored."""
    return CheckpointError(what, where=where, rule=RULE, fix=fix)
