"""An output head whose cross-entropy is computed by chunks of tokens, so that the logits of all tokens never exist.

    z = x wᵀ + b        loss = Σ_t (log Σ_v exp z_tv − z_t,target)        dz = softmax(z) − onehot(target)

A chunk's logits, its loss and the gradients of the hidden states, of the weight and of the bias are computed at once in
the forward, since the gradient of a sum is known but for its scale, by which the backward multiplies. Nothing is
computed twice (as in Hsu et al. 2024, "Liger Kernel", section 3.2). Elementwise operators between z and the loss, such
as a soft cap, are applied to a chunk with their derivative.

If the vocabulary is sharded over tp, each rank has its columns, and a chunk takes two small all-reduces: of the maxima,
and of the sums and target logits. The hidden states' gradient is then partial, like that of any column-parallel layer.

Shapes: b samples, t tokens, c tokens of a chunk, d model width, v vocabulary of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial

from meshwright.comm.collectives import all_reduce_max, all_reduce_sum
from meshwright.data.loader import IGNORED_TARGET
from meshwright.features.head_loss.plan import IN_PLACE, Step
from meshwright.mesh.local_shards import to_local
from meshwright.nn.linear import Linear, computed_or_deferred


class LossHead(Linear):
    """Output head that returns logits or, within `computing_loss_of`, the sum of the tokens' cross-entropies."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, chunk: int, after: tuple[Step, ...] = ()
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.chunk, self.after = chunk, after
        """Tokens of a chunk, and elementwise operators that turn its logits into those of the loss."""
        self.targets_bt: Tensor | None = None
        """Targets of the loss that forwards compute; None if they return logits."""

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, chunk: int, after: tuple[Step, ...] = ()) -> LossHead:
        """Return a head with the parameters of another layer."""
        with torch.device("meta"):
            head = cls(linear.in_features, linear.out_features, chunk=chunk, after=after)
        head.weight, head.bias = linear.weight, linear.bias
        return head.train(linear.training)

    @contextmanager
    def computing_loss_of(self, targets_bt: Tensor) -> Iterator[None]:
        """Let forwards within the context return the loss of these targets; `IGNORED_TARGET` is none."""
        self.targets_bt = targets_bt
        try:
            yield
        finally:
            self.targets_bt = None

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states [b, t, d] to logits [b, t, v] or, computing a loss, to a scalar in at least float32."""
        if self.targets_bt is None:
            return super().forward(x)
        inputs = (x, self.weight, self.bias, self.targets_bt, torch.is_grad_enabled(), self)
        loss: Tensor = _ChunkedLoss.apply(*inputs)  # type: ignore[no-untyped-call]
        return loss


class Columns(NamedTuple):
    """The columns of the vocabulary that this rank has."""

    start: int
    group: ProcessGroup | None
    """Ranks that have the others; None without any."""


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets_bt: Tensor,
        with_gradients: bool,
        head: LossHead,
    ) -> Tensor:
        needs = [needed and with_gradients for needed in ctx.needs_input_grad[:3]]
        x_td, w_vd = to_local(x).flatten(0, -2), to_local(weight)
        b_v = None if bias is None else to_local(bias)
        columns, targets_t = columns_of(weight), targets_bt.flatten()
        total = torch.zeros((), dtype=_wide(x.dtype), device=x.device)
        grad_x = torch.empty_like(x_td) if needs[0] else None
        # Sums of few rounded products would be rounded more than one product of all tokens.
        grad_w = torch.zeros_like(w_vd, dtype=_wide(x.dtype)) if needs[1] else None
        grad_b = torch.zeros_like(b_v, dtype=_wide(x.dtype)) if b_v is not None and needs[2] else None
        for start in range(0, len(x_td), head.chunk):
            rows = slice(start, start + head.chunk)
            logits_cv, slope = apply_steps(head.after, F.linear(x_td[rows], w_vd, b_v).to(total.dtype))
            total += cross_entropy_(logits_cv, targets_t[rows], columns)
            if head.after:
                logits_cv *= slope
            gradient_cv = logits_cv.to(x.dtype)  # by now
            if grad_x is not None:
                torch.mm(gradient_cv, w_vd, out=grad_x[rows])
            if grad_w is not None:
                _add_product_(grad_w, gradient_cv.T, x_td[rows])
            if grad_b is not None:
                grad_b += logits_cv.sum(0)
            del logits_cv, slope, gradient_cv  # or the next chunk's would live beside them
        ctx.parameters, ctx.store, ctx.shape = (weight, bias), head.weight_gradients, to_local(x).shape
        ctx.mesh = x.device_mesh if isinstance(x, DTensor) else None
        ctx.gradients = grad_x, grad_w, grad_b
        return total

    @staticmethod
    def backward(ctx: Any, *scales: Tensor) -> tuple[Tensor | None, ...]:
        scale, (weight, bias) = scales[0], ctx.parameters
        (x, w, b), ctx.gradients = ctx.gradients, (None, None, None)  # multiplied in place, so once
        if x is not None:
            x = x.mul_(scale).view(ctx.shape)
            x = x if ctx.mesh is None else DTensor.from_local(x, ctx.mesh, [Partial()], run_check=False)
        if w is not None:
            w = computed_or_deferred(ctx.store, weight, _itself, _like(w.mul_(scale), weight))
        if b is not None:
            b = _like(b.mul_(scale), bias)
        return x, w, b, None, None, None


def apply_steps(steps: tuple[Step, ...], logits_cv: Tensor) -> tuple[Tensor, Tensor | float]:
    """Return what elementwise operators make of logits, which are lost, and its derivative with respect to them."""
    slope: Tensor | float = 1.0
    for name, numbers in steps:
        if name in IN_PLACE:
            getattr(logits_cv, f"{name}_")(*numbers)
            if name in ("mul", "div"):
                slope *= numbers[0] if name == "mul" else 1 / numbers[0]
            continue
        with torch.enable_grad():
            out_cv = getattr(torch.ops.aten, name)(logits_cv.requires_grad_(), *numbers)
        (own,) = torch.autograd.grad(out_cv, logits_cv, out_cv.new_ones(()).expand_as(out_cv))
        logits_cv, slope = out_cv.detach(), own.mul_(slope)
    return logits_cv, slope


def cross_entropy_(logits_cv: Tensor, targets_c: Tensor, columns: Columns) -> Tensor:
    """Return the sum of the tokens' cross-entropies, and turn the logits in place into its gradient with respect to
    them."""
    largest_c1 = logits_cv.amax(-1, keepdim=True)
    if columns.group is not None:
        all_reduce_max(largest_c1, group=columns.group)
    logits_cv.sub_(largest_c1)
    counts_c = targets_c != IGNORED_TARGET
    local_c = targets_c - columns.start
    is_here_c = counts_c & (local_c >= 0) & (local_c < logits_cv.shape[1])
    at_c1 = local_c.where(is_here_c, 0)[:, None]
    target_c = logits_cv.gather(1, at_c1)[:, 0].where(is_here_c, 0)
    sums_2c = torch.stack((logits_cv.exp_().sum(-1), target_c))
    if columns.group is not None:
        all_reduce_sum(sums_2c, group=columns.group)
    sum_c, target_c = sums_2c
    logits_cv.div_(sum_c[:, None])
    logits_cv.scatter_add_(1, at_c1, -is_here_c.to(logits_cv.dtype)[:, None])
    logits_cv.mul_(counts_c[:, None])
    loss: Tensor = (sum_c.log() - target_c).where(counts_c, 0).sum()
    return loss


def columns_of(weight: Tensor) -> Columns:
    """Return the columns of the vocabulary that this rank's shard of the head's weight [v, d] has."""
    if not isinstance(weight, DTensor) or not weight.placements[0].is_shard(0):
        return Columns(0, None)
    mesh = weight.device_mesh  # of tp, which divides a vocabulary that it shards
    return Columns(mesh.get_local_rank() * to_local(weight).shape[0], mesh.get_group())


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype is a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def _like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a local gradient in the dtype and with the placements of its parameter."""
    gradient = gradient.to(parameter.dtype)
    if not isinstance(parameter, DTensor):
        return gradient
    return DTensor.from_local(gradient, parameter.device_mesh, parameter.placements, run_check=False)


def _itself(gradient: Tensor) -> Tensor:
    return gradient
