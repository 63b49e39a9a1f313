"""Diagnose ranks that read the wrong samples.

Data-parallel rank d reads the d-th contiguous block of a global batch, split into contiguous micro-batches. Ranks that
differ only along other axes read the same samples.
"""

from __future__ import annotations

from collections import defaultdict

from meshwright.mesh.axes import Axes
from meshwright.prove.compare.result import Diagnosis, FaultKind
from meshwright.prove.diagnose.phrases import MAX_LISTED, index_words, rank_words
from meshwright.units import counted, join_words


def diagnose_samples(
    read: list[list[list[int]]], batches: list[list[int]], axes: Axes, num_microbatches: int
) -> tuple[Diagnosis, ...]:
    """Return one diagnosis per cause of wrong samples, or an empty tuple if all samples are as expected."""
    cases_by_cause: dict[tuple[FaultKind, str], list[tuple[int, int, str]]] = defaultdict(list)
    for rank in range(min(axes.num_ranks(), len(read))):
        for step in range(min(len(batches), len(read[rank]))):
            found, expected = read[rank][step], samples_of_dp_rank(batches[step], axes.data_index(rank), axes)
            if found == expected:
                continue
            kind, symptom, cause = _classify(found, step, rank, batches, axes, num_microbatches)
            cases_by_cause[kind, cause].append((rank, step, symptom))
    return tuple(_finding(kind, cause, cases, len(batches)) for (kind, cause), cases in cases_by_cause.items())


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
            return FaultKind.OUT_OF_STEP, f"{symptom} (its samples of step {other + 1})", cause
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
