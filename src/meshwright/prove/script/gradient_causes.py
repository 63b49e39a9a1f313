"""Causes of wrong gradients that show in what a script recorded between its micro-batches, or in its loss.

Gradients alone show a factor, a missing reduction or a swapped tensor. These causes need more: gradients and weights
between micro-batches, numbers of targets, the loss of step 1, or the stages that hold a parameter, whose layers may be
missing, renumbered, or drawn alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from meshwright.prove.judge.tensors import Array, max_difference
from meshwright.prove.judge.verdicts import SuspectTensor, Verdicts
from meshwright.prove.result import UNKNOWN, Diagnosis, FaultKind, Finding, rank_words
from meshwright.prove.script.evidence import ScriptEvidence, reported
from meshwright.prove.script.samples import names_text

CLIPPED = 1e-3
"""Relative difference of norms that were clipped to the same limit."""
OVERWRITTEN = "each micro-batch overwrites the gradient of the previous one: accumulation is missing"
CLEARED = "gradients are cleared between micro-batches, before the backward of the last: accumulation is missing"
UNEQUAL_COUNTS = (
    "micro-batches weigh alike, whatever their number of targets: divide the sum of their losses by the number of "
    "targets in the global batch"
)


def stepped_between(layout: ScriptEvidence, reference: ScriptEvidence) -> Diagnosis | None:
    """Recognise an optimizer that steps in each micro-batch."""
    ranks = [rank for rank, record in enumerate(layout.records) if record.is_stepped_between]
    if not ranks or any(record.is_stepped_between for record in reference.records):
        return None
    symptom = f"weights change between the micro-batches of step 1 on {rank_words(ranks)}"
    cause = (
        "the optimizer steps after each micro-batch instead of the last: call it only then, or with accelerate give it "
        "to prepare()"
    )
    return Diagnosis(FaultKind.CONTRIBUTIONS, symptom, cause)


def overwritten(layout: ScriptEvidence, verdicts: Verdicts) -> Verdicts:
    """Recognise gradients that were cleared between micro-batches."""
    found = dict(verdicts)
    options = (("before_microbatches", OVERWRITTEN), ("before_last", CLEARED))
    lost = [(_by_rank(layout, kind), cause) for kind, cause in options]
    for name, verdict in verdicts.items():
        if verdict.result.ok:
            continue
        for left, cause in lost:
            if _adds_up(verdict.suspect, left.get(name, {})):
                symptom = f"only the last micro-batch is present {verdict.suspect.scope_text()}"
                found[name] = verdict.with_diagnosis(Diagnosis(FaultKind.CONTRIBUTIONS, symptom, cause))
                break
    return found


def _by_rank(layout: ScriptEvidence, kind: str) -> dict[str, dict[int, Array]]:
    """Return what was left of each gradient: [name][rank]."""
    return {
        name: {shard.rank: shard.value.double().numpy() for shard in shards}
        for name, shards in layout.shards(kind).items()
    }


def _adds_up(suspect: SuspectTensor, left: dict[int, Array]) -> bool:
    """Return whether what was left is what the gradient lacks: on each rank, or averaged over ranks, as DDP does."""
    shards = suspect.wrong_shards
    if not shards or any(shard.rank not in left or left[shard.rank].shape != shard.value.shape for shard in shards):
        return False
    replicas: dict[tuple[int, ...], list[Array]] = defaultdict(list)
    for shard in suspect.assembly.shards:
        if shard.rank in left:
            replicas[shard.start].append(left[shard.rank])
    for is_averaged in (False, True):
        lost = [np.mean(replicas[shard.start], axis=0) if is_averaged else left[shard.rank] for shard in shards]
        if all(
            suspect.matches(shard.value + part, shard.slice_of(suspect.expected), max_difference(part, 0 * part)[0])
            for shard, part in zip(shards, lost, strict=True)
        ):
            return True
    return False


def clipped_between(layout: ScriptEvidence, reference: ScriptEvidence) -> Diagnosis | None:
    """Recognise gradients that are clipped in each micro-batch: between them, all norms are the reference's limit."""
    norms = [norm for record in layout.records for norm in record.norms_between]
    factors = [factor for record in reference.records for factor in record.scaled]
    if not norms or not factors:
        return None
    whole = np.sqrt(sum(float((value**2).sum()) for value in reference.fulls("gradients").values()))
    limit = whole * factors[0]
    if any(abs(norm - limit) > CLIPPED * limit for norm in norms):
        return None
    symptom = f"after each micro-batch, the norm of the gradients on each rank is {limit:.3g}, the limit of clipping"
    cause = "gradients are clipped in each micro-batch: clip only once, when they are complete"
    return Diagnosis(FaultKind.CONTRIBUTIONS, symptom, cause)


def unequal_counts(layout: ScriptEvidence, reference: ScriptEvidence, tolerance: float) -> Diagnosis | None:
    """Recognise means over micro-batches that differ in how many of their targets count.

    Weighted by the numbers of targets, the losses of step 1 average to the reference.
    """
    losses = [loss for record in layout.records for step in record.losses[:1] for loss in step]
    counts = [count for record in layout.records for step in record.targets[:1] for count in step]
    if len(losses) != len(counts) or len(set(counts)) < 2 or min(counts) < 0 or not sum(counts):
        return None
    expected = reported(reference, "losses")[0]
    weighted = float(np.average(losses, weights=counts))
    if abs(weighted - expected) > tolerance * abs(expected):
        return None
    symptom = f"micro-batches have {min(counts)} to {max(counts)} targets that count"
    detail = f"loss of step 1: {np.mean(losses):.6g}, {weighted:.6g} if weighted by them, as in the reference"
    return Diagnosis(FaultKind.CONTRIBUTIONS, symptom, UNEQUAL_COUNTS, detail)


def copies_not_summed(reference: ScriptEvidence, verdicts: Verdicts) -> Verdicts:
    """Recognise copies of a tied weight on several stages, each with its own gradient only."""
    found = dict(verdicts)
    for group in {tuple(group) for record in reference.records for group in record.tied}:
        wrong = [name for name in group if name in found and not found[name].result.ok]
        if len(wrong) < 2 or any(found[name].suspect.assembly.faults for name in wrong):
            continue
        suspects = [found[name].suspect for name in wrong]
        replicas = [next(iter(suspect.assembly.replicas()), None) for suspect in suspects]
        total = np.sum([replica.value for replica in replicas if replica is not None], axis=0)
        if suspects[0].matches(total, suspects[0].expected, float(np.abs(suspects[0].expected).max())):
            cause = "the sum over the copies of the tied weight is missing: their gradients sum to the reference"
            for name in wrong:
                diagnosis = Diagnosis(FaultKind.SUM_MISSING, "each copy holds only its own contribution", cause)
                found[name] = found[name].with_diagnosis(diagnosis)
    return found


def other_forward(layout: ScriptEvidence, verdicts: Verdicts, loss: str) -> Verdicts:
    """Explain gradients that nothing else explains where the loss of step 1 is wrong as well.

    Args:
        loss: the loss, and what it is in the reference.
    """
    unknown = {
        name
        for name, one in verdicts.items()
        if one.result.diagnosis is not None and one.result.diagnosis.kind in UNKNOWN
    }
    stages = {name: found for name, found in stages_of(layout).items() if len(found) > 1}
    twice = {name for name in unknown if name in stages and verdicts[name].suspect.large_mismatches}
    found = dict(verdicts)
    for name in unknown:
        verdict = verdicts[name]
        old = verdict.result.diagnosis
        assert old is not None, "unknown causes have a diagnosis"
        if name in twice:
            held = " and ".join(str(stage) for stage in stages[name])
            symptom = f"held by stages {held}, with different gradients; the loss of step 1 is wrong"
            cause = "a layer is in several stages and so applied several times: stages overlap at their border"
            new = Diagnosis(FaultKind.FORWARD, symptom, cause, loss)
        elif twice:
            new = Diagnosis(
                FaultKind.CONSEQUENCE, f"wrong {verdict.suspect.scope_text()}", "follows from stages that overlap"
            )
        elif old.kind is FaultKind.UNRECOGNISED:
            cause = "the forward pass or the loss function differs: so does the loss of step 1, with the same weights"
            new = Diagnosis(FaultKind.FORWARD, f"wrong {verdict.suspect.scope_text()}", cause, f"{loss}; {old.detail}")
        else:
            continue
        found[name] = verdict.with_diagnosis(new)
    return found


def stages_of(layout: ScriptEvidence) -> dict[str, list[int]]:
    """Return the pipeline stages that hold each parameter."""
    found: dict[str, list[int]] = defaultdict(list)
    for rank, record in enumerate(layout.records):
        stage = layout.mesh.axes.coordinate(rank)["pp"]
        for name in record.shapes:
            if stage not in found[name]:
                found[name].append(stage)
    return found


def other_parameters(layout: ScriptEvidence, reference: ScriptEvidence) -> Iterator[Finding]:
    """Yield a finding for parameters that only one side has, or in another shape."""
    expected, found = reference.shapes, layout.shapes
    extra = [name for name in found if name not in expected]
    stages = stages_of(layout)
    renumbered = "the two sides do not hold the same parameters: a stage that renumbers its layers needs names="
    left_out = "no stage holds them, and none renumbers its layers: stages leave out layers, such as those at a border"
    only_lacks = layout.mesh.axes.pp > 1 and not extra and all(len(stages[name]) == 1 for name in found)
    for what, names, cause in (
        (
            "in the reference but not in the layout",
            [name for name in expected if name not in found],
            left_out if only_lacks else renumbered,
        ),
        ("in the layout but not in the reference", extra, renumbered),
        ("of another shape", [name for name in found if expected.get(name, found[name]) != found[name]], renumbered),
    ):
        if names:
            yield Finding("parameters", Diagnosis(FaultKind.EVIDENCE, f"{what}: {names_text(names)}", cause))


def drawn_alike(layout: ScriptEvidence, verdicts: Verdicts) -> Verdicts:
    """Recognise stages whose weights are those of another stage's layers, since all draw from the same seed."""
    stages, alike = stages_of(layout), {}
    wrong = {name: one for name, one in verdicts.items() if not one.result.ok}
    for name, one in wrong.items():
        old = one.result.diagnosis
        if old is not None and old.kind is FaultKind.MISPLACED:
            other = old.symptom.removeprefix("the reference of ").split(" ")[0]
            if other in stages and not set(stages[other]) & set(stages[name]):
                alike[name] = f"{name} starts as {other}"
    mine = {stage for name in alike for stage in stages[name]}
    found = dict(verdicts)
    for name, one in wrong.items():
        if name in alike:
            symptom = "initial weights are those of another stage's parameters"
            cause = "each stage draws only its own weights, from the same seed: draw the whole model on every rank"
            found[name] = one.with_diagnosis(Diagnosis(FaultKind.MISPLACED, symptom, cause, alike[name]))
        elif mine & set(stages[name]):
            follows = "follows from a stage that draws only its own weights"
            found[name] = one.with_diagnosis(Diagnosis(FaultKind.CONSEQUENCE, "initial weights differ", follows))
    return found
