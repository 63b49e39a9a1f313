"""Entries of `data.mixture`, such as `0.7:web/*.jsonl#text`: a weight, a source and its field.

Weights become integer shares.

Say how the sources of a run differ from those of an earlier one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from meshwright.errors import ConfigError

KEY = "data.mixture"
EXAMPLE = "data.mixture=['0.7:web/*.jsonl','0.3:stdlib']"
RULE = "an entry is weight:source or weight:source#field, with a source as data.source takes and a weight above zero"
BLOCK = 4096
"""Samples in a block, B."""
ONE = 2**32
"""The sum of all shares."""
MIN_SHARE = ONE // BLOCK
"""Smallest share of a source: one sample of each block."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,2})?", re.IGNORECASE)
_SEVERAL = re.compile(r",\s*[+-]?(\d+\.?\d*|\.\d+)%?:")


@dataclass(frozen=True)
class Entry:
    """A source of a mixture."""

    weight: Fraction
    source: str
    text_field: str | None
    """Field that is the text of its records; `data.text_field` if None."""

    @property
    def name(self) -> str:
        """The entry without its weight."""
        return self.source if self.text_field is None else f"{self.source}#{self.text_field}"


def parse_mixture(texts: Sequence[str]) -> tuple[Entry, ...]:
    """Return the entries of a mixture.

    Raises:
        ConfigError: an entry is malformed, a weight is out of range, or a source occurs twice.
    """
    entries = tuple(map(_parse, texts))
    for name, count in Counter(entry.name for entry in entries).items():
        if count == 1:
            continue
        raise _error(
            f"{name} is {count} of the sources",
            rule="each source of a mixture occurs once",
            fix="one entry with the sum of the weights",
        )
    total = sum((entry.weight for entry in entries), Fraction())
    for entry, share in zip(entries, shares(entries), strict=True):
        if share < MIN_SHARE:
            raise _error(
                f"the weight of {entry.name}, {float(entry.weight):g} of {float(total):g}, is too small",
                rule=f"a source has at least one sample in {BLOCK:,}, so that its share holds in every such block",
                fix=f"a weight of at least {_round_up(total / BLOCK):g}, or a mixture without it",
            )
    return entries


def shares(entries: Sequence[Entry]) -> tuple[int, ...]:
    """Return the normalised weights in units of 1/ONE, which add up to ONE: rounded where each source ends."""
    total = sum((entry.weight for entry in entries), Fraction())
    ends = [round(end / total * ONE) for end in accumulate(entry.weight for entry in entries)]
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


def _parse(text: str) -> Entry:
    if _SEVERAL.search(text):
        entries = "','".join(part.strip() for part in text.split(","))
        raise _error(f"{text!r} is one text, not a list of entries", rule=RULE, fix=f"\"{KEY}=['{entries}']\"")
    number, colon, rest = text.partition(":")
    source, _, text_field = rest.rpartition("#") if "#" in rest else (rest, "", "")
    if not colon or not _NUMBER.fullmatch(number):
        raise _error(f"{text!r} has no weight before its source", rule=RULE, fix=f"{_with_weight(text)} in place of it")
    weight = Fraction(number)
    if weight <= 0:
        raise _error(f"the weight of {text!r} is not above zero", rule=RULE, fix="a mixture without it")
    if not source:
        raise _error(f"{text!r} has no source", rule=RULE, fix=EXAMPLE)
    return Entry(weight, source, text_field or None)


def _with_weight(text: str) -> str:
    """Return an entry that the text may have been meant as: with its weight first, without a percent sign, or half."""
    first, _, last = text.rpartition(":")
    if first and _NUMBER.fullmatch(last.rstrip("%")):
        return f"{last.rstrip('%')}:{first}"
    number, _, rest = text.partition(":")
    is_percent = number.endswith("%") and _NUMBER.fullmatch(number[:-1])
    return f"{number[:-1]}:{rest}" if is_percent else f"0.5:{text}, with the weight for 0.5,"


def _round_up(weight: Fraction) -> float:
    """Return a number of two digits that is at least `weight`."""
    return float(f"{float(weight) * 1.05:.1e}")


def _error(what: str, *, rule: str, fix: str) -> ConfigError:
    return ConfigError(what, where=KEY, rule=rule, fix=fix)
