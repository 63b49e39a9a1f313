"""Load a preset or a TOML file with `section.key=value` overrides into a validated `RunConfig`.

Tracks where each key was set, so that errors can point to it. Doesn't import torch, so that errors are reported in a
fraction of a second.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from meshwright.config.facts_for_family import run_facts
from meshwright.config.foreign_names import DIFFERENCES
from meshwright.config.overlay import ConfigOverlay, fields, is_valid, sections, shorten, table_of
from meshwright.config.rules import Rules, check, repair
from meshwright.config.schema import PLANNED_SECTIONS, RunConfig, run_type
from meshwright.config.section_rules import DEFAULT_SOURCE, SOURCE
from meshwright.config.source import DEFAULT_PRESET, preset_names, read_source, smallest_preset
from meshwright.config.translate import (
    OF_VALIDATION,
    Meaning,
    find_meaning,
    likely_values,
    nearest_preset,
    normalize,
    option_named,
    parse_value,
    why_unavailable,
)
from meshwright.data.mixtures.entries import KEY as KEY_OF_MIXTURE
from meshwright.errors import ConfigError
from meshwright.models.contract.family import KEY, family_names, find_family
from meshwright.settings.violation import Fix, format_fix, format_value


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
    keys.check(overlay, num_ranks=num_ranks)
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
    return list(fields(kind or _default_kind()))


def _default_kind() -> str:
    return str(read_source(DEFAULT_PRESET)[1]["model"]["kind"])


def _kind_of(tree: Mapping[str, Any], label: str, words: Sequence[str]) -> str:
    """Return the family selected by the file or the overrides; the last setting wins."""
    model = tree.get("model")
    kind, origin = (model.get("kind"), label) if isinstance(model, Mapping) else (None, label)
    fallback = _default_kind() if kind is None else kind
    for word in words:
        key, _, value = word.partition("=")
        if key == KEY:
            kind, origin = value.strip("\"'"), "command line"
    if kind is None:
        return _default_kind()
    try:
        find_family(kind if isinstance(kind, str) else repr(kind))
    except ConfigError as error:
        fix = error.fix if error.fix and not error.fix.startswith(KEY) else f"{KEY}={fallback}"
        fix = f"{KEY}={_default_kind()}" if kind == fallback and fix == f"{KEY}={kind}" else fix
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
            rule = "an override has the form section.key=value; a preset or a file comes first, before the overrides"
            fix = f"name {word} first" if is_source else f"{self._nearest(key) or 'train.steps'}=…"
            raise ConfigError(f"{shorten(word)!r} is not an override", where=origin, rule=rule, fix=fix)
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
            rule = "the keys of a section are set individually"
            raise ConfigError(f"{key} is a section, not a key", where=f"{origin}, {key}", rule=rule, fix=f"{first}=…")
        else:
            self._put_other_family(key, value, origin)

    def _put_other_family(self, key: str, value: Any, origin: str) -> None:
        """Accept a key of another family if it has its default value and so no effect, as in files of saved runs."""
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
            alike = [k for k in fields(self.kind) if k.endswith(leaf.removeprefix("model"))]  # in other sections
            own = ", ".join([*alike, *(k for k in fields(self.kind) if k.startswith("model."))])
            rule = f"model.kind={self.kind} has the keys {own}"
            fix = f"model.kind={self.kind}, or start from a preset for {self.kind}" if is_of_preset else leaf
            what = f"{self.kind} models have no {leaf}"
            raise ConfigError(what, where=f"{origin}, {leaf}", rule=rule, fix=f"remove {fix}")
        leaves = _leaves(key, value) if key != leaf else [(leaf, value)]
        owners = " or ".join(others)
        for name, found in leaves:
            field = fields(others[0]).get(name)
            if field is None:
                raise self._unknown(name, origin)
            self._unread_keys.pop(name, None)
            if found != field.default:
                what = f"{name} = {format_value(found)} has no effect"
                rule = f"it applies to {owners} models, but model.kind is {self.kind}"
                fix = f"{name}={format_value(field.default)} or remove {name}, or start from a preset for {owners}"
                self._unread_keys[name] = ConfigError(what, where=f"{origin}, {name}", rule=rule, fix=fix)

    def check(self, overlay: ConfigOverlay, *, num_ranks: int | None) -> None:
        """Raise if a key has another framework's name, then if a name is unknown, so one doesn't hide the others, and
        then if a key of another family still has a non-default value, which would have no effect.

        Raises:
            ConfigError: such a key is set; the error names ours.
        """
        if self._foreign_keys:
            raise foreign_keys_error(self._foreign_keys, overlay, self.kind, num_ranks=num_ranks, rules=self.rules)
        for error in (*self._unknown_keys, *self._unread_keys.values()):
            raise error

    def _put_unknown(self, key: str, value: Any, origin: str) -> None:
        """Keep a key with another framework's name, to report all of them together, or the error for any other."""
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
            rule = f"it is {meaning.key} here, for models of {' or '.join(owners)}, but model.kind is {self.kind}"
            raise ConfigError(what, where=where, rule=rule, fix=f"{preset} {error.fix}")
        if option is None:
            self._unknown_keys.append(self._unknown(key, origin))
            return
        preset = text if Path(text).suffix == ".toml" else nearest_preset(text, preset_names()) or DEFAULT_PRESET
        rule = f"it is --{option} of meshwright run" if option else "a preset or a TOML file is the first word"
        fix = f"--{option} {text}" if option else f"{preset} as the first word"
        self._unknown_keys.append(ConfigError(what, where=where, rule=rule, fix=fix))

    def _unknown(self, key: str, origin: str) -> ConfigError:
        section, where = key.split(".")[0], f"{origin}, {shorten(key)}"
        if section in PLANNED_SECTIONS:
            what = f"the section {section} is not available yet"
            rule = f"this version has the sections {', '.join(self.type.model_fields)}"
            return ConfigError(what, where=where, rule=rule, fix=f"remove {shorten(key)}")
        near = self._nearest(key.lstrip("-"))
        fallback = f"meshwright presets {DEFAULT_PRESET} prints all keys"
        what = f"unknown {'option' if key.startswith('-') else 'key'} {shorten(key)}"
        rule = "keys are set by section.key=value; meshwright keys lists all"
        return ConfigError(what, where=where, rule=rule, fix=f"{near} (the nearest valid key)" if near else fallback)

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
    field, allowed = fields(keys.kind).get(key), first.get("ctx", {}).get("expected")
    rule = f"{key} is one of {allowed}" if allowed else first["msg"][:1].lower() + first["msg"][1:]
    if meaning := why_unavailable(key, first["input"]) or getattr(field, "description", ""):
        rule += f" ({meaning})"
    what = f"{key}{items} = {shorten(repr(first['input']))} is not allowed here"
    fix = _working_fix(overlay, keys, key, getattr(field, "default", None), num_ranks=num_ranks)
    return ConfigError(what, where=f"{overlay.origins.get(key, 'default')}, {key}", rule=rule, fix=fix)


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


MAX_NAMES = 5


@dataclass(frozen=True)
class ForeignKey:
    """A key as the user named it."""

    name: str
    value: Any
    origin: str
    meaning: Meaning


def foreign_keys_error(
    found: Sequence[ForeignKey], overlay: ConfigOverlay, kind: str, *, num_ranks: int | None, rules: Rules | None
) -> ConfigError:
    """Return the error for one or more keys with another framework's name.

    Args:
        found: the keys, at least one.
        overlay: all other keys.
        kind: family of the model, which has all keys that are meant.
        num_ranks: number of ranks started by a launcher, or None.
        rules: rules that the suggested overrides satisfy, if any do.
    """
    asked: dict[str, Any] = {}
    for one in sorted(found, key=lambda one: one.meaning.is_derived):  # these depend on the others
        asked |= _carried(one, overlay, kind, asked) or {}
    others = [one.meaning.key for one in found if one.meaning.key not in asked]
    kept = {key: overlay.get(key, fields(kind)[key].default) for key in others}
    words = asked | kept
    config = _config(overlay, kind, words)
    if config is not None:
        # Keep what the user asked for if the rules allow it.
        words |= repair(config, num_ranks, rules, words) or repair(config, num_ranks, rules) or {}
    notes = [f"{key} = {format_value(value)} does not fit" for key, value in asked.items() if words[key] != value]
    notes += [f"{key} as it was" for key in kept]
    names = list(dict.fromkeys(one.name for one in found))
    shown = ", ".join(map(shorten, names[:MAX_NAMES])) + (" …" if len(names) > MAX_NAMES else "")
    what = "option" if names[0].startswith("-") else "key"
    rule = "; ".join(_rule(one, kind, brief=len(names) > 1) for one in found[:MAX_NAMES])
    fix = f"{format_fix(words)} in place of {shown}" + (f" ({', '.join(notes)})" if notes else "")
    where = f"{found[0].origin}, {shorten(names[0])}"
    return ConfigError(f"unknown {what}{'s' if len(names) > 1 else ''} {shown}", where=where, rule=rule, fix=fix)


def _rule(one: ForeignKey, kind: str, *, brief: bool) -> str:
    key = one.meaning.key
    difference = DIFFERENCES[key] if one.meaning.is_derived else why_unavailable(key, one.name, one.value)
    about = difference or ("" if brief else fields(kind)[key].description)
    return f"{shorten(one.name)} is {key} here" + (f" ({about})" if about else "")


def _carried(one: ForeignKey, overlay: ConfigOverlay, kind: str, words: Mapping[str, Any]) -> Fix | None:
    """Return our key with the value that the user's stands for; None if the key doesn't take it."""
    key, value = one.meaning.key, one.value
    if one.meaning.is_derived:
        return _derived(one, _config(overlay, kind, words), words)
    annotation = fields(kind)[key].annotation
    chosen = {normalize(name): own for name, own in (one.meaning.choices or {}).items()}.get(normalize(str(value)))
    candidates = likely_values(key, value, annotation) if chosen is None else [parse_value(chosen, annotation)]
    # Configurations are hashed, so a list is a tuple; a single string may stand for one.
    is_tuple = get_origin(annotation) is tuple
    words_of = ([own] if is_tuple and isinstance(own, str) else own for own in candidates)
    frozen = (tuple(own) if isinstance(own, list) else own for own in words_of)
    return next(({key: own} for own in frozen if is_valid(kind, key, own)), None)


def _derived(one: ForeignKey, config: RunConfig | None, words: Mapping[str, Any]) -> Fix | None:
    """Compute our number from one with another meaning; None if it can't be."""
    key, value = one.meaning.key, one.value
    if config is None or isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        return None
    train, num_data_ranks = config.train, config.mesh.axes().data_parallel()
    if key == "train.num_microbatches":
        if key in words and "train.global_batch" not in words and isinstance(value, int):
            return {"train.global_batch": value * words[key] * num_data_ranks}
        return {key: max(1, round(train.global_batch / num_data_ranks / value))}
    if key == "pipeline.chunks":
        return {key: max(1, round(getattr(config.model, "num_layers", 1) / config.mesh.pp / value))}
    if key == "train.validation_samples":
        return {key: round(value * train.global_batch)}
    if key == "train.warmup_steps":
        return {key: round(value * train.steps)}
    return {key: min(1.0, value / train.lr)} if key == "train.min_lr_ratio" else None


def _config(overlay: ConfigOverlay, kind: str, words: Mapping[str, Any]) -> RunConfig | None:
    """Return the configuration with `words` set, or None if another key is invalid."""
    with suppress(ValidationError):
        return run_type(kind).model_validate(overlay.with_values(words))
    return None
