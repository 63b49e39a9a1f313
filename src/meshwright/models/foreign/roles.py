"""Find out what a module does with its parameters, in one forward: the operators that they reach say their roles.

A parameter is a matrix if a matrix product multiplies it, or something made of parameters alone: a cast, a slice, a sum
with adapters. Convolutions, decays of states and tables that are added are vectors, whatever their dims.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.models.contract.model_facts import Role
from meshwright.models.foreign import private
from meshwright.models.foreign.findings import Probe
from meshwright.models.foreign.origin import Origin

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "_grouped_mm", "mkldnn_rnn_layer")
SELECTIONS = ("index", "index_select")
"""Operators that take rows at places which may be any tensor."""


def parameter_roles(model: nn.Module, origin: Origin, found: Probe, *, last: set[str]) -> dict[str, Role]:
    """Return the roles of a model's parameters by all their names; those in `last` are used after the layers."""
    ids = torch.zeros((2, found.time), dtype=torch.long, device=next(model.parameters()).device)
    with torch.no_grad(), _Uses(model, found.vocab_size) as seen:
        origin.call(model, ids)
    roles = dict[str, Role]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        uses, shape = seen.uses[private.storage_id(parameter)], parameter.shape
        is_table = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding)
        is_head = len(shape) == 2 and shape[0] == found.vocab_size and name in last
        if len(shape) < 2 or (uses == {Role.VECTOR} and not is_table):
            roles[name] = Role.VECTOR
        elif is_table or is_head or Role.EMBEDDING in uses:
            roles[name] = Role.HEAD if is_head and not is_table else Role.EMBEDDING
        else:  # what this forward didn't use, such as an expert without tokens, is as its shape says
            roles[name] = Role.EXPERTS if len(shape) == 3 and Role.MATRIX not in uses else Role.MATRIX
    return roles


class _Uses(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that records the roles in which operators use parameters, by the id of their storage."""

    def __init__(self, model: nn.Module, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses: dict[int, set[Role]] = defaultdict(set)
        self._vocab_size = vocab_size
        self._parameters = {private.storage_id(parameter): parameter for parameter in model.parameters()}
        self._made_of = {number: {number} for number in self._parameters}
        """Parameters that a tensor is made of, if it is made of nothing else."""
        self._kept: list[Any] = []
        """Such tensors: the storage of one that is freed could be that of an activation."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and note which parameters it uses."""
        out, operator = func(*args, **(kwargs or {})), str(func).split(".")[1]
        tensors = [x for x in private.leaves((args, kwargs)) if isinstance(x, Tensor)]
        made_of = [self._made_of.get(private.storage_id(tensor), set()) for tensor in tensors]
        for tensor, numbers in zip(tensors, made_of, strict=True):
            for number in numbers:
                self.uses[number].add(self._use(operator, tensor, self._parameters[number]))
        if operator in SELECTIONS and tensors[0].dim() > 2:
            made_of = made_of[:1]  # experts of tokens
        if made_of and all(made_of) and operator != "embedding":
            for made in private.leaves(out):
                self._kept.append(made)
                self._made_of.setdefault(private.storage_id(made), set().union(*made_of))
        return out

    def _use(self, operator: str, tensor: Tensor, parameter: Tensor) -> Role:
        is_table = parameter.dim() == 2 and parameter.shape[0] == self._vocab_size
        if operator == "embedding" or (operator in SELECTIONS and is_table):
            return Role.EMBEDDING
        sides = sorted(tensor.shape[-2:])
        # A row per head is multiplied as a batch of matrices with one column.
        if operator not in PRODUCTS or len(sides) < 2 or sides[0] == 1 < min(parameter.shape):
            return Role.VECTOR
        is_stack = parameter.dim() == 3 and sides == sorted(parameter.shape[-2:])
        return Role.EXPERTS if is_stack else Role.MATRIX
