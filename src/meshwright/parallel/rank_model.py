"""One rank's stages of a model, with tensors addressed by their names in the full model."""

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
        """The stage in the plan."""
        return self.plan.stages[self.number]

    @property
    def part(self) -> Part:
        """The part of the model that the stage holds."""
        return part_of(self.plan, self.number)

    def keys(self) -> dict[str, str]:
        """Map parameter names in the module to names in the full model, in module order."""
        parameters = self.plan.parameters(self.stage)
        return {kind.full_name(p.name, layer): kind.key(p, layer) for kind, layer, p in parameters}

    def shared_parameter_keys(self) -> dict[str, str]:
        """Map names in the stage to the keys of the shared parameters that they are copies of."""
        return {name: key for key, sites in self.plan.shared for at, name in sites if at == self.number}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters with their names in the full model."""
        keys = self.keys()
        for name, parameter in self.module.named_parameters():
            yield keys.get(name, name), parameter

    def named_buffers(self, *, saved_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield buffers with their names in the full model."""
        wanted = {
            kind.full_name(buffer.name, layer)
            for kind, layer in self.plan.held(self.stage)
            for buffer in kind.buffers
            if buffer.saved or not saved_only
        }
        return ((name, buffer) for name, buffer in self.module.named_buffers() if name in wanted)


class RankModel:
    """All pipeline stages of a rank."""

    def __init__(self, parts: Mapping[int, StagePart]) -> None:
        self.parts = dict(parts)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters stage by stage, including all copies of shared ones."""
        return (parameter for part in self.parts.values() for parameter in part.module.parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters with their names in the full model; shared parameters only once, from the first stage."""
        seen = set()
        for part in self.parts.values():
            for name, parameter in part.named_parameters():
                if name not in seen:
                    seen.add(name)
                    yield name, parameter

    def named_buffers(self, *, saved_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield buffers with their names in the full model, each name once."""
        buffers: dict[str, Tensor] = {}
        for part in self.parts.values():
            for name, buffer in part.named_buffers(saved_only=saved_only):
                buffers.setdefault(name, buffer)
        return iter(buffers.items())

    def get_parameter(self, name: str) -> nn.Parameter:
        """Return the parameter with this name in the full model."""
        return dict(self.named_parameters())[name]

    def modules(self) -> Iterator[nn.Module]:
        """Yield all modules of all stages."""
        return (module for part in self.parts.values() for module in part.module.modules())

    @property
    def training(self) -> bool:
        """True if all stages are in training mode."""
        return all(part.module.training for part in self.parts.values())

    def train(self, mode: bool = True) -> None:
        """Set training or evaluation mode."""
        for part in self.parts.values():
            part.module.train(mode)


def part_of(plan: RunPlan, number: int) -> Part:
    """Return the part of the model that a stage holds."""
    return Part(range(*plan.stages[number].layers), stage=number, num_stages=len(plan.stages))
