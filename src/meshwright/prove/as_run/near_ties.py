"""Turn choices of experts that are close to a tie, as rounding may: few perturbations show what all of this changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from meshwright.nn.experts.router import Router

TIE_UNITS = 2.0
"""Rounding units by which the scores of a token's last chosen and next best expert may differ in a tie."""


def has_choices(model: nn.Module) -> bool:
    """Return whether a model chooses experts by scores."""
    return any(isinstance(module, Router) and not module.config.uniform for module in model.modules())


@contextmanager
def turned_ties(model: nn.Module, unit: float) -> Iterator[None]:
    """Within the context, give each token at a tie the next best expert instead of its last.

    Args:
        model: the plain model.
        unit: rounding unit of the run's precision.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router in routers:
        router.best = _turned(router.best, TIE_UNITS * unit)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for router in routers:
            del router.best


def _turned(best: Callable[[Tensor], Tensor], tie: float) -> Callable[[Tensor], Tensor]:
    def choose(scores: Tensor) -> Tensor:
        chosen = best(scores)
        last = chosen[..., -1:]
        others = best(scores.scatter(-1, last, -torch.inf))
        score, next_score = scores.gather(-1, last), scores.gather(-1, others[..., -1:])
        return torch.where((score - next_score).abs() <= tie * score.abs(), others, chosen)

    return choose
