"""Remarks on the proof as a whole: where the backward pass breaks, and caveats on a pass."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.prove.compare.result import FaultKind, ProofResult, TensorResult
from meshwright.prove.placement import StagePlacement
from meshwright.units import counted

LOSS_IS_RIGHT = (
    "the loss of step 1 is correct: check the backward pass and the gradient reductions, not the forward pass"
)


def notes_on(result: ProofResult, stages: StagePlacement | None = None) -> tuple[str, ...]:
    """Return the remarks, most helpful first."""
    return tuple(_notes(result, stages))


def _notes(result: ProofResult, stages: StagePlacement | None) -> Iterator[str]:
    gradients = [(p.name, p.gradient) for p in result.parameters if p.gradient is not None]
    yield from _backward_break(gradients, stages)
    losses = result.losses.steps
    if any(_unknown(gradient) for _, gradient in gradients) and losses and losses[0].ok:
        yield LOSS_IS_RIGHT
    if result.parameters and all(p.initial is None for p in result.parameters):
        yield "initial weights were not recorded"
    tensors = [tensor for p in result.parameters for tensor in p.tensors()]
    rounded = [tensor for tensor in tensors if tensor.ok and not tensor.replicas_equal]
    if rounded:
        most = max(tensor.max_replica_difference for tensor in rounded)
        equal = counted(len(rounded), "tensor")
        yield f"replicas of {equal} are equal only within rounding (differ by up to {most:.1e})"


def _backward_break(gradients: list[tuple[str, TensorResult]], stages: StagePlacement | None) -> Iterator[str]:
    """Locate a break in the backward pass: in model order, gradients are wrong only before it."""
    odd = [at for at, (_, gradient) in enumerate(gradients) if _unknown(gradient)]
    num_wrong = sum(not gradient.ok for _, gradient in gradients)
    if 1 < len(odd) == num_wrong < len(gradients) and odd == list(range(len(odd))):
        last, behind = gradients[odd[-1]][0], gradients[odd[-1] + 1][0]
        symptom = f"gradients are wrong up to {last} and correct from {behind} on"
        plain = f"{symptom}: the backward pass breaks between them"
        yield plain if stages is None else _pipeline_break(last, behind, stages)


def _pipeline_break(last: str, behind: str, stages: StagePlacement) -> str:
    a, b = stages.stages_with(last)[-1], stages.stages_with(behind)[0]
    if a == b:
        symptom = f"gradients are wrong up to {last} and correct from {behind} on, within {stages.describe([a])}"
        return f"{symptom}: check its input buffer, which may be overwritten before the backward pass reads it"
    is_local = stages.ranks[a] == stages.ranks[b]
    route = "which stage {b} passes on the same rank" if is_local else "sent by {b}SEND_B and received by {a}RECV_B"
    symptom = f"gradients are wrong up to {stages.describe([a])} and correct from {stages.describe([b])} on"
    return f"{symptom}: check the gradient between them, {route.format(a=a, b=b)}"


def _unknown(gradient: TensorResult) -> bool:
    unknown = (FaultKind.UNRECOGNISED, FaultKind.REPLICAS_DIFFER)
    return gradient.diagnosis is not None and gradient.diagnosis.kind in unknown
