"""Optimizers that are written for PyTorch (`torch.optim.Optimizer`), on this rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from meshwright.optim.contract import Optimizer, Settings, Slot, State
from meshwright.optim.role import Role

Make = Callable[[list[nn.Parameter], Settings], torch.optim.Optimizer]


class FromTorch(Optimizer):
    """An optimizer of PyTorch or of another library, which must update element by element.

    `train.optimizer=package.module:adagrad` names a function such as

        def adagrad():
            states = {"step": State((), "float32"), "sum": State()}
            return FromTorch(lambda parameters, s: torch.optim.Adagrad(parameters, s.lr), states)

    Args:
        make: makes it for the shards of one group, with the settings of a step. It is called in every step, so it must
            be cheap. Its weight decay must be decoupled, or 0.
        states: what its `state` has for each parameter, by name, all tensors: some keep the number of steps as a
            float32 scalar.
    """

    def __init__(self, make: Make, states: Mapping[str, State]) -> None:
        self._make, self._states = make, dict(states)

    def states(self, role: Role) -> Mapping[str, State]:
        """Return the states that were given, the same for all roles."""
        return self._states

    def update(self, slots: Sequence[Slot], settings: Settings) -> None:
        """Make the optimizer, give it the states that are kept, and take a step."""
        shards = [nn.Parameter(slot.parameter) for slot in slots]  # share its memory
        for shard, slot in zip(shards, slots, strict=True):
            shard.grad = slot.gradient
        optimizer = self._make(shards, settings)
        for shard, slot in zip(shards, slots, strict=True):
            optimizer.state[shard] = slot.state
        optimizer.step()
