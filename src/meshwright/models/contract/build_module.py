"""Build a family's module on the meta device, check it against its description, and tie its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.errors import ConfigError
from meshwright.models.contract.family import Family, RunFacts
from meshwright.models.contract.model_facts import KindFacts, ModelFacts, Part
from meshwright.nn.step_handles import auxiliary_losses, load_counters, step_buffers


def build_part(family: Family, f: RunFacts, *, dtype: torch.dtype, part: Part | None = None) -> nn.Module:
    """Build the model or one pipeline stage on the meta device, with parameters of `dtype`.

    Raises:
        ConfigError: the module does not match the family's description.
    """
    facts = family.describe(f)
    part = part or Part(range(facts.num_layers))
    with torch.device("meta"), _WithoutValues():
        module = family.build(f, part)
    for what in _mismatches(module, facts, part):
        raise ConfigError(
            what,
            where=f"{type(family).__name__}.describe, stage {part.stage}",
            rule="a module must have the parameters, buffers and auxiliary losses that its family describes",
            fix=f"make {type(family).__name__}.describe and {type(family).__name__}.build agree",
        )
    _cast_floats(module, dtype)
    tie_parameters(module, facts)
    return module


class _WithoutValues(TorchFunctionMode):
    """Leaves out functions of `torch.nn.init` on the meta device, where random ones import Dynamo in half a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = {**kwargs} if kwargs else {}
        tensor = found.get("tensor", args[0] if args else None)
        if getattr(func, "__module__", "") == "torch.nn.init" and tensor is not None and tensor.is_meta:
            return tensor
        return func(*args, **found)


def _cast_floats(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast a module's floating-point tensors to `dtype`, and complex buffers to the matching complex dtype, which
    `Module.to` would make real."""
    of_complex = {name: buffer for name, buffer in module.named_buffers() if buffer.is_complex()}
    for name in of_complex:
        _set_buffer(module, name, torch.empty(0, device="meta"))
    module.to(dtype)
    for name, buffer in of_complex.items():
        _set_buffer(module, name, buffer.to(dtype.to_complex()))


def _set_buffer(module: nn.Module, name: str, buffer: torch.Tensor) -> None:
    owner, _, last = name.rpartition(".")
    setattr(module.get_submodule(owner), last, buffer)


def _mismatches(module: nn.Module, facts: ModelFacts, part: Part) -> Iterator[str]:
    """Yield a message for each difference between a module and its description."""
    held = list(facts.held(part.layers, is_first=part.is_first, is_last=part.is_last))
    described = {kind.full_name(p.name, layer): p.shape for kind, layer in held for p in kind.parameters}
    built = {name: tuple(p.shape) for name, p in module.named_parameters(remove_duplicate=False)}
    yield from _shape_mismatches(built, described, "parameter")
    place = {name: number for number, name in enumerate(described)}
    for one, other in pairwise(built):
        if place[one] > place[other]:
            yield f"{one} comes before {other} in the module, but after it in the description"
    buffers = {kind.full_name(b.name, layer): b for kind, layer in held for b in kind.buffers}
    saved, found = module.state_dict(), dict(module.named_buffers(remove_duplicate=False))
    shapes = {name: tuple(buffer.shape) for name, buffer in found.items()}
    yield from _shape_mismatches(shapes, {name: facts_of.shape for name, facts_of in buffers.items()}, "buffer")
    for name, facts_of in buffers.items():
        dtype = str(found[name].dtype).removeprefix("torch.")
        if dtype != facts_of.dtype:
            yield f"the buffer {name} has the dtype {dtype} in the module, but {facts_of.dtype} in the description"
        if facts_of.saved is not (name in saved):
            persistent = "not persistent" if facts_of.saved else "persistent"
            saved_words = "saved" if facts_of.saved else "not saved"
            yield f"the buffer {name} is {saved_words} in the description, but {persistent} in the module"
    counted = {f"{name}.value" for name, _ in step_buffers(module)}
    for name in sorted(counted ^ {name for name, facts_of in buffers.items() if facts_of.updated}):
        has = "a step buffer" if name in counted else "not a step buffer"
        yield f"{name} is {has} of the module, but {'not ' if name in counted else ''}updated in the description"
    loads = {f"{name}.value" for name, _ in load_counters(module)}
    for name in sorted(loads ^ {name for name, facts_of in buffers.items() if facts_of.load}):
        has = "a load counter" if name in loads else "not a load counter"
        yield f"{name} is {has} of the module, but {'not ' if name in loads else ''}a load in the description"
    yield from _auxiliary(module, held)


def _auxiliary(module: nn.Module, held: list[tuple[KindFacts, int | None]]) -> Iterator[str]:
    """Yield a message for each difference in auxiliary losses, per block and for all ends together."""
    due = {kind.full_name("", layer): {one.name for one in kind.auxiliary} for kind, layer in held if layer is not None}
    ends = {one.name for kind, layer in held if layer is None for one in kind.auxiliary}
    built: dict[str, set[str]] = {}
    for path, loss in auxiliary_losses(module):
        block = next((one for one in due if path.startswith(f"{one}.")), "")
        built.setdefault(block, set()).add(loss.name)
    for path, names in {"": ends, **due}.items():
        for name in sorted(names ^ built.get(path, set())):
            has, lacks = ("description", "module") if name in names else ("module", "description")
            yield f"the {has} has the auxiliary loss {name} in {path or 'an end'}, but the {lacks} does not"


def _shape_mismatches(
    built: Mapping[str, tuple[int, ...]], described: Mapping[str, tuple[int, ...]], what: str
) -> Iterator[str]:
    for name in built:
        if name not in described:
            yield f"the module has the {what} {name}, but the description does not"
    for name, shape in described.items():
        if name not in built:
            yield f"the description has the {what} {name}, but the module does not"
        elif built[name] != shape:
            yield f"the {what} {name} has shape {built[name]} in the module, but {shape} in the description"


def tie_parameters(module: nn.Module, facts: ModelFacts) -> None:
    """Tie parameters that the family declares as tied, if both are in this module.

    Replacing parameters (by converting to DTensor or moving off the meta device) breaks ties; call this again
    afterwards.
    """
    ends = [(kind, one) for kind in (*facts.first, *facts.every, *facts.last) for one in kind.parameters]
    for name, target in ((kind.full_name(one.name, None), one.tied_to) for kind, one in ends):
        if target is None:
            continue
        owner, _, last = name.rpartition(".")
        try:
            one, tied = module.get_parameter(target), module.get_submodule(owner)
        except AttributeError:
            continue
        if last in dict(tied.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(tied, last, one)
