"""Activation recomputation: save a block's inputs instead of its activations (Chen et al. 2016, "Training deep nets
with sublinear memory cost").

Uses PyTorch's non-reentrant checkpointing: the reentrant variant loses hooks, needs an input that requires a gradient,
and runs a backward inside a backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.nn.forward_cache import ForwardCache, RecallingForward, SavingForward
from meshwright.nn.step_handles import StepHandle

Forward = Callable[..., Any]


def recompute(module: nn.Module, *, preserve_rng_state: bool = False) -> None:
    """Make `module` save only its inputs and recompute its forward in the backward pass.

    Replaces only this instance's `forward`: parameter names are unchanged, and hooks, compilation and FSDP2 can be
    applied on top. Step handles in the module (`nn/step_handles.py`) count the first forward only, and values of a
    `ForwardCache` are recalled. A block with step handles cannot be a single graph, so `module.compile()` runs it
    eagerly.

    Args:
        module: module to recompute as a unit; may contain modules that are recomputed themselves.
        preserve_rng_state: restore the RNG state for the recomputation. Required for modules that use random numbers
            (dropout); without it, their gradients are silently wrong. Costs a copy of the RNG state per forward, on a
            GPU from the device.
    """
    forward = module.forward
    # Unbound, so that a deep copy of the module recomputes itself rather than the original.
    function = forward.__func__ if isinstance(forward, MethodType) and forward.__self__ is module else _unbound(forward)

    @functools.wraps(function)
    def recomputed(self: nn.Module, *inputs: Any, **named: Any) -> Any:
        def run(*positional: Any) -> Any:
            return function(self, *positional, **named)  # bind keywords here: checkpoint has its own

        handles = [inner for inner in self.modules() if isinstance(inner, StepHandle)]
        if handles:
            return _checkpoint_with_handles(run, handles, preserve_rng_state, inputs)
        return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=preserve_rng_state)

    module.forward = MethodType(recomputed, module)


# A traced checkpoint cannot have side effects, and tracing its contexts would prevent recomputation.
@torch.compiler.disable(  # type: ignore[untyped-decorator, no-untyped-call]
    reason="a recomputed module that holds auxiliary losses or step buffers runs eagerly"
)
def _checkpoint_with_handles(
    run: Forward, handles: list[StepHandle], preserve_rng_state: bool, inputs: tuple[Any, ...]
) -> Any:
    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        saving = SavingForward([handle for handle in handles if isinstance(handle, ForwardCache)])
        return saving, _Recomputing(handles, saving)

    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=preserve_rng_state, context_fn=contexts)


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
