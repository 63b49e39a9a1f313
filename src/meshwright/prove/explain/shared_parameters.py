"""Causes of wrong gradients that stages tell: faults in the sum over copies of a shared parameter, and micro-batches
that get lost between stages.

The reference gives each stage's contribution to a shared parameter. On a faulty rank the sum has only its own stages'
contributions, lacks those of another rank, or has contributions of another parameter.

A stage's gradients depend on its own backward pass and those of all later stages. A micro-batch missing only from the
first stages was lost on its way to them. If it is missing from one middle stage, that stage dropped it; if only from
matrices, their deferred weight gradients are at fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from meshwright.prove.explain.contributions import FitProblem, stage_weights
from meshwright.prove.judge.tensors import Array, LocalShard, close, max_difference
from meshwright.prove.judge.verdicts import SuspectTensor, Verdicts
from meshwright.prove.placement import StagePlacement
from meshwright.prove.result import EVERYWHERE, Diagnosis, FaultKind, coordinates, number_words, rank_words, scope_words
from meshwright.units import join_words

MAX_LISTED = 4
Mask = npt.NDArray[np.bool_]
WeightsByPpRank = dict[int, Array]
"""Per pipeline rank: number of times its sum contains each stage's contribution."""


@dataclass(frozen=True, eq=False)
class StageContributions:
    """Contribution of each stage to the gradients of shared parameters."""

    stages: StagePlacement
    find: Callable[[], Mapping[str, Array]]
    """Compute contributions: [stage, *shape] per parameter."""

    @cached_property
    def by_name(self) -> Mapping[str, Array]:
        """Contributions: [stage, *shape] per parameter."""
        return self.find()

    def is_nonzero(self, name: str) -> Mask:
        """Return a mask of the stages whose contribution is nonzero: [stage]."""
        return np.asarray(self.by_name[name].reshape(len(self.stages.ranks), -1).any(axis=1))

    def stages_on_rank(self, name: str, pp: int) -> list[int]:
        """Return the stages on a pipeline rank that share the parameter."""
        return [stage for stage in self.stages.sharing_stages(name) if self.stages.ranks[stage] == pp]


def diagnose_shared(suspect: SuspectTensor, shared: StageContributions | None) -> Diagnosis | None:
    """Diagnose a wrong sum over the copies of a shared parameter."""
    name = suspect.assembly.name
    if shared is None or len(shared.stages.sharing_stages(name)) < 2 or name not in shared.by_name:
        return None
    pools: dict[int, list[LocalShard]] = defaultdict(list)
    for shard in suspect.wrong_shards:
        pools[coordinates(suspect.counts.axes)[shard.rank]["pp"]].append(shard)
    weights = {pp: _weights(suspect, pool, shared.by_name[name]) for pp, pool in sorted(pools.items())}
    known = {pp: found for pp, found in weights.items() if found is not None}
    if len(known) < len(weights):
        return _swapped_keys(suspect, pools, shared)
    scope = scope_words(suspect.wrong_ranks, suspect.informative_ranks, suspect.counts.axes)
    only = "" if scope == EVERYWHERE else f", {scope}"
    own_stages = _local_contributions(suspect, known, shared, only)
    return own_stages or _uniform(name, known, shared, only) or _listed(known, only)


def _weights(suspect: SuspectTensor, pool: list[LocalShard], contributions: Array) -> Array | None:
    """Fit a weight for each stage's contribution, 1 where the contribution is zero: [stage]."""
    values = np.concatenate([shard.value.reshape(-1) for shard in pool])
    inside = np.concatenate(
        [contributions[(slice(None), *shard.slices())].reshape(len(contributions), -1) for shard in pool], axis=1
    )
    some = np.flatnonzero(np.abs(inside).max(axis=1) > 0)
    num_distinct = sum({(shard.start, shard.stop): shard.value.size for shard in pool}.values())
    found = stage_weights(FitProblem(values, inside[some][None], suspect.counts, num_distinct))
    if found is None:
        return None
    weights = np.ones(len(contributions))
    weights[some] = found
    return weights


def _local_contributions(
    suspect: SuspectTensor, weights: WeightsByPpRank, shared: StageContributions, only: str
) -> Diagnosis | None:
    """Diagnose ranks whose sums contain only their own stages' contributions."""
    name = suspect.assembly.name
    is_nonzero = shared.is_nonzero(name)
    own_stages = {pp: shared.stages_on_rank(name, pp) for pp in weights}
    several = any(len(found) > 1 for found in own_stages.values())
    one_rank = len({shared.stages.ranks[stage] for stage in shared.stages.sharing_stages(name)}) == 1
    over = "the chunks of a rank" if one_rank else "pp and over the chunks of a rank"
    for first, what in ((False, "pp"), (True, over)):
        if (first and not several) or (not first and one_rank):
            continue
        held = {pp: stages[:1] if first else stages for pp, stages in own_stages.items()}
        if all(_holds(found, held[pp], is_nonzero) for pp, found in weights.items()):
            symptom = f"each rank holds only the contribution of its own {'first stage' if first else 'stages'}{only}"
            if not only:
                return Diagnosis(FaultKind.SUM_MISSING, symptom, f"the sum over {what} is missing")
            listed = [f"of {shared.stages.describe(held[pp])}" for pp in weights]
            hold = "holds" if len(suspect.wrong_ranks) == 1 else "hold"
            symptom = f"{rank_words(suspect.wrong_ranks)} {hold} only the contribution {join_words(listed)}"
            cause = f"the sum over {what} is missing there: other ranks hold it"
            return Diagnosis(FaultKind.SUM_MISSING, symptom, cause)
    return None


def _holds(weights: Array, held: Iterable[int], is_nonzero: Mask) -> bool:
    """Return whether exactly the contributions of the stages in `held` are present, each once."""
    expected = np.isin(np.arange(len(weights)), list(held))
    return bool(((weights == expected) | ~is_nonzero).all())


def _uniform(name: str, weights: WeightsByPpRank, shared: StageContributions, only: str) -> Diagnosis | None:
    """Diagnose sums that are equal on all ranks but lack or duplicate some stages' contributions."""
    first, stages, is_nonzero = next(iter(weights.values())), shared.stages, shared.is_nonzero(name)
    if any(not np.array_equal(first, other) for other in weights.values()):
        return None
    lost, odd = np.flatnonzero(first == 0).tolist(), np.flatnonzero(first != 1).tolist()
    if lost == odd:
        symptom = f"{_subject(lost, stages)} missing{only}"
        copies = [stage for stage in stages.sharing_stages(name) if is_nonzero[stage]]
        if lost == [stage for stage in copies if stages.ranks[stage] in stages.ranks[:stage]]:
            return Diagnosis(FaultKind.SUM_MISSING, symptom, "the sum over the chunks of a rank is missing")
        if not {stages.ranks[stage] for stage in lost} & {stages.ranks[stage] for stage in copies if stage not in lost}:
            cause = "the contributions of these ranks do not enter the sum over pp"
            return Diagnosis(FaultKind.CONTRIBUTIONS, symptom, cause)
        return Diagnosis(FaultKind.CONTRIBUTIONS, symptom, "the gradients of these copies do not enter the sum")
    extra = np.flatnonzero(first > 1).tolist()
    if extra == odd and len({float(first[stage]) for stage in extra}) == 1:
        times = "twice" if first[extra[0]] == 2 else f"{number_words(float(first[extra[0]]))} times"
        symptom = f"{_subject(extra, stages).removesuffix(' are').removesuffix(' is')} counted {times}{only}"
        return Diagnosis(FaultKind.CONTRIBUTIONS, symptom, "the gradients of these copies enter the sum more than once")
    return None


def _subject(numbers: list[int], stages: StagePlacement) -> str:
    words = stages.describe(numbers)
    return f"the contributions of {words} are" if len(numbers) > 1 else f"the contribution of {words} is"


def _listed(weights: WeightsByPpRank, only: str) -> Diagnosis:
    listed = []
    for pp, found in list(weights.items())[:MAX_LISTED]:
        odd = [f"{number_words(float(found[s]))} × stage {s}'s" for s in np.flatnonzero(found != 1)[:MAX_LISTED]]
        listed.append(f"pp rank {pp}: {', '.join(odd)}")
    symptom = f"stage contributions have wrong weights{only}"
    cause = f"the gradients of the copies are not summed correctly ({'; '.join(listed)})"
    return Diagnosis(FaultKind.CONTRIBUTIONS, symptom, cause)


def _swapped_keys(
    suspect: SuspectTensor, pools: Mapping[int, list[LocalShard]], shared: StageContributions
) -> Diagnosis | None:
    """Diagnose contributions of another shared parameter, e.g. because one rank reduces keys in a different order."""
    own_stages = shared.by_name[suspect.assembly.name]
    for name, other in shared.by_name.items():
        if name == suspect.assembly.name or other.shape != own_stages.shape:
            continue
        for pp in range(shared.stages.num_ranks):
            here = np.array([rank == pp for rank in shared.stages.ranks]).reshape(-1, *[1] * (own_stages.ndim - 1))
            # Sums on the other ranks, then on this one.
            mixtures = [np.where(here, other, own_stages).sum(0), np.where(here, own_stages, other).sum(0)]
            if all(_matches_any(suspect, shard, mixtures) for pool in pools.values() for shard in pool):
                symptom = f"contributions of {name} replace its own {suspect.scope_text()}"
                who = f"pp rank {pp} reduces" if shared.stages.num_ranks > 2 else "pp ranks 0 and 1 reduce"
                than = "in a different order than the others" if shared.stages.num_ranks > 2 else "in different orders"
                return Diagnosis(FaultKind.MISPLACED, symptom, f"{who} the shared parameters {than}")
    return None


def _matches_any(suspect: SuspectTensor, shard: LocalShard, mixtures: list[Array]) -> bool:
    error = max_difference(shard.value, shard.slice_of(suspect.expected))[0]
    return any(suspect.matches(shard.value, shard.slice_of(mix), error) for mix in mixtures)


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
