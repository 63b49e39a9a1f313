"""Initial values of a reference's tensors, written in full, independent of how ranks initialise their shards."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from meshwright.models.contract.family import Family
from meshwright.models.contract.initial_values import Computed, Constant, Stored, Uniform
from meshwright.models.contract.run_facts import RunFacts
from meshwright.nn.weight_init import normal_shard, uniform_shard


@torch.no_grad()
def fill_tensors(tensors: Iterable[tuple[str, Tensor]], family: Family, f: RunFacts) -> None:
    """Give each parameter or buffer the initial values of its name in the full model."""
    for name, tensor in tensors:
        fill = family.initial(f, name)
        if isinstance(fill, Constant):
            tensor.fill_(fill.value)
        elif isinstance(fill, Computed):
            tensor.copy_(fill.compute())
        elif isinstance(fill, Stored):
            tensor.copy_(fill.read(None))
        elif isinstance(fill, Uniform):
            tensor.copy_(uniform_shard(f.seed, name, tensor.shape, bound=fill.bound))
        else:
            tensor.copy_(normal_shard(f.seed, name, tensor.shape, std=fill.std))
