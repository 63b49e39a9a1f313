"""A random case from a seed and a number: always the same one, without running or reading anything."""

from __future__ import annotations

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
    drawing = Drawing(rng, smallest_preset([kind]), kind)
    for feature in FEATURES:
        feature(drawing)
    free = free_keys(drawing)
    for key in rng.sample(free, min(rng.choice((0, 0, 1, 2, 3)), len(free))):
        drawing.put_from_schema(key)
    case = _slip(drawing) if drawing.chance(SLIP) else drawing.case()
    always = Drawing(rng, drawing.preset, kind)
    always.words = {key: value for key, value in ALWAYS.items() if key in drawing.keys}
    return case.with_words(always.case().words)


def free_keys(drawing: Drawing) -> list[str]:
    """Keys of the family that no feature draws, and whose schema has values to draw."""
    return [key for key, field in drawing.keys.items() if key not in BY_HAND and schema_values(field)]


def _slip(drawing: Drawing) -> Case:
    """The case with a number beside the right one, or a letter left out."""
    key = drawing.choose(*drawing.words)
    value = drawing.words[key]
    if isinstance(value, int) and not isinstance(value, bool):
        drawing.words[key] = value + drawing.choose(-1, 1)
        return drawing.case()
    word = next(one for one in drawing.case().words if one.startswith(f"{key}="))
    at = drawing.rng.randrange(len(word))
    wrong = word[:at] + word[at + 1 :]
    return Case(drawing.preset, tuple(wrong if one == word else one for one in drawing.case().words))
