"""Replays of a layer's graphs in autograd; see [Note: replays in autograd] in `runner`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.capture.run.backend import CapturedLayer


class Replays(Protocol):
    """Interface of whatever replays graphs."""

    def forward(self, one: CapturedLayer, m: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Replay a layer's forward; returns static tensors."""

    def backward(
        self, one: CapturedLayer, m: int, gradients: Sequence[Tensor | None], parameters: Sequence[nn.Parameter]
    ) -> tuple[list[Tensor | None], Collection[int]]:
        """Replay a layer's backward; returns static gradients, and the positions of weights that have got one."""


@dataclass(frozen=True)
class LayerReplay:
    """A layer and a micro-batch."""

    runner: Replays
    layer: CapturedLayer
    microbatch: int
    parameters: list[nn.Parameter]
    """Parameters that get the gradients of the layer's trained weights. FSDP2 has others outside of the forward."""


class Replay(torch.autograd.Function):
    """A replay of a layer's graphs as one node of autograd."""

    @staticmethod
    def forward(ctx: Any, replay: LayerReplay, num_inputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.replay, ctx.num_weights = replay, len(tensors) - num_inputs
        found = replay.runner.forward(replay.layer, replay.microbatch, tensors[:num_inputs])
        outputs = [one.detach() for one in found]
        has_gradient = [replay.layer.observed.outputs[at].requires_grad for at in replay.layer.observed.order()]
        ctx.mark_non_differentiable(*(one for one, has in zip(outputs, has_gradient, strict=True) if not has))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        replay: LayerReplay = ctx.replay
        found, stored = replay.runner.backward(replay.layer, replay.microbatch, gradients, replay.parameters)
        result = replay.layer.gradients.result
        weights = (result(at) if at in stored else None for at in range(ctx.num_weights))
        return (None, None, *found, *weights)
