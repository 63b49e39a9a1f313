"""Gradients of captured layers' parameters, at addresses that graphs write to.

Graphs of parameters that nobody watches add to a buffer that is the parameter's `.grad` itself. With
`zero_grad(set_to_none=True)` the parameter loses the buffer, but the buffer stays where it is, and is zeroed and set as
`.grad` again before the next replay. (`torch.cuda.make_graphed_callables` returns aliases of one static gradient
instead, which autograd may take as `.grad`: with several micro-batches, the last one's gradient is then counted twice
and the others' are lost; pytorch#181723.)

FSDP2 and DistributedDataParallel watch gradients as autograd accumulates them. Graphs of their parameters write to
memory that all layers share, and autograd gets a clone, so that every hook runs exactly as in eager execution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn


class WeightGradients(Protocol):
    """Gradients of one layer's parameters, by position."""

    returns: bool
    """Whether autograd accumulates them."""

    def prepare(self, positions: Collection[int]) -> None:
        """Get ready for a replay that computes these gradients; the others stay None, as in eager execution."""

    def store(self, position: int, gradient: Tensor) -> None:
        """Store a gradient; a part of the graph."""

    def result(self, position: int) -> Tensor | None:
        """Return what autograd should accumulate after a replay; None if the graph has done so."""

    def addresses(self) -> tuple[int, ...]:
        """Return the addresses that graphs write to."""


class AccumulatedGradients(WeightGradients):
    """Gradients that graphs accumulate.

    Args:
        parameters: parameters of the layer.
    """

    returns = False

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._buffers = [torch.zeros_like(parameter, requires_grad=False) for parameter in parameters]

    @torch.no_grad()
    def prepare(self, positions: Collection[int]) -> None:
        """Make the buffers the parameters' gradients, with the values that those have."""
        for position in positions:
            parameter, buffer = self._parameters[position], self._buffers[position]
            if parameter.grad is buffer:
                continue
            if parameter.grad is None:
                buffer.zero_()
            else:
                buffer.copy_(parameter.grad)
            parameter.grad = buffer

    @torch.no_grad()
    def store(self, position: int, gradient: Tensor) -> None:
        """Add a gradient to the parameter's."""
        self._buffers[position].add_(gradient)

    def result(self, position: int) -> None:
        """Return None: the parameter has its gradient."""

    def addresses(self) -> tuple[int, ...]:
        """Return the addresses of the buffers."""
        return tuple(buffer.data_ptr() for buffer in self._buffers)


class SharedOutputs:
    """Memory for the gradients of one layer at a time, shared by all layers."""

    def __init__(self) -> None:
        self._outputs: dict[tuple[torch.Size, torch.dtype, int], Tensor] = {}

    def of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return memory for the gradients of a layer's parameters."""
        seen: Counter[tuple[torch.Size, torch.dtype]] = Counter()
        found = []
        for one in parameters:
            kind = (one.shape, one.dtype)
            key = (*kind, seen[kind])
            seen[kind] += 1
            if key not in self._outputs:
                self._outputs[key] = torch.zeros_like(one, requires_grad=False)
            found.append(self._outputs[key])
        return found


class ReturnedGradients(WeightGradients):
    """Gradients that autograd accumulates.

    Args:
        parameters: parameters of the layer, or the copies that its graphs read.
        outputs: memory shared by all layers.
    """

    returns = True

    def __init__(self, parameters: Sequence[Tensor], outputs: SharedOutputs) -> None:
        self._outputs = outputs.of(parameters)

    def prepare(self, positions: Collection[int]) -> None:
        """Do nothing."""

    @torch.no_grad()
    def store(self, position: int, gradient: Tensor) -> None:
        """Keep a gradient until autograd gets it."""
        self._outputs[position].copy_(gradient)

    def result(self, position: int) -> Tensor:
        """Return a clone of the gradient: autograd may keep it as `.grad`, and the next replay overwrites it."""
        return self._outputs[position].clone()

    def addresses(self) -> tuple[int, ...]:
        """Return the addresses of the memory."""
        return tuple(output.data_ptr() for output in self._outputs)
