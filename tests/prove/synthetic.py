"""Made-up evidence: a reference with random parts, and ranks that train on exactly that, to be damaged by tests.

Gradients don't depend on the weights. Everything is a random float64 tensor: no structure that a wrong diagnosis could
happen to fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from meshwright.config.schema import TrainConfig
from meshwright.mesh.axes import Axes
from meshwright.optim.role import Role
from meshwright.plan.rules import load
from meshwright.prove.conclude import with_verdicts
from meshwright.prove.explain.explain import Explainer
from meshwright.prove.judge.counts import LayoutCounts
from meshwright.prove.judge.judge import Sides, Tolerances, audit_steps, compare
from meshwright.prove.placement import StagePlacement
from meshwright.prove.record.evidence import Evidence, RankRecord, RecordedShard, Shards, ShardsByName, StepRecord
from meshwright.prove.record.plain_optimizer import RIGHT, Replay, UpdateFault, clip_factor, plain_learning_rate
from meshwright.prove.record.reference_run import Contributions, StepReference
from meshwright.prove.result import Diagnosis, FaultKind, Finding, ProofResult

STEPS = 3
SAMPLES_PER_CELL = 2
TRAIN = load("llama-tiny", ["train.warmup_steps=1", "train.max_grad_norm=5.0", "train.lr=0.001"]).train

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

ROLES = {name: Role.MATRIX if len(shape) > 1 else Role.VECTOR for name, (shape, _) in SHAPES.items()}
REPLICATED_OVER_TP = [name for name, (_, dim) in SHAPES.items() if dim is None]
EVERY, MATRIX = list(SHAPES), "blocks.0.attn.q.weight"


@dataclass
class Reference:
    """A reference whose batch falls into `shares` × `microbatches` cells; gradients of each step are random."""

    shares: int
    microbatches: int
    seed: int = 0
    roles: Mapping[str, Role] = field(default_factory=lambda: ROLES)
    bias_rates: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.seed)

        def rand(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        grid = (self.shares, self.microbatches)
        self.initial = {
            name: 0.1 * rand(*shape) if len(shape) > 1 else torch.ones(shape).double()
            for name, (shape, _) in SHAPES.items()
        }
        self.parts = [{name: rand(*grid, *shape) for name, (shape, _) in SHAPES.items()} for _ in range(STEPS)]
        self.losses = [rand(*grid).abs() / (self.shares * self.microbatches) + 0.5 for _ in range(STEPS)]

    def units(self, step: int) -> Tensor:
        return torch.ones(self.shares, self.microbatches)

    def gradients(self, step: int = 1) -> dict[str, Tensor]:
        return {name: parts.sum((0, 1)) for name, parts in self.parts[step - 1].items()}

    def batch(self, step: int) -> list[int]:
        size = self.shares * self.microbatches * SAMPLES_PER_CELL
        return list(range((step - 1) * size, step * size))

    def step(self, step: int, weights: Mapping[str, Tensor]) -> StepReference:
        return StepReference(float(self.losses[step - 1].sum()), self.gradients(step), {})

    def contributions(self, step: int, weights: Mapping[str, Tensor]) -> Contributions:
        return Contributions(self.losses[step - 1], self.parts[step - 1], {})

    def by_stage(self, step: int, weights: Mapping[str, Tensor], stages: StagePlacement) -> dict[str, Tensor]:
        return {}


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


def shards(fulls: Mapping[str, Tensor], axes: Axes) -> Shards:
    """Every rank's pieces."""
    return {
        name: [RecordedShard(r, box(name, r, axes)[0], cut(full, name, r, axes)) for r in range(axes.num_ranks())]
        for name, full in fulls.items()
    }


def hold(pieces: Shards, axes: Axes, name: str, full: Callable[[int], Tensor]) -> None:
    """Let every rank hold its piece of `full(rank)` instead."""
    for shard in pieces[name]:
        shard.value.copy_(cut(full(shard.rank), name, shard.rank, axes))


def scale(pieces: Shards, names: Sequence[str], factor: float, ranks: set[int] | None = None) -> None:
    """Multiply the pieces of some ranks, or of all."""
    for name in names:
        for shard in pieces[name]:
            if ranks is None or shard.rank in ranks:
                shard.value.mul_(factor)


Change = Callable[[int, int, str, Tensor, Tensor], Tensor]
"""Return what a rank holds after a step, given rank, step, name, and its pieces before and after the right update."""


class Layout:
    """Ranks that train; tests damage what they compute of it."""

    def __init__(self, reference: Reference, axes: Axes, train: TrainConfig = TRAIN) -> None:
        self.axes, num_ranks = axes, axes.num_ranks()
        self.initial = shards(reference.initial, axes)
        self.by_step = [shards(reference.gradients(step), axes) for step in range(1, STEPS + 1)]
        losses = [float(one.sum()) for one in reference.losses]
        self.losses = [list(losses) for _ in range(num_ranks)]
        self.samples = [
            [self._read(rank, reference.batch(step)) for step in range(1, STEPS + 1)] for rank in range(num_ranks)
        ]
        self.norms: dict[tuple[int, int], float] = {}
        """Reported norms by rank and step, where they are not those of the gradients."""
        self.rates: dict[tuple[int, int], float] = {}
        self.given: Callable[[int, int, str, Tensor], Tensor | None] = lambda rank, step, name, clipped: clipped
        """What the optimizer is given, from rank, step, name and clipped gradient; None for nothing."""
        self.train = train
        """Settings of the optimizer."""
        self.faults: dict[str, UpdateFault] = {}
        """Faults of the optimizer, by parameter."""
        self.after: Change = lambda rank, step, name, old, new: new

    @property
    def gradients(self) -> Shards:
        """Gradients of step 1."""
        return self.by_step[0]

    def _read(self, rank: int, batch: list[int]) -> list[int]:
        size, share = len(batch) // self.axes.data_parallel(), self.axes.data_index(rank)
        return batch[share * size : (share + 1) * size]

    def norm(self, step: int) -> float:
        """The norm of a step's gradients, replicas averaged."""
        squares = 0.0
        for name, pieces in self.by_step[step - 1].items():
            distinct = sum(piece.value.numel() for piece in pieces) / math.prod(SHAPES[name][0]) or 1.0
            squares += sum(float((piece.value**2).sum()) for piece in pieces) / distinct
        return math.sqrt(squares)

    def records(self) -> list[RankRecord]:
        """What the ranks record."""
        return [self._record(rank) for rank in range(self.axes.num_ranks())]

    def _record(self, rank: int) -> RankRecord:
        weights = self._of_rank(self.initial, rank)
        record = RankRecord(initial=dict(weights))
        replays = {name: Replay(self.train, ROLES, self.faults.get(name, RIGHT)) for name in SHAPES}
        for step in range(1, STEPS + 1):
            gradients = self._of_rank(self.by_step[step - 1], rank)
            norm = self.norms.get((rank, step), self.norm(step))
            rate = self.rates.get((rank, step), plain_learning_rate(step, self.train))
            factor, skipped = clip_factor(norm, self.train.max_grad_norm), not math.isfinite(norm)
            pairs = ((name, at, self.given(rank, step, name, factor * v)) for name, (at, v) in gradients.items())
            given = {name: (at, value) for name, at, value in pairs if value is not None}
            after: ShardsByName = {}
            for name, (at, old) in weights.items():
                new = old
                if name in given and not skipped:
                    new = replays[name].step(step, rate, {name: old}, {name: given[name][1]}, factor)[name]
                after[name] = at, self.after(rank, step, name, old, new)
            found = StepRecord(
                self.losses[rank][step - 1], norm, math.nan if skipped else rate, skipped, self.samples[rank][step - 1],
                {}, gradients, {} if skipped else given, after,
            )  # fmt: skip
            record.steps.append(vars(found))
            weights = after
        return record

    @staticmethod
    def _of_rank(pieces: Shards, rank: int) -> ShardsByName:
        return {
            name: (shard.offset, shard.value.clone())
            for name, found in pieces.items()
            for shard in found
            if shard.rank == rank
        }


class Case:
    """A faultless layout with what a test needs to damage it, and what the proof says then."""

    def __init__(self, axes: Axes, microbatches: int = 1, *, seed: int = 0, train: TrainConfig = TRAIN) -> None:
        self.axes, self.train = axes, train
        self.reference = Reference(axes.data_parallel(), microbatches, seed)
        self.layout = Layout(self.reference, axes, train)

    def give(self, full_of: Callable[[int, Tensor], Tensor], names: Sequence[str] = EVERY) -> None:
        """Let each rank hold its piece of the gradient `full_of(rank, parts)` of step 1, for every parameter."""
        for name in names:
            parts = self.reference.parts[0][name]
            hold(self.layout.gradients, self.axes, name, lambda rank, parts=parts: full_of(rank, parts))  # type: ignore[misc]

    def share(self, rank: int) -> int:
        return self.axes.data_index(rank)

    def proof(self) -> ProofResult:
        """What the proof concludes."""
        return conclude_with(self.reference, self.layout.records(), self.axes, self.train)

    def diagnoses(self, names: Sequence[str] = EVERY, about: str = "gradient") -> list[Diagnosis]:
        """What the proof says of some gradients, or of other tensors; all others must be right."""
        result = self.proof()
        assert not result.passed
        found = {p.name: p.tensors()[about] for p in result.parameters}
        assert sorted(name for name, one in found.items() if not one.ok) == sorted(names)
        diagnoses = [found[name].diagnosis for name in names]
        return [one for one in diagnoses if one is not None]

    def says(
        self, *words: str, kind: FaultKind | None = None, names: Sequence[str] = EVERY, about: str = "gradient"
    ) -> None:
        found = self.diagnoses(names, about)
        assert len(found) == len(names)
        for diagnosis in found:
            check(diagnosis, words, kind)

    def says_of(self, about: str, *words: str, kind: FaultKind | None = None) -> Finding:
        """What is said of the losses, of the norm, …"""
        result = self.proof()
        assert not result.passed
        found = [one for one in result.findings if one.about == about]
        assert found, [one.diagnosis.text for one in result.findings]
        check(found[0].diagnosis, words, kind)
        return found[0]


def conclude_with(
    reference: Reference, records: list[RankRecord], axes: Axes, train: TrainConfig = TRAIN
) -> ProofResult:
    """What a proof concludes from records."""
    evidence = Evidence(axes, reference.microbatches, tuple(records))
    result = ProofResult(axes, reference.microbatches, STEPS, "float64", (), (), (), ())
    if incomplete := audit_steps(evidence, STEPS):
        return replace(result, findings=tuple(Finding("evidence", one) for one in incomplete))
    counts = LayoutCounts(axes, reference.microbatches, len(reference.batch(1)))
    comparison = compare(Sides(evidence, reference, train, (train.max_grad_norm,) * STEPS, counts), Tolerances())
    return with_verdicts(result, comparison, Explainer(comparison).explain())


def check(diagnosis: Diagnosis, words: Sequence[str], kind: FaultKind | None) -> None:
    """The words are said, and the kind is that."""
    assert all(word in diagnosis.text for word in words), diagnosis.text
    assert kind is None or diagnosis.kind is kind, diagnosis.text
