"""Largest magnitudes of delayed scaling, all in one flat tensor: one all-reduce per step, and addresses that stay.

Layers only take maxima in place, which also works inside a CUDA graph, and in a recomputed forward, where the same
maximum changes nothing. History and scales move outside of layers, once per step. So every micro-batch of a step, and
every recomputed forward, uses the same scales.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class AmaxSlot(NamedTuple):
    """Views of one tensor's place in the flat tensors, all scalars."""

    amax: Tensor
    """Largest magnitude in this step so far."""
    known: Tensor
    """Largest magnitude in the history; 0 before there is any."""

    def record(self, amax: Tensor) -> None:
        """Include a magnitude in this step's."""
        torch.maximum(self.amax, amax, out=self.amax)

    def choose(self, amax: Tensor) -> Tensor:
        """Return the magnitude that determines the scale of a tensor with this `amax`.

        Without a history, that is the tensor's own, instead of a scale of 1, with which small gradients would vanish.
        The choice is made on the device. A non-finite amax is never hidden.
        """
        return torch.where((self.known > 0) & amax.isfinite(), self.known, amax)


class LayerSlots(NamedTuple):
    """Slots of the tensors that a layer casts."""

    input: AmaxSlot
    weight: AmaxSlot
    gradient: AmaxSlot


SLOTS_PER_LAYER = len(LayerSlots.__annotations__)


class AmaxHistory:
    """Magnitudes of the casts of all float8 layers of a model, in this step and in earlier ones."""

    def __init__(self, num_layers: int, *, length: int, device: torch.device) -> None:
        """Create an empty history of `length` steps."""
        num_slots = num_layers * SLOTS_PER_LAYER
        self.amax = torch.zeros(num_slots, device=device)
        """Largest magnitudes in this step on this rank; 0 for layers of other ranks."""
        self.known = torch.zeros(num_slots, device=device)
        """Largest magnitudes in the history."""
        self.history = torch.zeros(length, num_slots, device=device)
        """Largest magnitudes by step, newest first."""

    def slots(self, layer: int) -> LayerSlots:
        """Return the slots of a layer, by its number in the model."""
        first = layer * SLOTS_PER_LAYER
        return LayerSlots(*(AmaxSlot(self.amax[i], self.known[i]) for i in range(first, first + SLOTS_PER_LAYER)))

    @torch.no_grad()
    def advance(self) -> None:
        """End a step: move its magnitudes, already reduced over ranks, into the history."""
        self.history.copy_(self.history.roll(1, 0))
        # What is not finite measured nothing.
        self.history[0].copy_(self.amax.nan_to_num(nan=0.0, posinf=0.0))
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Set what is known from the history, and forget this step; call after loading a history."""
        self.known.copy_(self.history.amax(0))
        self.discard()

    @torch.no_grad()
    def discard(self) -> None:
        """Forget the magnitudes of a step that was skipped."""
        self.amax.zero_()
