"""Every configuration key with its meaning, and a search by words."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.config.dump import default_text, type_name
from meshwright.config.key_fields import fields
from meshwright.config.translate import find_meaning, names_elsewhere, normalize
from meshwright.models.contract.family import family_names


@dataclass(frozen=True)
class KnownKey:
    """A configuration key."""

    name: str
    type: str
    default: str
    meaning: str
    families: tuple[str, ...]
    """Families with this key; empty for all."""
    elsewhere: tuple[str, ...]
    """Names in other frameworks."""


def known_keys() -> list[KnownKey]:
    """Return all keys, those of all families first. A key that families describe differently is there several times."""
    kinds, found = family_names(), dict[tuple[str, str], list[str]]()
    by_kind = {kind: fields(kind) for kind in kinds}
    for kind, own in by_kind.items():
        for name, field in own.items():
            found.setdefault((name, field.description), []).append(kind)
    keys = [
        KnownKey(
            name,
            type_name((field := by_kind[owners[0]][name]).annotation),
            default_text(field),
            field.description,
            () if len(owners) == len(kinds) else tuple(owners),
            names_elsewhere(name),
        )
        for (name, _), owners in found.items()
    ]
    return sorted(keys, key=lambda key: bool(key.families))


def search(text: str) -> list[KnownKey]:
    """Return the keys that a text names or describes, the best first.

    These are keys that it means, in our words or another framework's; keys with the text in their names, ours or
    others'; and keys whose meaning has all its words.
    """
    meaning, wanted, words = find_meaning(text), normalize(text), text.lower().split()

    def rank(key: KnownKey) -> int | None:
        ways = (
            meaning is not None and meaning.key == key.name,
            wanted in normalize(key.name),
            any(wanted in normalize(name) for name in key.elsewhere),
            all(word in f"{key.name} {key.meaning}".lower() for word in words),
        )
        return ways.index(True) if True in ways else None

    ranked = [(found, key) for key in known_keys() if (found := rank(key)) is not None]
    return [key for _, key in sorted(ranked, key=lambda pair: pair[0])]
