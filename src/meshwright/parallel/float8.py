"""Replace the linear layers that a plan runs in float8."""

from __future__ import annotations

from torch import nn

from meshwright.errors import LayoutError
from meshwright.nn.float8.linear import Float8Linear
from meshwright.nn.float8.recipe import Float8Recipe
from meshwright.nn.float8.torchao_layers import convert_to_torchao
from meshwright.nn.linear import Linear
from meshwright.plan.block_layers import Float8Layers


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
