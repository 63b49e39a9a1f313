"""Made-up evidence: a reference with random parts, and the layout that holds exactly that, to be damaged by tests.

Gradients of later steps don't depend on the weights, so a fault of the optimizer can be made by running it with other
settings. Everything is a random float64 tensor: no structure that a wrong diagnosis could happen to fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.mesh.axes import Axes
from meshwright.prove.compare.conclude import compare
from meshwright.prove.compare.result import Diagnosis, FaultKind
from meshwright.prove.record.evidence import LayoutEvidence, RecordedShard, ReferenceEvidence

STEPS = 3
SAMPLES_PER_CELL = 2

SHAPES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "embed.weight": ((10, 6), 0),
    "blocks.0.norm.weight": ((6,), None),
    "blocks.0.attn.q.weight": ((8, 6), 0),
    "blocks.0.attn.o.weight": ((6, 8), 1),
    "blocks.0.ffn.up.weight": ((9, 6), 0),
    "blocks.1.norm.weight": ((6,), None),
    "blocks.1.attn.q.weight": ((8, 6), 0),
    "blocks.1.attn.o.weight": ((6, 8), 1),
    "blocks.1.ffn.up.weight": ((9, 6), 0),
    "norm.weight": ((6,), None),
    "head.weight": ((10, 6), 0),
    "square.weight": ((6, 6), None),
    "gate.bias": ((3,), None),
}
"""Shape, and the dim that tensor parallel divides."""

REPLICATED_OVER_TP = [name for name, (_, dim) in SHAPES.items() if dim is None]
EVERY, MATRIX = list(SHAPES), "blocks.0.attn.q.weight"


@dataclass(frozen=True)
class Optimizer:
    """AdamW's settings; decay is of matrices only, unless `decay_all`."""

    lr: float = 1e-3
    decay: float = 0.1
    decay_all: bool = False
    num_steps: int = STEPS


def make_reference(shares: int, microbatches: int, *, seed: int = 0) -> ReferenceEvidence:
    """A reference whose batch falls into `shares` × `microbatches` cells."""
    draw = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    parts = {name: rand(shares, microbatches, *shape) for name, (shape, _) in SHAPES.items()}
    gradients = {name: part.sum((0, 1)) for name, part in parts.items()}
    norm = math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))
    initial = {
        name: 0.1 * rand(*shape) if len(shape) > 1 else torch.ones(shape).double()
        for name, (shape, _) in SHAPES.items()
    }
    batch = shares * microbatches * SAMPLES_PER_CELL
    losses = rand(shares, microbatches).abs() / (shares * microbatches) + 0.5
    return ReferenceEvidence(
        losses=[float(losses.sum()), *(4.0 + rand(STEPS - 1)).tolist()],
        grad_norms=[norm, *(2.0 + rand(STEPS - 1)).abs().tolist()],
        samples=[list(range(step * batch, (step + 1) * batch)) for step in range(STEPS)],
        gradients=gradients,
        partial_gradients=parts,
        parameters=optimize(initial, gradients, Optimizer(), seed=seed),
        after_first=optimize(initial, gradients, Optimizer(num_steps=1), seed=seed),
        initial=initial,
        partial_losses=losses,
    )


def optimize(
    initial: dict[str, Tensor], first: dict[str, Tensor], how: Optimizer, *, seed: int = 0
) -> dict[str, Tensor]:
    """The parameters after AdamW's steps, whose gradients after the first are random."""
    draw, result = torch.Generator().manual_seed(seed + 1000), {}
    for name, start in initial.items():
        p, mean, square = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
        for step in range(1, STEPS + 1):
            fresh = torch.randn(start.shape, generator=draw, dtype=torch.float64)
            g = first[name] if step == 1 else first[name] + 0.3 * fresh
            mean, square = 0.9 * mean + 0.1 * g, 0.95 * square + 0.05 * g * g
            if step > how.num_steps:
                continue
            if p.dim() > 1 or how.decay_all:
                p = p * (1 - how.lr * how.decay)
            p = p - how.lr * (mean / (1 - 0.9**step)) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)
        result[name] = p
    return result


def box(name: str, rank: int, axes: Axes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of a rank's piece: tensor parallel divides, then dp_shard dim 0 of what is left."""
    shape, tp_dim = SHAPES[name]
    at = axes.coordinate(rank)
    offset, extent = [0] * len(shape), list(shape)
    for dim, num, index in ((tp_dim, axes.tp, at["tp"]), (0, axes.dp_shard, at["dp_shard"])):
        if dim is None:
            continue
        size = -(-extent[dim] // num)
        start = min(index * size, extent[dim])
        offset[dim], extent[dim] = offset[dim] + start, min(size, extent[dim] - start)
    return tuple(offset), tuple(extent)


def cut(full: Tensor, name: str, rank: int, axes: Axes) -> Tensor:
    """A rank's piece of a full tensor."""
    offset, extent = box(name, rank, axes)
    return full[tuple(slice(a, a + n) for a, n in zip(offset, extent, strict=True))].clone()


def shards(fulls: dict[str, Tensor], axes: Axes) -> dict[str, list[RecordedShard]]:
    """Every rank's pieces."""
    return {
        name: [RecordedShard(r, box(name, r, axes)[0], cut(full, name, r, axes)) for r in range(axes.num_ranks())]
        for name, full in fulls.items()
    }


def make_layout(reference: ReferenceEvidence, axes: Axes) -> LayoutEvidence:
    """Evidence of a layout without a fault. Its tensors and lists are its own: tests damage them."""
    num_ranks = axes.num_ranks()
    microbatches = next(iter(reference.partial_gradients.values())).shape[1]

    def read(rank: int, batch: list[int]) -> list[int]:
        size, share = len(batch) // axes.data_parallel(), axes.data_index(rank)
        return batch[share * size : (share + 1) * size]

    return LayoutEvidence(
        axes=axes,
        num_microbatches=microbatches,
        losses=[list(reference.losses) for _ in range(num_ranks)],
        grad_norms=[list(reference.grad_norms) for _ in range(num_ranks)],
        samples=[[read(rank, batch) for batch in reference.samples] for rank in range(num_ranks)],
        gradients=shards(reference.gradients, axes),
        parameters=shards(reference.parameters, axes),
        initial=shards(reference.initial, axes),
        after_first=shards(reference.after_first, axes),
    )


def hold(pieces: dict[str, list[RecordedShard]], axes: Axes, name: str, full: Callable[[int], Tensor]) -> None:
    """Let every rank hold its piece of `full(rank)` instead."""
    for shard in pieces[name]:
        shard.value.copy_(cut(full(shard.rank), name, shard.rank, axes))


def scale(
    pieces: dict[str, list[RecordedShard]], names: list[str], factor: float, ranks: set[int] | None = None
) -> None:
    """Multiply the pieces of some ranks, or of all."""
    for name in names:
        for shard in pieces[name]:
            if ranks is None or shard.rank in ranks:
                shard.value.mul_(factor)


class Case:
    """A faultless layout with what a test needs to damage it, and what the proof says then."""

    def __init__(self, axes: Axes, microbatches: int = 1) -> None:
        self.axes = axes
        self.reference = make_reference(axes.data_parallel(), microbatches)
        self.layout = make_layout(self.reference, axes)

    def give(self, full_of: Callable[[int, Tensor], Tensor], names: Sequence[str] = EVERY) -> None:
        """Let each rank hold its piece of the gradient `full_of(rank, parts)`, for every parameter."""
        for name in names:
            parts = self.reference.partial_gradients[name]
            hold(self.layout.gradients, self.axes, name, lambda rank, parts=parts: full_of(rank, parts))  # type: ignore[misc]

    def share(self, rank: int) -> int:
        return self.axes.data_index(rank)

    def diagnoses(self, names: Sequence[str] = EVERY, tensors: str = "gradient") -> list[Diagnosis]:
        """What the proof says of some gradients, or of other tensors; all others must be right."""
        result = compare(self.layout, self.reference)
        assert not result.passed
        found = {p.name: getattr(p, tensors) for p in result.parameters}
        assert sorted(name for name, one in found.items() if not one.ok) == sorted(names)
        assert tensors != "gradient" or all(one.diagnosis is None for one in found.values() if one.ok)
        return [found[name].diagnosis for name in names]

    def says(
        self, *words: str, kind: FaultKind | None = None, names: Sequence[str] = EVERY, tensors: str = "gradient"
    ) -> None:
        for diagnosis in self.diagnoses(names, tensors):
            check(diagnosis, words, kind)

    def says_of(self, what: str, *words: str, kind: FaultKind | None = None) -> None:
        """What is said of the losses, or of the norm."""
        result = compare(self.layout, self.reference)
        assert not result.passed and not getattr(result, what).ok
        check(getattr(result, what).diagnosis, words, kind)


def check(diagnosis: Diagnosis, words: Sequence[str], kind: FaultKind | None) -> None:
    """The words are said, and the kind is that."""
    assert all(word in diagnosis.text for word in words), diagnosis.text
    assert kind is None or diagnosis.kind is kind, diagnosis.text
