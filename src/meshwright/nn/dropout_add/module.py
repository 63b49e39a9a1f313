"""Fused residual dropout as a layer of a block: residual + dropout(x) in one pass, with one rounding.

A custom operator, opaque to torch.compile, so that a compiled block has the same bits. The backward saves the tokens'
numbers and computes the mask again. It is the same operator without a residual, hence differentiable, too.

Shapes: b batch, t time, d channels; more or fewer leading dims work as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import ConfigError, LayoutError
from meshwright.log import get_logger
from meshwright.nn.dropout_add import eager
from meshwright.nn.dropout_add.eager import DropoutKey, drop_threshold

_log = get_logger(__name__)


class DropoutAdd(nn.Module):
    """Residual dropout: `residual + dropout(x)` while training, `residual + x` otherwise. The site is the number of
    this dropout in the whole model.

    Raises:
        ConfigError: p, the seed or the site is out of range.
    """

    def __init__(self, p: float, *, seed: int, site: int) -> None:
        super().__init__()
        drop_threshold(p)
        self.p = p
        self.key = DropoutKey(seed, site)

    def forward(self, x_btd: Tensor, residual_btd: Tensor, rows_bt: Tensor | None = None) -> Tensor:
        """Add [b, t, d] to the residual [b, t, d]; rows are those of `dropout_add`, or None if nothing is dropped."""
        return dropout_add(x_btd, residual_btd, self.p, training=self.training, key=self.key, rows_bt=rows_bt)

    def extra_repr(self) -> str:
        """Return the fields for `repr`."""
        return f"p={self.p}, seed={self.key.seed}, site={self.key.site}"


def dropout_add(
    x_btd: Tensor, residual_btd: Tensor, p: float, *, training: bool, key: DropoutKey | None = None,
    rows_bt: Tensor | None = None, first_column: int = 0,
) -> Tensor:  # fmt: skip
    """Return `residual + dropout(x)`; exactly `residual + x` if not training, or if p drops nothing.

    Computed in float32 (float64 if an input is) and rounded once, to the promoted dtype of the inputs.

    Args:
        rows_bt: int64 […], the tokens' numbers, unique in the run (`attention.positions.token_rows`).
        first_column: channel of the first column, if x holds a shard of the channels.

    Raises:
        ConfigError: p is not in [0, 1), x is not real, or the key or the tokens' numbers are missing.
        LayoutError: the shapes don't fit each other.
    """
    threshold = drop_threshold(p)
    if not training or threshold == 0:
        return residual_btd + x_btd
    if key is None or rows_bt is None:
        raise ConfigError(
            f"dropout with p = {p} has no {'key' if key is None else 'numbers of the tokens (rows_bt)'}",
            rule="a dropout mask is a function of its key and of the tokens' numbers",
            fix="pass key=DropoutKey(seed, site) and rows_bt=token_rows(layout), or set train.dropout=0",
        )
    _check(x_btd, residual_btd, rows_bt, first_column)
    out: Tensor = _dropout_add(x_btd, residual_btd, rows_bt, key.words, threshold, first_column)
    return out


def _check(x_btd: Tensor, residual_btd: Tensor, rows_bt: Tensor, first_column: int) -> None:
    if x_btd.shape != residual_btd.shape or x_btd.shape[:-1] != rows_bt.shape or rows_bt.dtype != torch.int64:
        raise LayoutError(
            f"dropout of {tuple(x_btd.shape)} into a residual of {tuple(residual_btd.shape)} with "
            f"{rows_bt.dtype} numbers of tokens {tuple(rows_bt.shape)}",
            rule="x and the residual have the same shape, and each token of this rank a number, int64",
            fix="give each rank the numbers of exactly the tokens that it holds: token_rows(layout)",
        )
    if first_column < 0:
        raise LayoutError(f"first_column = {first_column}", rule="channels count from 0", fix="first_column=0")
    if not (x_btd.is_floating_point() and residual_btd.is_floating_point()):
        rule = "dropout takes real numbers, of 16, 32 or 64 bits"
        raise ConfigError(f"dropout of {x_btd.dtype} into {residual_btd.dtype}", rule=rule, fix="convert x first")


@torch.library.custom_op("meshwright::dropout_add", mutates_args=())
def _dropout_add(
    x: Tensor, residual: Tensor | None, rows: Tensor, words: Tensor, threshold: int, first_column: int
) -> Tensor:
    out = _empty_result(x, residual)
    rows_r = rows.reshape(-1)
    x_rd = x.reshape(len(rows_r), x.shape[-1])
    residual_rd = None if residual is None else residual.reshape(x_rd.shape)
    launch = find_triton() if x.is_cuda else None
    run = eager.dropout_add if launch is None else launch
    run(
        x_rd, residual_rd, rows_r, words.tolist(), threshold=threshold, first_column=first_column,
        out=out.view(x_rd.shape),
    )  # fmt: skip
    return out


@_dropout_add.register_fake
def _(x: Tensor, residual: Tensor | None, *others: Any) -> Tensor:
    return _empty_result(x, residual)


def _empty_result(x: Tensor, residual: Tensor | None) -> Tensor:
    return x.new_empty(x.shape, dtype=x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype))


def _save_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, residual, rows, words, *ctx.constants = inputs
    ctx.has_residual = residual is not None
    if ctx.needs_input_grad[0]:
        ctx.save_for_backward(rows, words)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    needs_x, needs_residual, *_ = ctx.needs_input_grad
    grad_x = _dropout_add(gradient, None, *ctx.saved_tensors, *ctx.constants) if needs_x else None
    return grad_x, gradient if needs_residual else None, None, None, None, None


_dropout_add.register_autograd(_backward, setup_context=_save_rows)


@cache
def find_triton() -> Callable[..., None] | None:
    """Return the Triton implementation; None, with one warning, if Triton cannot be imported."""
    try:
        from meshwright.nn.dropout_add.triton_launch import launch
    except ImportError as error:
        _log.warning("dropout with torch operations, many times slower than with Triton: %s", error)
        return None
    return launch


@dataclass(frozen=True)
class BlockDropout:
    """Dropout of one block, with the run's seed."""

    p: float
    seed: int
    layer: int

    def adds(self) -> tuple[DropoutAdd, DropoutAdd]:
        """Return the residual additions of the two branches: attention, and the feed-forward layer or experts."""
        site = 2 * self.layer
        return DropoutAdd(self.p, seed=self.seed, site=site), DropoutAdd(self.p, seed=self.seed, site=site + 1)


NO_DROPOUT = BlockDropout(0.0, seed=0, layer=0)
