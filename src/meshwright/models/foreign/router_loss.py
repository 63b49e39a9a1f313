"""The balance loss of a foreign model's routers: one loss of all layers together.

Of N choices by T tokens in L layers, expert e gets the fraction f_e = Σ counts / (L T), and p_e = Σ probabilities /
(L T); a sample's loss is E Σ_e f_e p_e (Fedus et al. 2022, equation 4, with the sums over layers inside). So what its
layers add up to reaches the last stage beside the stream, and gradients of p come back on the same way.

Hooks on routers note both sums. A recomputed forward computes them again, since it has to save what the first one did,
but notes nothing: the graph of the first one's result recomputes what it needs.

Shapes: b batch, t tokens of a sample on this rank, e experts, k choices per token.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.contract.model_facts import Part
from meshwright.models.foreign.structure import RouterLoss, Structure
from meshwright.nn.experts.router import SampleCounts
from meshwright.nn.step_handles import AuxiliaryLoss, StepHandle

NAME = "balance_loss"
"""Attribute of a stage that holds its loss, and name of what its routers note."""


def sums_of(logits: Tensor, loss: RouterLoss, num_samples: int) -> Tensor:
    """Return a router's counts and sums of probabilities, as parts of all routers' tokens, [b, 2, e]."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    probabilities_bte = logits.to(wide).softmax(-1).view(num_samples, -1, logits.shape[-1])
    chosen_bc = probabilities_bte.detach().topk(loss.top_k, -1).indices.flatten(1)
    sums_be = probabilities_bte.sum(1)
    counts_be = torch.zeros_like(sums_be).scatter_add_(1, chosen_bc, torch.ones_like(chosen_bc, dtype=wide))
    return torch.stack((counts_be, sums_be), 1) / (len(loss.routers) * probabilities_bte.shape[1])


class RouterSums(StepHandle):
    """Part of a router's last forward in the sums of its samples."""

    def __init__(self, loss: RouterLoss, index: int) -> None:
        """Create it for a router that returns its logits at an index of a tuple, if it returns one."""
        super().__init__()
        self._loss, self._index, self.num_samples = loss, index, 1
        self._noted: Tensor | None = None

    def note(self, module: nn.Module, inputs: Any, out: Any) -> None:
        """Note counts and probabilities, as a hook of the router."""
        sums = sums_of(out[self._index] if isinstance(out, tuple) else out, self._loss, self.num_samples)
        if not self.recomputing:
            self._noted = sums

    def take(self) -> Tensor | None:
        """Return what was noted, [b, 2, e], and forget it."""
        noted, self._noted = self._noted, None
        return noted


def watch_routers(model: nn.Module, loss: RouterLoss) -> list[RouterSums]:
    """Let the routers of a model note what their forwards add to the loss."""
    found = []
    for path, index in loss.routers:
        router, sums = model.get_submodule(path), RouterSums(loss, index)
        router.add_module(NAME, sums)
        router.register_forward_hook(sums.note)
        found.append(sums)
    return found


def loss_of(sums_b2e: Tensor, counts_be: Tensor) -> Tensor:
    """Return the sum of the losses of samples, given all counts of theirs, and the sums of probabilities here."""
    return (counts_be * sums_b2e[:, 1]).sum() * sums_b2e.shape[-1]


class BalanceLoss(nn.Module):
    """The loss on a stage: what the stages before add up to comes with its input, and it is attached to the output of
    the last one."""

    def __init__(self, model: nn.Module, structure: Structure, part: Part, width: int) -> None:
        """Create it for a stage, whose input and output have `width` features per token for the sums."""
        super().__init__()
        assert structure.router_loss is not None, "the model has such a loss"
        self.facts = structure.router_loss
        self.loss = AuxiliaryLoss("balance", self.facts.weight) if part.is_last else None
        self.counts = SampleCounts()
        self._routers, self._part, self._width = watch_routers(model, self.facts), part, width
        self._per_token = () if structure.carried else structure.per_token
        self._received: Tensor | None = None

    def before(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Take the sums of earlier stages from a stage's input, as a hook."""
        x, *others = inputs
        if not self._part.is_first:
            x, packed = x.split((x.shape[-1] - self._width, self._width), -1)
            self._received = _unpacked(packed, self.facts.num_experts) if self._trains() else None
            x = x.reshape(*x.shape[:2], *self._per_token) if self._per_token else x
        for router in self._routers:
            router.num_samples = x.shape[0]
        return (x, *others), named

    def after(self, module: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        """Add the loss to a last stage's output, or the sums to what another one sends, as a hook."""
        noted = [one for one in (self._received, *(router.take() for router in self._routers)) if one is not None]
        self._received = None
        sums = torch.stack(noted).sum(0) if noted and self._trains() else None
        if self.loss is None:
            return torch.cat((out.flatten(2), _packed(sums, out, self._width)), -1)
        if sums is None:
            return out
        sums = sums / self.counts.num_parts
        counts_be = self.counts.reduce(sums[:, 0].detach().double()).to(sums.dtype)
        attached: Tensor = self.loss(out, loss_of(sums, counts_be))
        return attached

    def _trains(self) -> bool:
        return self.training and torch.is_grad_enabled()


def add_balance_loss(stage: nn.Module, structure: Structure, part: Part, width: int) -> None:
    """Add the loss of a model's routers to one of its stages, in place."""
    loss = BalanceLoss(stage, structure, part, width)
    stage.add_module(NAME, loss)
    stage.register_forward_pre_hook(loss.before, with_kwargs=True)
    stage.register_forward_hook(loss.after)


def _packed(sums_b2e: Tensor | None, like: Tensor, width: int) -> Tensor:
    """Return sums as features of the tokens of a sample [b, t, width], zeros if there are none. A dtype of two bytes
    takes two numbers for each, of which the second is what the first rounds off."""
    shape = (*like.shape[:2], width)
    if sums_b2e is None:
        return like.new_zeros(shape)
    flat = sums_b2e.flatten(1)
    high = flat.to(like.dtype)
    parts = (high,) if like.element_size() > 2 else (high, (flat - high).to(like.dtype))
    numbers = torch.cat(parts, 1)
    return F.pad(numbers, (0, prod(shape[1:]) - numbers.shape[1])).view(shape)


def _unpacked(packed: Tensor, num_experts: int) -> Tensor:
    """Return the sums [b, 2, e] in at least float32."""
    count = 1 if packed.element_size() > 2 else 2
    numbers = packed.flatten(1)[:, : count * 2 * num_experts].to(torch.promote_types(packed.dtype, torch.float32))
    return numbers.view(-1, count, 2, num_experts).sum(1)
