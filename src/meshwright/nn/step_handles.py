"""Handles in a model for work that is done once per step: auxiliary losses and buffer updates.

A module does not know the global batch, the other micro-batches or the other ranks. It records this micro-batch's
contribution in a handle, and the training step scales, accumulates and reduces it. Each micro-batch counts once, even
if its module is recomputed (see `nn/recompute.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from meshwright.errors import LayoutError


class StepHandle(nn.Module):
    """Base class of handles, which determines whether a forward counts."""

    def __init__(self) -> None:
        super().__init__()
        self.recomputing = False
        """True during a recomputed forward, which has already been counted."""
        self._contribution: Tensor | None = None

    def discard(self) -> None:
        """Drop the contributions of this step's forwards."""
        self._contribution = None

    def take_contribution(self) -> Tensor | None:
        """Return and clear what this step's forwards contributed; None if they contributed nothing."""
        contribution, self._contribution = self._contribution, None
        return contribution

    def add_contribution(self, contribution: Tensor) -> None:
        """Add what another forward contributed, as returned by `take_contribution`."""
        self._contribution = contribution if self._contribution is None else self._contribution + contribution

    def _trains(self) -> bool:
        """Return True if a backward will follow."""
        return self.training and torch.is_grad_enabled()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Modules are moved between steps; contributions from a forward on the meta device have no values.
        self.discard()
        return super()._apply(fn, recurse)  # type: ignore[no-any-return, no-untyped-call]


class AuxiliaryLoss(StepHandle):
    """A loss inside the model whose gradient is injected in the backward pass (as in Megatron-LM).

    The backward adds `scale × weight × d loss_sum` regardless of the gradient of `x`, so `x` can be sent to another
    pipeline stage while the loss stays local. `scale` is set before each step to 1 / samples of the global batch.
    """

    def __init__(self, name: str, weight: float) -> None:
        """Create the handle with its display name, and its weight relative to the main loss."""
        super().__init__()
        self.name, self.weight, self.scale = name, weight, 1.0

    def forward(self, x: Tensor, loss_sum: Tensor) -> Tensor:
        """Attach the loss to the autograd graph of `x`, any tensor that the main loss depends on, and return `x`.

        `loss_sum` is the scalar sum of the per-sample losses of this micro-batch; with a sharded residual stream, over
        this rank's tokens only. The gradient has the same dtype: use float32 when training in bfloat16. In evaluation
        mode or without gradients, the loss is ignored.
        """
        if not self._trains():
            return x
        if loss_sum.dim():
            raise LayoutError(
                f"the auxiliary loss {self.name!r} got a tensor of shape {list(loss_sum.shape)}",
                rule="an auxiliary loss must be a scalar",
                fix="pass the sum over the samples of the micro-batch, not one loss per sample",
            )
        factor = self.weight * self.scale
        if not self.recomputing:
            wide = torch.promote_types(loss_sum.dtype, torch.float32)
            self.add_contribution(loss_sum.detach().to(wide) * factor)
        if not loss_sum.requires_grad:
            return x
        out: Tensor = _AddGradient.apply(x, loss_sum, factor)  # type: ignore[no-untyped-call]
        return out

    def take(self) -> Tensor | None:
        """Return and clear the sum of `weight × scale × loss_sum`, in float32 or wider; None if nothing was added."""
        return self.take_contribution()


class StepBuffer(StepHandle):
    """A buffer updated once per step with the sum of the contributions of the global batch."""

    value: Tensor

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, saved: bool = True) -> None:
        """Create the buffer, `value`, as zeros; checkpoints include it if it is `saved`."""
        super().__init__()
        self.register_buffer("value", torch.zeros(shape, dtype=dtype), persistent=saved)

    def add(self, delta: Tensor) -> None:
        """Add this micro-batch's contribution; ignored outside training and in a recomputed forward."""
        self._check(delta)
        if self._trains() and not self.recomputing:
            self.add_contribution(delta)

    @torch.no_grad()
    def add_contribution(self, contribution: Tensor) -> None:
        """Add to the contributions, whatever the mode."""
        pending = torch.zeros_like(self.value) if self._contribution is None else self._contribution
        self._contribution = pending.add_(contribution.detach())

    @torch.no_grad()
    def pending(self) -> Tensor:
        """Return the sum of this rank's contributions since the last commit."""
        return torch.zeros_like(self.value) if self._contribution is None else self._contribution.clone()

    @torch.no_grad()
    def commit(self, total: Tensor) -> None:
        """Add `total`, the contributions summed over all ranks, to `value`, and clear the pending ones."""
        self._check(total)
        self.value.add_(total)
        self.discard()

    def _check(self, update: Tensor) -> None:
        if update.shape != self.value.shape:
            raise LayoutError(
                f"a buffer of shape {list(self.value.shape)} got an update of shape {list(update.shape)}",
                rule="an update must have its buffer's shape",
                fix="sum over samples and tokens only",
            )


class LoadCounter(StepBuffer):
    """Token counts of a router's experts, summed over micro-batches and ranks; `value` counts since the first step."""

    def __init__(self, num_experts: int, saved: bool = True) -> None:
        """Create the counter; call `add` with int64 counts per expert, once per micro-batch."""
        super().__init__((num_experts,), torch.int64, saved)
        self.latest: Tensor | None = None
        """Counts of the last committed step; None before the first one and after the module was moved."""

    @torch.no_grad()
    def commit(self, total: Tensor) -> None:
        """Add `total` to `value`, and keep it as `latest`."""
        super().commit(total)
        self.latest = total

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.latest = None  # not a buffer, so it would stay on the old device
        return super()._apply(fn, recurse)


def handles(module: nn.Module) -> list[tuple[str, StepHandle]]:
    """Return all handles in `module` with their names, sorted by name."""
    return _named(module, StepHandle)


def auxiliary_losses(module: nn.Module) -> list[tuple[str, AuxiliaryLoss]]:
    """Return the auxiliary losses in `module` with their names, sorted by name."""
    return _named(module, AuxiliaryLoss)


def step_buffers(module: nn.Module) -> list[tuple[str, StepBuffer]]:
    """Return the step buffers in `module` with their names, sorted by name."""
    return _named(module, StepBuffer)


def load_counters(module: nn.Module) -> list[tuple[str, LoadCounter]]:
    """Return the load counters in `module` with their names, sorted by name."""
    return _named(module, LoadCounter)


H = TypeVar("H", bound=StepHandle)


def _named(module: nn.Module, kind: type[H]) -> list[tuple[str, H]]:
    named = ((name, handle) for name, handle in module.named_modules() if isinstance(handle, kind))
    return sorted(named, key=lambda item: item[0])


class _AddGradient(torch.autograd.Function):
    """Identity on `x` with a backward that also passes the gradient `factor` to `loss_sum`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss_sum: Tensor, factor: float) -> Tensor:
        ctx.factor, ctx.dtype, ctx.device = factor, loss_sum.dtype, loss_sum.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None]:
        grad_loss = torch.full((), ctx.factor, dtype=ctx.dtype, device=ctx.device)
        return gradients[0] if ctx.needs_input_grad[0] else None, grad_loss, None
