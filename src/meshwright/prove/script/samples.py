"""Compare what scripts read and set: samples of each step as a set for the global batch, since ranks may split it in
any way, trained and optimized parameters, tied weights and learning rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from meshwright.prove.result import Diagnosis, FaultKind, Finding, number_words, rank_words
from meshwright.prove.script.evidence import ScriptEvidence
from meshwright.units import counted, first_words, join_words

SET_EPOCH = "every epoch has the same order: DistributedSampler.set_epoch(epoch) is not called"
Batch = Counter[int]


def diagnose_batches(layout: ScriptEvidence, reference: ScriptEvidence) -> Diagnosis | None:
    """Return the likely cause if a step's global batch is not that of the reference."""
    expected = [batch(reference, step) for step in range(reference.run.num_steps)]
    found = [batch(layout, step) for step in range(layout.run.num_steps)]
    wrong = [step for step, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
    wrong = [step for step in wrong if _by_content(layout, step) != expected[step]]
    split = _split_groups(layout, set().union(*expected))
    if split is not None:
        return split
    if not wrong:
        return None
    at = wrong[0]
    symptom, cause = _classify(layout, at, found, expected)
    steps = join_words([str(step + 1) for step in wrong])
    return Diagnosis(FaultKind.SAMPLES, symptom, cause, f"in {counted(len(wrong), 'step')}: {steps}")


def diagnose_epochs(evidence: ScriptEvidence) -> Diagnosis | None:
    """Return the cause if samples come in the same order in every epoch although a sampler shuffles them."""
    record = next(record for record in evidence.records if record.samples[0])
    pair = _repetition(record.samples)
    if pair is None or not any(record.fixed_samplers for record in evidence.records):
        return None
    symptom = f"step {pair[1] + 1} reads the samples of step {pair[0] + 1} again, in the same order"
    return Diagnosis(FaultKind.SAMPLES, symptom, SET_EPOCH)


def _repetition(steps: Sequence[list[int]]) -> tuple[int, int] | None:
    """Return two steps with the same samples in the same order, unless all steps have the same samples."""
    if all(sorted(step) == sorted(steps[0]) for step in steps):
        return None
    return next(((a, b) for b in range(len(steps)) for a in range(b) if steps[a] == steps[b] and steps[a]), None)


def batch(evidence: ScriptEvidence, step: int) -> Batch:
    """Return the samples of a step's global batch: those of one reading rank per data-parallel index."""
    total: Batch = Counter()
    done = set()
    for rank, record in enumerate(evidence.records):
        index = evidence.mesh.axes.data_index(rank)
        if record.samples[step] and index not in done:
            done.add(index)
            total.update(record.samples[step])
    return total


def _by_content(evidence: ScriptEvidence, step: int) -> Batch:
    """Return the samples of a step's global batch if ranks that read the same are not data parallel."""
    distinct = {tuple(sorted(record.samples[step])) for record in evidence.records}
    return Counter(sample for samples in distinct for sample in samples)


def _split_groups(layout: ScriptEvidence, known: set[int]) -> Diagnosis | None:
    """Diagnose ranks of the same data-parallel index, such as those along tp, that read different samples."""
    first: dict[int, int] = {}
    for rank, record in enumerate(layout.records):
        if not record.samples[0]:
            continue
        other = first.setdefault(layout.mesh.axes.data_index(rank), rank)
        if record.samples[0] != layout.records[other].samples[0]:
            symptom = f"{rank_words((other, rank))} are not data parallel to each other, but read different samples"
            theirs, ours = set(layout.records[other].samples[0]), set(record.samples[0])
            if ours <= known and not ours & theirs:
                cause = (
                    "the sampler splits over all processes: give it the rank and size of the data-parallel mesh only"
                )
            elif ours <= known:
                cause = "they read the same data in other orders: another seed of the sampler on each rank"
            else:
                cause = "their data differ: another seed or order on each rank"
            return Diagnosis(FaultKind.SAMPLES, symptom, cause)
    return None


def _classify(layout: ScriptEvidence, at: int, found: list[Batch], expected: list[Batch]) -> tuple[str, str]:
    """Return the symptom and the cause of a step's wrong global batch."""
    missing, extra = expected[at] - found[at], found[at] - expected[at]
    same = _same_readers(layout, at)
    absent = f"{missing.total()} of {counted(expected[at].total(), 'sample')} of step {at + 1} are read by no rank"
    if same and missing:
        cause = (
            "the same data on several ranks: the sampler is not given the rank and the number of processes (accelerate "
            "does so for a loader in prepare())"
        )
        return f"{rank_words(same)} read the same samples, and {absent}", cause
    earlier = [step for step in range(at) if found[step] == found[at]]
    if earlier and _repetition([sorted(one.elements()) for one in found]):
        return f"step {at + 1} reads the samples of step {earlier[0] + 1} again", SET_EPOCH
    if same:
        times = found[at].total() / max(1, expected[at].total())
        symptom = f"{rank_words(same)} read the same samples: {found[at].total()} instead of {expected[at].total()}"
        return (
            symptom,
            f"the same data on several ranks, each sample {times:g} times: the sampler is not given the rank",
        )
    if (steps := _steps_that_form(found, expected, at)) is not None:
        return steps
    if found[at].total() != expected[at].total():
        symptom = f"step {at + 1} reads {counted(found[at].total(), 'sample')}, {expected[at].total()} in the reference"
        cause = "another global batch: micro-batch × accumulation steps × data-parallel processes must be the same"
        return symptom, cause
    for step, other in enumerate(expected):
        if step != at and found[at] == other:
            away = counted(abs(step - at), "step")
            return (
                f"step {at + 1} reads the samples of step {step + 1} of the reference",
                f"the data is {away} {'behind' if step < at else 'ahead'}",
            )
    if (shared := _read_by_several(layout, expected)) is not None:
        cause = "each rank shuffles the data in an order of its own (another seed), instead of reading its part of one"
        return f"{absent}; {shared}", cause
    place = _first_place(layout, at, extra)
    return f"{absent}; {place} is not in the reference's batch", "another seed, order or shard of the data"


def _steps_that_form(found: list[Batch], expected: list[Batch], at: int) -> tuple[str, str] | None:
    """Recognise batches that are cut or joined: several steps of one side have the samples of one of the other."""
    if at != 0:
        return None
    product = "micro-batch × accumulation steps × data-parallel processes must be the same"
    for steps in range(2, len(found) + 1):
        if sum(found[:steps], Batch()) == expected[0]:
            symptom = f"step 1 reads {found[0].total()} samples, {expected[0].total()} in the reference"
            symptom += f", whose step 1 has those of steps 1 to {steps}"
            cause = (
                f"another global batch, {steps} times too small: {product}, and the optimizer may step only once in it"
            )
            return symptom, cause
        if sum(expected[:steps], Batch()) == found[0]:
            symptom = f"step 1 reads {found[0].total()} samples, {expected[0].total()} in the reference: "
            symptom += f"those of its steps 1 to {steps}"
            return symptom, f"another global batch, {steps} times too large: {product}"
    return None


def _read_by_several(layout: ScriptEvidence, expected: list[Batch]) -> str | None:
    """Describe samples that several data-parallel ranks read in the steps in which the reference reads none twice."""
    known = Counter(set().union(*expected))
    steps = max(count for count in range(len(expected) + 1) if not sum(expected[:count], Batch()) - known)
    readers: dict[int, int] = {}
    shared: Counter[tuple[int, int]] = Counter()
    for rank, record in enumerate(layout.records):
        for sample in known.keys() & {sample for step in record.samples[:steps] for sample in step}:
            other = readers.setdefault(sample, rank)
            if layout.mesh.axes.data_index(other) != layout.mesh.axes.data_index(rank):
                shared[other, rank] += 1
    (ranks, count), *_ = shared.most_common(1) or [((0, 0), 0)]
    # A single one may be an exchanged sample, or fill up the last batch.
    return f"{rank_words(ranks)} both read {count} of the others" if count > 1 else None


def _same_readers(layout: ScriptEvidence, at: int) -> list[int]:
    """Return the ranks of different data-parallel indices that read the same samples as another."""
    readers: dict[tuple[int, ...], list[int]] = {}
    for rank, record in enumerate(layout.records):
        if record.samples[at]:
            readers.setdefault(tuple(sorted(record.samples[at])), []).append(rank)
    groups = [ranks for ranks in readers.values() if len({layout.mesh.axes.data_index(rank) for rank in ranks}) > 1]
    return groups[0] if groups else []


def _first_place(layout: ScriptEvidence, at: int, extra: Batch) -> str:
    for rank, record in enumerate(layout.records):
        for row, sample in enumerate(record.samples[at]):
            if sample in extra:
                return f"sample {row} of rank {rank}"
    return "a sample"


MAX_NAMES = 3
LEARNING_RATE = 1e-6
"""Relative difference of learning rates that are the same."""


def diagnose_settings(layout: ScriptEvidence, reference: ScriptEvidence) -> Iterator[Finding]:
    """Yield a finding for each setting that differs from the reference."""
    yield from _flags(layout, reference)
    yield from _tied(layout, reference)
    yield from _learning_rates(layout, reference)
    yield from _options(layout, reference)


def diagnose_optimizer(reference: ScriptEvidence) -> Iterator[Finding]:
    """Yield a finding if the optimizer holds other tensors than the model's parameters, whatever the layout."""
    lost, foreign = _not_optimized(reference), max(record.num_foreign for record in reference.records)
    if lost and foreign:
        yield _finding("optimizer", FaultKind.NOT_UPDATED, f"lacks {names_text(lost)}", _foreign_cause(foreign))


def notes_on_settings(reference: ScriptEvidence, layouts: Sequence[ScriptEvidence]) -> Iterator[str]:
    """Yield remarks on what all layouts have in common, where comparing them can't find a fault."""
    frozen = [name for name, flag in _merged(reference, "trainable").items() if not flag]
    if frozen:
        yield f"frozen on every layout (requires_grad is False): {names_text(frozen)}"
    lost = _not_optimized(reference)
    if lost:
        yield f"not in the optimizer on any layout, so never updated: {names_text(lost)}"
    micro = reference.microbatches
    if micro > 1 and all(layout.microbatches == micro for layout in layouts):
        yield (
            f"every layout has {micro} micro-batches, so a missing division by their number is not seen: make the "
            "reference take the batch as one"
        )


def names_text(names: list[str]) -> str:
    """Format names; long lists are truncated."""
    return first_words(names, MAX_NAMES)


def untied(layout: ScriptEvidence, reference: ScriptEvidence) -> list[str]:
    """Return the names that share one tensor in the reference, and on a rank of the layout have one each."""
    names = []
    for group in {tuple(group) for record in reference.records for group in record.tied}:
        for record in layout.records:
            held = [name for name in group if name in record.shapes]
            if len(held) > 1 and not any(set(held) <= set(other) for other in record.tied):
                names += [name for name in held if name not in names]
    return names


def _merged(evidence: ScriptEvidence, field: str) -> dict[str, bool]:
    """Return a flag per parameter that holds on every rank that has it."""
    merged: dict[str, bool] = {}
    for record in evidence.records:
        for name, flag in getattr(record, field).items():
            merged[name] = merged.get(name, True) and flag
    return merged


def _flags(layout: ScriptEvidence, reference: ScriptEvidence) -> Iterator[Finding]:
    expected, found = _merged(reference, "trainable"), _merged(layout, "trainable")
    frozen = [name for name, flag in found.items() if not flag and expected.get(name)]
    if frozen:
        cause = "frozen by mistake: requires_grad is False, and True in the reference"
        yield _finding("frozen", FaultKind.NOT_UPDATED, names_text(frozen), cause)
    thawed = [name for name, flag in found.items() if flag and not expected.get(name, True)]
    if thawed:
        yield _finding("trained", FaultKind.STEP_SCALED, names_text(thawed), "frozen in the reference, but not here")
    expected, found = _merged(reference, "optimized"), _merged(layout, "optimized")
    lost = [name for name, flag in found.items() if not flag and expected.get(name)]
    if lost:
        foreign = max(record.num_foreign for record in layout.records)
        cause = _foreign_cause(foreign) if foreign else "not in the optimizer"
        yield _finding("optimizer", FaultKind.NOT_UPDATED, f"lacks {names_text(lost)}", cause)


def _not_optimized(evidence: ScriptEvidence) -> list[str]:
    trainable = _merged(evidence, "trainable")
    return [name for name, flag in _merged(evidence, "optimized").items() if not flag and trainable[name]]


def _foreign_cause(num_tensors: int) -> str:
    what = counted(num_tensors, "tensor")
    return (
        f"not in the optimizer, which holds {what} that the model lacks: make it after sharding or wrapping the model"
    )


def _tied(layout: ScriptEvidence, reference: ScriptEvidence) -> Iterator[Finding]:
    names = untied(layout, reference)
    if names:
        cause = "weights are not tied after sharding: tie them again, before the optimizer is made"
        yield _finding("tied weights", FaultKind.CONTRIBUTIONS, f"{names_text(names)} do not share one tensor", cause)


def _learning_rates(layout: ScriptEvidence, reference: ScriptEvidence) -> Iterator[Finding]:
    expected = reference.records[0].learning_rates
    for rank, record in enumerate(layout.records):
        for step, (rates, due) in enumerate(zip(record.learning_rates, expected, strict=False)):
            for group, (rate, wanted) in enumerate(zip(rates, due, strict=False)):
                if abs(rate - wanted) <= LEARNING_RATE * abs(wanted):
                    continue
                factor, sizes = rate / wanted if wanted else 0.0, {layout.mesh.axes.num_ranks(): "processes"}
                sizes |= {layout.mesh.axes.data_parallel(): "data-parallel ranks"}
                of = next((what for size, what in sizes.items() if abs(factor - size) <= LEARNING_RATE * size), "")
                cause = f"the learning rate is multiplied by the number of {of}" if of else ""
                cause = cause or _schedule_cause(layout, record.learning_rates, expected, group)
                cause = cause or "another learning rate"
                symptom = f"{rate:.6g} in step {step + 1} on {rank_words([rank])}, {wanted:.6g} in the reference"
                detail = f"{number_words(factor)} × the reference, in parameter group {group}"
                yield _finding("learning rate", FaultKind.STEP_SCALED, symptom, cause, detail)
                return


def _schedule_cause(layout: ScriptEvidence, found: list[list[float]], expected: list[list[float]], group: int) -> str:
    """Recognise a schedule that runs ahead: its rates are those of later steps of the reference."""
    due = [rates[group] for rates in expected]
    ahead = []
    for step, rates in enumerate(found):
        matches = [other for other, rate in enumerate(due) if abs(rates[group] - rate) <= LEARNING_RATE * abs(rate)]
        if len(matches) == 1:
            ahead.append((step, matches[0]))
    late = [(step, other) for step, other in ahead if other > step]
    if not late:
        return ""
    step, other = late[0]
    micro, processes = layout.microbatches, layout.mesh.axes.num_ranks()
    text = f"the schedule is ahead: the rate of step {step + 1} is that of step {other + 1} of the reference"
    # A schedule that steps in each micro-batch is ahead by all but the last when the gradients are complete.
    if step == 0:
        return f"{text}, as if it stepped in each micro-batch" if micro > 1 and other == micro - 1 else text
    speed = other / step if (0, 0) in ahead else 0.0
    if speed == processes > 1:
        return f"{text}, as if it stepped once per process, as one prepared by accelerate does"
    return f"{text}, as if it stepped {speed:g} times per step" if speed > 1.0 else text


def _options(layout: ScriptEvidence, reference: ScriptEvidence) -> Iterator[Finding]:
    expected = reference.records[0].options
    for rank, record in enumerate(layout.records):
        for group, (options, due) in enumerate(zip(record.options, expected, strict=False)):
            for key, wanted in due.items():
                if key in options and options[key] != wanted:
                    found, right = (
                        ", ".join(f"{number:g}" for number in numbers) for numbers in (options[key], wanted)
                    )
                    symptom = f"{key} is {found} on {rank_words([rank])}, {right} in the reference"
                    yield _finding("optimizer", FaultKind.STEP_SCALED, symptom, f"another {key}", f"in group {group}")
                    return


def _finding(about: str, kind: FaultKind, symptom: str, cause: str, detail: str = "") -> Finding:
    return Finding(about, Diagnosis(kind, symptom, cause, detail))
