"""What wrong gradients say of a pipeline: the stages that a fault is confined to, and the actions that can do that.

A stage's gradients need its own backward and everything behind it. So a micro-batch that is missing on the first
stages only got lost on the way to them; missing on one stage in the middle it is that stage's own; and where only
matrices miss it, their put-off product.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from meshwright.prove.compare.result import Diagnosis, Kind
from meshwright.prove.compare.tensor_verdict import ByName
from meshwright.prove.diagnose.factors import close
from meshwright.prove.diagnose.phrases import EVERYWHERE, join_words
from meshwright.prove.stage_placement import Stages

LOCATED = (Kind.PARTS, Kind.SUM_MISSING, Kind.SCALED, Kind.ZERO, Kind.NON_FINITE, Kind.UNRECOGNISED)
"""Findings of which it helps to know the stage."""


def located(weighed: ByName, stages: Stages | None) -> ByName:
    """The findings on gradients, with the stages they are confined to and what of a pipeline does that."""
    if stages is None:
        return weighed
    groups: dict[tuple[Kind, str, str], list[str]] = defaultdict(list)
    for name, one in weighed.items():
        if (found := one.result.diagnosis) is not None and found.kind in LOCATED:
            groups[found.kind, found.seen, found.cause].append(name)
    result = dict(weighed)
    for names in groups.values():
        where = stages.holding(names)
        only_shared = all(len(stages.sharing(name)) > 1 for name in names)
        for name in names:
            found = weighed[name].result.diagnosis
            assert found is not None, "only findings are grouped"
            shared = stages.sharing(name)
            if len(shared) > 1 and (only_shared or "along pp" in found.seen):
                due = f"the gradients of a shared parameter are due, summed, on {stages.words(shared)}"
                cause = f"{_of_copies(found, len(shared), stages)}; {due}"
                result[name] = weighed[name].diagnosed(replace(found, cause=cause))
            elif len(where) < len(stages.ranks):
                cause = _cause(found, names, where, weighed, stages) or _placed(found.cause, stages.words(where))
                seen = _placed(found.seen, stages.words(where), always=cause == found.cause or bool(found.microbatches))
                result[name] = weighed[name].diagnosed(replace(found, seen=seen, cause=cause))
    return result


def _of_copies(found: Diagnosis, num_copies: int, stages: Stages) -> str:
    """The cause, where a factor is that of the copies and not of the ranks."""
    if found.factor is not None and num_copies != stages.num_ranks:
        if close(found.factor, num_copies):
            return f"added up twice over its {num_copies} copies"
        if close(found.factor, 1 / num_copies):
            return f"averaged over its {num_copies} copies where a sum was due"
    return found.cause


def _placed(text: str, where: str, *, always: bool = False) -> str:
    if text.endswith(EVERYWHERE):
        return f"{text.removesuffix(EVERYWHERE)}on {where}"
    return f"{text} on {where}" if always else text


def _cause(found: Diagnosis, names: list[str], where: tuple[int, ...], weighed: ByName, stages: Stages) -> str:
    """What leaves a micro-batch out on some stages, or counts it more than once; empty when it is something else."""
    if not found.microbatches:
        return ""
    own = [name for name in weighed if set(stages.of(name)) <= set(where)]
    right = [name for name in own if weighed[name].result.ok]
    numbers, top = found.microbatches, where[-1]
    if right:
        matrices = all(weighed[name].subject.due.ndim > 1 for name in names)
        if not (stages.splits_backward and matrices and len(where) == 1):
            return ""
        what = "did not run, or not before the reduction" if found.is_lost else "ran more than once"
        return f"the put-off weight gradients: {_actions('W', top, numbers)} {what}"
    backward = _actions("I" if stages.splits_backward else "B", top, numbers)
    if not found.is_lost:
        return f"{backward} ran twice, or what it adds to was not empty before"
    if where != tuple(range(top + 1)):
        return f"{backward} did not run, or its gradients of weights are left out of the sum"
    lost = f"{backward} did not run" if top == 0 else f"{backward} did not run or gave nothing"
    return f"{lost}, or its gradient did not get from stage {top + 1} to stage {top}"


def _actions(kind: str, stage: int, microbatches: tuple[int, ...]) -> str:
    return join_words([f"{stage}{kind}{m}" for m in microbatches])
