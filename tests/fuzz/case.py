"""A case: the preset and the words of one command."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from meshwright.config.overlay import fields
from meshwright.config.source import read_source


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
