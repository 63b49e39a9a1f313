"""Find out what a module does with its parameters, in one forward: the operators that they reach say their roles.

A parameter is a matrix if a matrix product multiplies it, as it is or as something made of parameters alone: a cast, a
slice, a sum with adapters. Convolutions, decays of states and tables that are added are none, whatever their dims.
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
"""Operators of which each output is a sum over products with a matrix."""
SELECTIONS = ("index", "index_select")
"""Operators that take rows at places which may be any tensor."""
PRODUCT, STACK, LOOKUP, OTHER = "product", "product with slices along dim 0", "lookup", "other"


def parameter_roles(model: nn.Module, origin: Origin, found: Probe, *, last: set[str]) -> dict[str, Role]:
    """Return the roles of a model's parameters by every one of their names.

    Args:
        model: the model, on the meta device or with values.
        origin: calls it.
        found: findings of its probe.
        last: names of the parameters that are used after the layers.
    """
    ids = torch.zeros((2, found.time), dtype=torch.long, device=next(model.parameters()).device)
    with torch.no_grad(), _Uses(model, found.vocab_size) as seen:
        origin.call(model, ids)
    roles = dict[str, Role]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        uses, shape = seen.uses[private.storage_id(parameter)], parameter.shape
        is_table = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding)
        is_head = len(shape) == 2 and shape[0] == found.vocab_size and name in last
        if len(shape) < 2 or (uses == {OTHER} and not is_table):
            roles[name] = Role.VECTOR
        elif is_table or (LOOKUP in uses and not is_head):
            roles[name] = Role.EMBEDDING
        elif is_head:
            roles[name] = Role.HEAD
        else:  # what this forward didn't use, such as an expert without tokens, is as its shape says
            roles[name] = Role.EXPERTS if len(shape) == 3 and PRODUCT not in uses else Role.MATRIX
    return roles


class _Uses(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that records the uses of parameters, by the id of their storage."""

    def __init__(self, model: nn.Module, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses: dict[int, set[str]] = defaultdict(set)
        self._vocab_size = vocab_size
        self._parameters = {private.storage_id(parameter): parameter for parameter in model.parameters()}
        self._made_of: dict[int, frozenset[int]] = {number: frozenset([number]) for number in self._parameters}
        """Parameters that a tensor is made of, if it is made of nothing else."""
        self._kept: list[Tensor] = []
        """Such tensors: the storage of one that is freed could be that of an activation."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and note which parameters it uses."""
        out, operator = func(*args, **(kwargs or {})), str(func).split(".")[1]
        tensors = [x for x in private.leaves((args, kwargs)) if isinstance(x, Tensor)]
        for tensor in tensors:
            for number in self._made_of.get(private.storage_id(tensor), ()):
                if use := self._use(operator, tensor, self._parameters[number]):
                    self.uses[number].add(use)
        made_of = [self._made_of.get(private.storage_id(tensor)) for tensor in tensors]
        if operator in SELECTIONS:
            made_of = made_of[:1] if tensors[0].dim() > 2 else [None]
        known = [one for one in made_of if one is not None]
        if known and len(known) == len(made_of) and operator != "embedding":
            self._keep(out, frozenset().union(*known))
        return out

    def _keep(self, out: Any, made_of: frozenset[int]) -> None:
        for made in (x for x in private.leaves(out) if isinstance(x, Tensor)):
            self._kept.append(made)
            self._made_of.setdefault(private.storage_id(made), made_of)

    def _use(self, operator: str, tensor: Tensor, parameter: Tensor) -> str:
        """Return how an operator uses a tensor that is made of a parameter."""
        is_table = parameter.dim() == 2 and parameter.shape[0] == self._vocab_size
        if operator == "embedding" or (operator in SELECTIONS and is_table):
            return LOOKUP
        sides = sorted(tensor.shape[-2:])
        # A row or column per head is multiplied as a batch of matrices with one.
        if operator not in PRODUCTS or len(sides) < 2 or (sides[0] == 1 < min(parameter.shape)):
            return OTHER
        is_slice = parameter.dim() == 3 and sides == sorted(parameter.shape[-2:])
        return STACK if is_slice else PRODUCT
