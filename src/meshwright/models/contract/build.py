"""A family's module on the meta device, whole or a stage's part: compared with its description, and tied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.contract.facts import ModelFacts, Part
from meshwright.models.contract.family import Family
from meshwright.models.contract.run_facts import RunFacts


def build_part(family: Family, f: RunFacts, *, dtype: torch.dtype, part: Part | None = None) -> nn.Module:
    """The module, or a part of it, on the meta device, with parameters of `dtype` and no storage.

    Raises:
        ConfigError: it is not as the family describes it.
    """
    facts = family.describe(f)
    part = part or Part(range(facts.num_layers))
    with torch.device("meta"):
        module = family.build(f, part).to(dtype)
    for what in _undescribed(module, facts, part):
        raise ConfigError(
            what,
            where=f"{type(family).__name__}.describe, stage {part.stage}",
            rule="a module has the parameters and saved buffers that its family describes, in that order",
            fix=f"the same in {type(family).__name__}.describe and {type(family).__name__}.build",
        )
    tie(module, facts)
    return module


def _undescribed(module: nn.Module, facts: ModelFacts, part: Part) -> Iterator[str]:
    """What a module has otherwise than its description, in words."""
    held = list(facts.held(part.layers, is_first=part.is_first, is_last=part.is_last))
    described = {kind.full_name(p.name, layer): p.shape for kind, layer in held for p in kind.parameters}
    built = {name: tuple(p.shape) for name, p in module.named_parameters(remove_duplicate=False)}
    yield from _differ(built, described, "parameter")
    place = {name: number for number, name in enumerate(described)}
    for one, other in pairwise(built):
        if place[one] > place[other]:
            yield f"{one} comes before {other} in the module, and after it in the description"
    buffers = {kind.full_name(b.name, layer): b.shape for kind, layer in held for b in kind.buffers}
    saved, found = module.state_dict(), dict(module.named_buffers(remove_duplicate=False))
    yield from _differ({n: tuple(b.shape) for n, b in found.items() if n in saved or n in buffers}, buffers, "buffer")
    for name in (kind.full_name(b.name, layer) for kind, layer in held for b in kind.buffers if b.saved):
        if name not in saved:
            yield f"the buffer {name} is saved by the description, and not persistent in the module"


def _differ(built: Mapping[str, tuple[int, ...]], described: Mapping[str, tuple[int, ...]], what: str) -> Iterator[str]:
    for name in built:
        if name not in described:
            yield f"the module has the {what} {name}, and the description doesn't"
    for name, shape in described.items():
        if name not in built:
            yield f"the description has the {what} {name}, and the module doesn't"
        elif built[name] != shape:
            yield f"the {what} {name} has the shape {built[name]} in the module, and {shape} in the description"


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
