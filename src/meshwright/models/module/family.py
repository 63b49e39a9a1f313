"""The family of modules of one's own. Their structure is derived in each process: their code may change at any time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from meshwright.errors import ConfigError
from meshwright.models.contract.family import RunFacts
from meshwright.models.contract.model_facts import HeadFacts, ModelFacts
from meshwright.models.foreign.foreign_family import ForeignFamily
from meshwright.models.foreign.structure import Structure, computed_names
from meshwright.models.module.config import ModuleConfig
from meshwright.settings.import_object import OBJECT_NAME
from meshwright.settings.violation import Violation

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from meshwright.models.contract.family import OtherWeights
    from meshwright.models.contract.task import Reference, Task
    from meshwright.models.module.origin import OwnModule


class ModuleFamily(ForeignFamily):
    """A `torch.nn.Module` that maps token ids to logits, trained on text."""

    sections = {"model": ModuleConfig}

    def rules(self, f: RunFacts) -> Iterable[Violation]:
        """Check that the builder and the loss are named, and the layout against what the module allows."""
        section = f.section(ModuleConfig)
        for key, value in (("model.builder", section.builder), ("model.loss", section.loss)):
            if (value or key == "model.builder") and not OBJECT_NAME.fullmatch(value):
                what = f"{key} = {value}" if value else f"{key} is not set"
                rule = f"{key} is package.module:name of your own"
                raise ConfigError(what, where=key, rule=rule, fix=f"{key}=my_model:build, with my_model on PYTHONPATH")
        if section.loss:
            from meshwright.models.module.origin import own_loss

            own_loss(section.loss)
        yield from super().rules(f)

    def structure(self, f: RunFacts) -> Structure:
        return _structure(f.section(ModuleConfig), f.seq_len, f.axes.tp)

    def identity(self, f: RunFacts) -> Mapping[str, Any]:
        section = f.section(ModuleConfig)
        return {"kind": "module", "builder": section.builder, "arguments": dict(section.arguments)}

    def describe(self, f: RunFacts) -> ModelFacts:
        facts = super().describe(f)
        if not f.section(ModuleConfig).loss:
            return facts
        head = HeadFacts(reason="model.loss is a function of them")
        return replace(facts, last=tuple(replace(end, head=head) for end in facts.last))

    def origin(self, f: RunFacts) -> OwnModule:
        return _origin(f.section(ModuleConfig))

    def compute(self, f: RunFacts, name: str) -> Tensor:
        return _computed(f.section(ModuleConfig), f.seq_len, f.axes.tp, f.seed)[name]

    def other_weights(self) -> OtherWeights:
        from meshwright.models.module.export import ModuleWeights

        return ModuleWeights()

    def task(self, f: RunFacts, data: Any, device: torch.device) -> Task:
        from meshwright.models.module.origin import own_loss
        from meshwright.models.tasks.text_task import text_task

        return text_task(f, data, device, own_loss(f.section(ModuleConfig).loss))

    def reference(self, f: RunFacts, data: Any) -> Reference:
        from meshwright.models.module.origin import own_loss
        from meshwright.models.tasks.text_task import text_reference

        loss = own_loss(f.section(ModuleConfig).loss)
        return text_reference(f, data) if loss is None else text_reference(f, data, loss.sum)


@lru_cache(maxsize=8)
def _origin(section: ModuleConfig) -> OwnModule:
    from meshwright.models.module.origin import OwnModule

    return OwnModule(section)


@lru_cache(maxsize=8)
def _structure(section: ModuleConfig, seq_len: int, tp: int) -> Structure:
    from meshwright.models.foreign.derive import derive_structure

    return derive_structure(_origin(section), seq_len=seq_len, tp=tp)


@lru_cache(maxsize=1)
def _computed(section: ModuleConfig, seq_len: int, tp: int, seed: int) -> dict[str, Tensor]:
    from meshwright.models.module.origin import computed_values

    return computed_values(_origin(section), computed_names(_structure(section, seq_len, tp)), seed)


FAMILY = ModuleFamily()
