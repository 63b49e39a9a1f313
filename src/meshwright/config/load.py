"""From a preset's name or a TOML file and `section.key=value` words to one validated `RunConfig`.

Keeps where each key was set, so that an error can say so. Torch-free: errors answer in a fraction of a second.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from meshwright.config import rules
from meshwright.config.schema import PLANNED_SECTIONS, RunConfig
from meshwright.errors import ConfigError

DEFAULT_PRESET = "llama-tiny"


def preset_names() -> list[str]:
    """Names of the presets that come with the package."""
    files = resources.files("meshwright.config").joinpath("presets").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load(
    source: str | None, overrides: Sequence[str] = (), *, defaults: Sequence[str] = (), num_ranks: int | None = None
) -> RunConfig:
    """Read a preset or a file, apply the command line's words, validate, and check the cross-section rules.

    Args:
        source: a preset's name or the path of a TOML file; the default preset when None.
        overrides: `section.key=value` words; values are TOML, and a bare word is a string.
        defaults: words of the same form that a verb sets; source and overrides go over them.
        num_ranks: ranks that a launcher started, None when the verb starts them.

    Raises:
        ConfigError: an unknown preset, key or type; LayoutError: a mesh that does not fit.
    """
    source = source or DEFAULT_PRESET
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for word in defaults:
        _set(values, origins, word, origin="default of this command")
    label, tree = _read(source)
    for key, value in _flatten(tree):
        _put(values, key, value, where=f"{label}, {key}")
        origins[key] = label
    for word in overrides:
        _set(values, origins, word, origin="command line")
    values.setdefault("name", Path(source).stem)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise _explain(error, origins) from None
    rules.check(config, origins, num_ranks=num_ranks)
    return config


def known_keys() -> list[str]:
    """Every dotted key of the configuration."""
    return [key for key, _ in _walk(RunConfig, "")]


def _walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        nested = next(
            (kind for kind in (field.annotation, *get_args(field.annotation)) if _is_section(kind)),
            None,
        )
        if nested is not None:
            yield from _walk(nested, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _read(source: str) -> tuple[str, dict[str, Any]]:
    path = Path(source)
    if source in preset_names():
        text = resources.files("meshwright.config").joinpath("presets", f"{source}.toml").read_text("utf-8")
        label = f"preset {source}"
    elif path.suffix == ".toml" and path.is_file():
        text, label = path.read_text("utf-8"), source
    else:
        near = difflib.get_close_matches(source, preset_names(), n=1)
        raise ConfigError(
            f"{source} is neither a preset nor a TOML file" + (" (no such file)" if path.suffix == ".toml" else ""),
            where="command line",
            rule=f"presets are {', '.join(preset_names())}",
            fix=near[0] if near else DEFAULT_PRESET,
        )
    try:
        return label, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"not TOML: {error}", where=label, rule="a run is described in TOML", fix="see docs/config.md"
        ) from None


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _set(values: dict[str, Any], origins: dict[str, str], word: str, *, origin: str) -> None:
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"{word!r} is not an override",
            where=origin,
            rule="an override is section.key=value",
            fix=f"{_nearest_key(key) or 'train.steps'}=…",
        )
    _put(values, key, _parse_value(text), where=f"{origin}, {key}")
    origins[key] = origin


def _parse_value(text: str) -> Any:
    """A TOML value; what TOML can't read is a string, so paths and names need no quotes. `none` unsets a key."""
    if text.lower() in ("none", "null"):
        return None
    if text in ("True", "False"):
        text = text.lower()
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _put(values: dict[str, Any], key: str, value: Any, *, where: str) -> None:
    if key not in known_keys():
        raise _unknown_key(key, where)
    *sections, name = key.split(".")
    for section in sections:
        child = values.get(section)
        if not isinstance(child, dict):
            child = values[section] = {}
        values = child
    values[name] = value


def _unknown_key(key: str, where: str) -> ConfigError:
    section = key.split(".")[0]
    if section in PLANNED_SECTIONS:
        return ConfigError(
            f"the section {section} is not available yet",
            where=where,
            rule=f"this version has the sections {', '.join(RunConfig.model_fields)}",
            fix=f"leave {key} out",
        )
    near = _nearest_key(key)
    return ConfigError(
        f"unknown key {key}",
        where=where,
        rule="keys are those of docs/config.md",
        fix=f"{near} (the nearest valid key)" if near else "see meshwright presets llama-tiny for all keys",
    )


def _nearest_key(key: str) -> str | None:
    names = known_keys()
    exact_tail = [name for name in names if name.split(".")[-1] == key.split(".")[-1]]
    return next(iter(exact_tail or difflib.get_close_matches(key, names, n=1, cutoff=0.5)), None)


def _explain(error: ValidationError, origins: Mapping[str, str]) -> ConfigError:
    """The first of pydantic's complaints as one of our errors."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    field = dict(_walk(RunConfig, "")).get(key)
    rule = first["msg"][:1].lower() + first["msg"][1:]
    default = getattr(field, "default", None)
    meaning = getattr(field, "description", "") or ""
    allowed = first.get("ctx", {}).get("expected")
    fix = f"{key}={str(default).lower() if isinstance(default, bool) else default}" if field is not None else ""
    return ConfigError(
        f"{key} = {first['input']!r} is not allowed here",
        where=f"{origins.get(key, 'default')}, {key}",
        rule=(f"{key} is one of {allowed}" if allowed else rule) + (f" ({meaning})" if meaning else ""),
        fix=fix + (" (the default)" if fix else ""),
    )
