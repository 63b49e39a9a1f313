"""Handles that a model's modules hold for what happens once a step: auxiliary losses, and buffers that a step updates.

A module can't know the global batch, the other micro-batches or the other ranks. So it tells a handle what this
micro-batch gives, and whoever runs the step scales, collects and reduces. A handle counts a micro-batch once, where
its module is recomputed too: `nn/recompute.py` says when that is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from meshwright.errors import LayoutError


class StepHandle(nn.Module):
    """Base of the handles: it says when a forward counts."""

    def __init__(self) -> None:
        super().__init__()
        self.recomputing = False
        """The forward that runs now has been counted already."""

    def discard(self) -> None:
        """Forget what this step's forwards told."""
        raise NotImplementedError

    def _trains(self) -> bool:
        """Whether a backward is going to follow."""
        return self.training and torch.is_grad_enabled()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # A module moves between steps; what a forward on the meta device told has no values.
        self.discard()
        return super()._apply(fn, recurse)  # type: ignore[no-any-return, no-untyped-call]


class AuxiliaryLoss(StepHandle):
    """A loss inside the model, which reaches the gradients without travelling (Megatron's `MoEAuxLossAutoScaler`).

    Backward adds `scale × weight × d loss_sum` whatever gradient the stream gets, so the stream may go on to another
    pipeline stage and the loss need not. `scale` is set before a step, 1 / samples of the global batch.
    """

    def __init__(self, name: str, weight: float) -> None:
        """Make.

        Args:
            name: what it is called where it is shown.
            weight: of this loss beside the main one.
        """
        super().__init__()
        self.name, self.weight, self.scale = name, weight, 1.0
        self._sum: Tensor | None = None

    def forward(self, x: Tensor, loss_sum: Tensor) -> Tensor:
        """Put the loss on the way of a backward.

        Args:
            x: any tensor that the main loss depends on.
            loss_sum: a scalar, the sum over this micro-batch's samples of a loss of each; over this rank's tokens only,
                where the stream is divided. Its gradient is rounded to its dtype: hold it in float32 under bfloat16.

        Returns:
            `x`, and nothing else happens, in evaluation or without gradients.
        """
        if not self._trains():
            return x
        if loss_sum.dim():
            raise LayoutError(
                f"the auxiliary loss {self.name!r} was given a tensor of shape {list(loss_sum.shape)}",
                rule="an auxiliary loss takes a scalar",
                fix="give the sum over the samples of the micro-batch, not a vector of them",
            )
        factor = self.weight * self.scale
        if not self.recomputing:
            wide = torch.promote_types(loss_sum.dtype, torch.float32)
            value = loss_sum.detach().to(wide) * factor
            self._sum = value if self._sum is None else self._sum + value
        if not loss_sum.requires_grad:
            return x
        out: Tensor = _AddGradient.apply(x, loss_sum, factor)  # type: ignore[no-untyped-call]
        return out

    def take(self) -> Tensor | None:
        """Sum of `weight × scale × loss_sum` since the last time, in float32 or wider; None if there was no forward."""
        value, self._sum = self._sum, None
        return value

    def discard(self) -> None:
        """Forget the sum."""
        self._sum = None


class StepBuffer(StepHandle):
    """A buffer that is updated once a step, by what all samples of the global batch add to it."""

    value: Tensor

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, saved: bool = True) -> None:
        """Make, with `value` zero.

        Args:
            shape: of the buffer.
            dtype: of the buffer and of what is added.
            saved: whether it is in checkpoints.
        """
        super().__init__()
        self.register_buffer("value", torch.zeros(shape, dtype=dtype), persistent=saved)
        self._pending: Tensor | None = None

    def add(self, delta: Tensor) -> None:
        """Add what this micro-batch gives: in a forward that trains, and once where it is recomputed."""
        self._check(delta)
        if self._trains() and not self.recomputing:
            with torch.no_grad():
                pending = torch.zeros_like(self.value) if self._pending is None else self._pending
                self._pending = pending.add_(delta.detach())

    @torch.no_grad()
    def pending(self) -> Tensor:
        """What was added since the last commit, on this rank; zeros if nothing was."""
        return torch.zeros_like(self.value) if self._pending is None else self._pending.clone()

    @torch.no_grad()
    def commit(self, total: Tensor) -> None:
        """End the step: add to `value` what all ranks had pending."""
        self._check(total)
        self.value.add_(total)
        self.discard()

    def discard(self) -> None:
        """Forget what is pending."""
        self._pending = None

    def _check(self, given: Tensor) -> None:
        if given.shape != self.value.shape:
            raise LayoutError(
                f"a buffer of shape {list(self.value.shape)} was given {list(given.shape)}",
                rule="an update has the shape of its buffer",
                fix="sum over the samples and tokens, and over nothing else",
            )


def handles(module: nn.Module) -> list[tuple[str, StepHandle]]:
    """All handles in `module`, with their names and in the names' order."""
    return _named(module, StepHandle)


def auxiliary_losses(module: nn.Module) -> list[tuple[str, AuxiliaryLoss]]:
    """The auxiliary losses in `module`, with their names and in the names' order."""
    return _named(module, AuxiliaryLoss)


def step_buffers(module: nn.Module) -> list[tuple[str, StepBuffer]]:
    """The buffers in `module` that a step updates, with their names and in the names' order."""
    return _named(module, StepBuffer)


H = TypeVar("H", bound=StepHandle)


def _named(module: nn.Module, kind: type[H]) -> list[tuple[str, H]]:
    found = ((name, handle) for name, handle in module.named_modules() if isinstance(handle, kind))
    return sorted(found, key=lambda item: item[0])


class _AddGradient(torch.autograd.Function):
    """The identity of `x`, whose backward gives a second input the gradient `factor`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss_sum: Tensor, factor: float) -> Tensor:
        ctx.factor, ctx.dtype, ctx.device = factor, loss_sum.dtype, loss_sum.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None]:
        of_loss = torch.full((), ctx.factor, dtype=ctx.dtype, device=ctx.device)
        return gradients[0] if ctx.needs_input_grad[0] else None, of_loss, None
