"""Suggestions for mistyped layouts, for use in error messages: `S(0) p(MAX)` → `S0 P(max)`.

Accepts text that `layout_text` rejects: PyTorch's own names for placements, upper or lower case, missing or extra
spaces. Leftover text or an ambiguous name yields no suggestion, because a wrong one is worse than none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshwright.mesh.reduction import Reduction

_NUMBER = r"-?\d{1,9}"
_POSITION = r"(?:\s*@\s*(?P<{}>\d{{1,9}}))?"
_TOKEN = re.compile(
    r"(?P<replicated>replicated?|r)(?:\s*\(\s*\))?"
    # SS0/2, _StridedShard(dim=0, sf=2), _S(0, 2)
    rf"|(?:_?stridedshard|_s|ss)\s*\(?\s*(?:dim\s*=\s*)?(?P<strided>{_NUMBER})\s*\)?\s*"
    rf"(?:/|,\s*(?:(?:sf|split_factor)\s*=)?)\s*(?P<parts>\d{{1,9}})\s*\)?{_POSITION.format('strided_position')}"
    rf"|(?:shard|s)\s*\(?\s*(?:dim\s*=\s*)?(?P<dim>{_NUMBER})\s*\)?{_POSITION.format('position')}"
    r"|(?P<partial>partial|p)(?:\s*\(\s*(?:reduce_op\s*=\s*)?['\"]?(?P<reduction>\w*)['\"]?\s*\))?",
    re.IGNORECASE,
)
_SEPARATOR = re.compile(r"[\s,;|()\[\]'\"]*")

_REDUCTIONS = {
    **{reduction.value: reduction for reduction in Reduction},
    "": Reduction.SUM, "add": Reduction.SUM, "mean": Reduction.AVG, "average": Reduction.AVG,
    "maximum": Reduction.MAX, "minimum": Reduction.MIN, "prod": Reduction.PRODUCT, "mul": Reduction.PRODUCT,
}  # fmt: skip


def suggest_layouts(text: str, num_axes: int) -> Iterator[str]:
    """Yield possible readings of the text as a layout, most likely first; some may not fit the tensor and mesh."""
    words = _words(text)
    if not words or set(words[num_axes:]) - {"R"}:
        return
    words = (words + ["R"] * num_axes)[:num_axes]
    yield " ".join(words)
    yield " ".join(_renumbered(words))


def _words(text: str) -> list[str] | None:
    """Return the placements of a layout, or None if any of the text is unknown or ambiguous."""
    words: list[str] = []
    at = _end(_SEPARATOR.match(text, 0))
    while at < len(text):
        match = _TOKEN.match(text, at)
        word = _word(match) if match else None
        if match is None or word is None:
            return None
        words.append(word)
        at = _end(_SEPARATOR.match(text, match.end()))
    return words


def _end(match: re.Match[str] | None) -> int:
    return match.end() if match else 0


def _word(match: re.Match[str]) -> str | None:
    if match["replicated"]:
        return "R"
    if match["partial"]:
        reduction = _REDUCTIONS.get((match["reduction"] or "").lower())
        return reduction and ("P" if reduction is Reduction.SUM else f"P({reduction})")
    position = match["position"] or match["strided_position"]
    suffix = "" if position is None else f"@{int(position)}"
    return (
        f"S{int(match['dim'])}{suffix}" if match["dim"] else f"SS{int(match['strided'])}/{int(match['parts'])}{suffix}"
    )


def _renumbered(words: list[str]) -> list[str]:
    """Renumber the `@` positions of each dim from 0, filling gaps with shards that have no position."""
    renumbered = list(words)
    dims = {axis: re.split("[/@]", word.lstrip("S"))[0] for axis, word in enumerate(words) if word.startswith("S")}
    for dim in dict.fromkeys(dims.values()):
        axes = [axis for axis in dims if dims[axis] == dim]
        positions = {axis: int(words[axis].partition("@")[2]) for axis in axes if "@" in words[axis]}
        if len(set(positions.values())) < len(positions):
            continue
        order = sorted(positions, key=lambda axis: positions[axis])
        for axis in axes if positions else ():
            if axis not in positions:
                free = next(i for i in range(len(axes) + 1) if i not in positions.values())
                order.insert(min(free, len(order)), axis)
                positions[axis] = free
        for position, axis in enumerate(order):
            renumbered[axis] = f"{words[axis].partition('@')[0]}@{position}"
    return renumbered
