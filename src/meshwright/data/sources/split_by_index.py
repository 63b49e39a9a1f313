"""Split documents that are known by index: one in ten is held out by a hash of its index, of few the last tenth.

Documents added at the end move no others while there are more than about fifty.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import filterfalse, islice

from meshwright.data.text_documents import HOLD_OUT_DIVISOR, MIN_HELD_OUT_FILES, is_held_out


def split_indices(number: int) -> tuple[Iterable[int], Iterable[int]]:
    """Return the indices of the documents for training, and of those held out, both ascending."""
    indices = range(number)
    if len(list(islice(filter(_is_held_out, indices), MIN_HELD_OUT_FILES))) == MIN_HELD_OUT_FILES:
        return filterfalse(_is_held_out, indices), filter(_is_held_out, indices)
    end = number - number // HOLD_OUT_DIVISOR
    return indices[:end], indices[end:]


def _is_held_out(index: int) -> bool:
    return is_held_out(str(index))
