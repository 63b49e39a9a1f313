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
from meshwright.models.foreign.structure import FillFacts
from meshwright.models.hf import private
from meshwright.models.hf.source import KEY

COMPUTED = FillFacts("computed")


def fills_of(model: nn.Module) -> dict[str, FillFacts]:
    """Return how each parameter and buffer of a model on the meta device is initialised, by every one of its names."""
    recorded = private.recorded_initialisation(model)
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: _fill(recorded.get(id(tensor)), tensor) for name, tensor in tensors}


def _fill(found: private.Initialisation | None, tensor: Tensor) -> FillFacts:
    if found is None or not tensor.is_floating_point():
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
    real = copy.deepcopy(by).to_empty(device="cpu")
    generator = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "little")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator)
        private.initialise_module(meta, real)
    found: Tensor = getattr(real.get_submodule(inside), last)
    return found.detach()


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
