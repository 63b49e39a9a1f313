"""Remarks on a whole proof that no tensor alone gives away: where the backward pass breaks, what a pass rests on."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.prove.compare.result import FaultKind, ProofResult, TensorResult
from meshwright.prove.stage_placement import StagePlacement


def notes_on(result: ProofResult, stages: StagePlacement | None = None) -> tuple[str, ...]:
    """The remarks, most helpful first; `stages` of a pipeline."""
    return tuple(_notes(result, stages))


def _notes(result: ProofResult, stages: StagePlacement | None) -> Iterator[str]:
    gradients = [(p.name, p.gradient) for p in result.parameters if p.gradient is not None]
    yield from _backward_break(gradients, stages)
    losses = result.losses.steps
    if any(_unknown(gradient) for _, gradient in gradients) and losses and losses[0].ok:
        yield "the loss of step 1 is right: look at the backward pass and the gradients' sums, not at the forward pass"
    if result.parameters and all(p.initial is None for p in result.parameters):
        yield "initial weights were not recorded"
    tensors = [tensor for p in result.parameters for tensor in p.tensors()]
    rounded = [tensor for tensor in tensors if tensor.ok and not tensor.replicas_equal]
    if rounded:
        most = max(tensor.max_replica_difference for tensor in rounded)
        yield f"copies of {len(rounded)} tensors are equal only within rounding (differ by up to {most:.1e})"


def _backward_break(gradients: list[tuple[str, TensorResult]], stages: StagePlacement | None) -> Iterator[str]:
    """Parameters stand in model order: gradients wrong up to a point and right behind it tell where it went wrong."""
    odd = [at for at, (_, gradient) in enumerate(gradients) if _unknown(gradient)]
    num_wrong = sum(not gradient.ok for _, gradient in gradients)
    if 1 < len(odd) == num_wrong < len(gradients) and odd == list(range(len(odd))):
        last, behind = gradients[odd[-1]][0], gradients[odd[-1] + 1][0]
        yield (
            _pipeline_break(last, behind, stages)
            if stages is not None
            else f"gradients are wrong up to {last} and right from {behind} on: "
            "the backward pass goes wrong on the way between them"
        )


def _pipeline_break(last: str, behind: str, stages: StagePlacement) -> str:
    a, b = stages.stages_with(last)[-1], stages.stages_with(behind)[0]
    if a == b:
        symptom = f"gradients are wrong up to {last} and right from {behind} on, within {stages.describe([a])}"
        return (
            f"{symptom}: look at the buffer of its input, which may be filled again before the backward that reads it"
        )
    suspect_text = (
        "what stage {b} hands on" if stages.ranks[a] == stages.ranks[b] else "{b}SEND_B, {a}RECV_B and its buffer"
    )
    symptom = f"gradients are wrong up to {stages.describe([a])} and right from {stages.describe([b])} on"
    return f"{symptom}: look at the gradient between them, {suspect_text.format(a=a, b=b)}"


def _unknown(gradient: TensorResult) -> bool:
    return gradient.diagnosis is not None and gradient.diagnosis.kind in (
        FaultKind.UNRECOGNISED,
        FaultKind.REPLICAS_DIFFER,
    )
