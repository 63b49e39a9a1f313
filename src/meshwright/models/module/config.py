"""The `model` section of a module of one's own."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from meshwright.settings.section import ModelSection, Table


class ModuleConfig(ModelSection):
    """A torch.nn.Module of your own."""

    kind: Literal["module"] = Field(
        "module", description="family: a built-in one, or package.module:Family for your own"
    )
    builder: str = Field(
        "", description="package.module:name of the class or function that builds the module, from token ids to logits"
    )
    arguments: Table = Field((), description="keyword arguments of the builder: model.arguments.width=64")
    layer_list: str = Field(
        "",
        description="path of the torch.nn.ModuleList of layers, or of a torch.nn.Sequential; "
        "the largest ModuleList if empty",
    )
    loss: str = Field(
        "",
        description="package.module:name of a function of logits and targets that returns each token's loss; "
        "cross-entropy if empty",
    )
    styles: Table = Field(
        (),
        description="tensor-parallel style by glob of module paths: model.styles.layers.*.up=column; if empty, "
        "feed-forward layers are sharded that their shapes show",
    )
