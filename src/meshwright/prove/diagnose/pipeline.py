"""What wrong gradients say of a pipeline: the stages that a fault is confined to, and the actions that can do that.

A stage's gradients need its own backward and everything behind it. So a micro-batch that is missing on the first
stages only got lost on the way to them; missing on one stage in the middle it is that stage's own; and where only
matrices miss it, their put-off product.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from meshwright.prove.compare.result import Diagnosis, FaultKind
from meshwright.prove.compare.tensor_verdict import TensorVerdicts
from meshwright.prove.diagnose.factors import close
from meshwright.prove.diagnose.phrases import EVERYWHERE, join_words
from meshwright.prove.stage_placement import StagePlacement

LOCATED = (
    FaultKind.CONTRIBUTIONS,
    FaultKind.SUM_MISSING,
    FaultKind.SCALED,
    FaultKind.ZERO,
    FaultKind.NON_FINITE,
    FaultKind.UNRECOGNISED,
)
"""Findings of which it helps to know the stage."""


def locate_stages(verdicts: TensorVerdicts, stages: StagePlacement | None) -> TensorVerdicts:
    """The findings on gradients, with the stages they are confined to and what of a pipeline does that."""
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
                rule = f"the gradients of a shared parameter are due, summed, on {stages.describe(shared)}"
                cause = f"{_copy_cause(found, len(shared), stages)}; {rule}"
                result[name] = verdicts[name].with_diagnosis(replace(found, cause=cause))
            elif len(where) < len(stages.ranks):
                cause = _cause(found, names, where, verdicts, stages) or _with_stages(
                    found.cause, stages.describe(where)
                )
                symptom = _with_stages(
                    found.symptom, stages.describe(where), always=cause == found.cause or bool(found.microbatches)
                )
                result[name] = verdicts[name].with_diagnosis(replace(found, symptom=symptom, cause=cause))
    return result


def _copy_cause(found: Diagnosis, num_copies: int, stages: StagePlacement) -> str:
    """The cause, where a factor is that of the copies and not of the ranks."""
    if found.factor is not None and num_copies != stages.num_ranks:
        if close(found.factor, num_copies):
            return f"added up twice over its {num_copies} copies"
        if close(found.factor, 1 / num_copies):
            return f"averaged over its {num_copies} copies where a sum was due"
    return found.cause


def _with_stages(text: str, where: str, *, always: bool = False) -> str:
    if text.endswith(EVERYWHERE):
        return f"{text.removesuffix(EVERYWHERE)}on {where}"
    return f"{text} on {where}" if always else text


def _cause(
    found: Diagnosis, names: list[str], where: tuple[int, ...], verdicts: TensorVerdicts, stages: StagePlacement
) -> str:
    """What leaves a micro-batch out on some stages, or counts it more than once; empty when it is something else."""
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
        return f"the put-off weight gradients: {_actions('W', top, numbers)} {fault}"
    backward = _actions("I" if stages.splits_backward else "B", top, numbers)
    if not found.is_missing:
        return f"{backward} ran twice, or what it adds to was not empty before"
    if where != tuple(range(top + 1)):
        return f"{backward} did not run, or its gradients of weights are left out of the sum"
    lost = f"{backward} did not run" if top == 0 else f"{backward} did not run or gave nothing"
    return f"{lost}, or its gradient did not get from stage {top + 1} to stage {top}"


def _actions(kind: str, stage: int, microbatches: tuple[int, ...]) -> str:
    return join_words([f"{stage}{kind}{m}" for m in microbatches])
