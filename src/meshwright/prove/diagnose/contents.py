"""Diagnose ranks that read something else than the samples they asked for: wrong tokens, targets, noise or labels.

Samples are compared by digests of their parts. A digest that belongs to another sample tells where the data came from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.mesh.axes import Axes
from meshwright.prove.compare.result import Diagnosis, FaultKind
from meshwright.prove.diagnose.phrases import rank_words, scope_words
from meshwright.prove.diagnose.samples import samples_of_dp_rank
from meshwright.prove.record.evidence import Contents
from meshwright.units import counted, join_words

ELSEWHERE = (
    "no sample of these steps is like it: it was read with another seed, from other data or at another place, or was "
    "changed after it was read"
)


@dataclass(frozen=True)
class _Wrong:
    """A sample with wrong parts on a rank."""

    rank: int
    step: int
    sample: int
    parts: tuple[str, ...]
    right: tuple[str, ...]
    owner: int | None
    """Sample whose parts these are, or None if there is none."""


def diagnose_contents(
    read: list[list[Contents]], expected: Contents, batches: list[list[int]], axes: Axes
) -> tuple[Diagnosis, ...]:
    """Return one diagnosis per cause of samples with wrong content, or an empty tuple.

    Args:
        read: [rank][step]: digests by sample and part.
        expected: digests by sample and part; parts that are not among them are not compared.
        batches: [step]: samples of the global batch, in order.
        axes: mesh axes.
    """
    by_cause: dict[tuple[str, tuple[str, ...]], list[_Wrong]] = defaultdict(list)
    for one in _wrong_samples(read, expected):
        by_cause[_cause(one, batches, axes), one.parts].append(one)
    num_read = sum(len(contents) for steps in read for contents in steps)
    return tuple(_finding(cause, found, num_read, axes) for (cause, _), found in by_cause.items())


def _wrong_samples(read: list[list[Contents]], expected: Contents) -> Iterator[_Wrong]:
    owners: dict[tuple[str, str], set[int]] = defaultdict(set)
    for sample, parts in expected.items():
        for part, digest in parts.items():
            owners[part, digest].add(sample)
    for rank, steps in enumerate(read):
        for step, contents in enumerate(steps):
            for sample, parts in sorted(contents.items()):
                known = {part: digest for part, digest in parts.items() if part in expected.get(sample, {})}
                wrong = tuple(part for part, digest in known.items() if digest != expected[sample][part])
                if wrong:
                    common = set.intersection(*(owners[part, known[part]] for part in wrong))
                    right = tuple(part for part in known if part not in wrong)
                    # A part such as a label may be that of many samples.
                    owner = min(common, key=lambda other, sample=sample: abs(other - sample), default=None)  # type: ignore[misc]
                    yield _Wrong(rank, step, sample, wrong, right, owner)


def _cause(one: _Wrong, batches: list[list[int]], axes: Axes) -> str:
    if one.owner is None:
        return ELSEWHERE
    step = next(number for number, batch in enumerate(batches) if one.owner in batch)
    if step != one.step:
        when = "an earlier" if step < one.step else "a later"
        return f"the data of {when} step: a stale batch or cache, or a wrong position in the data"
    home = axes.data_index(one.rank)
    dp_rank = next(d for d in range(axes.data_parallel()) if one.owner in samples_of_dp_rank(batches[step], d, axes))
    if dp_rank == home:
        return "the rank's own samples are exchanged"
    others = rank_words(rank for rank in range(axes.num_ranks()) if axes.data_index(rank) == dp_rank)
    return f"the rank asked for its own samples, but was given those of {others}"


def _finding(cause: str, found: list[_Wrong], num_read: int, axes: Axes) -> Diagnosis:
    first = found[0]
    ranks, steps = {one.rank for one in found}, sorted({one.step + 1 for one in found})
    scope = scope_words(ranks, range(axes.num_ranks()), axes)
    symptom = f"the {join_words(first.parts)} of samples differ {scope}"
    whose = "" if first.owner is None else f" are those of sample {first.owner}"
    right = f", its {join_words(first.right)} are right" if first.right else ""
    when = f"in step{'s' if len(steps) > 1 else ''} {join_words([str(step) for step in steps])}"
    detail = (
        f"first: rank {first.rank}, step {first.step + 1}, sample {first.sample}, whose {join_words(first.parts)}"
        f"{whose or ' differ'}{right}; {len(found)} of the {counted(num_read, 'sample')} that ranks read, {when}"
    )
    return Diagnosis(FaultKind.SAMPLES, symptom, cause, detail)
