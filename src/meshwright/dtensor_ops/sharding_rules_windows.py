"""Rules of operators that look at neighbours along some dims: padding by reflection and by edges, unfold, im2col.

Dims they don't look along may be cut in any way.
"""

from __future__ import annotations

from typing import Any

import torch

from meshwright.dtensor_ops.placement_rules import Spec, Way, copies, cuts, partials
from meshwright.dtensor_ops.private import Rule, packet_name

aten = torch.ops.aten


def padded_rule(x: Spec, padding: list[int]) -> list[Way]:
    """Along dims that nothing is added to; what is added is a choice among values."""
    return [copies(1, 1)] + [([p], [p]) for d in unpadded(x, padding) for p in cuts(d, x)] + passed_on(x)


def padded_backward_rule(grad: Spec, x: Spec, padding: list[int]) -> list[Way]:
    """Along the same dims."""
    return [copies(1, 2)] + [([p], [p, p]) for d in unpadded(x, padding) for p in cuts(d, grad, x)]


def unfold_rule(x: Spec, dim: int, size: int, step: int) -> list[Way]:
    """Windows along `dim`, their elements in a new last dim."""
    ways = [copies(1, 1), *passed_on(x)]
    return ways + [([p], [p]) for d in range(x.ndim) if d != dim % x.ndim for p in cuts(d, x)]


def unfold_backward_rule(grad: Spec, shape: list[int], dim: int, size: int, step: int) -> list[Way]:
    """The same the other way."""
    others = [d for d in range(len(shape)) if d != dim % max(len(shape), 1)]
    return [copies(1, 1)] + [([p], [p]) for d in others for p in cuts(d, grad)]


def images_rule(x: Spec, *_: Any) -> list[Way]:
    """Between images and columns of their windows: each image by itself, where there is a dim of images."""
    return [copies(1, 1)] + ([([p], [p]) for p in cuts(0, x)] if x.ndim == 4 else [])


def columns_rule(x: Spec, *_: Any) -> list[Way]:
    """The same the other way."""
    return [copies(1, 1)] + ([([p], [p]) for p in cuts(0, x)] if x.ndim == 3 else [])


def unpadded(x: Spec, padding: list[int]) -> list[int]:
    """Dims that nothing is added to; paddings come in pairs, the last dim first."""
    padded = {x.ndim - 1 - place // 2 for place, width in enumerate(padding) if width}
    return [d for d in range(x.ndim) if d not in padded]


def passed_on(x: Spec) -> list[Way]:
    """Partial values, of what only chooses among values."""
    return [([p], [p]) for p in partials(x)]


PADS = [getattr(aten, f"{kind}_pad{n}d") for kind in ("reflection", "replication") for n in (1, 2, 3)]
PADS_BACKWARD = [getattr(aten, f"{packet_name(pad)}_backward") for pad in PADS]

WINDOW_RULES: dict[Any, Rule] = {
    **{pad.default: padded_rule for pad in PADS},
    **{pad.default: padded_backward_rule for pad in PADS_BACKWARD},
    aten.unfold.default: unfold_rule,
    aten.unfold_copy.default: unfold_rule,
    aten.unfold_backward.default: unfold_backward_rule,
    aten.im2col.default: images_rule,
    aten.col2im.default: columns_rule,
}
SHAPE_ARGUMENTS: dict[Any, int] = {aten.unfold_backward.default: 1}
"""Places of arguments that are the shape of the result."""
