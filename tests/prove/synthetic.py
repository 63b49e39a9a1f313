"""Made-up evidence: a reference with random parts, and ranks that train on exactly that, to be damaged by tests.

Gradients don't depend on the weights. Everything is a random float64 tensor: no structure that a wrong diagnosis could
happen to fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.config.schema import TrainConfig
from meshwright.mesh.axes import Axes
from meshwright.optim.role import Role
from meshwright.plan.rules import load
from meshwright.prove.conclude import with_verdicts
from meshwright.prove.explain.explain import Explainer
from meshwright.prove.judge.judge import Sides, Tolerances, audit_steps, compare
from meshwright.prove.judge.tensors import LayoutCounts
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
    roles: Mapping[str, Role] = field(default_factory=lambda: ROLES)
    bias_rates: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(0)

        def rand(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        grid = (self.shares, self.microbatches)
        shapes = {name: shape for name, (shape, _) in SHAPES.items()}
        self.initial = {n: 0.1 * rand(*s) if len(s) > 1 else torch.ones(s).double() for n, s in shapes.items()}
        self.parts = [{name: rand(*grid, *shape) for name, shape in shapes.items()} for _ in range(STEPS)]
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
        steps = range(1, STEPS + 1)
        self.samples = [[self._read(rank, reference.batch(step)) for step in steps] for rank in range(num_ranks)]
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
                of_it = {name: given[name][1]} if name in given and not skipped else {}
                new = replays[name].step(step, rate, {name: old}, of_it, factor)[name] if of_it else old
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
        held = ((name, shard) for name, found in pieces.items() for shard in found if shard.rank == rank)
        return {name: (shard.offset, shard.value.clone()) for name, shard in held}


class Case:
    """A faultless layout with what a test needs to damage it, and what the proof says then."""

    def __init__(self, axes: Axes, microbatches: int = 1, *, train: TrainConfig = TRAIN) -> None:
        self.axes, self.train = axes, train
        self.reference = Reference(axes.data_parallel(), microbatches)
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
        return diagnoses_of(self.proof(), names, about)


def diagnoses_of(result: ProofResult, names: Sequence[str], about: str) -> list[Diagnosis]:
    """What is said of these tensors, which alone are wrong."""
    found = {p.name: p.tensors()[about] for p in result.parameters}
    assert not result.passed and {name for name, one in found.items() if not one.ok} == set(names)
    return [diagnosis for name in names if (diagnosis := found[name].diagnosis) is not None]


@dataclass(frozen=True)
class Fault:
    """What is done to a faultless layout, and what the proof must say of it and of nothing else."""

    damage: Callable[[Case], object]
    words: Sequence[str]
    kind: FaultKind | None = None
    names: Sequence[str] = ()
    """Parameters of which all of that is said, and that alone are wrong; empty where it is of no parameter."""
    about: str = "gradient"
    step: int = 1
    also: tuple[str, ...] = ()
    """What else is found."""
    unsaid: str | None = None
    layouts: Sequence[Axes] = (Axes(dp_shard=2),)
    num_microbatches: int = 1

    def assert_named(self, layouts: Sequence[Axes] = ()) -> None:
        """Check what is said on some of its layouts, or on all."""
        for axes in layouts or self.layouts:
            case = Case(axes, self.num_microbatches)
            self.damage(case)
            result = case.proof()
            told = [one for one in result.findings if not one.is_consequence]
            assert not result.passed and {one.about for one in told} == {self.about, *self.also}, told
            of_it = [one for one in told if one.about == self.about]
            assert {one.step for one in of_it} == {self.step}
            said = diagnoses_of(result, self.names, self.about) if self.names else [of_it[0].diagnosis]
            assert len(said) == max(1, len(self.names))
            data_axes = " and ".join(axis for axis in axes.used() if axis.startswith("dp_"))
            for diagnosis in said:
                assert all(words.replace("DATA", data_axes) in diagnosis.text for words in self.words), diagnosis.text
                assert self.unsaid is None or self.unsaid not in diagnosis.text
                assert self.kind in (None, diagnosis.kind), diagnosis.kind


def by_layout(faults: Mapping[str, Fault]) -> list[Any]:
    """Parameters of a test: each fault with its layouts, of which two in turns are quick and the others slow."""
    found = []
    for turn, (name, fault) in enumerate(faults.items()):
        layouts = list(fault.layouts)
        turn %= len(layouts)
        turned = layouts[turn:] + layouts[:turn]
        found.append(pytest.param(name, turned[:2], id=name))
        if turned[2:]:
            found.append(pytest.param(name, turned[2:], id=f"{name}, other layouts", marks=pytest.mark.slow))
    return found


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
