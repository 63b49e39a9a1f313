"""Helpers that build and describe models from specs, without a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.models.contract.build_module import tie_parameters
from meshwright.models.contract.family import find_family
from meshwright.models.contract.model_facts import Fill, ModelFacts, Part
from meshwright.models.decoder.description import describe as describe_llama
from meshwright.models.decoder.module import Decoder
from meshwright.models.dit.description import DiTSpec
from meshwright.models.dit.description import describe as describe_dit
from meshwright.models.dit.module import DiT
from meshwright.models.llama.family import LlamaSpec
from meshwright.train.build_job import initialize

Spec = LlamaSpec | DiTSpec


@dataclass(frozen=True)
class _Section:
    given: Spec

    def spec(self) -> Spec:
        return self.given


class Run:
    """What `Family.initial` takes."""

    def __init__(self, spec: Spec, seed: int = 0) -> None:
        self.seed, self._section = seed, _Section(spec)

    def section(self, kind: Any) -> Any:
        return self._section


def facts_of(spec: Spec, seq_len: int = 8) -> ModelFacts:
    return describe_llama(spec, seq_len) if isinstance(spec, LlamaSpec) else describe_dit(spec)


def build(spec: Spec, *, dtype: torch.dtype, part: Part | None = None) -> nn.Module:
    """On the meta device."""
    with torch.device("meta"):
        model = Decoder(spec, part) if isinstance(spec, LlamaSpec) else DiT(spec, part)
    return model.to(dtype)


def initial(spec: Spec, name: str) -> Fill:
    return find_family(str(spec.identity()["kind"])).initial(Run(spec), name)


def initialized(spec: Spec, *, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """On the CPU, with its initial values."""
    model = build(spec, dtype=dtype).to_empty(device="cpu")
    tie_parameters(model, facts_of(spec))
    initialize(model.named_parameters(), find_family(str(spec.identity()["kind"])), Run(spec, seed))
    return model
