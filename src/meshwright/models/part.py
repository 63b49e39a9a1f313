"""What every model is to those that lay it out, train and save it: whole, or the part of it on a pipeline stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import nn

from meshwright.models.shapes import Part
from meshwright.pipeline.shared import SharedParameter


class ModelPart(nn.Module, ABC):
    """A model, or the part of it that a pipeline stage has.

    A part's blocks have the names that they have in the whole model. What it shares with other parts it declares.
    """

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part

    def shared_parameters(self) -> tuple[SharedParameter, ...]:
        """What the parts of this model share, the same on every part."""
        return ()

    def tie(self) -> None:
        """Make one parameter of those that are one, where both are in this part.

        Anything that replaces parameters (laying on a mesh, leaving the meta device) calls this again.
        """

    @abstractmethod
    def initial_std(self, name: str) -> float | None:
        """Standard deviation of a parameter's initial values, by its name in the whole model; None if all are one."""

    def local_copies(self) -> dict[str, str]:
        """This part's copies of shared parameters: from the name here to the key, which is the name in the whole."""
        stage = self.part.stage
        return {name: p.key for p in self.shared_parameters() for at, name in p.sites if at == stage}

    def whole_model_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by the name that they have in the whole model."""
        keys = self.local_copies()
        for name, parameter in self.named_parameters():
            yield keys.get(name, name), parameter
