"""A family's module on the meta device, whole or a stage's part, with what is tied made one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from meshwright.models.contract.facts import ModelFacts, Part
from meshwright.models.contract.family import Family
from meshwright.models.contract.run_facts import RunFacts


def build_part(family: Family, f: RunFacts, *, dtype: torch.dtype, part: Part | None = None) -> nn.Module:
    """The module, or a part of it, on the meta device, with parameters of `dtype` and no storage."""
    facts = family.describe(f)
    with torch.device("meta"):
        module = family.build(f, part or Part(range(facts.num_layers))).to(dtype)
    tie(module, facts)
    return module


def tie(module: nn.Module, facts: ModelFacts) -> None:
    """Make one parameter of those that are one, where both are in this part.

    Whatever replaces parameters (DTensors, leaving the meta device) undoes it, and calls this again.
    """
    for name, target in _ties(facts):
        owner, _, last = name.rpartition(".")
        try:
            one, tied = module.get_parameter(target), module.get_submodule(owner)
        except AttributeError:
            continue
        if last in tied._parameters:
            setattr(tied, last, one)


def _ties(facts: ModelFacts) -> Iterator[tuple[str, str]]:
    for kind in (*facts.first, *facts.every, *facts.last):
        for parameter in kind.parameters:
            if parameter.tied_to is not None:
                yield kind.full_name(parameter.name, None), parameter.tied_to
