"""Compare what scripts set: trained and optimized parameters, tied weights, learning rates, optimizers' options."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from meshwright.prove.judge.counts import close
from meshwright.prove.result import Diagnosis, FaultKind, Finding, number_words, rank_words
from meshwright.prove.script.evidence import ScriptEvidence
from meshwright.prove.script.recorder import ScriptRecord
from meshwright.units import counted, first_words

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
