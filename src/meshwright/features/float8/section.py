"""The keys of `float8`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from meshwright.settings.section import Names, Section


class Float8Config(Section):
    """Float8 products of the blocks' linear layers."""

    recipe: Literal["none", "current", "delayed"] = Field(
        "none",
        description="scales of float8 layers: current, from the tensor itself; delayed, from the largest magnitudes of "
        "earlier steps; none uses no float8",
    )
    modules: Names = Field(
        ("*",),
        description="globs over the names of linear layers in blocks, such as blocks.3.ffn.up, that run in float8",
    )
    keep_first: int = Field(0, ge=0, description="first blocks that stay in train.precision")
    keep_last: int = Field(0, ge=0, description="last blocks that stay in train.precision")
    amax_history: int = Field(16, ge=1, le=4096, description="steps that the scales of recipe=delayed look back on")
    cache_weights: bool = Field(
        False, description="keep weights in float8 for a whole step, instead of casting them for every micro-batch"
    )
