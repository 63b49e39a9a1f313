"""Causes of wrong gradients that show in what a script recorded between its micro-batches, in its loss, or in which
stages hold a parameter.

Gradients alone show a factor, a missing reduction or a swapped tensor. These causes need more: gradients and weights
between micro-batches, numbers of targets, the loss of step 1, or stages whose layers may overlap or be drawn alike.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from meshwright.prove.explain.explain import missing_gradient
from meshwright.prove.explain.gradients import GradientContext, diagnose_gradient
from meshwright.prove.judge.tensors import Array, LayoutCounts, close, max_magnitude
from meshwright.prove.judge.verdicts import SuspectTensor, Verdicts, expected_of, wrong_names
from meshwright.prove.result import UNKNOWN, Diagnosis, FaultKind, StepValue, rank_words
from meshwright.prove.script.evidence import GRADIENT, ScriptEvidence
from meshwright.prove.script.samples import untied

CLIPPED = 1e-3
"""Relative difference of norms that were clipped to the same limit."""
OVERWRITTEN = "each micro-batch overwrites the gradient of the previous one: accumulation is missing"
CLEARED = "gradients are cleared between micro-batches, before the backward of the last: accumulation is missing"
STEPPED = (
    "the optimizer steps after each micro-batch instead of the last: call it only then, or with accelerate give it to "
    "prepare()"
)
UNEQUAL_COUNTS = (
    "micro-batches weigh alike, whatever their number of targets: divide the sum of their losses by the number of "
    "targets in the global batch"
)
NOT_SUMMED = "the sum over the copies of the tied weight is missing: their gradients sum to the reference"
DIVIDED = "such as a loss that the script divides, and accelerate or the pipeline's schedule too"
OVERLAP = "a layer is in several stages and so applied several times: stages overlap at their border"
OTHER_FORWARD = "the forward pass or the loss function differs: so does the loss of step 1, with the same weights"


def consequence(what: str, follows: str) -> Diagnosis:
    """Return the diagnosis of a value that follows from another finding."""
    return Diagnosis(FaultKind.CONSEQUENCE, what, f"follows from {follows}")


@dataclass(frozen=True, eq=False)
class GradientCauses:
    """Causes of the wrong gradients of step 1, tried from particular to general."""

    layout: ScriptEvidence
    reference: ScriptEvidence
    verdicts: Verdicts
    counts: LayoutCounts
    before: str
    """Earlier fault that makes gradients wrong, or an empty string."""
    loss: StepValue
    """Loss of step 1, with its diagnosis if it is wrong."""

    def explained(self) -> Verdicts:
        """Return the verdicts with a cause for each wrong gradient."""
        wrong = wrong_names(self.verdicts)
        found = {name: self._own(name) for name in wrong}
        if not self.before and (stepped := self._stepped_between()) is not None:
            found = dict.fromkeys(wrong, stepped)
        found = {name: self._of_unknown(name, one, found) for name, one in found.items()}
        return {n: one.with_diagnosis(found[n]) if n in found else one for n, one in self.verdicts.items()}

    def _own(self, name: str) -> Diagnosis:
        """Return the cause that shows in a gradient, and in what was left of it between micro-batches."""
        suspect = self.verdicts[name].suspect
        if name in untied(self.layout, self.reference):
            return consequence(f"wrong {suspect.scope_text()}", "the finding on tied weights")
        gradient, parameter = (found.get(name, []) for found in (self.layout.gradients(1), self.layout.weights(0)))
        absent = missing_gradient(gradient, parameter, self.counts)
        if absent is not None and not all(record.trainable.get(name, True) for record in self.layout.ranks):
            return consequence(absent.symptom, "the finding on frozen")
        follows = self.before if self.before != "other parameters" else ""
        context = GradientContext(expected_of(self.verdicts), follows=follows)
        special = None if self.before else self._overwritten(name) or self._copies_not_summed(name)
        found = special or absent or diagnose_gradient(suspect, context)
        micro = self.layout.num_microbatches
        if micro > 1 and found.cause.startswith("averaged over ") and f"over the {micro} micro-batches" in found.cause:
            return replace(found, cause=f"{found.cause}: {DIVIDED}")
        return found

    def _of_unknown(self, name: str, found: Diagnosis, all_found: Mapping[str, Diagnosis]) -> Diagnosis:
        """Return the cause of a gradient, if it isn't known from itself: that of the step as a whole."""
        if found.kind not in UNKNOWN:
            return found
        of_step = consequence("wrong gradient", self.before) if self.before else self._of_step
        if of_step is not None:
            return of_step if found.kind is FaultKind.UNRECOGNISED else found
        if not self._unknown_loss:
            return found
        twice = [
            other
            for other, one in all_found.items()
            if one.kind in UNKNOWN and len(self.layout.holders[other]) > 1 and self._suspect(other).large_mismatches
        ]
        loss = f"loss of step 1: {self._unknown_loss}"
        if name in twice:
            held = " and ".join(str(stage) for stage in self.layout.holders[name])
            symptom = f"held by stages {held}, with different gradients; the loss of step 1 is wrong"
            return Diagnosis(FaultKind.FORWARD, symptom, OVERLAP, loss)
        symptom = f"wrong {self._suspect(name).scope_text()}"
        if twice:
            return consequence(symptom, "stages that overlap")
        if found.kind is FaultKind.REPLICAS_DIFFER:
            return found
        return Diagnosis(FaultKind.FORWARD, symptom, OTHER_FORWARD, f"{loss}; {found.detail}")

    def _suspect(self, name: str) -> SuspectTensor:
        return self.verdicts[name].suspect

    @cached_property
    def _of_step(self) -> Diagnosis | None:
        """Return the cause of all gradients that are not explained by themselves."""
        if (clipped := self._clipped_between()) is not None:
            return clipped
        return unequal_counts(self.layout, self.loss) if self._unknown_loss else None

    @property
    def _unknown_loss(self) -> str:
        """Say what is wrong with the loss of step 1 for an unknown reason, or an empty string."""
        found = self.loss.diagnosis
        return found.symptom if found is not None and found.kind is FaultKind.UNRECOGNISED else ""

    def _stepped_between(self) -> Diagnosis | None:
        """Recognise an optimizer that steps in each micro-batch."""
        ranks = [rank for rank, record in enumerate(self.layout.ranks) if record.is_stepped_between]
        if not ranks or any(record.is_stepped_between for record in self.reference.ranks):
            return None
        symptom = f"weights change between the micro-batches of step 1 on {rank_words(ranks)}"
        return Diagnosis(FaultKind.CONTRIBUTIONS, symptom, STEPPED)

    def _overwritten(self, name: str) -> Diagnosis | None:
        """Recognise a gradient that was cleared between micro-batches."""
        suspect = self._suspect(name)
        for kind, cause in (("before_microbatches", OVERWRITTEN), ("before_last", CLEARED)):
            held = {rank: getattr(record, kind).get(name) for rank, record in enumerate(self.layout.ranks)}
            left = {rank: one[1].double().numpy() for rank, one in held.items() if one is not None}
            if _adds_up(suspect, left):
                symptom = f"only the last micro-batch is present {suspect.scope_text()}"
                return Diagnosis(FaultKind.CONTRIBUTIONS, symptom, cause)
        return None

    def _copies_not_summed(self, name: str) -> Diagnosis | None:
        """Recognise copies of a tied weight on several stages, each with its own gradient only."""
        for group in self.reference.tied:
            wrong = [other for other in wrong_names(self.verdicts) if other in group]
            if name not in wrong or len(wrong) < 2:
                continue
            suspects = [self._suspect(other) for other in wrong]
            copies = [next(suspect.assembly.replicas(), None) for suspect in suspects]
            total = np.sum([copy.value for copy in copies if copy is not None], axis=0)
            whole = not any(suspect.assembly.faults for suspect in suspects)
            due = suspects[0].expected
            if whole and suspects[0].matches(total, due, max_magnitude(due)):
                return Diagnosis(FaultKind.SUM_MISSING, "each copy holds only its own contribution", NOT_SUMMED)
        return None

    def _clipped_between(self) -> Diagnosis | None:
        """Recognise gradients clipped in each micro-batch: before the last, all norms are the reference's limit."""
        left = [[value for _, value in record.before_last.values()] for record in self.layout.ranks]
        norms = [math.hypot(*(float(value.double().norm()) for value in values)) for values in left if values]
        factors = [factor for record in self.reference.ranks for factor in record.scaled]
        if not norms or not factors:
            return None
        limit = factors[0] * math.hypot(*(np.linalg.norm(value) for value in self.reference.fulls(GRADIENT).values()))
        if not all(close(norm, limit, CLIPPED) for norm in norms):
            return None
        symptom = f"before the last micro-batch, the norm of the gradients on each rank is {limit:.3g}, the limit of "
        symptom += "clipping"
        cause = "gradients are clipped in each micro-batch: clip only once, when they are complete"
        return Diagnosis(FaultKind.CONTRIBUTIONS, symptom, cause)


def _adds_up(suspect: SuspectTensor, left: dict[int, Array]) -> bool:
    """Return whether what was left is what the gradient lacks: on each rank, or averaged over ranks, as DDP does."""
    shards = suspect.wrong_shards
    if not shards or any(shard.rank not in left or left[shard.rank].shape != shard.value.shape for shard in shards):
        return False
    replicas: dict[tuple[int, ...], list[Array]] = defaultdict(list)
    for shard in suspect.assembly.shards:
        if shard.rank in left:
            replicas[shard.start].append(left[shard.rank])
    means = {start: np.mean(values, axis=0) for start, values in replicas.items()}
    return any(
        all(
            suspect.matches(shard.value + part, shard.slice_of(suspect.expected), max_magnitude(part))
            for shard, part in zip(shards, lost, strict=True)
        )
        for lost in ([left[shard.rank] for shard in shards], [means[shard.start] for shard in shards])
    )


def unequal_counts(layout: ScriptEvidence, loss: StepValue) -> Diagnosis | None:
    """Recognise means over micro-batches that differ in how many of their targets count.

    Weighted by the numbers of targets, the losses of step 1 average to the reference.
    """
    losses, counts = ([one for found in layout.series(name, 1) for one in found] for name in ("loss", "targets"))
    if len(losses) != len(counts) or len(set(counts)) < 2 or min(counts) < 0 or not sum(counts):
        return None
    weighted = float(np.average(losses, weights=counts))
    if not close(weighted, loss.expected, loss.tolerance):
        return None
    symptom = f"micro-batches have {min(counts)} to {max(counts)} targets that count"
    detail = f"loss of step 1: {np.mean(losses):.6g}, {weighted:.6g} if weighted by them, as in the reference"
    return Diagnosis(FaultKind.CONTRIBUTIONS, symptom, UNEQUAL_COUNTS, detail)


def drawn_alike(layout: ScriptEvidence, verdicts: Verdicts) -> Verdicts:
    """Recognise stages whose weights are those of another stage's layers, since all draw from the same seed."""
    stages, alike, found = layout.holders, {}, dict(verdicts)
    for name in wrong_names(verdicts):
        old = verdicts[name].result.diagnosis
        other = "" if old is None else old.symptom.removeprefix("the reference of ").split(" ")[0]
        if other in stages and not set(stages[other]) & set(stages[name]):
            alike[name] = f"{name} starts as {other}"
    mine = {stage for name in alike for stage in stages[name]}
    for name in wrong_names(verdicts):
        if name in alike:
            symptom = "initial weights are those of another stage's parameters"
            cause = "each stage draws only its own weights, from the same seed: draw the whole model on every rank"
            found[name] = verdicts[name].with_diagnosis(Diagnosis(FaultKind.MISPLACED, symptom, cause, alike[name]))
        elif mine & set(stages[name]):
            follows = consequence("initial weights differ", "a stage that draws only its own weights")
            found[name] = verdicts[name].with_diagnosis(follows)
    return found
