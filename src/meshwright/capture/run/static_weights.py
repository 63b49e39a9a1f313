"""Weights that a layer's graphs read, at addresses that never change.

A parameter whose storage stays where it is is read there. FSDP2 allocates gathered weights again in each step, also on
one rank in mixed precision, so graphs read a copy in the compute dtype, which the first micro-batch of a step refreshes
in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.capture.run.private import copy_all
from meshwright.errors import CaptureError


@dataclass(frozen=True)
class TensorFacts:
    """Shape, dtype and gradient of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        what = f"{'×'.join(map(str, self.shape)) or 'a scalar'} {str(self.dtype).removeprefix('torch.')}"
        return f"{what} {'with' if self.requires_grad else 'without'} a gradient"

    @staticmethod
    def of(tensor: Tensor) -> TensorFacts:
        """Return the facts of a tensor."""
        return TensorFacts(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


class StaticWeights:
    """Weights of one layer.

    Args:
        module: the layer.
        facts: what its forward computes with, by name, without duplicates.
        copies: whether to keep copies.
        device: device of the copies.
    """

    def __init__(
        self, module: nn.Module, facts: Mapping[str, TensorFacts], *, copies: bool, device: torch.device
    ) -> None:
        self._module, self._facts = module, dict(facts)
        own = dict(module.named_parameters())
        self._leaves: dict[str, nn.Parameter] = {}
        """Tensors that graphs read: copies, or aliases of the parameters, whose own nodes belong to other streams."""
        for name, one in facts.items():
            memory = torch.zeros(one.shape, dtype=one.dtype, device=device) if copies else own[name].detach()
            self._leaves[name] = nn.Parameter(memory, requires_grad=one.requires_grad)
        self._copies = copies
        self._fixed = {} if copies else {name: p.data_ptr() for name, p in own.items()}
        self._owners = {
            name: (module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in facts
        }
        self._is_fresh = False

    def replacements(self) -> dict[str, nn.Parameter]:
        """Return what graphs read by every name in the module, names of tied parameters included."""
        first = {id(p): name for name, p in self._module.named_parameters()}
        every = self._module.named_parameters(remove_duplicate=False)
        return {name: self._leaves[first[id(p)]] for name, p in every}

    def trained(self) -> list[nn.Parameter]:
        """Return the weights that graphs compute gradients of."""
        return [p for name, p in self._leaves.items() if self._facts[name].requires_grad]

    def current(self) -> list[nn.Parameter]:
        """Return the module's own parameters that get these gradients, in the same order."""
        return [p for name, p in self._own().items() if self._facts[name].requires_grad]

    def expire(self) -> None:
        """Refresh the copies at the next use: the optimizer has changed the parameters, or may have."""
        self._is_fresh = False

    @torch.no_grad()
    def refresh(self, where: str) -> None:
        """Make sure that graphs read the parameters' values.

        Raises:
            CaptureError: a parameter is no longer where it was, or what it was.
        """
        if self._copies and self._is_fresh:
            return
        found = self._own()
        for name, one in self._facts.items():
            if (
                TensorFacts.of(found[name]) != one
                or self._fixed.get(name, address := found[name].data_ptr()) != address
            ):
                raise CaptureError(
                    f"the parameter {name} has moved since its graphs were captured",
                    where=where,
                    rule="graphs read parameters at fixed addresses",
                    fix="capture again after replacing parameters; for parameters that move in each step, "
                    "capture(…, copies_weights=True)",
                )
        if self._copies:
            copy_all(list(self._leaves.values()), [found[name] for name in self._leaves])
        self._is_fresh = True

    def addresses(self) -> tuple[int, ...]:
        """Return the addresses that graphs read."""
        return tuple(p.data_ptr() for p in self._leaves.values())

    def _own(self) -> dict[str, nn.Parameter]:
        return {name: getattr(owner, last) for name, (owner, last) in self._owners.items()}
