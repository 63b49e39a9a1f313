"""Load a preset or a TOML file with `section.key=value` overrides into a validated `RunConfig`.

Tracks where each key was set, so that errors can point to it. Doesn't import torch, so that errors are reported in a
fraction of a second.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from meshwright.config.facts_for_family import run_facts
from meshwright.config.foreign_keys import ForeignKey, foreign_keys_error
from meshwright.config.key_fields import fields, is_valid, sections, table_of
from meshwright.config.overlay import ConfigOverlay, shorten
from meshwright.config.parse_value import likely_values, parse_value
from meshwright.config.rules import Rules, check, repair
from meshwright.config.rules_data import DEFAULT_SOURCE, SOURCE
from meshwright.config.schema import PLANNED_SECTIONS, RunConfig, run_type
from meshwright.config.source import DEFAULT_PRESET, preset_names, read_source, smallest_preset
from meshwright.config.translate import OF_VALIDATION, find_meaning, nearest_preset, option_named, why_unavailable
from meshwright.data.mixtures.entries import KEY as KEY_OF_MIXTURE
from meshwright.errors import ConfigError
from meshwright.models.contract.family import KEY, family_names, find_family
from meshwright.settings.violation import format_fix, format_value


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
    label, tree = read_source(source)
    keys = _FamilyKeys(_kind_of(tree, label, [*defaults, *overrides]), rules)
    overlay = ConfigOverlay()
    for word in defaults:
        keys.set(overlay, word, origin="default of this command")
    keys.put(overlay, "", tree, origin=label)
    for word in overrides:
        keys.set(overlay, word, origin="command line")
    keys.check_foreign(overlay, num_ranks=num_ranks)
    keys.check_other_families()
    if overlay.get(KEY_OF_MIXTURE, ()) and overlay.origins.get(SOURCE, "").startswith("preset "):
        overlay.put(SOURCE, DEFAULT_SOURCE, "default, as a mixture takes its place")
    overlay.values.setdefault("name", Path(source).stem)
    overlay.values.setdefault("model", {})["kind"] = keys.kind
    try:
        config = keys.type.model_validate(overlay.values)
        implied = config.family.implied(run_facts(config))
        for key in implied.keys() - overlay.origins.keys():
            overlay.put(key, implied[key], "default of the model")
        config = keys.type.model_validate(overlay.values) if implied else config
    except ValidationError as error:
        raise _validation_error(error, overlay, keys, num_ranks=num_ranks) from None
    check(config, overlay.origins, num_ranks=num_ranks, rules=rules)
    return config


def known_keys(kind: str | None = None) -> list[str]:
    """Return all dotted keys for a family, by default that of the default preset."""
    return list(fields(kind or default_kind()))


def default_kind() -> str:
    """Return the family of the default preset."""
    kind: str = read_source(DEFAULT_PRESET)[1]["model"]["kind"]
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


class _FamilyKeys:
    """Keys for one family; sets them in an overlay and explains unknown keys."""

    def __init__(self, kind: str, rules: Rules | None) -> None:
        self.kind, self.rules = kind, rules
        self.type = run_type(kind)
        self._unread_keys: dict[str, ConfigError] = {}
        """Errors for keys of other families that have a non-default value, by key."""
        self._foreign_keys: list[ForeignKey] = []
        self._unknown_keys: list[ConfigError] = []

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
        field = fields(self.kind).get(key) or sections(self.kind).get(key)
        self.put(overlay, key, parse_value(text, getattr(field, "annotation", None)), origin=origin)

    def put(self, overlay: ConfigOverlay, key: str, value: Any, *, origin: str) -> None:
        """Set a key, or all keys of a section from a mapping; an empty `key` stands for the entire configuration."""
        if key in fields(self.kind):
            overlay.put(key, value, origin)
            return
        if (table := table_of(self.kind, key)) is not None:
            overlay.put(table, {**overlay.get(table, {}), key.removeprefix(f"{table}."): value}, origin)
            return
        known = sections(self.kind)
        if isinstance(value, Mapping) and (not key or key in known):
            if not value:
                overlay.put(key, {}, origin) if key else None
            for name, inner in value.items():
                self.put(overlay, f"{key}.{name}" if key else name, inner, origin=origin)
        elif key in known and value is None:
            overlay.put(key, None, origin)
        elif key in known:
            first = next(name for name in fields(self.kind) if name.startswith(f"{key}."))
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
        others = [kind for kind in family_names() if leaf in fields(kind)]
        if not others:
            for name, found in _leaves(key, value):
                self._put_unknown(name, found, origin)
            if not self._foreign_keys and not self._unknown_keys:  # an empty section
                raise self._unknown(leaf, origin)
            return
        if leaf.startswith("model."):
            # Users can't remove a preset's keys, so treat the kind as the wrong setting.
            is_of_preset = origin.startswith("preset ")
            raise ConfigError(
                f"{self.kind} models have no {leaf}",
                where=f"{origin}, {leaf}",
                rule=f"model.kind={self.kind} has the keys "
                + ", ".join(k for k in fields(self.kind) if k.startswith("model.")),
                fix=f"remove model.kind={self.kind}, or start from a preset for {self.kind}"
                if is_of_preset
                else f"remove {leaf}",
            )
        leaves = _leaves(key, value) if key != leaf else [(leaf, value)]
        owners = " or ".join(others)
        for name, found in leaves:
            field = fields(others[0]).get(name)
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

    def check_foreign(self, overlay: ConfigOverlay, *, num_ranks: int | None) -> None:
        """Raise if a key has another framework's name, and then if a name is unknown: so one doesn't hide the others.

        Raises:
            ConfigError: such a key is set; the error names ours.
        """
        if self._foreign_keys:
            raise foreign_keys_error(self._foreign_keys, overlay, self.kind, num_ranks=num_ranks, rules=self.rules)
        for error in self._unknown_keys:
            raise error

    def _put_unknown(self, key: str, value: Any, origin: str) -> None:
        """Keep a key with another framework's name, to report all of them together, or the error for any other.

        Raises:
            ConfigError: the name is that of another family's key.
        """
        meaning = find_meaning(key)
        if meaning is not None and meaning.key in fields(self.kind):
            self._foreign_keys.append(ForeignKey(key, value, origin, meaning))
            return
        option = option_named(key)
        what = f"unknown {'option' if key.startswith('-') else 'key'} {shorten(key)}"
        where, text = f"{origin}, {shorten(key)}", format_value(value)
        if meaning is not None:
            owners = [kind for kind in family_names() if meaning.key in fields(kind)]
            preset = smallest_preset(owners)
            other = ConfigOverlay(read_source(preset)[1])
            found = [ForeignKey(key, value, origin, meaning)]
            error = foreign_keys_error(found, other, other.get(KEY, None), num_ranks=None, rules=self.rules)
            raise ConfigError(
                what,
                where=where,
                rule=f"it is {meaning.key} here, for models of {' or '.join(owners)}, but model.kind is {self.kind}",
                fix=f"{preset} {error.fix}",
            )
        if option is None:
            self._unknown_keys.append(self._unknown(key, origin))
            return
        preset = text if Path(text).suffix == ".toml" else nearest_preset(text, preset_names()) or DEFAULT_PRESET
        error = ConfigError(
            what,
            where=where,
            rule=f"it is --{option} of meshwright run" if option else "a preset or a TOML file is the first word",
            fix=f"--{option} {text}" if option else f"{preset} as the first word",
        )
        self._unknown_keys.append(error)

    def _unknown(self, key: str, origin: str) -> ConfigError:
        section, where = key.split(".")[0], f"{origin}, {shorten(key)}"
        if section in PLANNED_SECTIONS:
            return ConfigError(
                f"the section {section} is not available yet",
                where=where,
                rule=f"this version has the sections {', '.join(self.type.model_fields)}",
                fix=f"remove {shorten(key)}",
            )
        near = self._nearest(key.lstrip("-"))
        fallback = f"meshwright presets {DEFAULT_PRESET} prints all keys"
        return ConfigError(
            f"unknown {'option' if key.startswith('-') else 'key'} {shorten(key)}",
            where=where,
            rule="keys are set by section.key=value; meshwright keys lists all",
            fix=f"{near} (the nearest valid key)" if near else fallback,
        )

    def _nearest(self, key: str) -> str | None:
        names = list(fields(self.kind))
        if key.startswith(OF_VALIDATION):  # the nearest ones are those of training
            return None
        exact_tail = [name for name in names if "." in name and name.split(".")[-1] == key.split(".")[-1]]
        return next(iter(exact_tail or difflib.get_close_matches(key, names, n=1, cutoff=0.7)), None)


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


def _validation_error(
    error: ValidationError, overlay: ConfigOverlay, keys: _FamilyKeys, *, num_ranks: int | None
) -> ConfigError:
    """Convert pydantic's first error to a `ConfigError`."""
    first = error.errors()[0]
    key = _key(first)
    items = "".join(f"[{part}]" for part in first["loc"] if isinstance(part, int))
    field = fields(keys.kind).get(key)
    rule = first["msg"][:1].lower() + first["msg"][1:]
    meaning = getattr(field, "description", "") or ""
    allowed = first.get("ctx", {}).get("expected")
    meaning = why_unavailable(key, first["input"]) or meaning
    return ConfigError(
        f"{key}{items} = {shorten(repr(first['input']))} is not allowed here",
        where=f"{overlay.origins.get(key, 'default')}, {key}",
        rule=(f"{key} is one of {allowed}" if allowed else rule) + (f" ({meaning})" if meaning else ""),
        fix=_working_fix(overlay, keys, key, getattr(field, "default", None), num_ranks=num_ranks),
    )


def _working_fix(overlay: ConfigOverlay, keys: _FamilyKeys, key: str, default: Any, *, num_ranks: int | None) -> str:
    """Return the override that sets what the value probably means, or the previous value, or the default, whichever
    gives a valid run."""
    choices = [(default, "the default")]
    if key in overlay.replaced:
        value, origin = overlay.replaced[key]
        choices.insert(0, (value, f"as in {origin}"))
    written, field = overlay.get(key, None), fields(keys.kind).get(key)
    if field is not None:
        meant = (value for value in likely_values(key, written, field.annotation) if is_valid(keys.kind, key, value))
        choices[:0] = [(value, f"for {shorten(str(written))}") for value in islice(meant, 1)]
    for value, what in choices:
        word = f"{key}={format_value(value)} ({what})"
        try:
            config = keys.type.model_validate(overlay.with_values({key: value}))
        except ValidationError as error:
            if all(key != _key(one) for one in error.errors()):
                return word  # another key is invalid too; its error is next
            continue
        more = repair(config, num_ranks, keys.rules)
        if more is not None and key not in more:
            return f"{word} with {format_fix(more)}" if more else word
    return word


def _key(error: ErrorDetails) -> str:
    return ".".join(part for part in error["loc"] if isinstance(part, str))
