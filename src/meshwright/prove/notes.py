"""Remarks on a whole proof that no tensor alone gives away: where the backward pass breaks, what a pass rests on."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.prove.result import Kind, ProofResult, TensorResult


def notes_on(result: ProofResult) -> tuple[str, ...]:
    """The remarks, most helpful first."""
    return tuple(_notes(result))


def _notes(result: ProofResult) -> Iterator[str]:
    gradients = [(p.name, p.gradient) for p in result.parameters if p.gradient is not None]
    yield from _break(gradients)
    losses = result.losses.steps
    if any(_unknown(gradient) for _, gradient in gradients) and losses and losses[0].ok:
        yield "the loss of step 1 is right: look at the backward pass and the gradients' sums, not at the forward pass"
    if result.parameters and all(p.initial is None for p in result.parameters):
        yield "initial weights were not recorded"
    tensors = [tensor for p in result.parameters for tensor in p.tensors()]
    rounded = [tensor for tensor in tensors if tensor.ok and not tensor.copies_equal]
    if rounded:
        most = max(tensor.copy_difference for tensor in rounded)
        yield f"copies of {len(rounded)} tensors are equal only within rounding (differ by up to {most:.1e})"


def _break(gradients: list[tuple[str, TensorResult]]) -> Iterator[str]:
    """Parameters stand in model order: gradients wrong up to a point and right behind it tell where it went wrong."""
    odd = [at for at, (_, gradient) in enumerate(gradients) if _unknown(gradient)]
    num_wrong = sum(not gradient.ok for _, gradient in gradients)
    if 1 < len(odd) == num_wrong < len(gradients) and odd == list(range(len(odd))):
        last, behind = gradients[odd[-1]][0], gradients[odd[-1] + 1][0]
        yield (
            f"gradients are wrong up to {last} and right from {behind} on: "
            "the backward pass goes wrong on the way between them"
        )


def _unknown(gradient: TensorResult) -> bool:
    return gradient.diagnosis is not None and gradient.diagnosis.kind in (Kind.UNRECOGNISED, Kind.COPIES_DIFFER)
