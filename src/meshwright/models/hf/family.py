"""The family of transformers models.

Doesn't import torch or transformers: what it needs to know of a model is cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from meshwright.errors import ConfigError
from meshwright.models.contract.family import OtherWeights
from meshwright.models.contract.initial_values import Computed, Fill
from meshwright.models.contract.run_facts import RunFacts
from meshwright.models.foreign.description import saved_names
from meshwright.models.foreign.facts_cache import cached_structure
from meshwright.models.foreign.foreign_family import ForeignFamily
from meshwright.models.foreign.structure import Structure
from meshwright.models.hf.config import HfConfig
from meshwright.models.hf.source import Source, find_source, transformers_version
from meshwright.settings.violation import Violation

if TYPE_CHECKING:
    from torch import Tensor, nn

    from meshwright.models.hf.origin import TransformersModel


class HfFamily(ForeignFamily):
    """Any causal language model of transformers, trained on text."""

    sections = {"model": HfConfig}
    preload = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto")

    def structure(self, f: RunFacts) -> Structure:
        """Return the structure of a run's model, from the cache if it was derived before."""
        return structure_of(f)

    def identity(self, f: RunFacts) -> Mapping[str, Any]:
        """Return what determines the model's configuration."""
        return {"kind": "hf", **_source(_section(f)).identity()}

    def origin(self, f: RunFacts) -> TransformersModel:
        """Return how the model is built and called."""
        return _origin(_section(f))

    def rules(self, f: RunFacts) -> Iterable[Violation]:
        """Check the layout and the weights against what the model allows."""
        yield from super().rules(f)
        if _section(f).weights == "folder" and _source(_section(f)).folder is None:
            what, rule = "model.weights = folder, but model.config is a model type", "a model type has no weights"
            yield Violation(ConfigError, what, "model.weights", rule, [{"model.weights": "random"}])

    def make(self, f: RunFacts) -> nn.Module:
        """Build the whole model on the meta device, with grouped experts where they are right."""
        import torch

        from meshwright.models.hf.build_model import build_model

        # Grouped products have no kernel for float64. They leave rows of tokens for other ranks' experts uninitialised.
        experts = None if f.precision == "bfloat16" and f.axes.tp == 1 else "eager"
        with torch.device("meta"):
            return build_model(self.origin(f).config, attention=_section(f).attention, experts=experts)

    def other_weights(self) -> OtherWeights:
        """Return the export to a folder that `from_pretrained` opens."""
        from meshwright.models.hf.export import TransformersWeights

        return TransformersWeights()

    def initial(self, f: RunFacts, name: str) -> Fill:
        """Return the values of the folder's weights, or those that the model's own rules give."""
        folder, structure = _source(_section(f)).folder, structure_of(f)
        if _section(f).weights == "folder" and folder is not None and name in saved_names(structure):
            from meshwright.models.hf.pretrained import read_pretrained

            names, cache_dir = saved_names(structure), f.data.cache_dir
            return Computed(lambda: read_pretrained(folder, name, names, cache_dir=cache_dir))
        return super().initial(f, name)

    def compute(self, f: RunFacts, name: str) -> Tensor:
        """Return initial values as the model's own rules compute them."""
        from meshwright.models.hf.initial_values import compute

        return compute(lambda small: _without_values(_section(f), small), name, f.seed)


def _section(f: RunFacts) -> HfConfig:
    return f.section(HfConfig)


@lru_cache(maxsize=64)
def _source(section: HfConfig) -> Source:
    return find_source(section.config)


@lru_cache(maxsize=64)
def _origin(section: HfConfig) -> TransformersModel:
    from meshwright.models.hf.origin import TransformersModel

    return TransformersModel(_source(section), section.attention)


def structure_of(f: RunFacts) -> Structure:
    """Return the structure of a run's model, from the cache if it was derived before."""
    return _structure(_section(f), f.seq_len, f.axes.tp, f.data.cache_dir)


@lru_cache(maxsize=64)
def _structure(section: HfConfig, seq_len: int, tp: int, cache_dir: str | None) -> Structure:
    source = _source(section)

    def derive() -> Structure:
        from meshwright.models.foreign.derive import derive_structure

        return derive_structure(_origin(section), seq_len=seq_len, tp=tp)

    versions = {"transformers": transformers_version(), "torch": version("torch")}
    key = {**source.identity(), "attention": section.attention, "seq_len": seq_len, "tp": tp, **versions}
    return cached_structure(key, derive, cache_dir=cache_dir)


@lru_cache(maxsize=4)
def _without_values(section: HfConfig, small: bool) -> nn.Module:
    """Build the model on the meta device; with `small`, small tensors on the CPU."""
    import torch

    from meshwright.models.foreign.private import small_on_cpu

    with small_on_cpu() if small else torch.device("meta"):
        return _origin(section).build()


FAMILY = HfFamily()
