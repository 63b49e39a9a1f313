"""The sections `model` and `lora` of a transformers model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from meshwright.settings.section import ModelSection, Names, Section

FOREIGN_NAMES: Mapping[str, str] = {
    "lora.rank": "lora_r lora_rank lora_dim lora.r lora.dim peft.dim peft.r peft_config.r",
    "lora.alpha": "lora_alpha lora.lora_alpha peft.alpha peft_config.lora_alpha",
    "lora.targets": "target_modules lora_target_modules lora.target_modules peft.target_modules lora_attn_modules",
    "lora.rslora": "use_rslora lora.use_rslora",
    "lora.zero_init": "init_lora_weights lora.init_lora_weights",
}
"""Names of peft, TRL, NeMo and torchtune by our keys."""


class HfConfig(ModelSection):
    """A causal language model of transformers."""

    kind: Literal["hf"] = Field("hf", description="family: a built-in one, or package.module:Family for your own")
    config: str = Field(
        "qwen3",
        min_length=1,
        description="folder of a model in Hugging Face's format, a config.json, or a model type of transformers, "
        "which is built small",
    )
    weights: Literal["auto", "random", "folder"] = Field(
        "auto",
        validate_default=True,
        description="initial weights: random as the model defines them, or those in the folder of model.config; auto "
        "takes a folder's if it has some",
    )
    unused_weights: Names = Field(
        (),
        description="tensors of the folder that are knowingly left out, as globs over the names in the error; all "
        "others have a place in the model, or the run is refused",
    )
    attention: Literal["auto", "sdpa", "eager"] = Field(
        "auto", description="attention of transformers: sdpa (PyTorch's kernels), or eager; auto takes the model's own"
    )

    @field_validator("weights")
    @classmethod
    def _find_weights(cls, value: str, info: ValidationInfo) -> str:
        """Decide `auto` once, where a configuration is read: a run keeps to it, wherever it is continued."""
        if value != "auto":
            return value
        return "folder" if has_weights(Path(info.data.get("config", "")).expanduser()) else "random"


def has_weights(folder: Path) -> bool:
    """Return whether a folder has a model's weights, and not adapters alone; a path of a config.json has none."""
    found = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    return any(not path.name.startswith("adapter_") for path in found)


class LoraConfig(Section):
    """Low-rank adapters of peft, which are trained in place of the model's own weights."""

    rank: int = Field(0, ge=0, description="rank of the adapters; 0 trains the model's own weights instead")
    alpha: float = Field(
        16.0, gt=0, description="adapters add alpha / rank times their product; with lora.rslora alpha / √rank"
    )
    targets: Names = Field(
        (),
        description="linear layers of the decoder layers that get adapters: last parts of their paths, such as q_proj, "
        "or globs over paths; all by default",
    )
    rslora: bool = Field(False, description="scale what adapters add by 1 / √rank in place of 1 / rank")
    zero_init: bool = Field(
        True, description="start the second matrix of adapters at zero, so that they add nothing at first"
    )

    def identity(self) -> dict[str, Any]:
        """Return what determines the adapters and their meaning; nothing without adapters."""
        return self.model_dump(mode="json", exclude={"zero_init"}) if self.rank else {}
