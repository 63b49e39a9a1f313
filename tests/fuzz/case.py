"""A case: the preset and the words of one command; and a case while it is drawn, by values that a schema allows."""

from __future__ import annotations

import math
import operator
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from random import Random
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic.fields import FieldInfo

from meshwright.config.overlay import fields, table_of
from meshwright.config.source import read_source
from meshwright.settings.violation import format_value


@dataclass(frozen=True)
class Case:
    """The first word and the overrides of a command, as a shell hands them on."""

    preset: str
    words: tuple[str, ...]

    def command(self, verb: str = "run") -> str:
        """The command as one types it."""
        return shlex.join(["meshwright", verb, self.preset, *self.words])

    def with_words(self, words: Iterable[str]) -> Case:
        """The case with these words, each in place of an earlier one of the same key."""
        by_key = {key_of(word): word for word in (*self.words, *words)}
        return replace(self, words=tuple(by_key.values()))

    def without(self, *prefixes: str) -> Case:
        """The case without the words whose keys start like that."""
        return replace(self, words=tuple(word for word in self.words if not word.startswith(prefixes)))

    @property
    def kind(self) -> str:
        """Family of the model."""
        return self.value("model.kind") or _kind(self.preset)

    def value(self, key: str) -> str:
        """Text of a word's value; empty if there is no such word."""
        return {key_of(word): word.partition("=")[2] for word in self.words}.get(key, "")

    def setting(self, key: str) -> str:
        """Value of a key that the preset doesn't set, as text."""
        return self.value(key) or str(fields(self.kind)[key].default)


@cache
def _kind(preset: str) -> str:
    kind: str = read_source(preset)[1]["model"]["kind"]
    return kind


def key_of(word: str) -> str:
    return word.partition("=")[0]


T = TypeVar("T")


class Drawing:
    """Words drawn so far, and what later ones depend on: the layout."""

    def __init__(self, rng: Random, preset: str, kind: str) -> None:
        self.rng, self.preset, self.kind = rng, preset, kind
        self.words: dict[str, Any] = {}

    @cached_property
    def keys(self) -> Mapping[str, FieldInfo]:
        """Fields of the family's keys."""
        return fields(self.kind)

    def chance(self, probability: float) -> bool:
        """Return True that often."""
        return self.rng.random() < probability

    def choose(self, *options: T) -> T:
        """Return one of the options."""
        return self.rng.choice(options)

    def put(self, **settings: Any) -> None:
        """Set keys of sections that the family has: `mesh__tp=2` is mesh.tp=2."""
        for name, value in settings.items():
            key = name.replace("__", ".")
            if key in self.keys or table_of(self.kind, key):
                self.words[key] = value

    def put_from_schema(self, key: str) -> None:
        """Set a key, if the family has it, to a value that its schema allows."""
        if key in self.keys and (values := schema_values(self.keys[key])):
            self.words[key] = self.choose(*values)

    def get(self, key: str) -> Any:
        """Value of a key: what was drawn, or the default."""
        return self.words.get(key, self.keys[key].default if key in self.keys else None)

    def axis(self, *names: str) -> int:
        """Product of the sizes of mesh axes."""
        return math.prod(self.get(f"mesh.{name}") for name in names)

    def case(self) -> Case:
        """What was drawn, as a command's words; defaults are left out that the preset doesn't replace."""
        preset = preset_keys(self.preset)
        kept = {key: value for key, value in self.words.items() if key in preset or self._is_set(key)}
        words = (f"{key}={format_value(value)}" for key, value in kept.items())
        return Case(self.preset, tuple(" ".join(shlex.split(word)) for word in words))

    def _is_set(self, key: str) -> bool:
        return key not in self.keys or self.words[key] != self.keys[key].default


@cache
def preset_keys(preset: str) -> Mapping[str, Any]:
    """Return the values that a preset sets, by dotted key."""
    return dict(_leaves(read_source(preset)[1]))


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def schema_values(field: FieldInfo) -> list[Any]:
    """Values near a key's default and at its bounds; none for keys whose texts need a meaning."""
    kinds = [one for one in get_args(field.annotation) if one is not type(None)]
    if get_origin(field.annotation) is Literal:
        return list(kinds)
    if type(None) in get_args(field.annotation):
        found = _numbers(kinds[0], 1, field.metadata) if len(kinds) == 1 else []
        return [None, *found] if found else []
    return [True, False] if field.annotation is bool else _numbers(field.annotation, field.default, field.metadata)


def _numbers(kind: Any, default: Any, metadata: Sequence[Any]) -> list[Any]:
    """Numbers within the bounds, beside and at which they lie."""
    tests = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}
    bounds = [(tests[name], getattr(one, name)) for one in metadata for name in tests if hasattr(one, name)]
    lowest = [bound for test, bound in bounds if test is operator.ge]
    if kind is int:
        values = [*lowest, default - 1, default, default + 1]
    elif kind is float:
        values = [*map(float, lowest), default / 2, default, 2 * default or 0.01]
    else:
        return []
    return sorted({value for value in values if all(test(value, bound) for test, bound in bounds)})
