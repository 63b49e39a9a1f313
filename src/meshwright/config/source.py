"""Sources of a configuration: presets that ship with the package, TOML files, folders of runs; and writing TOML."""

from __future__ import annotations

import difflib
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.config.overlay import shorten
from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError
from meshwright.settings.toml import values_to_toml

DEFAULT_PRESET = "llama-tiny"
PRESETS = Path(__file__).parent / "presets"
CONFIG_FILE = "config.toml"
"""File of a run folder with the run's configuration."""
OTHER_FORMATS = (".yaml", ".yml", ".json", ".py", ".ini", ".cfg", ".sh")
"""Suffixes of other frameworks' configuration files."""


def preset_names() -> list[str]:
    """Return the names of the presets that ship with the package."""
    return sorted(file.stem for file in PRESETS.glob("*.toml"))


def is_run_folder(path: Path) -> bool:
    """Return whether a path is a folder with the configuration of a run."""
    return (path / CONFIG_FILE).is_file()


def read_source(source: str) -> tuple[str, dict[str, Any]]:
    """Return the label, for errors, and the values of a preset, a TOML file or a run folder.

    Raises:
        ConfigError: there is no such preset or file, or it is not TOML.
    """
    path = Path(source)
    if source in preset_names():
        text, label = (PRESETS / f"{source}.toml").read_bytes(), f"preset {source}"
    elif (path.suffix == ".toml" and path.is_file()) or is_run_folder(path):
        path = path / CONFIG_FILE if path.is_dir() else path
        text, label = path.read_bytes(), str(path)
    else:
        raise _unknown_source(source)
    try:
        return label, tomllib.loads(text.decode("utf-8-sig"))  # some editors write a byte-order mark
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        fix = f"meshwright presets {DEFAULT_PRESET} prints a valid file with all keys"
        raise ConfigError(f"not TOML: {error}", where=label, rule="a run is configured in TOML", fix=fix) from None


def smallest_preset(kinds: Sequence[str]) -> str:
    """Return the preset with the least layers and width whose model is of one of these families."""
    models = {name: read_source(name)[1]["model"] for name in preset_names()}
    own = [name for name in models if models[name]["kind"] in kinds]
    return min(own, key=lambda name: models[name].get("num_layers", 0) * models[name].get("dim", 0) ** 2)


def _unknown_source(source: str) -> ConfigError:
    from meshwright.config.translate import nearest_preset  # ranks don't need it

    path = Path(source)
    is_file = path.suffix == ".toml"
    state = " (a directory)" if path.is_dir() else " (no such file)" if is_file else ""
    files = [str(other) for other in path.parent.glob("*.toml") if other.is_file()]
    near = next(iter(difflib.get_close_matches(source, files if is_file else preset_names(), n=1, cutoff=0.8)), None)
    fix = shlex.quote(near or (None if is_file else nearest_preset(source, preset_names())) or DEFAULT_PRESET)
    if (path / "config.json").is_file():
        state = " (a directory in Hugging Face's format)"
        name = shlex.quote(source)
        fix = f"hf-tiny model.config={name}, or meshwright checkpoint import {name} runs/imported and its config.toml"
    elif path.suffix in OTHER_FORMATS:
        fix = f"meshwright presets {fix} > {shlex.quote(f'{path.stem}.toml')} writes a file with all keys, to be edited"
    what = f"{shorten(source)} is neither a preset nor a TOML file{state}"
    return ConfigError(what, where="command line", rule=f"presets are {', '.join(preset_names())}", fix=fix)


def to_toml(config: RunConfig) -> str:
    """Return the configuration as TOML; keys set to None are omitted, which is equivalent."""
    return values_to_toml(config.model_dump())
