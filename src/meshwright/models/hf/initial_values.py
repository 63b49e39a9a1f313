"""Initial values of a transformers model by name, as its own rules give them.

Normal values are drawn shard by shard (`nn/weight_init.py`), so they are the same on every layout. Values of other
rules are computed in full on the CPU, by the model's own code on a copy of the one module that they belong to.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from meshwright.errors import ConfigError
from meshwright.models.foreign.recorded_fills import COMPUTED, build_recorded
from meshwright.models.foreign.structure import FillFacts
from meshwright.models.hf import private
from meshwright.models.hf.source import KEY


def fills_of(build: Callable[[], nn.Module]) -> dict[str, FillFacts]:
    """Return how each parameter and buffer of a model is initialised, by every one of its names: by the model's rules,
    or by its constructor where they don't say."""
    model, constructed = build_recorded(build)
    recorded = private.recorded_initialisation(model)
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        name: _fill(recorded[id(tensor)], tensor) if id(tensor) in recorded else constructed[name]
        for name, tensor in tensors
    }


def _fill(found: private.Initialisation, tensor: Tensor) -> FillFacts:
    if not tensor.is_floating_point():
        return COMPUTED
    if found.function == "normal_" and found.arguments[0] == 0:
        return FillFacts("normal", float(found.arguments[1]))
    if found.function in ("zeros_", "ones_"):
        return FillFacts("constant", float(found.function == "ones_"))
    if found.function == "constant_":
        return FillFacts("constant", float(found.arguments[0]))
    return COMPUTED


@torch.no_grad()
def compute(model: Callable[[bool], nn.Module], name: str, seed: int) -> Tensor:
    """Return the initial values of a tensor as the model's own rules compute them.

    Args:
        model: returns the model on the meta device or, for True, with small tensors on the CPU as its constructor made
            them.
        name: its name in the model.
        seed: seed of values that are random.
    """
    path, _, last = name.rpartition(".")
    meta = model(False)
    owner = meta.get_submodule(path)
    recorded = private.recorded_initialisation(meta).get(id(getattr(owner, last)))
    if recorded is None:
        return _constructed(getattr(model(True).get_submodule(path), last), name)
    by = owner if recorded.by is None else recorded.by
    inside = next(key for key, module in by.named_modules() if module is owner)
    real = _retied(copy.deepcopy(by).to_empty(device="cpu"), by)
    generator = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "little")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator)
        private.initialise_module(meta, real)
    found: Tensor = getattr(real.get_submodule(inside), last)
    return found.detach()


def _retied(real: nn.Module, original: nn.Module) -> nn.Module:
    """Tie the parameters of a copy that are tied in the original, in place."""
    first: dict[int, nn.Parameter] = {}
    for name, parameter in original.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        owner = real.get_submodule(path)
        setattr(owner, leaf, first.setdefault(id(parameter), getattr(owner, leaf)))
    return real


def _constructed(tensor: Tensor, name: str) -> Tensor:
    """Return the values that a tensor was constructed with."""
    if tensor.is_meta:
        raise ConfigError(
            f"{name} is not initialised by the model's rules, and too large to construct",
            where=KEY,
            rule="a run starts from initial values that the model defines",
            fix="start from the weights of a folder: model.weights=folder",
        )
    return tensor.detach()
