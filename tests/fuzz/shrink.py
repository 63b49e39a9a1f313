"""The smallest case that fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.fuzz.case import Case, key_of
from tests.fuzz.judge import Verdict
from tests.fuzz.meaning import ALWAYS


def shrink(verdict: Verdict, judge: Callable[[Case], Verdict], *, max_tries: int = 30) -> Case:
    """Drop words of a failed case while it still fails in the same way: first many at once, then one by one.

    Args:
        verdict: the failure.
        judge: judges a case.
        max_tries: cases to judge at most.
    """
    case, tries = verdict.case, 0
    size = len(_droppable(case)) // 2
    while size:
        for smaller in _smaller(case, size):
            tries += 1
            if tries > max_tries:
                return case
            if judge(smaller).is_like(verdict):
                case = smaller
                break
        else:
            size //= 2
        size = min(size, len(_droppable(case)))
    return case


def _droppable(case: Case) -> list[str]:
    return [word for word in case.words if key_of(word) not in ALWAYS]


def _smaller(case: Case, size: int) -> Iterator[Case]:
    words = _droppable(case)
    for first in range(0, len(words), size):
        dropped = set(words[first : first + size])
        yield Case(case.preset, tuple(word for word in case.words if word not in dropped))
