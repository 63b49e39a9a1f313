"""Recomputation: keep a block's inputs instead of its activations (Chen et al. 2016, "Training deep nets with sublinear
memory cost").

PyTorch's non-reentrant checkpointing: the reentrant one loses hooks, can't have an input without a gradient, and runs a
backward within a backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.nn.step_handles import StepHandle

Forward = Callable[..., Any]


def recompute(module: nn.Module, *, preserve_rng_state: bool = False) -> None:
    """Let `module` keep only its inputs for the backward, and compute its forward again there.

    Only this instance's `forward` is replaced: names stay, and hooks, compilation and FSDP2, all applied afterwards,
    are around it. Handles inside (`nn/step_handles.py`) count the first forward only. They keep a block from being one
    graph: with any, `module.compile()` leaves the block to eager execution.

    Args:
        module: what is recomputed as a whole; it may hold others that are recomputed.
        preserve_rng_state: put the generators back for the second forward. Without, a module that draws random numbers
            (dropout) draws others there, and its gradients are silently those of another forward; with, each forward
            copies the generators' states, on a GPU from the device.
    """
    forward = module.forward
    # Not bound to the instance, so that a deep copy recomputes itself and not its original.
    function = forward.__func__ if isinstance(forward, MethodType) and forward.__self__ is module else _unbound(forward)

    @functools.wraps(function)
    def recomputed(self: nn.Module, *inputs: Any, **named: Any) -> Any:
        def run(*again: Any) -> Any:
            return function(self, *again, **named)  # so that no name is taken for one of checkpoint's own

        handles = [inner for inner in self.modules() if isinstance(inner, StepHandle)]
        if handles:
            return _checkpoint_with_handles(run, handles, preserve_rng_state, inputs)
        return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=preserve_rng_state)

    module.forward = MethodType(recomputed, module)


# A traced checkpoint can't write to anything outside it, and traced contexts would keep it from being recomputed.
@torch.compiler.disable(  # type: ignore[untyped-decorator, no-untyped-call]
    reason="a recomputed module that holds auxiliary losses or step buffers runs eagerly"
)
def _checkpoint_with_handles(
    run: Forward, handles: list[StepHandle], preserve_rng_state: bool, inputs: tuple[Any, ...]
) -> Any:
    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _Recomputing(handles)

    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=preserve_rng_state, context_fn=contexts)


class _Recomputing(AbstractContextManager[None]):
    """Tells handles that what runs has been counted; they may know already, from a module around this one.

    Entered once a recomputation, and there is one for each backward over the same graph.
    """

    def __init__(self, handles: list[StepHandle]) -> None:
        self._handles = handles
        self._before: list[list[bool]] = []

    def __enter__(self) -> None:
        self._before.append([handle.recomputing for handle in self._handles])
        for handle in self._handles:
            handle.recomputing = True

    def __exit__(self, *raised: object) -> None:
        for handle, value in zip(self._handles, self._before.pop(), strict=True):
            handle.recomputing = value


def _unbound(forward: Forward) -> Forward:
    return lambda _, *inputs, **named: forward(*inputs, **named)
