"""Known faults that explain several wrong values at once, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.prove.compare.result import Diagnosis, FaultKind, SeriesResult
from meshwright.prove.compare.tensor_shards import Array
from meshwright.prove.compare.tensor_verdict import TensorVerdict, Verdicts, to_arrays
from meshwright.prove.diagnose.expert_counts import diagnose_bias, diagnose_counts
from meshwright.prove.diagnose.factors import LayoutCounts
from meshwright.prove.diagnose.phrases import rank_words
from meshwright.prove.diagnose.suspect import UNKNOWN, SuspectTensor
from meshwright.prove.diagnose.variants import StepVector, diagnose_by_variants, diagnose_later
from meshwright.prove.record.evidence import LayoutEvidence, ReferenceEvidence, Variants
from meshwright.units import first_words

MAX_NAMES = 3
"""Most parameters that are listed."""


@dataclass(frozen=True)
class KnownFault:
    """A fault that a variant of the reference has, too."""

    diagnosis: Diagnosis
    evidence: ReferenceEvidence | None = None
    """Values of the variant."""

    @property
    def name(self) -> str:
        """How consequences refer to the fault."""
        return f"a known fault ({self.diagnosis.cause.partition(':')[0]})"


def known_fault_of_step_1(
    gradients: Verdicts,
    losses: SeriesResult,
    layout: LayoutEvidence,
    reference: ReferenceEvidence,
    counts: LayoutCounts,
    variants: Variants | None,
) -> KnownFault | None:
    """Return the fault whose variant has all gradients and losses of step 1, if a value is wrong and not recognised."""
    unknown = [v for v in gradients.values() if v.result.diagnosis and v.result.diagnosis.kind in UNKNOWN]
    loss = losses.diagnosis is not None and losses.diagnosis.kind in UNKNOWN and not losses.steps[0].ok
    if variants is None or not (unknown or loss):
        return None
    tolerance = losses.steps[0].tolerance
    vector = StepVector(gradients, np.array(losses.steps[0].observed), reference, counts, tolerance, layout.experts)
    found = diagnose_by_variants(vector, variants.of_first_step())
    return None if found is None else KnownFault(*found)


def known_fault_of_later_steps(
    final: Verdicts,
    losses: SeriesResult,
    norms: SeriesResult,
    reference: ReferenceEvidence,
    counts: LayoutCounts,
    variants: Variants | None,
) -> KnownFault | None:
    """Return the fault whose variant has all losses, norms and parameters, if only what follows step 1 is wrong."""
    if variants is None or not losses.steps[0].ok or all(verdict.result.ok for verdict in final.values()):
        return None
    vector = StepVector(final, np.array([]), reference, counts, losses.steps[-1].tolerance)
    norms_sr, losses_sr = (np.array([step.observed for step in series.steps]) for series in (norms, losses))
    found = diagnose_later(vector, norms_sr, losses_sr, variants.of_later_steps())
    return None if found is None else KnownFault(found)


def weights_left_gathered(layout: LayoutEvidence, reference: ReferenceEvidence) -> KnownFault | None:
    """Return the fault of ranks that hold full parameters after a step, of which they had a shard before it."""
    after, found = layout.after_first or layout.parameters, dict[str, set[int]]()
    for name, shards in layout.initial.items():
        before = {shard.rank: shard.value.shape for shard in shards}
        full = reference.initial[name].shape if name in reference.initial else None
        for shard in after.get(name, []):
            if shard.value.shape == full != before.get(shard.rank):
                found.setdefault(name, set()).add(shard.rank)
    if not found:
        return None
    ranks, names = rank_words({rank for held in found.values() for rank in held}), first_words([*found], MAX_NAMES)
    symptom = f"after step 1, parameters of which {ranks} had a shard are held in full: {names}"
    cause = "weights left gathered: they are not resharded after the backward, so no update reaches them"
    return KnownFault(Diagnosis(FaultKind.EVIDENCE, symptom, cause))


def as_consequences(verdicts: Verdicts, fault: KnownFault) -> Verdicts:
    """Mark all wrong tensors as consequences of a known fault."""
    return {
        name: verdict if verdict.result.ok else verdict.with_diagnosis(_follows(verdict.suspect, fault.name))
        for name, verdict in verdicts.items()
    }


def losses_as_consequence(series: SeriesResult, fault: KnownFault | None) -> SeriesResult:
    """Mark wrong losses as consequences of a known fault, which agrees with them."""
    if fault is None or series.diagnosis is None:
        return series
    symptom, cause = series.diagnosis.symptom, f"follows from {fault.name}"
    return replace(series, diagnosis=Diagnosis(FaultKind.CONSEQUENCE, symptom, cause))


def norms_as_consequence(series: SeriesResult, fault: KnownFault | None) -> SeriesResult:
    """Mark wrong norms as consequences of a known fault, unless they are wrong in a way of their own."""
    is_unknown = series.diagnosis is not None and series.diagnosis.kind in UNKNOWN
    return losses_as_consequence(series, fault) if is_unknown else series


def _follows(suspect: SuspectTensor, fault: str) -> Diagnosis:
    return Diagnosis(FaultKind.CONSEQUENCE, f"wrong {suspect.scope_text()}", f"follows from {fault}")


def explain_counts(
    verdicts: Verdicts, layout: LayoutEvidence, reference: ReferenceEvidence, fault: KnownFault | None
) -> Verdicts:
    """Replace the diagnoses of wrong counts and balancing biases after step 1, where their cause is recognised."""
    result, partial = dict(verdicts), to_arrays(reference.partial_counts)
    for name, contributions in partial.items():
        bias = f"{name.rpartition('.')[0]}.bias"
        if layout.experts is None or name not in verdicts:
            continue
        for wrong in (one for one in (name, bias) if one in verdicts and not verdicts[one].result.ok):
            if fault is not None and _is_of_variant(verdicts[wrong], wrong, fault):
                result[wrong] = verdicts[wrong].with_diagnosis(_follows(verdicts[wrong].suspect, fault.name))
                continue
            suspect, held = verdicts[wrong].suspect, _held(verdicts[name])
            if wrong == name:
                found = diagnose_counts(suspect, contributions, layout.experts)
            else:
                found = diagnose_bias(suspect, held, contributions, reference.bias_rates[name])
            if found is not None:
                result[wrong] = verdicts[wrong].with_diagnosis(found)
    return result


def _held(verdict: TensorVerdict) -> dict[int, Array]:
    return {shard.rank: shard.value for shard in verdict.suspect.assembly.shards}


def _is_of_variant(verdict: TensorVerdict, name: str, fault: KnownFault) -> bool:
    if fault.evidence is None or name not in fault.evidence.after_first:
        return False
    due = to_arrays({name: fault.evidence.after_first[name]})[name]
    return all(np.allclose(shard.value, shard.slice_of(due)) for shard in verdict.suspect.wrong_shards)
