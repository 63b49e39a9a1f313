"""Sharding rules of window operators: reflection and replication padding, unfold, im2col and col2im.

Dims that the windows do not cover may be sharded in any way.

Building blocks of sharding rules: placements of outputs and inputs on one mesh axis.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from meshwright.dtensor_ops.private import Rule, is_shard, packet_name

aten = torch.ops.aten


def padded_rule(x: Spec, padding: list[int]) -> list[Sharding]:
    """Sharding rule of reflection and replication padding: shards along unpadded dims, and partial values."""
    sharded: list[Sharding] = [([p], [p]) for d in unpadded_dims(x, padding) for p in dim_shards(d, x)]
    return [all_replicated(1, 1), *sharded, *pass_partials(x)]


def padded_backward_rule(grad: Spec, x: Spec, padding: list[int]) -> list[Sharding]:
    """Sharding rule of the padding backward: shards along unpadded dims."""
    return [all_replicated(1, 2)] + [([p], [p, p]) for d in unpadded_dims(x, padding) for p in dim_shards(d, grad, x)]


def unfold_rule(x: Spec, dim: int, size: int, step: int) -> list[Sharding]:
    """Sharding rule of `unfold`: shards along dims other than `dim`; a new last dim holds the window elements."""
    shardings = [all_replicated(1, 1), *pass_partials(x)]
    return shardings + [([p], [p]) for d in range(x.ndim) if d != dim % x.ndim for p in dim_shards(d, x)]


def unfold_backward_rule(grad: Spec, shape: list[int], dim: int, size: int, step: int) -> list[Sharding]:
    """Sharding rule of `unfold_backward`: shards along dims other than `dim`."""
    other_dims = [d for d in range(len(shape)) if d != dim % max(len(shape), 1)]
    return [all_replicated(1, 1)] + [([p], [p]) for d in other_dims for p in dim_shards(d, grad)]


def im2col_rule(x: Spec, *_: Any) -> list[Sharding]:
    """Sharding rule of `im2col`: shards along the batch dim, if any."""
    return [all_replicated(1, 1)] + ([([p], [p]) for p in dim_shards(0, x)] if x.ndim == 4 else [])


def col2im_rule(x: Spec, *_: Any) -> list[Sharding]:
    """Sharding rule of `col2im`: shards along the batch dim, if any."""
    return [all_replicated(1, 1)] + ([([p], [p]) for p in dim_shards(0, x)] if x.ndim == 3 else [])


def unpadded_dims(x: Spec, padding: list[int]) -> list[int]:
    """Return the dims without padding; `padding` holds pairs, last dim first."""
    padded = {x.ndim - 1 - i // 2 for i, width in enumerate(padding) if width}
    return [d for d in range(x.ndim) if d not in padded]


def pass_partials(x: Spec) -> list[Sharding]:
    """Return placements that pass partial values through an operator that only selects values."""
    return [([p], [p]) for p in partials(x)]


PADS = [getattr(aten, f"{kind}_pad{n}d") for kind in ("reflection", "replication") for n in (1, 2, 3)]
PADS_BACKWARD = [getattr(aten, f"{packet_name(pad)}_backward") for pad in PADS]

WINDOW_RULES: dict[Any, Rule] = {
    **{pad.default: padded_rule for pad in PADS},
    **{pad.default: padded_backward_rule for pad in PADS_BACKWARD},
    aten.unfold.default: unfold_rule,
    aten.unfold_copy.default: unfold_rule,
    aten.unfold_backward.default: unfold_backward_rule,
    aten.im2col.default: im2col_rule,
    aten.col2im.default: col2im_rule,
}
SHAPE_ARGUMENTS: dict[Any, int] = {aten.unfold_backward.default: 1}
"""Index of the argument with the result's shape, by operator."""


Sharding = tuple[list[Placement | None], list[Placement | None]]
"""Placements of the outputs and of the inputs on one mesh axis."""
Spec = Any
"""Tensor argument as DTensor passes it to a rule, with `shape`, `ndim` and `placements`."""


def all_replicated(num_outputs: int, num_inputs: int) -> Sharding:
    """Return replicated placements for all outputs and inputs, which are always correct."""
    return [Replicate()] * num_outputs, [Replicate()] * num_inputs


def dim_shards(dim: int, *tensors: Spec) -> list[Placement]:
    """Return the candidate placements that shard `dim`: `Shard` and the tensors' current (strided) placements."""
    candidates: list[Placement] = [Shard(dim)]
    for tensor in tensors:
        candidates += [p for p in tensor.placements if is_shard(p) and p.dim == dim and p not in candidates]
    return candidates


def partials(tensor: Spec) -> list[Placement]:
    """Return a tensor's partial placements, which operators that only select values can pass through."""
    return [p for p in dict.fromkeys(tensor.placements) if type(p) is Partial]
