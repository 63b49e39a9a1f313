"""Explain a wrong gradient of a router's logits by the balance loss of all routers of a foreign model.

Shapes: b samples, e experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.models.foreign.router_loss import NAME, BalanceLoss, loss_of, sums_of
from meshwright.prove.judge.tensors import NOTHING_FITS, Array, LayoutCounts, factor_cause
from meshwright.prove.result import number_words
from meshwright.prove.trace.first_difference import LocalValue, Trace
from meshwright.prove.trace.probe import GRADIENT
from meshwright.prove.trace.relations import close, factor_of


def explain_balance(value: LocalValue, trace: Trace, counts: LayoutCounts) -> str | None:
    """Return the cause of a wrong gradient on a rank, or None if it is not recognised."""
    module = trace.module(NAME)
    if value.what != f"{GRADIENT}output" or not isinstance(module, BalanceLoss) or module.loss is None:
        return None
    due = _gradient(value, trace, module, lambda counts_be: counts_be)
    if due is None or due.shape != value.observed.shape:
        return None
    off = value.observed - value.expected
    other = _gradient(value, trace, module, lambda counts_be: counts_be.mean(0, keepdim=True))
    if other is not None and close(off, other - due, value.rounding):
        return "the balance loss counts the load of each rank's micro-batch instead of each sample's"
    factor = round(1.0 + factor_of(off, due), 6) + 0.0
    if not close(off, (factor - 1.0) * due, value.rounding):
        return None
    if factor == 0.0:
        return "the gradient of the balance loss is missing: it is not added, or doesn't come back from later stages"
    why = factor_cause(factor, counts) or NOTHING_FITS
    return f"the balance loss has {number_words(factor)} × its weight: {why}"


def _gradient(value: LocalValue, trace: Trace, module: BalanceLoss, change: Callable[[Tensor], Tensor]) -> Array | None:
    """Return the gradient of a router's logits from the loss of a cell with changed counts; None without all logits."""
    assert module.loss is not None, "the reference is the last stage, too"
    names = {path: f"output of {path}" for path, _ in module.facts.routers}
    reference, num_samples = trace.reference[value.cell], len(trace.source.samples[value.cell])
    if value.module not in names or any(name not in reference for name in names.values()):
        return None
    logits = {path: torch.from_numpy(reference[name]).requires_grad_() for path, name in names.items()}
    sums = torch.stack([sums_of(one, module.facts, num_samples) for one in logits.values()]).sum(0)
    loss = loss_of(sums, change(sums[:, 0].detach())) * module.loss.weight * module.loss.scale
    return torch.autograd.grad(loss, logits[value.module])[0].numpy()
