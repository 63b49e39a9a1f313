"""What a rank holds of a model: the modules of its stages, and their tensors by their names in the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from meshwright.models.contract.model_facts import Part
from meshwright.plan.run_plan import RunPlan, Stage


class StagePart:
    """The module of one pipeline stage."""

    def __init__(self, plan: RunPlan, number: int, module: nn.Module) -> None:
        self.plan, self.number, self.module = plan, number, module

    @property
    def stage(self) -> Stage:
        """What the plan says of it."""
        return self.plan.stages[self.number]

    @property
    def part(self) -> Part:
        """Which part of the model it is."""
        return part_of(self.plan, self.number)

    def keys(self) -> dict[str, str]:
        """From a parameter's name in the module to its name in the whole model, in the module's order."""
        found = self.plan.parameters(self.stage)
        return {kind.full_name(p.name, layer): kind.key(p, layer) for kind, layer, p in found}

    def local_copies(self) -> dict[str, str]:
        """This stage's copies of shared parameters: from the name here to the key."""
        return {name: key for key, sites in self.plan.shared for at, name in sites if at == self.number}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by the name that they have in the whole model."""
        keys = self.keys()
        for name, parameter in self.module.named_parameters():
            yield keys.get(name, name), parameter

    def named_buffers(self, *, saved_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Buffers by the name that they have in the whole model."""
        wanted = {
            kind.full_name(buffer.name, layer)
            for kind, layer in self.plan.held(self.stage)
            for buffer in kind.buffers
            if buffer.saved or not saved_only
        }
        return ((name, buffer) for name, buffer in self.module.named_buffers() if name in wanted)


class RankModel:
    """All stages of a rank."""

    def __init__(self, parts: Mapping[int, StagePart]) -> None:
        self.parts = dict(parts)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of all stages, stage by stage; copies of shared ones too."""
        return (parameter for part in self.parts.values() for parameter in part.module.parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """By the name in the whole model, each name once: of several copies here the first stage's stands for all."""
        seen = set()
        for part in self.parts.values():
            for name, parameter in part.named_parameters():
                if name not in seen:
                    seen.add(name)
                    yield name, parameter

    def named_buffers(self, *, saved_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """By the name in the whole model, each name once."""
        found: dict[str, Tensor] = {}
        for part in self.parts.values():
            for name, buffer in part.named_buffers(saved_only=saved_only):
                found.setdefault(name, buffer)
        return iter(found.items())

    def get_parameter(self, name: str) -> nn.Parameter:
        """The parameter of this name in the whole model."""
        return dict(self.named_parameters())[name]

    def modules(self) -> Iterator[nn.Module]:
        """Every module of every stage."""
        return (module for part in self.parts.values() for module in part.module.modules())

    @property
    def training(self) -> bool:
        """Whether all stages are in training mode."""
        return all(part.module.training for part in self.parts.values())

    def train(self, mode: bool = True) -> None:
        """Training or evaluation mode."""
        for part in self.parts.values():
            part.module.train(mode)


def part_of(plan: RunPlan, number: int) -> Part:
    """The part of the model that a stage of a plan is."""
    return Part(range(*plan.stages[number].layers), stage=number, num_stages=len(plan.stages))
