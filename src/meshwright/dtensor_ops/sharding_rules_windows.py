"""Sharding rules of window operators: reflection and replication padding, unfold, im2col and col2im.

Dims that the windows do not cover may be sharded in any way.
"""

from __future__ import annotations

from typing import Any

import torch

from meshwright.dtensor_ops.private import Rule, packet_name
from meshwright.dtensor_ops.sharding_rule_helpers import Sharding, Spec, all_replicated, dim_shards, partials

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
