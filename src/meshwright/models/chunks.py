"""The parts of a model that one rank of a pipeline has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

from torch import nn

from meshwright.models.part import ModelPart


class Chunks(nn.ModuleDict):
    """Parts by the number of their stage, as one module."""

    def __init__(self, parts: Mapping[int, ModelPart]) -> None:
        super().__init__({str(stage): part for stage, part in parts.items()})

    def parts(self) -> dict[int, ModelPart]:
        """By the number of the stage."""
        return {int(stage): cast(ModelPart, part) for stage, part in self.items()}

    def whole_model_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by the name that they have in the whole model, each name once.

        Of a shared parameter with several copies here the first stage's stands for all.
        """
        seen = set()
        for part in self.parts().values():
            for name, parameter in part.whole_model_parameters():
                if name not in seen:
                    seen.add(name)
                    yield name, parameter

    def initial_std(self, name: str) -> float | None:
        """As `ModelPart.initial_std`."""
        return next(iter(self.parts().values())).initial_std(name)
