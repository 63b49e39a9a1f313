"""Find out what `model.config` names: a folder, a config.json or a model type. Doesn't import torch."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError
from meshwright.settings.import_object import download_fix

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
        """Return all that determines the model's configuration."""
        return {"model_type": self.model_type, "fields": json.loads(self.fields) if self.fields else None}


def find_source(text: str) -> Source:
    """Return the model that `model.config` names.

    Raises:
        ConfigError: there is no such folder or file, it is no model's configuration, or transformers is missing.
    """
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
    """Check that transformers is installed.

    Raises:
        ConfigError: it is missing or too old.
    """
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
