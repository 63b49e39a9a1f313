"""The sections `model` and `lora` of a transformers model, and what they name. Doesn't import torch.

`model.config` is a folder, a config.json or a model type. peft replaces a linear layer `x` by a module with the layer
`x.base_layer` and two matrices, `x.lora_A.default` [r, d] and `x.lora_B.default` [e, r].
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from meshwright.errors import ConfigError
from meshwright.settings.import_object import download_fix
from meshwright.settings.section import ModelSection, Names, Section

FOREIGN_NAMES: Mapping[str, str] = {
    "lora.rank": "lora_r lora_rank lora_dim lora.r lora.dim peft.dim peft.r peft_config.r",
    "lora.alpha": "lora_alpha lora.lora_alpha peft.alpha peft_config.lora_alpha",
    "lora.targets": "target_modules lora_target_modules lora.target_modules peft.target_modules lora_attn_modules",
    "lora.rslora": "use_rslora lora.use_rslora",
    "lora.zero_init": "init_lora_weights lora.init_lora_weights",
}
"""Names of peft, TRL, NeMo and torchtune by our keys."""


OURS = "meshwright"
"""Name of our attention, in transformers' registries, too."""


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
    attention: Literal["auto", "meshwright", "sdpa", "eager"] = Field(
        "auto",
        description="attention: meshwright (this package's backends, in the model's own places), or transformers' sdpa "
        "or eager; auto is, with packed documents or mesh.cp, meshwright, and else the model's own",
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


ADAPTER = "default"
"""peft's name of an only adapter."""
FIRST, SECOND, BASE = f"lora_A.{ADAPTER}", f"lora_B.{ADAPTER}", "base_layer"


def is_adapter(name: str) -> bool:
    """Return whether a parameter is an adapter's, by its name."""
    return name.endswith((f".{FIRST}.weight", f".{SECOND}.weight"))


def original_name(name: str) -> str:
    """Return the name that a parameter or buffer has in the model without adapters."""
    return name.replace(f".{BASE}.", ".")


def check_peft() -> None:
    """Raise a ConfigError if peft is missing."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "peft is not installed",
            where="lora.rank",
            rule="adapters are peft's",
            fix="pip install peft, or lora.rank=0",
        )


KEY = "model.config"
RULE = "model.config is a folder in Hugging Face's format, a config.json, or a model type such as qwen3"
CONFIG_FILE = "config.json"
QUANTIZATION = ("quantization_config", "compression_config")
MIN_TRANSFORMERS = (5, 0)


@dataclass(frozen=True)
class Source:
    """The model that `model.config` names."""

    model_type: str
    folder: Path | None = None
    """Folder with the weights and the tokenizer; None for a model type, which is built small."""
    fields: str = ""
    """Content of config.json, without how its weights are quantised: the model is what they stand for."""
    quantization: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """`quantization_config` of config.json; empty without one."""

    def identity(self) -> dict[str, Any]:
        return {"model_type": self.model_type, "fields": json.loads(self.fields) if self.fields else None}


def find_source(text: str) -> Source:
    """Return the model that `model.config` names, or raise a ConfigError: there is no such folder or file, it is no
    model's configuration, or transformers is missing."""
    check_installed()
    path = Path(text).expanduser()
    if path.is_dir():
        path = path / CONFIG_FILE
        if not path.is_file():
            fix = f"the folder that save_pretrained or hf download wrote, or {KEY}=qwen3"
            raise _error(f"{text} has no {CONFIG_FILE}", fix)
    if path.is_file():
        return _read(path)
    if "/" in text or text.endswith(".json") or text.startswith((".", "~")):
        raise _missing(text)
    return Source(text)


def file_state(text: str) -> tuple[Path, int] | None:
    """Return which config.json `model.config` names from here, and when it was written; None for a model type."""
    path = Path(text).expanduser()
    path = path / CONFIG_FILE if path.is_dir() else path
    return (path.absolute(), path.stat().st_mtime_ns) if path.is_file() else None


def _read(path: Path) -> Source:
    try:
        fields = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise _error(f"{path} can't be read: {error}", f"a config.json, or {KEY}=qwen3") from error
    model_type = fields.get("model_type") if isinstance(fields, dict) else None
    if not isinstance(model_type, str):
        raise _error(f"{path} has no model_type", "the config.json of a transformers model")
    parts = [part for part in (fields, fields.get("text_config")) if isinstance(part, dict)]
    found = [part.pop(key, None) for part in parts for key in QUANTIZATION]
    quantization = next((one if isinstance(one, dict) else {"quant_method": str(one)} for one in found if one), {})
    return Source(model_type, path.parent, json.dumps(fields, sort_keys=True), quantization)


def _missing(text: str) -> ConfigError:
    if fix := download_fix(text, KEY + "={}"):
        return _error(f"{text} looks like a name on the Hugging Face Hub, and nothing is downloaded", fix)
    return _error(f"file or folder not found: {text}", f"the path of a folder with a {CONFIG_FILE}, or {KEY}=qwen3")


def check_installed() -> None:
    """Raise a ConfigError if transformers is missing or too old."""
    if importlib.util.find_spec("transformers") is None:
        raise _error("transformers is not installed", "pip install 'transformers>=5,<6'")
    found = transformers_version()
    if tuple(int(part) for part in found.split(".")[:2]) < MIN_TRANSFORMERS:
        raise _error(f"transformers {found} is too old", "pip install 'transformers>=5,<6'")


def transformers_version() -> str:
    """Return the version of transformers, without importing it."""
    return version("transformers")


def _error(what: str, fix: str) -> ConfigError:
    return ConfigError(what, where=KEY, rule=RULE, fix=fix)
