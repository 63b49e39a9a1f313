"""Load a preset or a TOML file with `section.key=value` overrides into a validated `RunConfig`.

Tracks where each key was set, so that errors can point to it. Doesn't import torch, so that errors are reported in a
fraction of a second.
"""

from __future__ import annotations

import difflib
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from meshwright.config.overlay import ConfigOverlay, shorten
from meshwright.config.rules import Rules, check, repair
from meshwright.config.schema import PLANNED_SECTIONS, REPLACED_KEYS, RunConfig, run_type
from meshwright.errors import ConfigError
from meshwright.models.contract.family import KEY, family_names, find_family
from meshwright.settings.section import sections_in
from meshwright.settings.violation import format_fix, format_value

DEFAULT_PRESET = "llama-tiny"


def preset_names() -> list[str]:
    """Return the names of the presets that ship with the package."""
    files = resources.files("meshwright.config").joinpath("presets").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load(
    source: str | None,
    overrides: Sequence[str] = (),
    *,
    defaults: Sequence[str] = (),
    num_ranks: int | None = None,
    rules: Rules | None = None,
) -> RunConfig:
    """Load a preset or a file, apply overrides, validate the result, and check the cross-section rules.

    Args:
        source: name of a preset or path of a TOML file; the default preset if None.
        overrides: `section.key=value` arguments; values are TOML, and a bare word is a string.
        defaults: overrides set by a verb; `source` and `overrides` take precedence.
        num_ranks: number of ranks started by a launcher; None if the verb starts them.
        rules: rules to check in addition to types; by default those of `config.rules`.

    Raises:
        ConfigError: a preset, family or key is unknown, or a value is invalid.
        LayoutError: the mesh does not fit.
    """
    source = source or DEFAULT_PRESET
    label, tree = _read_source(source)
    keys = _FamilyKeys(_kind_of(tree, label, [*defaults, *overrides]), rules)
    overlay = ConfigOverlay()
    for word in defaults:
        keys.set(overlay, word, origin="default of this command")
    keys.put(overlay, "", tree, origin=label)
    for word in overrides:
        keys.set(overlay, word, origin="command line")
    keys.check_other_families()
    overlay.values.setdefault("name", Path(source).stem)
    overlay.values.setdefault("model", {})["kind"] = keys.kind
    try:
        config = keys.type.model_validate(overlay.values)
    except ValidationError as error:
        raise _validation_error(error, overlay, keys, num_ranks=num_ranks) from None
    check(config, overlay.origins, num_ranks=num_ranks, rules=rules)
    return config


def known_keys(kind: str | None = None) -> list[str]:
    """Return all dotted keys for a family, by default that of the default preset."""
    return list(_fields(kind or default_kind()))


def default_kind() -> str:
    """Return the family of the default preset."""
    kind: str = _read_source(DEFAULT_PRESET)[1]["model"]["kind"]
    return kind


def _kind_of(tree: Mapping[str, Any], label: str, words: Sequence[str]) -> str:
    """Return the family selected by the file or the overrides; the last setting wins."""
    model = tree.get("model")
    kind, origin = (model.get("kind"), label) if isinstance(model, Mapping) else (None, label)
    fallback = default_kind() if kind is None else kind
    for word in words:
        key, _, value = word.partition("=")
        if key == KEY:
            kind, origin = value.strip("\"'"), "command line"
    if kind is None:
        return default_kind()
    try:
        find_family(kind if isinstance(kind, str) else repr(kind))
    except ConfigError as error:
        fix = error.fix if error.fix and not error.fix.startswith(KEY) else f"{KEY}={fallback}"
        fix = f"{KEY}={default_kind()}" if kind == fallback and fix == f"{KEY}={kind}" else fix
        raise ConfigError(error.what, where=f"{origin}, {KEY}", rule=error.rule, fix=fix) from error.__cause__
    return str(kind)


@cache
def _fields(kind: str) -> Mapping[str, Any]:
    """Return the fields of all keys for a family, by dotted name."""
    return {key: field for key, field, is_section in _walk(run_type(kind), "") if not is_section}


@cache
def _sections(kind: str) -> Mapping[str, Any]:
    """Return the fields of all sections for a family, by dotted name."""
    return {key: field for key, field, is_section in _walk(run_type(kind), "") if is_section}


def _walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, Any, bool]]:
    """Yield dotted name, field, and whether it is a section, for all keys and sections."""
    for name, field in model.model_fields.items():
        nested = sections_in(field.annotation)
        yield f"{prefix}{name}", field, bool(nested)
        for section in nested:
            yield from _walk(section, f"{prefix}{name}.")


def _read_source(source: str) -> tuple[str, dict[str, Any]]:
    path = Path(source)
    if source in preset_names():
        text = resources.files("meshwright.config").joinpath("presets", f"{source}.toml").read_bytes()
        label = f"preset {source}"
    elif path.suffix == ".toml" and path.is_file():
        text, label = path.read_bytes(), source
    else:
        raise _unknown_source(source)
    try:
        return label, tomllib.loads(text.decode("utf-8-sig"))  # some editors write a byte-order mark
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"not TOML: {error}",
            where=label,
            rule="a run is configured in TOML",
            fix=f"meshwright presets {DEFAULT_PRESET} prints a valid file with all keys",
        ) from None


def _unknown_source(source: str) -> ConfigError:
    path = Path(source)
    is_file = path.suffix == ".toml"
    state = " (a directory)" if path.is_dir() else " (no such file)" if is_file else ""
    files = [str(other) for other in path.parent.glob("*.toml") if other.is_file()]
    near = difflib.get_close_matches(source, files if is_file else preset_names(), n=1)
    return ConfigError(
        f"{shorten(source)} is neither a preset nor a TOML file{state}",
        where="command line",
        rule=f"presets are {', '.join(preset_names())}",
        fix=shlex.quote(near[0]) if near else DEFAULT_PRESET,
    )


class _FamilyKeys:
    """Keys for one family; sets them in an overlay and explains unknown keys."""

    def __init__(self, kind: str, rules: Rules | None) -> None:
        self.kind, self.rules = kind, rules
        self.type = run_type(kind)
        self._unread_keys: dict[str, ConfigError] = {}
        """Errors for keys of other families that have a non-default value, by key."""

    def set(self, overlay: ConfigOverlay, word: str, *, origin: str) -> None:
        """Set one `section.key=value` override."""
        key, equals, text = word.partition("=")
        if not equals or not key:
            is_source = word in preset_names() or word.endswith(".toml")
            raise ConfigError(
                f"{shorten(word)!r} is not an override",
                where=origin,
                rule="an override has the form section.key=value; a preset or a file comes first, before the overrides",
                fix=f"name {word} first" if is_source else f"{self._nearest(key) or 'train.steps'}=…",
            )
        field = _fields(self.kind).get(key) or _sections(self.kind).get(key)
        self.put(overlay, key, _parse_value(text, getattr(field, "annotation", None)), origin=origin)

    def put(self, overlay: ConfigOverlay, key: str, value: Any, *, origin: str) -> None:
        """Set a key, or all keys of a section from a mapping; an empty `key` stands for the entire configuration."""
        if key in _fields(self.kind):
            overlay.put(key, value, origin)
            return
        sections = _sections(self.kind)
        if isinstance(value, Mapping) and (not key or key in sections):
            if not value:
                overlay.put(key, {}, origin) if key else None
            for name, inner in value.items():
                self.put(overlay, f"{key}.{name}" if key else name, inner, origin=origin)
        elif key in sections and value is None:
            overlay.put(key, None, origin)
        elif key in sections:
            first = next(name for name in _fields(self.kind) if name.startswith(f"{key}."))
            raise ConfigError(
                f"{key} is a section, not a key",
                where=f"{origin}, {key}",
                rule="the keys of a section are set individually",
                fix=f"{first}=…",
            )
        else:
            self._put_other_family(key, value, origin)

    def _put_other_family(self, key: str, value: Any, origin: str) -> None:
        """Accept a key of another family if it has its default value and so no effect, as in files of saved runs.

        Raises:
            ConfigError: the key belongs to the section `model` or to no family.
        """
        leaf, value = _first_leaf(key, value)
        others = [kind for kind in family_names() if leaf in _fields(kind)]
        if not others:
            raise self._unknown(leaf, origin)
        if leaf.startswith("model."):
            # Users can't remove a preset's keys, so treat the kind as the wrong setting.
            is_of_preset = origin.startswith("preset ")
            raise ConfigError(
                f"{self.kind} models have no {leaf}",
                where=f"{origin}, {leaf}",
                rule=f"model.kind={self.kind} has the keys "
                + ", ".join(k for k in _fields(self.kind) if k.startswith("model.")),
                fix=f"remove model.kind={self.kind}, or start from a preset for {self.kind}"
                if is_of_preset
                else f"remove {leaf}",
            )
        leaves = _leaves(key, value) if key != leaf else [(leaf, value)]
        owners = " or ".join(others)
        for name, found in leaves:
            field = _fields(others[0]).get(name)
            if field is None:
                raise self._unknown(name, origin)
            self._unread_keys.pop(name, None)
            if found != field.default:
                self._unread_keys[name] = ConfigError(
                    f"{name} = {format_value(found)} has no effect",
                    where=f"{origin}, {name}",
                    rule=f"it applies to {owners} models, but model.kind is {self.kind}",
                    fix=f"{name}={format_value(field.default)} or remove {name}, or start from a preset for {owners}",
                )

    def check_other_families(self) -> None:
        """Raise if a key of another family still has a non-default value.

        Raises:
            ConfigError: such a key is set; it would have no effect.
        """
        for error in self._unread_keys.values():
            raise error

    def _unknown(self, key: str, origin: str) -> ConfigError:
        section, where = key.split(".")[0], f"{origin}, {shorten(key)}"
        if section in PLANNED_SECTIONS:
            return ConfigError(
                f"the section {section} is not available yet",
                where=where,
                rule=f"this version has the sections {', '.join(self.type.model_fields)}",
                fix=f"remove {shorten(key)}",
            )
        near = self._nearest(key)
        fix = f"{near} (the nearest valid key)" if near else f"meshwright presets {DEFAULT_PRESET} prints all keys"
        return ConfigError(
            f"unknown key {shorten(key)}",
            where=where,
            rule="docs/config.md lists all keys",
            fix=REPLACED_KEYS.get(key, fix),
        )

    def _nearest(self, key: str) -> str | None:
        names = list(_fields(self.kind))
        exact_tail = [name for name in names if name.split(".")[-1] == key.split(".")[-1]]
        return next(iter(exact_tail or difflib.get_close_matches(key, names, n=1, cutoff=0.5)), None)


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Flatten a nested mapping to dotted keys and values."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key, value


def _first_leaf(key: str, value: Any) -> tuple[str, Any]:
    """Return the key and value of a table's first leaf, whose key is more specific than the section's name."""
    leaf, inner = key, value
    while isinstance(inner, Mapping) and inner:
        name, inner = next(iter(inner.items()))
        leaf = f"{leaf}.{name}"
    return leaf, value


def _parse_value(text: str, annotation: Any) -> Any:
    """Parse a TOML value; invalid TOML is taken as a string, so paths and names need no quotes. `none` unsets a key.

    Values of string keys are always strings, even if TOML would parse them as another type: `data.source=2024` is a
    file name.
    """
    kinds = get_args(annotation) or (annotation,)
    if type(None) in kinds and text.lower() in ("none", "null"):
        return None
    if text in ("True", "False"):
        text = text.lower()
    try:
        tree = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    is_more = len(tree) > 1  # the text has a newline followed by another key
    wanted = (str, list) if get_origin(annotation) is tuple else (str,)
    return text if is_more or (str in kinds and not isinstance(tree["value"], wanted)) else tree["value"]


def _validation_error(
    error: ValidationError, overlay: ConfigOverlay, keys: _FamilyKeys, *, num_ranks: int | None
) -> ConfigError:
    """Convert pydantic's first error to a `ConfigError`."""
    first = error.errors()[0]
    key = ".".join(part for part in first["loc"] if isinstance(part, str))
    items = "".join(f"[{part}]" for part in first["loc"] if isinstance(part, int))
    field = _fields(keys.kind).get(key)
    rule = first["msg"][:1].lower() + first["msg"][1:]
    meaning = getattr(field, "description", "") or ""
    allowed = first.get("ctx", {}).get("expected")
    return ConfigError(
        f"{key}{items} = {shorten(repr(first['input']))} is not allowed here",
        where=f"{overlay.origins.get(key, 'default')}, {key}",
        rule=(f"{key} is one of {allowed}" if allowed else rule) + (f" ({meaning})" if meaning else ""),
        fix=_restoring_fix(overlay, keys, key, getattr(field, "default", None), num_ranks=num_ranks),
    )


def _restoring_fix(overlay: ConfigOverlay, keys: _FamilyKeys, key: str, default: Any, *, num_ranks: int | None) -> str:
    """Return the override that restores a key's previous value or its default, whichever gives a valid run."""
    choices = [(default, "the default")]
    if key in overlay.replaced:
        value, origin = overlay.replaced[key]
        choices.insert(0, (value, f"as in {origin}"))
    for value, what in choices:
        try:
            config = keys.type.model_validate(overlay.with_value(key, value))
        except ValidationError:
            continue
        more = repair(config, num_ranks, keys.rules)
        if more is not None:
            word = f"{key}={format_value(value)} ({what})"
            return f"{word} with {format_fix(more)}" if more else word
    value, what = choices[0]
    return f"{key}={format_value(value)} ({what})"
