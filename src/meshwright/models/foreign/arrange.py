"""Split the modules around a model's decoder layers into those before and after, and order them so.

Checkpoints, compression and descriptions take parameters in module order; a model that declares its final norm before
its layers would have another. Only the order of registration changes, no name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from meshwright.models.foreign import private
from meshwright.models.foreign.findings import Probe


@dataclass(frozen=True)
class Sides:
    """Names of the parameters outside the layers, by where their modules run, all names of tied ones included."""

    first: tuple[str, ...]
    every: tuple[str, ...]
    last: tuple[str, ...]


def containers(path: str) -> tuple[str, ...]:
    """Return the paths of the modules that contain the list of layers, the model first."""
    parts = path.split(".")
    return tuple(".".join(parts[:count]) for count in range(len(parts)))


def side_modules(model: nn.Module, layers_path: str) -> Iterator[str]:
    """Yield the paths of the modules beside those that lead to the layers."""
    on_path = {*containers(layers_path), layers_path}
    for path in containers(layers_path):
        for name, _ in model.get_submodule(path).named_children():
            child = f"{path}.{name}" if path else name
            if child not in on_path:
                yield child


def find_sides(model: nn.Module, probe: Probe) -> Sides:
    """Return where the parameters outside the layers are used."""
    canonical = _canonical_names(model)
    sides: dict[str, str] = {}
    own: dict[str, str] = {}
    """Those of the modules that contain the layers."""
    for path in side_modules(model, probe.layers_path):
        module = model.get_submodule(path)
        names = [f"{path}.{name}" for name, _ in module.named_parameters(remove_duplicate=False)]
        side = _side(path, names, canonical, probe)
        sides |= dict.fromkeys(names, side)
    for path in containers(probe.layers_path):
        for name, _ in model.get_submodule(path).named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            sides[full] = own[full] = "every" if full in probe.after | probe.between else "first"
    if "every" in own.values():  # they come before those of other modules, in whatever order these are registered
        sides = {name: "every" if side == "first" else side for name, side in sides.items()}
    return Sides(*(tuple(name for name, side in sides.items() if side == wanted) for wanted in Sides.__match_args__))


def _side(path: str, names: list[str], canonical: dict[str, str], probe: Probe) -> str:
    phases: set[str] = set()
    for inner, found in probe.phases.items():
        if inner == path or inner.startswith(f"{path}."):
            phases |= found
    used = {canonical[name] for name in names}
    if not phases:  # its parameters are read without calling it
        phases |= {"before"} if used & probe.before else set()
        phases |= {"after"} if used & probe.after else set()
    if used <= probe.unused:  # what the layers take from it has no gradient, so they may all need it
        return "every"
    if used & probe.between and phases != {"after"}:
        return "every"
    if phases == {"after"}:
        return "last"
    return "first" if phases <= {"before"} else "every"


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter's tensor, by every name."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}


def remove_aliases(model: nn.Module, aliases: Mapping[str, str]) -> None:
    """Make modules read parameters of others by a property in place of a parameter of their own."""
    for name, target in aliases.items():
        path, _, leaf = name.rpartition(".")
        owner_path, _, owner_leaf = target.rpartition(".")
        module, owner = model.get_submodule(path), model.get_submodule(owner_path)
        delattr(module, leaf)
        read = property(partial(_read, owner, owner_leaf))
        module.__class__ = type(type(module).__name__, (type(module),), {leaf: read})


def _read(owner: nn.Module, leaf: str, reader: nn.Module) -> Any:
    return getattr(owner, leaf)


def arrange(model: nn.Module, layers_path: str, last: tuple[str, ...], every: tuple[str, ...]) -> None:
    """Register the modules on the way to the layers in the order first, every, layers, last."""

    def rank(path: str) -> int:
        if layers_path == path or layers_path.startswith(f"{path}."):
            return 2
        inside = [name for name in (*last, *every) if name.startswith(f"{path}.")]
        return 0 if not inside else 3 if inside[0] in last else 1

    def rank_in(path: str, name: str) -> int:
        return rank(f"{path}.{name}" if path else name)

    for path in containers(layers_path):
        private.order_children(model.get_submodule(path), partial(rank_in, path))
