"""Which samples a rank read that it should not have.

Share d of a step's batch is its d-th contiguous block, and a rank's micro-batches are contiguous in its share.
Ranks that differ only along other axes read the same share.
"""

from __future__ import annotations

from collections import defaultdict

from meshwright.mesh.axes import Axes
from meshwright.prove.compare.result import Diagnosis, Kind
from meshwright.prove.diagnose.phrases import MAX_LISTED, index_words, join_words, rank_words


def diagnose_samples(
    read: list[list[list[int]]], batches: list[list[int]], axes: Axes, num_microbatches: int
) -> tuple[Diagnosis, ...]:
    """A finding for every way in which ranks strayed from their shares; none when all read what was due."""
    strays: dict[tuple[Kind, str], list[tuple[int, int, str]]] = defaultdict(list)
    for rank in range(min(axes.num_ranks(), len(read))):
        for step in range(min(len(batches), len(read[rank]))):
            found, due = read[rank][step], share_of(batches[step], axes.data_index(rank), axes)
            if found == due:
                continue
            kind, seen, cause = _stray(found, step, rank, batches, axes, num_microbatches)
            strays[kind, cause].append((rank, step, seen))
    return tuple(_finding(kind, cause, cases, len(batches)) for (kind, cause), cases in strays.items())


def share_of(batch: list[int], share: int, axes: Axes) -> list[int]:
    """The samples of one data-parallel share of a batch, in order."""
    size = len(batch) // axes.data_parallel()
    return batch[share * size : (share + 1) * size]


def _finding(kind: Kind, cause: str, cases: list[tuple[int, int, str]], num_steps: int) -> Diagnosis:
    rank, step, seen = cases[0]
    ranks, steps = {case[0] for case in cases}, sorted({case[1] + 1 for case in cases})
    listed = join_words([str(number) for number in steps[:MAX_LISTED]])
    when = "in every step" if len(steps) == num_steps else f"in step{'s' if len(steps) > 1 else ''} {listed}"
    detail = when if len(ranks) == 1 else f"{when}, on {rank_words(ranks)}; shown: rank {rank}, step {step + 1}"
    return Diagnosis(kind, f"rank {rank} {seen}", cause, detail)


def _stray(
    found: list[int], step: int, rank: int, batches: list[list[int]], axes: Axes, num_microbatches: int
) -> tuple[Kind, str, str]:
    """Kind, what was read, and why."""
    mine, batch = axes.data_index(rank), batches[step]
    due = share_of(batch, mine, axes)
    seen = f"read samples {index_words(found)} where {index_words(due)} were due"
    owner = _owner(found, batch, axes)
    if owner is not None:
        owners = rank_words(r for r in range(axes.num_ranks()) if axes.data_index(r) == owner)
        return Kind.SAMPLES, f"{seen} ({owners}'s share)", "a rank reads another rank's samples"
    if sorted(found) == sorted(due):
        return Kind.SAMPLES, seen, _order(found, due, num_microbatches)
    for other, candidate in enumerate(batches):
        if other != step and found == share_of(candidate, mine, axes):
            away = other - step
            cause = f"the sampler is {abs(away)} step{'s' if abs(away) > 1 else ''} {'behind' if away < 0 else 'ahead'}"
            return Kind.OUT_OF_STEP, f"{seen} (its share of step {other + 1})", cause
    if len(found) != len(due):
        seen = f"read {len(found)} samples ({index_words(found)}) where {len(due)} ({index_words(due)}) were due"
        whole = found == batch
        return (
            Kind.SAMPLES,
            seen,
            "the batch is not divided: the rank reads all of it" if whole else "wrong share size",
        )
    if found == batch[mine :: axes.data_parallel()]:
        return Kind.SAMPLES, seen, "samples are dealt out in turn where contiguous blocks were due"
    if len(set(found)) < len(found):
        return Kind.SAMPLES, seen, "samples are read more than once"
    inside = set(found) <= set(batch)
    return (
        Kind.SAMPLES,
        seen,
        "another division of the batch" if inside else "samples from outside the step's batch",
    )


def _owner(found: list[int], batch: list[int], axes: Axes) -> int | None:
    for share in range(axes.data_parallel()):
        if found == share_of(batch, share, axes):
            return share
    return None


def _order(found: list[int], due: list[int], num_microbatches: int) -> str:
    size = len(due) // num_microbatches
    blocks = [due[at : at + size] for at in range(0, len(due), size)] if size else []
    if num_microbatches > 1 and all(found[at : at + size] in blocks for at in range(0, len(due), size)):
        return "its own samples, with micro-batches in another order"
    if found == due[::-1]:
        return "its own samples, backwards"
    return "its own samples, in another order"
