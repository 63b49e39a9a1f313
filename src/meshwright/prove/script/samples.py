"""What scripts read and set: samples, which are compared as a set for the global batch, since ranks may split it in any
way; trained and optimized parameters, tied weights, learning rates, and optimizers' options."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from meshwright.prove.judge.tensors import close
from meshwright.prove.result import Diagnosis, FaultKind, Finding, number_words, rank_words
from meshwright.prove.script.evidence import ScriptEvidence
from meshwright.prove.script.recorder import ScriptRecord
from meshwright.units import counted, first_words, join_words

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


MAX_NAMES = 3
SAME = 1e-6
"""Relative difference of options, such as learning rates, that are the same."""
FROZEN = "frozen by mistake: requires_grad is False, and True in the reference"
UNTIED = "weights are not tied after sharding: tie them again, before the optimizer is made"
RENUMBERED = "the two sides do not hold the same parameters: a stage that renumbers its layers needs names="
LEFT_OUT = "no stage holds them, and none renumbers its layers: stages leave out layers, such as those at a border"


def diagnose_settings(layout: ScriptEvidence, reference: ScriptEvidence) -> Iterator[Finding]:
    """Yield a finding for each setting that differs from the reference."""
    for about, of, flag, kind, what, cause in (
        ("frozen", "trainable", False, FaultKind.NOT_UPDATED, "", FROZEN),
        ("trained", "trainable", True, FaultKind.STEP_SCALED, "", "frozen in the reference, but not here"),
        ("optimizer", "optimized", False, FaultKind.NOT_UPDATED, "lacks ", _not_held(layout)),
    ):
        due = _merged(reference, of)
        names = [name for name, found in _merged(layout, of).items() if found == flag != due.get(name, flag)]
        if names:
            yield Finding(about, Diagnosis(kind, what + names_text(names), cause))
    if names := untied(layout, reference):
        symptom = f"{names_text(names)} do not share one tensor"
        yield Finding("tied weights", Diagnosis(FaultKind.CONTRIBUTIONS, symptom, UNTIED))
    yield from _options(layout, reference)


def diagnose_optimizer(reference: ScriptEvidence) -> Iterator[Finding]:
    """Yield a finding if the optimizer holds other tensors than the model's parameters, whatever the layout."""
    lost = _not_optimized(reference)
    if lost and any(record.num_foreign for record in reference.ranks):
        yield Finding("optimizer", Diagnosis(FaultKind.NOT_UPDATED, f"lacks {names_text(lost)}", _not_held(reference)))


def notes_on_settings(reference: ScriptEvidence, layouts: Sequence[ScriptEvidence]) -> Iterator[str]:
    """Yield remarks on what all layouts have in common, where comparing them can't find a fault."""
    frozen = [name for name, flag in _merged(reference, "trainable").items() if not flag]
    if frozen:
        yield f"frozen on every layout (requires_grad is False): {names_text(frozen)}"
    if lost := _not_optimized(reference):
        yield f"not in the optimizer on any layout, so never updated: {names_text(lost)}"
    micro = reference.num_microbatches
    if micro > 1 and all(layout.num_microbatches == micro for layout in layouts):
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
    for group in reference.tied:
        for record in layout.ranks:
            held = [name for name in group if name in record.shapes]
            if len(held) > 1 and not any(set(held) <= set(other) for other in record.tied):
                names += [name for name in held if name not in names]
    return names


def other_parameters(layout: ScriptEvidence, reference: ScriptEvidence) -> Iterator[Finding]:
    """Yield a finding for parameters that only one side has, or in another shape."""
    expected, found = reference.shapes, layout.shapes
    extra = [name for name in found if name not in expected]
    only_lacks = layout.axes.pp > 1 and not extra and all(len(stages) == 1 for stages in layout.holders.values())
    for what, names, cause in (
        (
            "in the reference but not in the layout",
            [name for name in expected if name not in found],
            LEFT_OUT if only_lacks else RENUMBERED,
        ),
        ("in the layout but not in the reference", extra, RENUMBERED),
        ("of another shape", [name for name in found if expected.get(name, found[name]) != found[name]], RENUMBERED),
    ):
        if names:
            yield Finding("parameters", Diagnosis(FaultKind.EVIDENCE, f"{what}: {names_text(names)}", cause))


def _merged(evidence: ScriptEvidence, field: str) -> dict[str, bool]:
    """Return a flag per parameter that holds on every rank that has it."""
    merged: dict[str, bool] = {}
    for record in evidence.ranks:
        for name, flag in getattr(record, field).items():
            merged[name] = merged.get(name, True) and flag
    return merged


def _not_optimized(evidence: ScriptEvidence) -> list[str]:
    trainable = _merged(evidence, "trainable")
    return [name for name, flag in _merged(evidence, "optimized").items() if not flag and trainable[name]]


def _not_held(evidence: ScriptEvidence) -> str:
    num_foreign = max(record.num_foreign for record in evidence.ranks)
    what = f"which holds {counted(num_foreign, 'tensor')} that the model lacks: make it after sharding or wrapping it"
    return f"not in the optimizer, {what}" if num_foreign else "not in the optimizer"


def _options(layout: ScriptEvidence, reference: ScriptEvidence) -> Iterator[Finding]:
    """Yield the first difference of each option of the optimizer, such as the learning rate."""
    told, expected = set[str](), _by_option(reference.ranks[0])
    for rank, record in enumerate(layout.ranks):
        for (group, key), found in _by_option(record).items():
            due = expected.get((group, key), found)
            at = next((at for at, pair in enumerate(zip(found, due, strict=False)) if not _are_close(*pair)), None)
            if at is None or key in told:
                continue
            told.add(key)
            numbers, wanted = (", ".join(f"{one:.6g}" for one in values[at]) for values in (found, due))
            symptom = f"{numbers} in step {at + 1} on {rank_words([rank])}, {wanted} in the reference"
            if key != "lr":
                cause, detail = f"another {key}", f"in group {group}"
                yield Finding("optimizer", Diagnosis(FaultKind.STEP_SCALED, f"{key} is {symptom}", cause, detail))
                continue
            factor = found[at][0] / due[at][0] if due[at][0] else 0.0
            sizes = {layout.axes.num_ranks(): "processes", layout.axes.data_parallel(): "data-parallel ranks"}
            of = next((what for size, what in sizes.items() if close(factor, size, SAME)), "")
            cause = f"the learning rate is multiplied by the number of {of}" if of else ""
            cause = cause or _schedule_cause(layout, *([one for (one,) in values] for values in (found, due)))
            detail = f"{number_words(factor)} × the reference, in parameter group {group}"
            different = Diagnosis(FaultKind.STEP_SCALED, symptom, cause or "another learning rate", detail)
            yield Finding("learning rate", different)


def _by_option(record: ScriptRecord) -> dict[tuple[int, str], list[list[float]]]:
    """Return what each option of each parameter group is in the steps in which it was recorded."""
    found: dict[tuple[int, str], list[list[float]]] = defaultdict(list)
    for step in record.steps:
        for group, options in enumerate(step["options"]):
            for key, numbers in options.items():
                found[group, key].append(numbers)
    return found


def _are_close(found: list[float], due: list[float]) -> bool:
    return len(found) == len(due) and all(close(a, b, SAME) for a, b in zip(found, due, strict=True))


def _schedule_cause(layout: ScriptEvidence, found: list[float], expected: list[float]) -> str:
    """Recognise a schedule that runs ahead: its rates are those of later steps of the reference."""
    matches = [[other for other, due in enumerate(expected) if close(rate, due, SAME)] for rate in found]
    known = {step: others[0] for step, others in enumerate(matches) if len(others) == 1}
    late = [(step, other) for step, other in known.items() if other > step]
    if not late:
        return ""
    step, other = late[0]
    micro, processes = layout.num_microbatches, layout.axes.num_ranks()
    text = f"the schedule is ahead: the rate of step {step + 1} is that of step {other + 1} of the reference"
    # A schedule that steps in each micro-batch is ahead by all but the last when the gradients are complete.
    if step == 0:
        return f"{text}, as if it stepped in each micro-batch" if micro > 1 and other == micro - 1 else text
    speed = other / step if known.get(0) == 0 else 0.0
    if speed == processes > 1:
        return f"{text}, as if it stepped once per process, as one prepared by accelerate does"
    return f"{text}, as if it stepped {speed:g} times per step" if speed > 1.0 else text
