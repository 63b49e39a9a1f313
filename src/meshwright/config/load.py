"""From a preset's name or a TOML file and `section.key=value` words to one validated `RunConfig`.

Keeps where each key was set, so that an error can say so. Torch-free: errors answer in a fraction of a second.
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

from meshwright.config import rules
from meshwright.config.breach import as_word, as_words
from meshwright.config.draft import Draft, shorten
from meshwright.config.schema import PLANNED_SECTIONS, RunConfig, sections_in
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
    draft = Draft()
    for word in defaults:
        _set(draft, word, origin="default of this command")
    label, tree = _read(source)
    _put(draft, "", tree, origin=label)
    for word in overrides:
        _set(draft, word, origin="command line")
    draft.values.setdefault("name", Path(source).stem)
    try:
        config = RunConfig.model_validate(draft.values)
    except ValidationError as error:
        raise _explain(error, draft, num_ranks=num_ranks) from None
    rules.check(config, draft.origins, num_ranks=num_ranks)
    return config


def known_keys() -> list[str]:
    """Every dotted key of the configuration."""
    return list(_fields())


@cache
def _fields(kind: str | None = None) -> Mapping[str, Any]:
    """Every dotted key's field; where kinds of models have keys of one name, that of `kind`, or the first's."""
    found: dict[str, Any] = {}
    for key, field, is_section in _walk(RunConfig, "", kind):
        if not is_section:
            found.setdefault(key, field)
    return found


@cache
def _sections() -> Mapping[str, Any]:
    """The field of every section, by its dotted name."""
    return {key: field for key, field, is_section in _walk(RunConfig, "", None) if is_section}


def _walk(model: type[BaseModel], prefix: str, kind: str | None) -> Iterator[tuple[str, Any, bool]]:
    """Name and field of all keys and sections, and whether it is a section."""
    for name, field in model.model_fields.items():
        nested = sections_in(field.annotation)
        yield f"{prefix}{name}", field, bool(nested)
        for section in nested:
            own = section.model_fields.get("kind")
            if kind is None or own is None or kind in get_args(own.annotation):
                yield from _walk(section, f"{prefix}{name}.", kind)


def _read(source: str) -> tuple[str, dict[str, Any]]:
    path = Path(source)
    if source in preset_names():
        text = resources.files("meshwright.config").joinpath("presets", f"{source}.toml").read_bytes()
        label = f"preset {source}"
    elif path.suffix == ".toml" and path.is_file():
        text, label = path.read_bytes(), source
    else:
        raise _no_source(source)
    try:
        return label, tomllib.loads(text.decode("utf-8-sig"))  # some editors mark UTF-8 at its beginning
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"not TOML: {error}",
            where=label,
            rule="a run is described in TOML",
            fix=f"meshwright presets {DEFAULT_PRESET} prints such a file with all keys",
        ) from None


def _no_source(source: str) -> ConfigError:
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


def _set(draft: Draft, word: str, *, origin: str) -> None:
    key, equals, text = word.partition("=")
    if not equals or not key:
        is_source = word in preset_names() or word.endswith(".toml")
        raise ConfigError(
            f"{shorten(word)!r} is not an override",
            where=origin,
            rule="an override is section.key=value; a preset or a file comes first, before all of them",
            fix=f"name {word} first" if is_source else f"{_nearest_key(key) or 'train.steps'}=…",
        )
    field = _fields().get(key) or _sections().get(key)
    _put(draft, key, _parse_value(text, getattr(field, "annotation", None)), origin=origin)


def _parse_value(text: str, annotation: Any) -> Any:
    """A TOML value; what TOML can't read is a string, so paths and names need no quotes. `none` unsets a key.

    Where a string belongs a word is one, whatever else TOML would read it as: `data.source=2024` is a file's name.
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
    is_more = len(tree) > 1  # a line end in the word, and another key after it
    wanted = (str, list) if get_origin(annotation) is tuple else (str,)
    return text if is_more or (str in kinds and not isinstance(tree["value"], wanted)) else tree["value"]


def _put(draft: Draft, key: str, value: Any, *, origin: str) -> None:
    """Set a key, or all keys of a section given whole; `key` is empty for the whole configuration."""
    if key in _fields():
        draft.put(key, value, origin)
        return
    sections = _sections()
    if isinstance(value, Mapping) and (not key or key in sections):
        if not value:
            draft.put(key, {}, origin) if key else None
        for name, inner in value.items():
            _put(draft, f"{key}.{name}" if key else name, inner, origin=origin)
    elif key in sections and value is None:
        draft.put(key, None, origin)
    elif key in sections:
        first = next(name for name in _fields() if name.startswith(f"{key}."))
        raise ConfigError(
            f"{key} is a section, not a key",
            where=f"{origin}, {key}",
            rule="a section's keys are set one by one",
            fix=f"{first}=…",
        )
    else:
        raise _unknown_key(_first_leaf(key, value), origin)


def _first_leaf(key: str, value: Any) -> str:
    """The first key in a table of an unknown section, which says more than the section's name."""
    while isinstance(value, Mapping) and value:
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    return key


def _unknown_key(key: str, origin: str) -> ConfigError:
    section, where = key.split(".")[0], f"{origin}, {shorten(key)}"
    if section in PLANNED_SECTIONS:
        return ConfigError(
            f"the section {section} is not available yet",
            where=where,
            rule=f"this version has the sections {', '.join(RunConfig.model_fields)}",
            fix=f"leave {shorten(key)} out",
        )
    near = _nearest_key(key)
    return ConfigError(
        f"unknown key {shorten(key)}",
        where=where,
        rule="keys are those of docs/config.md",
        fix=f"{near} (the nearest valid key)" if near else f"meshwright presets {DEFAULT_PRESET} prints all keys",
    )


def _nearest_key(key: str) -> str | None:
    names = known_keys()
    exact_tail = [name for name in names if name.split(".")[-1] == key.split(".")[-1]]
    return next(iter(exact_tail or difflib.get_close_matches(key, names, n=1, cutoff=0.5)), None)


def _explain(error: ValidationError, draft: Draft, *, num_ranks: int | None) -> ConfigError:
    """The first of pydantic's complaints as one of our errors."""
    first = error.errors()[0]
    place = [part for part in first["loc"] if isinstance(part, str)]
    items = "".join(f"[{part}]" for part in first["loc"] if isinstance(part, int))
    kind = place.pop(1) if place[0] == "model" and len(place) > 2 else None
    key = ".".join(place) if place != ["model"] else "model.kind"
    if first["type"] == "extra_forbidden":
        origin = draft.origins.get(key, "default")
        # A preset's keys can't be left out: there the kind is what was set wrongly.
        is_of_preset = origin.startswith("preset ") and "model.kind" in draft.origins
        return ConfigError(
            f"a {kind} has no {key}",
            where=f"{origin}, {key}",
            rule=f"model.kind={kind} has the keys {', '.join(k for k in _fields(kind) if k.startswith('model.'))}",
            fix=f"leave model.kind={kind} out, or start from a preset of a {kind}" if is_of_preset
            else f"leave {key} out",
        )  # fmt: skip
    field = _fields(kind).get(key)
    rule = first["msg"][:1].lower() + first["msg"][1:]
    meaning = getattr(field, "description", "") or ""
    allowed = first.get("ctx", {}).get("expected")
    found = first["input"]["kind"] if key == "model.kind" and isinstance(first["input"], dict) else first["input"]
    return ConfigError(
        f"{key}{items} = {shorten(repr(found))} is not allowed here",
        where=f"{draft.origins.get(key, 'default')}, {key}",
        rule=(f"{key} is one of {allowed}" if allowed else rule) + (f" ({meaning})" if meaning else ""),
        fix=_way_back(draft, key, getattr(field, "default", None), num_ranks=num_ranks),
    )


def _way_back(draft: Draft, key: str, default: Any, *, num_ranks: int | None) -> str:
    """The word that sets a key to what stood there before, or to its default, whichever makes a valid run."""
    choices = [(default, "the default")]
    if key in draft.replaced:
        value, origin = draft.replaced[key]
        choices.insert(0, (value, f"as in {origin}"))
    for value, what in choices:
        try:
            config = RunConfig.model_validate(draft.with_value(key, value))
        except ValidationError:
            continue
        more = rules.repair(config, num_ranks)
        if more is not None:
            way = f"{key}={as_word(value)} ({what})"
            return f"{way} with {as_words(more)}" if more else way
    value, what = choices[0]
    return f"{key}={as_word(value)} ({what})"
