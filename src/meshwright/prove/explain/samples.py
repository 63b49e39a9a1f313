"""Diagnose ranks that read the wrong samples, or something else than the samples they asked for.

Data-parallel rank d reads the d-th contiguous block of a global batch, split into contiguous micro-batches. Ranks that
differ only along other axes read the same samples. What samples contain is compared by digests of their parts; one that
belongs to another sample tells where the data came from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from meshwright.mesh.axes import Axes
from meshwright.prove.record.evidence import Contents, Evidence
from meshwright.prove.result import MAX_LISTED, Diagnosis, FaultKind, index_words, rank_words, scope_words
from meshwright.units import counted, join_words

ELSEWHERE = "no other sample of these steps alone is like it"
"""Start of the cause of contents that are not those of other samples, of all wrong ones."""


def diagnose_samples(
    read: list[list[list[int]]], batches: list[list[int]], axes: Axes, num_microbatches: int
) -> Iterator[tuple[int, Diagnosis]]:
    """Yield one diagnosis per cause of wrong samples, with its first step, from 1.

    Args:
        read: [rank][step]: indices of the samples that were read, in micro-batch order.
        batches: [step]: samples of the global batch, in order.
        axes: mesh axes.
        num_microbatches: number of micro-batches.
    """
    cases_by_cause: dict[tuple[FaultKind, str], list[tuple[int, int, str]]] = defaultdict(list)
    for rank in range(min(axes.num_ranks(), len(read))):
        for step in range(min(len(batches), len(read[rank]))):
            found, expected = read[rank][step], samples_of_dp_rank(batches[step], axes.data_index(rank), axes)
            if found == expected:
                continue
            kind, symptom, cause = _classify(found, step, rank, batches, axes, num_microbatches)
            cases_by_cause[kind, cause].append((rank, step, symptom))
    for (kind, cause), cases in cases_by_cause.items():
        yield min(case[1] for case in cases) + 1, _finding(kind, cause, cases, len(batches))


def samples_of_dp_rank(batch: list[int], dp_rank: int, axes: Axes) -> list[int]:
    """Return a data-parallel rank's samples in a batch, in order."""
    size = len(batch) // axes.data_parallel()
    return batch[dp_rank * size : (dp_rank + 1) * size]


def _finding(kind: FaultKind, cause: str, cases: list[tuple[int, int, str]], num_steps: int) -> Diagnosis:
    rank, step, symptom = cases[0]
    ranks, steps = {case[0] for case in cases}, sorted({case[1] + 1 for case in cases})
    listed = join_words([str(number) for number in steps[:MAX_LISTED]])
    when = "in every step" if len(steps) == num_steps else f"in step{'s' if len(steps) > 1 else ''} {listed}"
    detail = when if len(ranks) == 1 else f"{when}, on {rank_words(ranks)}; shown: rank {rank}, step {step + 1}"
    return Diagnosis(kind, f"rank {rank} {symptom}", cause, detail)


def _classify(
    found: list[int], step: int, rank: int, batches: list[list[int]], axes: Axes, num_microbatches: int
) -> tuple[FaultKind, str, str]:
    """Return the kind of fault, the symptom and the cause."""
    dp_rank, batch = axes.data_index(rank), batches[step]
    expected = samples_of_dp_rank(batch, dp_rank, axes)
    symptom = f"read samples {index_words(found)} instead of {index_words(expected)}"
    owner = _matching_dp_rank(found, batch, axes)
    if owner is not None:
        owners = rank_words(r for r in range(axes.num_ranks()) if axes.data_index(r) == owner)
        return FaultKind.SAMPLES, f"{symptom} (the samples of {owners})", "a rank reads another rank's samples"
    if sorted(found) == sorted(expected):
        return FaultKind.SAMPLES, symptom, _order_cause(found, expected, num_microbatches)
    for other, candidate in enumerate(batches):
        if other != step and found == samples_of_dp_rank(candidate, dp_rank, axes):
            offset = other - step
            steps = f"{abs(offset)} step{'s' if abs(offset) > 1 else ''}"
            cause = f"the sampler is {steps} {'behind' if offset < 0 else 'ahead'}"
            return FaultKind.OTHER_STEP, f"{symptom} (its samples of step {other + 1})", cause
    size = len(expected) // num_microbatches
    blocks = [expected[at : at + size] for at in range(0, len(expected), size)] if size else []
    lost = [number for number, block in enumerate(blocks) if not set(block) & set(found)]
    left = [sample for number, block in enumerate(blocks) if number not in lost for sample in block]
    if lost and found and found == left:
        numbers = index_words(lost)
        return FaultKind.SAMPLES, symptom, f"micro-batch {numbers} is not read: another is processed in its place"
    if len(found) != len(expected):
        read = f"{counted(len(found), 'sample')} ({index_words(found)})"
        symptom = f"read {read} instead of {len(expected)} ({index_words(expected)})"
        is_whole_batch = found == batch
        return (
            FaultKind.SAMPLES,
            symptom,
            "the batch is not split: the rank reads all of it" if is_whole_batch else "wrong number of samples",
        )
    if found == batch[dp_rank :: axes.data_parallel()]:
        return FaultKind.SAMPLES, symptom, "samples are interleaved instead of split into contiguous blocks"
    if len(set(found)) < len(found):
        return FaultKind.SAMPLES, symptom, "samples are read more than once"
    inside = set(found) <= set(batch)
    return (
        FaultKind.SAMPLES,
        symptom,
        "the batch is split differently" if inside else "samples from outside the batch of the step",
    )


def _matching_dp_rank(found: list[int], batch: list[int], axes: Axes) -> int | None:
    for dp_rank in range(axes.data_parallel()):
        if found == samples_of_dp_rank(batch, dp_rank, axes):
            return dp_rank
    return None


def _order_cause(found: list[int], expected: list[int], num_microbatches: int) -> str:
    size = len(expected) // num_microbatches
    blocks = [expected[at : at + size] for at in range(0, len(expected), size)] if size else []
    if num_microbatches > 1 and all(found[at : at + size] in blocks for at in range(0, len(expected), size)):
        return "the correct samples, with micro-batches in a different order"
    if found == expected[::-1]:
        return "the correct samples, in reverse order"
    return "the correct samples, in a different order"


@dataclass(frozen=True)
class _Wrong:
    """A sample with wrong parts on a rank."""

    rank: int
    step: int
    sample: int
    parts: tuple[str, ...]
    right: tuple[str, ...]
    owners: frozenset[int]
    """Samples whose parts these are."""
    digests: Mapping[str, str] = field(default_factory=dict, hash=False)
    """What was read of the wrong parts."""

    @property
    def owner(self) -> int | None:
        """Return the sample whose parts these are, or None if there is none, or several, which tells nothing."""
        return next(iter(self.owners)) if len(self.owners) == 1 else None

    @property
    def shift(self) -> int:
        """Return by how many samples the reading is off."""
        return 0 if self.owner is None else self.owner - self.sample


OtherContents = Callable[[Iterable[int]], Iterator[tuple[str, Contents]]]
"""Make the digests that samples have if the data is read otherwise, each with what is then wrong."""


def diagnose_contents(
    read: list[list[Contents]],
    expected: Contents,
    batches: list[list[int]],
    axes: Axes,
    others: OtherContents = lambda samples: iter(()),
) -> Iterator[tuple[int, Diagnosis]]:
    """Yield one diagnosis per cause of samples with wrong content, with its first step, from 1.

    Args:
        read: [rank][step]: digests by sample and part.
        expected: digests by sample and part; parts that are not among them are not compared.
        batches: [step]: samples of the global batch, in order.
        axes: mesh axes.
        others: other ways to read the data.
    """
    num_read = sum(len(contents) for steps in read for contents in steps)
    by_parts: dict[tuple[str, ...], list[_Wrong]] = defaultdict(list)
    for one in _wrong_samples(read, expected):
        by_parts[one.parts].append(one)
    for found in by_parts.values():
        known = [one for one in found if one.owner is not None]
        causes, shifts = {_content_cause(one, batches, axes) for one in known}, {one.shift for one in known}
        # A cause must explain all others, too, which may have several owners or lie beyond the samples that are known.
        rest = [one for one in found if one.owner is None]
        is_one = len(causes) == 1 and all(
            any(one.sample + shift in one.owners for shift in shifts)
            or (not one.owners and len(shifts) == 1 and one.sample + min(shifts) not in expected)
            for one in rest
        )
        if not is_one:
            causes = {_of_others(found, others) or _mixed(found, len(known))}
            found = [replace(one, owners=frozenset()) for one in found]
        yield min(one.step for one in found) + 1, _content_finding(causes.pop(), found, num_read, axes)


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
                    digests = {part: known[part] for part in wrong}
                    yield _Wrong(rank, step, sample, wrong, right, frozenset(common), digests)


def _content_cause(one: _Wrong, batches: list[list[int]], axes: Axes) -> str:
    assert one.owner is not None, "only contents of other samples tell where they come from"
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


def _unlike(one: _Wrong) -> str:
    """Return what may be wrong with a sample that is like no other."""
    if "inputs" in one.parts and "targets" in one.parts:
        return f"{ELSEWHERE}: it was read with another seed, from other data or at another place, or was changed"
    return f"{ELSEWHERE}: its {join_words(one.parts)} are made differently, or were changed after it was read"


def _of_others(found: list[_Wrong], others: OtherContents) -> str:
    """Return what is wrong if all samples are those that the data has when it is read in another way."""
    for cause, contents in others(sorted({one.sample for one in found})):
        if all(contents[one.sample].get(part) == value for one in found for part, value in one.digests.items()):
            return cause
    return ""


def _mixed(found: list[_Wrong], num_known: int) -> str:
    """Return the cause of contents that no single mistake explains."""
    if not num_known:
        return _unlike(found[0])
    return (
        f"not recognised: {num_known} of {len(found)} equal those of another sample, but no single mistake explains all"
    )


def _content_finding(cause: str, found: list[_Wrong], num_read: int, axes: Axes) -> Diagnosis:
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


def wrong_steps(evidence: Evidence, batches: list[list[int]], contents: Contents) -> set[int]:
    """Return the steps, from 1, in which a rank read the wrong samples, or samples with wrong contents."""
    axes, found = evidence.axes, set()
    for rank, record in enumerate(evidence.ranks):
        for at, step in enumerate(record.steps):
            if step["samples"] != samples_of_dp_rank(batches[at], axes.data_index(rank), axes):
                found.add(at + 1)
    read = [[step["contents"] for step in record.steps] for record in evidence.ranks]
    return found | {one.step + 1 for one in _wrong_samples(read, contents)}
