"""Replace the linear layers that a plan runs in float8, and let them multiply tensor-parallel shards.

Under tensor parallelism each rank casts its own shards and multiplies them. Current scales of shards may differ, as
each rank scales its product back before products are summed. Delayed scales are the same on all ranks.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from meshwright.errors import LayoutError
from meshwright.nn.float8.linear import Float8Linear
from meshwright.nn.float8.recipe import Float8Recipe
from meshwright.nn.float8.torchao_layers import convert_to_torchao
from meshwright.nn.linear import Linear
from meshwright.parallel.local_shards import compute_on_local_shards
from meshwright.plan.run_plan import Float8Layers


def apply_float8(block: nn.Module, float8: Float8Layers) -> None:
    """Replace linear layers of a block by float8 layers with the same parameters and names.

    Raises:
        LayoutError: one of them is not a `nn.linear.Linear`.
    """
    for path in float8.layers:
        layer = block.get_submodule(path)
        if type(layer) is not Linear:
            raise LayoutError(
                f"{path} is {type(layer).__module__}.{type(layer).__name__}, but the plan runs it in float8",
                where="Family.describe, KindFacts.linear_inputs",
                rule="float8 replaces layers of the class meshwright.nn.linear.Linear",
                fix="build the layer as this class, or leave it out of KindFacts.linear_inputs",
            )
    if float8.recipe is Float8Recipe.TORCHAO:
        convert_to_torchao(block, float8.layers)
        return
    for path in float8.layers:
        owner, _, name = path.rpartition(".")
        layer = block.get_submodule(path)
        assert isinstance(layer, Linear)
        setattr(block.get_submodule(owner), name, Float8Linear.from_linear(layer))


def multiply_shards(block: nn.Module, float8: Float8Layers) -> None:
    """Let float8 layers whose parameters are tensor-parallel shards compute with local tensors; call after styles."""
    for path in float8.layers:
        layer = block.get_submodule(path)
        assert isinstance(layer, Float8Linear) and isinstance(layer.weight, DTensor)
        (placement,) = layer.weight.placements
        compute_on_local_shards(layer)
        layer.forward = _on_shards(layer.forward, placement)  # type: ignore[method-assign]


def _on_shards(forward: Any, weight: Placement) -> Any:
    """Return a forward from and to DTensors; inside a region, inputs and outputs are local already."""

    def on_shards(x: Any) -> Any:
        if not isinstance(x, DTensor):
            return forward(x)
        features = Shard(x.dim() - 1)
        gradient: Placement = Replicate()
        output: Placement = Replicate()
        if weight.is_shard(0):
            gradient, output = Partial(), features
        elif weight.is_shard(1):
            gradient, output = features, Partial()
        local = forward(x.to_local(grad_placements=[gradient]))
        return DTensor.from_local(local, x.device_mesh, [output], run_check=False)

    return on_shards
