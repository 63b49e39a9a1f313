"""Where a pipeline has its parameters: which stages hold one, and on which rank of the pipeline a stage is.

From the configuration alone, so that a finding about some parameters can be one about a stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.config.pipeline import has_stages, layers_per_stage, lowered_table
from meshwright.config.schema import RunConfig
from meshwright.pipeline.shared import SharedParameter
from meshwright.pipeline.stages import layer_ranges
from meshwright.prove.words import join_words


@dataclass(frozen=True)
class Stages:
    """The stages of a pipeline, in the model's order."""

    ranks: tuple[int, ...]
    """Of each stage, its rank of the pipeline."""
    layers: tuple[range, ...]
    """Of each stage, its blocks."""
    shared: tuple[SharedParameter, ...] = ()
    """Parameters with copies on several stages."""
    splits_backward: bool = False
    """Gradients of weights are put off: B is I and W."""

    @property
    def last(self) -> int:
        """The last stage."""
        return len(self.ranks) - 1

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return max(self.ranks) + 1

    def of(self, name: str) -> tuple[int, ...]:
        """The stages that hold a parameter."""
        if self.sharing(name):
            return self.sharing(name)
        block = re.match(r"blocks\.(\d+)\.", name)
        if block is not None:
            return tuple(stage for stage, layers in enumerate(self.layers) if int(block[1]) in layers)
        if name.startswith("embed."):
            return (0,)
        return (self.last,)

    def sharing(self, name: str) -> tuple[int, ...]:
        """The stages that have copies of a shared parameter; none if it isn't shared."""
        return next((parameter.stages() for parameter in self.shared if parameter.key == name), ())

    def holding(self, names: Iterable[str]) -> tuple[int, ...]:
        """The stages that hold any of some parameters."""
        return tuple(sorted({stage for name in names for stage in self.of(name)}))

    def words(self, stages: Iterable[int]) -> str:
        """`stage 1 (pp rank 1)`, `stages 0 and 3 (pp rank 0)`."""
        found = sorted(set(stages))
        ranks = sorted({self.ranks[stage] for stage in found})
        return f"{_numbered('stage', found)} ({_numbered('pp rank', ranks)})"


def stages_of(config: RunConfig) -> Stages | None:
    """A configuration's stages; None without a pipeline."""
    if not has_stages(config):
        return None
    table = lowered_table(config)
    return Stages(
        table.stage_ranks,
        tuple(layer_ranges(layers_per_stage(config))),
        shared=config.model.spec().shared_parameters(table.num_stages),
        splits_backward=table.splits_backward,
    )


def _numbered(word: str, numbers: list[int]) -> str:
    plural = "s" if len(numbers) > 1 else ""
    return f"{word}{plural} {join_words([str(number) for number in numbers])}"
