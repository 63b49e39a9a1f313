"""Hugging Face's Mixtral, for import and export. Torch-free."""

from __future__ import annotations

from meshwright.models.huggingface.architecture import LAYERS, Architecture, Repeated
from meshwright.models.moe.hf_config import (
    ARCHITECTURE,
    MODEL_TYPE,
    check_is_mixtral,
    config_from_model,
    model_from_config,
)
from meshwright.models.moe.hf_parameter_names import load_counters, mapped_tensors

MIXTRAL = Architecture(
    kind="moe",
    noun="Mixtral",
    name=ARCHITECTURE,
    model_type=MODEL_TYPE,
    read_config=model_from_config,
    write_config=config_from_model,
    tensors=mapped_tensors,
    repeated=(LAYERS, Repeated("num_local_experts", "num_experts", "expert")),
    counters=load_counters,
    check_model=check_is_mixtral,
)
