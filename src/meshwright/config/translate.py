"""Look up what other frameworks call our keys, values, options and presets (the names are in `foreign_names`); parse
the text of an override as a value, and say what a value that a key does not take may mean.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_origin

from meshwright.config import foreign_names
from meshwright.config.overlay import fields
from meshwright.models.contract.family import family_names, find_family
from meshwright.pipeline.generate import ScheduleKind

T = TypeVar("T")

OWN_SECTIONS = ("mesh", "model", "train")
"""Sections whose keys are also found by their last part alone: in others it says too little (mode, every, keep)."""


@dataclass(frozen=True)
class Meaning:
    """Our key for another framework's name."""

    key: str
    choices: Mapping[str, str] | None = None
    """Our value by theirs; None if values carry over."""
    is_derived: bool = False
    """The number has another meaning, see `foreign_names.DERIVED`."""


def normalize(text: str) -> str:
    """Drop what spellings of one name differ in: case, hyphens, underscores and spaces."""
    return re.sub(r"[-_ ]", "", text.lower())


def find_meaning(name: str) -> Meaning | None:
    """Return the meaning of a key or option, with or without its sections, or None."""
    return _find(name, _meanings())


def names_elsewhere(key: str) -> tuple[str, ...]:
    """Return what other frameworks call one of our keys."""
    tables = [foreign_names.KEYS, *(find_family(kind).foreign_names for kind in family_names())]
    names = [name for table in tables for name in table.get(key, "").split()]
    return (*names, *(name for name, (own, _) in foreign_names.CHOICES.items() if own == key))


def own_key(option: str) -> str | None:
    """Return our key for an option with its name, such as --steps or --train.steps; None for any other."""
    return _own_names().get(normalize(option[2:])) if option.startswith("--") else None


def option_named(name: str) -> str | None:
    """Return our option for another framework's name; empty for the first word, the preset or file."""
    return _find(name, _by_name({"": foreign_names.SOURCE, **foreign_names.OPTIONS}))


def value_named(key: str, value: Any) -> str | None:
    """Return our value for another framework's name of a key's value, or None."""
    found = {normalize(name): own for name, own in foreign_names.VALUES.get(key, {}).items()}
    if key == "pipeline.schedule":
        found |= {normalize(kind.value): kind.value for kind in ScheduleKind}
    return found.get(normalize(str(value)))


def why_unavailable(key: str, *values: Any) -> str:
    """Return why the value suggested for one of `values` is another one, or an empty string."""
    reasons = foreign_names.UNAVAILABLE.get(key, {})
    return next((reasons[name] for name in (normalize(str(value)) for value in values) if name in reasons), "")


def nearest_preset(name: str, presets: Sequence[str]) -> str | None:
    """Return the preset whose name shares most with a model's name, the shortest of several; None without any.

    Words count more than numbers: `mistralai/Mistral-7B-v0.3` is mistral-7b. The organization doesn't count.
    """
    last = name.rstrip("/").rpartition("/")[2]
    wanted = _words(last if re.search("[A-Za-z]", last) else name)

    def shared(preset: str) -> tuple[int, int, int]:
        common = wanted & _words(preset)
        return sum(3 if word.isalpha() else 1 for word in common), -len(_words(preset) - common), -len(preset)

    best = max(presets, key=shared)
    if any(len(word) > 1 and not word.isdigit() for word in wanted & _words(best)):
        return best
    return next((preset for word, preset in foreign_names.PRESETS.items() if word in wanted), None)


def _find(name: str, found: Mapping[str, T]) -> T | None:
    """Look a name up with its sections, then without the first ones."""
    parts = normalize(name).split(".")
    names = (".".join(parts[start:]) for start in range(1 if parts[0] in OF_VALIDATION else len(parts)))
    return next((found[one] for one in names if one in found), None)


def _words(name: str) -> frozenset[str]:
    """Split a name into words and sizes: mixtral-8x7b into mixtral and 8x7b."""
    return frozenset(re.findall(r"\d+x\d+b|\d+b|[a-z]+|\d+", name.lower()))


OF_VALIDATION = ("validation", "evaluation", "eval")
"""Sections elsewhere, whose keys don't mean what they do of training."""
NAMED_IN_FULL = ("model.kind", "model.config")
"""Keys whose last part means something else: elsewhere --config is a file of settings."""


@cache
def _own_names() -> Mapping[str, str]:
    """Return our keys by name, and by their last part where it says enough."""
    own = dict.fromkeys(key for kind in family_names() for key in fields(kind))
    tails = Counter(key.rpartition(".")[2] for key in own)
    keys = [
        key for key in own if key.count(".") == 1 and key.split(".")[0] in OWN_SECTIONS and key not in NAMED_IN_FULL
    ]
    found = {normalize(tail): key for key in keys if tails[tail := key.rpartition(".")[2]] == 1}
    return found | {normalize(key): key for key in own}


@cache
def _meanings() -> Mapping[str, Meaning]:
    found = {name: Meaning(key) for name, key in _own_names().items() if "." not in name and "." in key}
    tables = [foreign_names.KEYS, *(find_family(kind).foreign_names for kind in family_names())]
    found |= {name: Meaning(key) for table in tables for name, key in _by_name(table).items()}
    found |= {normalize(name): Meaning(key, choices=own) for name, (key, own) in foreign_names.CHOICES.items()}
    return found | {normalize(name): Meaning(key, is_derived=True) for name, key in foreign_names.DERIVED.items()}


def _by_name(names: Mapping[str, str]) -> dict[str, str]:
    """Invert a table of names separated by spaces."""
    return {normalize(name): own for own, text in names.items() for name in text.split()}


BINARY_UNITS = ("train.seq_len", "model.rope_scaling.original_seq_len", "model.vocab_size", "model.window")
"""Keys whose k is 1,024, as in a context of 128k tokens."""
UNITS = ("", "k", "m", "b")
NUMBER = re.compile(r"(\d+\.?\d*(?:e[+-]?\d+)?)([kmb]?)")
SWITCHES = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def parse_value(text: str, annotation: Any) -> Any:
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


def likely_values(key: str, value: Any, annotation: Any) -> Iterator[Any]:
    """Yield what a value may mean for a key, most likely first: another framework's word, or a number with a unit."""
    named = value_named(key, value)
    if named is not None:
        yield parse_value(named, annotation)
    kinds = get_args(annotation) or (annotation,)
    text = str(value).strip().lower()
    if bool in kinds and text in SWITCHES:
        yield SWITCHES[text]
    if (found := NUMBER.fullmatch(re.sub("[,_]", "", text))) and not isinstance(value, bool):
        number = float(found[1]) * (1024 if key in BINARY_UNITS else 1000) ** UNITS.index(found[2])
        if int in kinds and number.is_integer():
            yield int(number)
        if float in kinds:
            yield number
    yield from (one for one in kinds if isinstance(one, str) and normalize(one) == normalize(text))
    if str in kinds:
        yield str(value)
    yield value
