"""What a mistyped layout was evidently meant to be, for the error to suggest: `S(0) p(MAX)` → `S0 P(max)`.

Reads what `layout_text` refuses: PyTorch's own names for placements, either case, missing or needless spaces. Where
anything is left over, or a name could mean several things, there is no suggestion: a wrong one is worse than none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshwright.mesh.reduction import Reduction

_NUMBER = r"-?\d{1,9}"
_PLACE = r"(?:\s*@\s*(?P<{}>\d{{1,9}}))?"
_TOKEN = re.compile(
    r"(?P<copies>replicated?|r)(?:\s*\(\s*\))?"
    # SS0/2, _StridedShard(dim=0, sf=2), _S(0, 2)
    rf"|(?:_?stridedshard|_s|ss)\s*\(?\s*(?:dim\s*=\s*)?(?P<strided>{_NUMBER})\s*\)?\s*"
    rf"(?:/|,\s*(?:(?:sf|split_factor)\s*=)?)\s*(?P<parts>\d{{1,9}})\s*\)?{_PLACE.format('strided_place')}"
    rf"|(?:shard|s)\s*\(?\s*(?:dim\s*=\s*)?(?P<dim>{_NUMBER})\s*\)?{_PLACE.format('place')}"
    r"|(?P<partial>partial|p)(?:\s*\(\s*(?:reduce_op\s*=\s*)?['\"]?(?P<reduction>\w*)['\"]?\s*\))?",
    re.IGNORECASE,
)
_BETWEEN = re.compile(r"[\s,;|()\[\]'\"]*")

_REDUCTIONS = {
    **{reduction.value: reduction for reduction in Reduction},
    "": Reduction.SUM, "add": Reduction.SUM, "mean": Reduction.AVG, "average": Reduction.AVG,
    "maximum": Reduction.MAX, "minimum": Reduction.MIN, "prod": Reduction.PRODUCT, "mul": Reduction.PRODUCT,
}  # fmt: skip


def meant(text: str, num_axes: int) -> Iterator[str]:
    """Layouts that were perhaps meant, the likeliest first. Not all of them fit a tensor and its mesh."""
    words = _words(text)
    if not words or set(words[num_axes:]) - {"R"}:
        return
    words = (words + ["R"] * num_axes)[:num_axes]
    yield " ".join(words)
    yield " ".join(_renumbered(words))


def _words(text: str) -> list[str] | None:
    """The words of a layout; None where some of the text says nothing, or not one thing."""
    words: list[str] = []
    at = _end(_BETWEEN.match(text, 0))
    while at < len(text):
        match = _TOKEN.match(text, at)
        word = _word(match) if match else None
        if match is None or word is None:
            return None
        words.append(word)
        at = _end(_BETWEEN.match(text, match.end()))
    return words


def _end(match: re.Match[str] | None) -> int:
    return match.end() if match else 0


def _word(match: re.Match[str]) -> str | None:
    if match["copies"]:
        return "R"
    if match["partial"]:
        reduction = _REDUCTIONS.get((match["reduction"] or "").lower())
        return reduction and ("P" if reduction is Reduction.SUM else f"P({reduction})")
    place = match["place"] or match["strided_place"]
    at = "" if place is None else f"@{int(place)}"
    return f"S{int(match['dim'])}{at}" if match["dim"] else f"SS{int(match['strided'])}/{int(match['parts'])}{at}"


def _renumbered(words: list[str]) -> list[str]:
    """The words with places of each dim's cuts counted from 0: in their order, those without one where they fit."""
    found = list(words)
    cuts = {axis: re.split("[/@]", word.lstrip("S"))[0] for axis, word in enumerate(words) if word.startswith("S")}
    for dim in dict.fromkeys(cuts.values()):
        axes = [axis for axis in cuts if cuts[axis] == dim]
        places = {axis: int(words[axis].partition("@")[2]) for axis in axes if "@" in words[axis]}
        if len(set(places.values())) < len(places):
            continue
        order = sorted(places, key=lambda axis: places[axis])
        for axis in axes if places else ():
            if axis not in places:
                free = next(place for place in range(len(axes) + 1) if place not in places.values())
                order.insert(min(free, len(order)), axis)
                places[axis] = free
        for place, axis in enumerate(order):
            found[axis] = f"{words[axis].partition('@')[0]}@{place}"
    return found
