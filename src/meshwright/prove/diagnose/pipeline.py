"""Locate gradient faults in a pipeline: the affected stages and the actions that can cause the fault.

A stage's gradients depend on its own backward pass and those of all later stages. A micro-batch missing only from the
first stages was lost on its way to them. If it is missing from one middle stage, that stage dropped it; if only from
matrices, their deferred weight gradients are at fault.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from meshwright.prove.compare.result import Diagnosis, FaultKind
from meshwright.prove.compare.tensor_verdict import Verdicts
from meshwright.prove.diagnose.factors import close
from meshwright.prove.diagnose.phrases import EVERYWHERE
from meshwright.prove.placement import StagePlacement
from meshwright.units import join_words

LOCATED = (
    FaultKind.CONTRIBUTIONS,
    FaultKind.SUM_MISSING,
    FaultKind.SCALED,
    FaultKind.ZERO,
    FaultKind.NON_FINITE,
    FaultKind.UNRECOGNISED,
)
"""Fault kinds for which the stage is reported."""


def locate_stages(verdicts: Verdicts, stages: StagePlacement | None) -> Verdicts:
    """Add the affected stages and the suspect actions to gradient diagnoses."""
    if stages is None:
        return verdicts
    groups: dict[tuple[FaultKind, str, str], list[str]] = defaultdict(list)
    for name, verdict in verdicts.items():
        if (found := verdict.result.diagnosis) is not None and found.kind in LOCATED:
            groups[found.kind, found.symptom, found.cause].append(name)
    result = dict(verdicts)
    for names in groups.values():
        where = stages.stages_with_any(names)
        only_shared = all(len(stages.sharing_stages(name)) > 1 for name in names)
        for name in names:
            found = verdicts[name].result.diagnosis
            assert found is not None, "only findings are grouped"
            shared = stages.sharing_stages(name)
            if len(shared) > 1 and (only_shared or "along pp" in found.symptom):
                rule = f"a shared parameter needs the sum of its gradients on {stages.describe(shared)}"
                cause = f"{_copy_cause(found, len(shared), stages)}; {rule}"
                result[name] = verdicts[name].with_diagnosis(replace(found, cause=cause))
            elif len(where) < len(stages.ranks):
                text = stages.describe(where)
                cause = _cause(found, names, where, verdicts, stages) or _with_stages(found.cause, text)
                always = cause == found.cause or bool(found.microbatches)
                symptom = _with_stages(found.symptom, text, always=always)
                result[name] = verdicts[name].with_diagnosis(replace(found, symptom=symptom, cause=cause))
    return result


def _copy_cause(found: Diagnosis, num_copies: int, stages: StagePlacement) -> str:
    """Return the cause if a factor equals the number of copies of a shared parameter."""
    if found.factor is not None and num_copies != stages.num_ranks:
        if close(found.factor, num_copies):
            return f"summed twice over its {num_copies} copies"
        if close(found.factor, 1 / num_copies):
            return f"averaged over its {num_copies} copies instead of summed"
    return found.cause


def _with_stages(text: str, where: str, *, always: bool = False) -> str:
    if text.endswith(EVERYWHERE):
        return f"{text.removesuffix(EVERYWHERE)}on {where}"
    return f"{text} on {where}" if always else text


def _cause(
    found: Diagnosis, names: list[str], where: tuple[int, ...], verdicts: Verdicts, stages: StagePlacement
) -> str:
    """Describe the actions that can lose or duplicate a micro-batch on some stages; empty for other faults."""
    if not found.microbatches:
        return ""
    on_stages = [name for name in verdicts if set(stages.stages_with(name)) <= set(where)]
    right = [name for name in on_stages if verdicts[name].result.ok]
    numbers, top = found.microbatches, where[-1]
    if right:
        matrices = all(verdicts[name].suspect.expected.ndim > 1 for name in names)
        if not (stages.splits_backward and matrices and len(where) == 1):
            return ""
        fault = "did not run, or not before the reduction" if found.is_missing else "ran more than once"
        return f"deferred weight gradients: {_actions('W', top, numbers)} {fault}"
    backward = _actions("I" if stages.splits_backward else "B", top, numbers)
    if not found.is_missing:
        return f"{backward} ran twice, or it accumulates into gradients that were not zeroed"
    if where != tuple(range(top + 1)):
        return f"{backward} did not run, or its weight gradients are left out of the sum"
    lost = f"{backward} did not run" if top == 0 else f"{backward} did not run or produced no gradient"
    return f"{lost}, or its gradient was lost from stage {top + 1} to stage {top}"


def _actions(kind: str, stage: int, microbatches: tuple[int, ...]) -> str:
    return join_words([f"{stage}{kind}{m}" for m in microbatches])
