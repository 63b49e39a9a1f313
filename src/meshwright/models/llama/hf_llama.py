"""Hugging Face's Llama, for import and export. Torch-free."""

from __future__ import annotations

from meshwright.models.huggingface.architecture import Architecture
from meshwright.models.llama.hf_config import ARCHITECTURE, MODEL_TYPE, config_from_model, model_from_config
from meshwright.models.llama.hf_parameter_names import mapped_tensors

LLAMA = Architecture(
    kind="llama",
    noun="Llama",
    name=ARCHITECTURE,
    model_type=MODEL_TYPE,
    read_config=model_from_config,
    write_config=config_from_model,
    tensors=mapped_tensors,
)
