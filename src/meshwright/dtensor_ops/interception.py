"""Which operators a context intercepts: a table by operator, and calls that need a look at their arguments.

The interception itself is in `reshard.dtensor.private`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

from meshwright.dtensor_ops.private import (
    OpOverload,
    draws_per_rank,
    shard_dim,
    spec_has_default_order,
    tree_leaves,
)
from meshwright.reshard.dtensor import DTensorSpec, Handler, active_interceptor, is_tracing, run_below
from meshwright.reshard.dtensor.placements import layout_of_placements

READ_METADATA = (torch.ops.aten.is_same_size.default, torch.ops.aten.is_pinned.default)
"""Operators whose DTensor handlers read only metadata, so no context needs to intercept them."""


def _run_intercepted(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    context = active_interceptor()
    if is_tracing():
        context.note_tracing()
        return run_below(context, lambda call: operator(*args, **kwargs), None)
    return context.run(operator, args, kwargs)


class Handlers(dict[OpOverload, Handler]):
    """DTensor's table of handlers with those of an interceptor; changes, as by `loss_parallel`, go to DTensor's own."""

    def __init__(self, own: dict[OpOverload, Handler], operators: Iterable[OpOverload]) -> None:
        self._own = own
        self._operators = tuple(operators)
        super().__init__()
        self._merge()

    def refresh(self) -> Handlers:
        """Return the table, merged again if DTensor's own has changed since."""
        if self._num_own != len(self._own):
            self._merge()
        return self

    def _merge(self) -> None:
        self.clear()
        self._num_own = len(self._own)
        super().update(dict.fromkeys((*self._own, *self._operators), _run_intercepted))
        super().update({operator: self._own[operator] for operator in READ_METADATA if operator in self._own})

    def update(self, *others: Any, **more: Any) -> None:
        self._own.update(*others, **more)
        self._merge()

    def pop(self, *args: Any) -> Any:
        handler = self._own.pop(*args)
        self._merge()
        return handler

    def __setitem__(self, operator: OpOverload, handler: Handler) -> None:
        self.update({operator: handler})

    def __delitem__(self, operator: OpOverload) -> None:
        self.pop(operator)


def depends_on_context(
    operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], specs: Sequence[DTensorSpec]
) -> bool:
    """Return True if a context may treat the call in another way than DTensor by itself."""
    if torch.Tag.nondeterministic_seeded in operator.tags and draws_per_rank(operator):
        return True
    if any(_is_special(spec) for spec in specs) or has_empty_list(args):
        return True
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    return any(not isinstance(x, DTensor) and x.numel() != 1 for x in tensors)


def has_empty_list(args: tuple[Any, ...]) -> bool:
    """Return True if an argument is an empty list, which may mean that an operator reduces over all dims."""
    return any(type(value) is list and not value for value in args)


def _is_special(spec: DTensorSpec) -> bool:
    return not spec_has_default_order(spec) or 0 in spec.shape or has_empty_shards(spec)


def has_empty_shards(spec: DTensorSpec) -> bool:
    """Return True if any rank's shard is empty."""
    return _has_empty_shards(spec.placements, tuple(spec.shape), tuple(spec.mesh.shape))


@lru_cache(maxsize=4096)
def _has_empty_shards(placements: tuple[Placement, ...], shape: tuple[int, ...], axis_sizes: tuple[int, ...]) -> bool:
    """Return True if any rank's shard is empty; the order of the axes does not matter."""
    sharded = tuple(p if shard_dim(p) is not None else Replicate() for p in placements)
    num_ranks = math.prod(axis_sizes)
    is_small = any(shape[dim] < num_ranks**2 for p in sharded if (dim := shard_dim(p)) is not None)
    return is_small and not layout_of_placements(sharded, None, shape, axis_sizes).local_numels().all()
