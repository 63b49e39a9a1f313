"""Compare what the scripts set: trained and optimized parameters, tied weights and learning rates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.prove.compare.result import Diagnosis, FaultKind
from meshwright.prove.diagnose.phrases import number_words, rank_words
from meshwright.prove.report import ReportedFinding
from meshwright.prove.script.evidence import ScriptEvidence
from meshwright.units import counted, first_words

MAX_NAMES = 3
LEARNING_RATE = 1e-6
"""Relative difference of learning rates that are the same."""


def diagnose_settings(layout: ScriptEvidence, reference: ScriptEvidence) -> Iterator[ReportedFinding]:
    """Yield a finding for each setting that differs from the reference."""
    yield from _flags(layout, reference)
    yield from _tied(layout, reference)
    yield from _learning_rates(layout, reference)
    yield from _options(layout, reference)


def diagnose_optimizer(reference: ScriptEvidence) -> Iterator[ReportedFinding]:
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


def _flags(layout: ScriptEvidence, reference: ScriptEvidence) -> Iterator[ReportedFinding]:
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


def _tied(layout: ScriptEvidence, reference: ScriptEvidence) -> Iterator[ReportedFinding]:
    names = untied(layout, reference)
    if names:
        cause = "weights are not tied after sharding: tie them again, before the optimizer is made"
        yield _finding("tied weights", FaultKind.CONTRIBUTIONS, f"{names_text(names)} do not share one tensor", cause)


def _learning_rates(layout: ScriptEvidence, reference: ScriptEvidence) -> Iterator[ReportedFinding]:
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


def _options(layout: ScriptEvidence, reference: ScriptEvidence) -> Iterator[ReportedFinding]:
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


def _finding(about: str, kind: FaultKind, symptom: str, cause: str, detail: str = "") -> ReportedFinding:
    return ReportedFinding(about, Diagnosis(kind, symptom, cause, detail))
