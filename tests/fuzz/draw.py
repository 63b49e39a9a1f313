"""A random case from a seed and a number: always the same one, without running or reading anything."""

from __future__ import annotations

from functools import cache
from random import Random

from meshwright.config.source import smallest_preset
from tests.fuzz.case import Case
from tests.fuzz.drawing import Drawing, schema_values
from tests.fuzz.meaning import ALWAYS, BY_HAND, FEATURES, families

SLIP = 0.12
"""How often one word is slightly wrong, as typed ones are."""


def draw(seed: int, number: int) -> Case:
    """Draw a case: a family's smallest preset, a layout and features, then other keys from the schema alone."""
    rng = Random(f"{seed} {number}")
    kinds, weights = families()
    kind = rng.choices(kinds, weights)[0]
    drawing = Drawing(rng, _preset(kind), kind)
    for feature in FEATURES:
        feature(drawing)
    free = free_keys(drawing)
    for key in rng.sample(free, min(rng.choice((0, 0, 1, 2, 3)), len(free))):
        drawing.put_from_schema(key)
    case = drawing.case()
    if drawing.chance(SLIP):
        case = _slip(case, rng)
    always = Drawing(rng, drawing.preset, kind)
    always.words = {key: value for key, value in ALWAYS.items() if key in drawing.keys}
    return case.with_words(always.case().words)


@cache
def _preset(kind: str) -> str:
    return smallest_preset([kind])


def free_keys(drawing: Drawing) -> list[str]:
    """Keys of the family that no feature draws, and whose schema has values to draw."""
    return [key for key, field in drawing.keys.items() if key not in BY_HAND and schema_values(field)]


def _slip(case: Case, rng: Random) -> Case:
    """The case with a number beside the right one, or a letter left out."""
    word = rng.choice(case.words)
    key, _, value = word.partition("=")
    if value.isdecimal():
        wrong = f"{key}={int(value) + rng.choice((-1, 1))}"
    else:
        at = rng.randrange(len(word))
        wrong = word[:at] + word[at + 1 :]
    return Case(case.preset, tuple(wrong if one == word else one for one in case.words))
