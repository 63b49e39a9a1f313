"""Activation recomputation: save a block's inputs instead of its activations (Chen et al. 2016, "Training deep nets
with sublinear memory cost").

Uses PyTorch's non-reentrant checkpointing: the reentrant variant loses hooks, needs an input that requires a gradient,
and runs a backward inside a backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from meshwright.nn.forward_cache import ForwardCache, RecallingForward, SavingForward
from meshwright.nn.kept_results import KeepingMode, KeptResults, RecallingMode, compiled_policy
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.nn.step_handles import StepHandle

Forward = Callable[..., Any]


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

        if not _needs_backward(self, (*inputs, *named.values())):
            return run(*inputs)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
        handles = [inner for inner in self.modules() if isinstance(inner, StepHandle)]
        if handles:
            return _checkpoint_with_handles(run, handles, is_selective, options, inputs)
        if is_selective:
            options["context_fn"] = _compiled_contexts if torch.compiler.is_compiling() else _keeping_contexts
        return checkpoint(run, *inputs, **options)

    module.forward = MethodType(recomputed, module)


def _needs_backward(module: nn.Module, inputs: tuple[Any, ...]) -> bool:
    """Return whether a parameter or an input requires a gradient."""
    return any(isinstance(x, Tensor) and x.requires_grad for x in inputs) or any(
        parameter.requires_grad for parameter in module.parameters()
    )


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
    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        kept = KeptResults() if is_selective else None
        saving = SavingForward([handle for handle in handles if isinstance(handle, ForwardCache)], kept)
        recomputing = _Recomputing(handles, saving)
        if kept is None:
            return saving, recomputing
        return _Both(saving, KeepingMode(kept)), _Both(recomputing, RecallingMode(kept))

    return checkpoint(run, *inputs, context_fn=contexts, **options)


class _Both(AbstractContextManager[None]):
    """Two contexts, entered together any number of times."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self._contexts = contexts
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._entered.append(stack.pop_all())

    def __exit__(self, *raised: Any) -> None:
        self._entered.pop().__exit__(*raised)


class _Recomputing(AbstractContextManager[None]):
    """Context that marks step handles as recomputing, and restores their previous state on exit.

    Entered once per recomputation, that is, once for each backward over the same graph.
    """

    def __init__(self, handles: list[StepHandle], saved: SavingForward) -> None:
        self._handles, self._recalling = handles, RecallingForward(saved)
        self._before: list[list[bool]] = []

    def __enter__(self) -> None:
        self._recalling.__enter__()
        self._before.append([handle.recomputing for handle in self._handles])
        for handle in self._handles:
            handle.recomputing = True

    def __exit__(self, *raised: object) -> None:
        self._recalling.__exit__(*raised)
        for handle, value in zip(self._handles, self._before.pop(), strict=True):
            handle.recomputing = value


def _unbound(forward: Forward) -> Forward:
    return lambda _, *inputs, **named: forward(*inputs, **named)
