"""A plain quantiser of what ranks send, by which proofs as run measure what a lossy codec may change.

Written for reading, and independent of the codecs that it stands for: only the layout of what is sent together is
theirs, because small values lose their digits beside large ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from meshwright.comm.compression.catalogue import GROUP, Method, find_method
from meshwright.plan.run_plan import RunPlan, Unit
from meshwright.prove.record.reference_run import TensorsByName

ROTATED = 32
"""Elements that a rotation mixes."""


@dataclass(frozen=True)
class SentUnit:
    """Parameters that are sent together, with the method."""

    method: Method
    names: tuple[str, ...]


def sent_units(plan: RunPlan, method_of: Callable[[Unit], str], num_ranks: int) -> list[SentUnit]:
    """Return the units that `num_ranks` ranks send with a lossy method."""
    found: list[SentUnit] = []
    for stage in plan.stages if num_ranks > 1 else ():
        members: dict[tuple[int | None, str, str], list[str]] = {}
        methods = {}
        for kind, layer, parameter in plan.parameters(stage):
            unit = plan.unit_of(stage, kind, parameter)
            key = (None, "", "") if unit is stage.root else (layer, kind.name, unit.name)
            members.setdefault(key, []).append(kind.key(parameter, layer))
            methods[key] = find_method(method_of(unit))
        found += [SentUnit(methods[key], tuple(names)) for key, names in members.items() if methods[key].is_lossy]
    return found


def flatten(tensors: list[Tensor], num_ranks: int) -> Tensor:
    """Return one row per rank with its rows of all tensors, in order; a tensor's rows are padded with zeros."""
    return torch.cat([_rows(tensor, num_ranks) for tensor in tensors], dim=1)


def unflatten(flat: Tensor, shapes: dict[str, torch.Size]) -> TensorsByName:
    """Return the tensors of `flatten`."""
    found, at = {}, 0
    for name, shape in shapes.items():
        size = -(-shape[0] // len(flat)) * shape[1:].numel()
        full = flat[:, at : at + size].reshape(-1, *shape[1:])
        found[name], at = full[: shape[0]], at + size
    return found


def _rows(tensor: Tensor, num_ranks: int) -> Tensor:
    padded = tensor.new_zeros((num_ranks * -(-tensor.shape[0] // num_ranks), *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    return padded.reshape(num_ranks, -1)


def quantise(x: Tensor, method: Method) -> tuple[Tensor, Tensor]:
    """Round each group of a row to integers times a scale, by which the element largest in size is the lowest integer.

    Returns:
        The rounded elements, and the squares of their errors: at least those expected of an element that may be
        anywhere between two integers, and more where an element is larger than the highest integer.
    """
    if not method.codec.is_quantised:
        return x.bfloat16().to(x.dtype), (x * torch.finfo(torch.bfloat16).eps).square() / 12
    width, lowest = -x.shape[-1] % GROUP, -(2 ** (method.codec.bits - 1))
    groups = _rotated(torch.nn.functional.pad(x, (0, width)).reshape(len(x), -1, GROUP), method)
    scale = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / lowest
    codes = (groups / torch.where(scale == 0, 1, scale)).round().clamp(lowest, -lowest - 1)
    square = torch.maximum((codes * scale - groups).square(), scale.square() / 12)
    if method.rotate:  # errors spread over the elements that are rotated together
        parts = square.reshape(len(x), -1, ROTATED)
        square = parts.mean(-1, keepdim=True).expand_as(parts)
    rounded = _rotated(codes * scale, method).reshape(len(x), -1)
    return rounded[:, : x.shape[-1]], square.reshape(len(x), -1)[:, : x.shape[-1]]


def _rotated(groups: Tensor, method: Method) -> Tensor:
    """Return rotated groups, if the method rotates; the rotation is its own inverse."""
    if not method.rotate:
        return groups
    rotated: Tensor = groups.reshape(len(groups), -1, ROTATED) @ _rotation().to(groups.dtype)
    return rotated.reshape(groups.shape)


@cache
def _rotation() -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < ROTATED:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
    return matrix / math.sqrt(ROTATED)
