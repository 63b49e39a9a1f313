"""Activation recomputation: save a block's inputs instead of its activations (Chen et al. 2016, "Training deep nets
with sublinear memory cost").

Uses PyTorch's non-reentrant checkpointing: the reentrant variant loses hooks, needs an input that requires a gradient,
and runs a backward inside a backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from meshwright.nn.kept_results import ForwardCache, KeepingMode, KeptResults, RecallingMode, compiled_policy
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.nn.step_handles import StepHandle

Forward = Callable[..., Any]
Values = dict[ForwardCache, list[tuple[Any, ...]]]


def recompute(
    module: nn.Module, policy: RecomputePolicy = RecomputePolicy.FULL, *, preserve_rng_state: bool = False
) -> None:
    """Make `module` save what `policy` says and recompute the rest of its forward in the backward pass.

    Replaces only this instance's `forward`: parameter names are unchanged, and hooks, compilation and FSDP2 can be
    applied on top. Step handles in the module (`nn/step_handles.py`) count the first forward only, and values of a
    `ForwardCache` are recalled. A block with step handles cannot be a single graph, so `module.compile()` runs it
    eagerly. A forward in which nothing requires a gradient runs as it is.

    Args:
        module: module to recompute as a unit; may contain modules that are recomputed themselves.
        policy: what to save; with `NONE`, the module stays as it is.
        preserve_rng_state: restore the RNG state for the recomputation. Required for modules that use random numbers
            (dropout); without it, their gradients are silently wrong. Costs a copy of the RNG state per forward, on a
            GPU from the device.
    """
    if policy is RecomputePolicy.NONE:
        return
    forward, is_selective = module.forward, policy is RecomputePolicy.SELECTIVE
    # Unbound, so that a deep copy of the module recomputes itself rather than the original.
    function = forward.__func__ if isinstance(forward, MethodType) and forward.__self__ is module else _unbound(forward)

    @functools.wraps(function)
    def recomputed(self: nn.Module, *inputs: Any, **named: Any) -> Any:
        def run(*positional: Any) -> Any:
            return function(self, *positional, **named)  # bind keywords here: checkpoint has its own

        takes_gradient = any(isinstance(x, Tensor) and x.requires_grad for x in (*inputs, *named.values()))
        if not takes_gradient and not any(parameter.requires_grad for parameter in self.parameters()):
            return run(*inputs)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
        handles = [inner for inner in self.modules() if isinstance(inner, StepHandle)]
        if handles:
            return _checkpoint_with_handles(run, handles, is_selective, options, inputs)
        if is_selective:
            options["context_fn"] = _compiled_contexts if torch.compiler.is_compiling() else _keeping_contexts
        return checkpoint(run, *inputs, **options)

    module.forward = MethodType(recomputed, module)


_compiled_contexts = functools.partial(create_selective_checkpoint_contexts, compiled_policy)


def _keeping_contexts() -> tuple[KeepingMode, RecallingMode]:
    kept = KeptResults()
    return KeepingMode(kept), RecallingMode(kept)


# A traced checkpoint cannot have side effects, and tracing its contexts would prevent recomputation.
@torch.compiler.disable(  # type: ignore[untyped-decorator, no-untyped-call]
    reason="a recomputed module that holds auxiliary losses or step buffers runs eagerly"
)
def _checkpoint_with_handles(
    run: Forward, handles: list[StepHandle], is_selective: bool, options: dict[str, Any], inputs: tuple[Any, ...]
) -> Any:
    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        kept = KeptResults() if is_selective else None
        values: Values = {handle: [] for handle in handles if isinstance(handle, ForwardCache)}
        return _saving(values, kept), _Recalling(lambda: _recalling(handles, values, kept))

    return checkpoint(run, *inputs, context_fn=contexts, **options)


@contextmanager
def _saving(values: Values, kept: KeptResults | None) -> Iterator[None]:
    """Context of a forward whose cached values are kept, and other results in `kept` if it is given."""
    before = [(cache.sinks, cache.kept) for cache in values]
    for cache, sink in values.items():
        cache.sinks = (*cache.sinks, sink)  # of modules around this one, too: they are recomputed first
        cache.kept = cache.kept if kept is None else (*cache.kept, kept)
    try:
        with nullcontext() if kept is None else KeepingMode(kept):
            yield
    finally:
        for cache, state in zip(values, before, strict=True):
            cache.sinks, cache.kept = state


class _Recalling(AbstractContextManager[None]):
    """Context of a recomputed forward, made whenever it is entered: once for each backward over the same graph."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *raised: Any) -> None:
        self._entered.pop().__exit__(*raised)


@contextmanager
def _recalling(handles: list[StepHandle], values: Values, kept: KeptResults | None) -> Iterator[None]:
    """Mark step handles as recomputing, and let caches recall the values and results of the first forward."""
    before = [(cache.source, cache.sinks, cache.kept) for cache in values]
    counted = [handle.recomputing for handle in handles]
    for cache, saved in values.items():
        # No sinks: those of a forward under way, which another task interrupted, are not for these values.
        cache.source, cache.sinks, cache.kept = iter(saved), (), ()
    for handle in handles:
        handle.recomputing = True
    try:
        with nullcontext() if kept is None else RecallingMode(kept):
            yield
    finally:
        for cache, state in zip(values, before, strict=True):
            cache.source, cache.sinks, cache.kept = state
        for handle, value in zip(handles, counted, strict=True):
            handle.recomputing = value


def _unbound(forward: Forward) -> Forward:
    return lambda _, *inputs, **named: forward(*inputs, **named)
