"""Causes of wrong samples: those of each step are compared as a set for the global batch, since ranks may split it in
any way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from meshwright.prove.result import Diagnosis, FaultKind, rank_words
from meshwright.prove.script.evidence import ScriptEvidence
from meshwright.units import counted, join_words

SET_EPOCH = "every epoch has the same order: DistributedSampler.set_epoch(epoch) is not called"
PRODUCT = "micro-batch × accumulation steps × data-parallel processes must be the same"
Batch = Counter[str]


def diagnose_batches(layout: ScriptEvidence, reference: ScriptEvidence) -> Diagnosis | None:
    """Return the likely cause if a step's global batch is not that of the reference."""
    expected, found = ([one.batch(step + 1) for step in range(one.num_steps)] for one in (reference, layout))
    wrong = [step for step, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
    wrong = [step for step in wrong if _by_content(layout, step) != expected[step]]
    split = _split_groups(layout, set().union(*expected))
    if split is not None or not wrong:
        return split
    symptom, cause = _classify(layout, wrong[0], found, expected)
    steps = join_words([str(step + 1) for step in wrong])
    return Diagnosis(FaultKind.SAMPLES, symptom, cause, f"in {counted(len(wrong), 'step')}: {steps}")


def diagnose_epochs(evidence: ScriptEvidence) -> Diagnosis | None:
    """Return the cause if samples come in the same order in every epoch although a sampler shuffles them."""
    record = next(record for record in evidence.ranks if record.steps[0]["samples"])
    pair = _repetition([step["samples"] for step in record.steps])
    if pair is None or not any(record.fixed_samplers for record in evidence.ranks):
        return None
    symptom = f"step {pair[1] + 1} reads the samples of step {pair[0] + 1} again, in the same order"
    return Diagnosis(FaultKind.SAMPLES, symptom, SET_EPOCH)


def _repetition(steps: Sequence[list[str]]) -> tuple[int, int] | None:
    """Return two steps with the same samples in the same order, unless all steps have the same samples."""
    if all(sorted(step) == sorted(steps[0]) for step in steps):
        return None
    return next(((a, b) for b in range(len(steps)) for a in range(b) if steps[a] == steps[b] and steps[a]), None)


def _by_content(evidence: ScriptEvidence, step: int) -> Batch:
    """Return the samples of a step's global batch if ranks that read the same are not data parallel."""
    distinct = {tuple(sorted(samples)) for samples in evidence.series("samples", step + 1)}
    return Counter(sample for samples in distinct for sample in samples)


def _split_groups(layout: ScriptEvidence, known: set[str]) -> Diagnosis | None:
    """Diagnose ranks of the same data-parallel index, such as those along tp, that read different samples."""
    first: dict[int, int] = {}
    read = layout.series("samples", 1)
    for rank, samples in enumerate(read):
        other = first.setdefault(layout.axes.data_index(rank), rank) if samples else rank
        if samples == read[other]:
            continue
        cause = "their data differ: another seed or order on each rank"
        if known.issuperset(samples):
            cause = "they read the same data in other orders: another seed of the sampler on each rank"
            if not set(samples) & set(read[other]):
                cause = (
                    "the sampler splits over all processes: give it the rank and size of the data-parallel mesh only"
                )
        symptom = f"{rank_words((other, rank))} are not data parallel to each other, but read different samples"
        return Diagnosis(FaultKind.SAMPLES, symptom, cause)
    return None


def _classify(layout: ScriptEvidence, at: int, found: list[Batch], expected: list[Batch]) -> tuple[str, str]:
    """Return the symptom and the cause of a step's wrong global batch."""
    missing, num_found, num_due = expected[at] - found[at], found[at].total(), expected[at].total()
    same, step = _same_readers(layout, at), f"step {at + 1}"
    absent = f"{missing.total()} of {counted(num_due, 'sample')} of {step} are read by no rank"
    not_given = "the same data on several ranks{}: the sampler is not given the rank and the number of processes"
    if same and missing:
        cause = not_given.format("") + " (accelerate does so for a loader in prepare())"
        return f"{rank_words(same)} read the same samples, and {absent}", cause
    earlier = [step for step in range(at) if found[step] == found[at]]
    if earlier and _repetition([sorted(one.elements()) for one in found]):
        return f"{step} reads the samples of step {earlier[0] + 1} again", SET_EPOCH
    if same:
        symptom = f"{rank_words(same)} read the same samples: {num_found} instead of {num_due}"
        return symptom, not_given.format(f", each sample {num_found / max(1, num_due):g} times")
    if at == 0 and (joined := _steps_that_form(found, expected)) is not None:
        return joined
    if num_found != num_due:
        symptom = f"{step} reads {counted(num_found, 'sample')}, {num_due} in the reference"
        return symptom, f"another global batch: {PRODUCT}"
    if found[at] in expected:
        away = expected.index(found[at]) - at
        symptom = f"{step} reads the samples of step {at + away + 1} of the reference"
        return symptom, f"the data is {counted(abs(away), 'step')} {'behind' if away < 0 else 'ahead'}"
    if (shared := _read_by_several(layout, expected)) is not None:
        cause = "each rank shuffles the data in an order of its own (another seed), instead of reading its part of one"
        return f"{absent}; {shared}", cause
    extra = found[at] - expected[at]
    places = (
        (rank, row, one) for rank, read in enumerate(layout.series("samples", at + 1)) for row, one in enumerate(read)
    )
    place = next((f"sample {row} of rank {rank}" for rank, row, one in places if one in extra), "a sample")
    return f"{absent}; {place} is not in the reference's batch", "another seed, order or shard of the data"


def _steps_that_form(found: list[Batch], expected: list[Batch]) -> tuple[str, str] | None:
    """Recognise batches that are cut or joined: several steps of one side have the samples of one of the other."""
    symptom = f"step 1 reads {found[0].total()} samples, {expected[0].total()} in the reference"
    for steps in range(2, len(found) + 1):
        times = f"another global batch, {steps} times too"
        if sum(found[:steps], Batch()) == expected[0]:
            cause = f"{times} small: {PRODUCT}, and the optimizer may step only once in it"
            return f"{symptom}, whose step 1 has those of steps 1 to {steps}", cause
        if sum(expected[:steps], Batch()) == found[0]:
            return f"{symptom}: those of its steps 1 to {steps}", f"{times} large: {PRODUCT}"
    return None


def _read_by_several(layout: ScriptEvidence, expected: list[Batch]) -> str | None:
    """Describe samples that several data-parallel ranks read in the steps in which the reference reads none twice."""
    known = Counter(set().union(*expected))
    steps = max(count for count in range(len(expected) + 1) if not sum(expected[:count], Batch()) - known)
    readers: dict[str, int] = {}
    shared: Counter[tuple[int, int]] = Counter()
    for rank, record in enumerate(layout.ranks):
        for sample in known.keys() & {sample for step in record.steps[:steps] for sample in step["samples"]}:
            other = readers.setdefault(sample, rank)
            if layout.axes.data_index(other) != layout.axes.data_index(rank):
                shared[other, rank] += 1
    (ranks, count), *_ = shared.most_common(1) or [((0, 0), 0)]
    # A single one may be an exchanged sample, or fill up the last batch.
    return f"{rank_words(ranks)} both read {count} of the others" if count > 1 else None


def _same_readers(layout: ScriptEvidence, at: int) -> list[int]:
    """Return the ranks of different data-parallel indices that read the same samples as another."""
    readers: dict[tuple[str, ...], list[int]] = {}
    for rank, samples in enumerate(layout.series("samples", at + 1)):
        if samples:
            readers.setdefault(tuple(sorted(samples)), []).append(rank)
    groups = (ranks for ranks in readers.values() if len({layout.axes.data_index(rank) for rank in ranks}) > 1)
    return next(groups, [])
