"""What differs between two records, named so that one knows where to look. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

import numpy as np

from tests.rebuild.record import Record, Tensor

NOTHING = "(nothing)"
TOTALS = ("memory.", "traffic.")
"""Figures that every way of asking for predictions has."""
SHOWN = 160


def record_differences(old: Record, new: Record) -> Iterator[str]:
    """Each thing in which two runs differ, in the order in which a run makes them."""
    if old.error or new.error:
        sides = [f"{side} failed:\n{record.error}" for side, record in (("OLD", old), ("NEW", new)) if record.error]
        yield "\n".join(sides)
        return
    yield from step_differences(old.steps, new.steps)
    yield from (f"{key}: {shown}" for key, shown in _mapping_differences(old.drawn, new.drawn))
    yield from tensor_differences(old.tensors, new.tensors)


def step_differences(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of metrics: the field, the step, both values."""
    for number, (ours, theirs) in enumerate(zip_longest(old, new), start=1):
        if ours is None or theirs is None:
            yield f"{len(old)} steps on OLD and {len(new)} on NEW"
            return
        step = ours.get("step", number)
        yield from (f"{key} at step {step}: {shown}" for key, shown in _mapping_differences(ours, theirs))


def tensor_differences(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> Iterator[str]:
    """Tensors of two checkpoints: those that one side lacks, those of another kind, those with other bits."""
    for name in [*old, *(name for name in new if name not in old)]:
        if name not in new or name not in old:
            yield f"tensor {name} is on {'OLD' if name in old else 'NEW'} alone"
        elif old[name].kind() != new[name].kind():
            yield f"tensor {name}: {old[name].kind()} → {new[name].kind()}"
    both = [name for name in old if name in new and old[name].kind() == new[name].kind()]
    different = [name for name in both if old[name].fingerprint != new[name].fingerprint]
    if different:
        first, other = old[different[0]], new[different[0]]
        furthest = largest_difference([old[name] for name in different], [new[name] for name in different])
        yield (
            f"{len(different)} of {len(both)} tensors have other bits, first {different[0]}: "
            f"{first.num_different(other)} of {first.num_elements()} elements, by at most "
            f"{largest_difference([first], [other]):.3g}; of all tensors by at most {furthest:.3g}"
        )


def largest_difference(old: Sequence[Tensor], new: Sequence[Tensor]) -> float:
    """Between the elements of tensors of the same kinds; NaN where only one side is, or both in other bits."""
    largest = 0.0
    for ours, theirs in zip(old, new, strict=True):
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.abs(ours.values() - theirs.values())
        largest = float(np.maximum(largest, distance.max(initial=0.0)))
    return largest


def prediction_differences(
    old: Mapping[str, Any], new: Mapping[str, Any], *, totals_only: bool = False
) -> Iterator[str]:
    """Predicted figures of one command line.

    Args:
        old, new: figures by name, or what it was refused with under `refused`.
        totals_only: the sides were asked in other ways, so only what both have by that name counts.
    """
    if "refused" in old or "refused" in new:
        if totals_only and "refused" in old and "refused" in new:
            return
        yield from (f"{key}: {shown}" for key, shown in _mapping_differences(_refusal(old), _refusal(new)))
        return
    if totals_only:
        # Of what is not sent at all one way says nothing and the other may say 0.
        old, new = ({k: n for k, n in side.items() if k.startswith(TOTALS) and n} for side in (old, new))
    yield from (f"predicted {key}: {shown}" for key, shown in _mapping_differences(old, new))


def _refusal(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {"refused": figures.get("refused", NOTHING)}


def _mapping_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in dict.fromkeys(chain(old, new)):
        ours, theirs = (repr(side[key]) if key in side else NOTHING for side in (old, new))
        if ours != theirs:
            yield key, f"{_cut(ours)} → {_cut(theirs)}"


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} …"
