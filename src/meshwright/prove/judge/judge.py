"""Compare what the ranks recorded with the reference, each value given the recorded ones that it is computed from.

Gradients and losses are compared with the reference at the weights that the ranks held, norms with those of the
recorded gradients, what the optimizer was given with the clipped gradients, and parameters after a step with the
reference's update of those before it by what the optimizer was given. So each error is seen once, in the step and at
the place in which it arises.

An audit before that finds evidence that is missing, inconsistent or vacuous: two empty dictionaries or all-zero
reference gradients would pass a comparison.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from meshwright.config.schema import TrainConfig
from meshwright.optim.role import Role
from meshwright.prove.judge.tensors import Array, LayoutCounts, assemble, max_magnitude, safe_ratio, to_arrays
from meshwright.prove.judge.verdicts import (
    SuspectTensor,
    TensorVerdict,
    Verdicts,
    compare_step,
    compare_tensors,
    tensor_scales,
    verdict_on,
)
from meshwright.prove.placement import StagePlacement
from meshwright.prove.record.evidence import INITIAL, Evidence, Shards, UnequalCopies
from meshwright.prove.record.plain_optimizer import Replay, clip_factor, plain_learning_rate
from meshwright.prove.record.reference_run import Contributions, StepReference
from meshwright.prove.result import Diagnosis, FaultKind, StepValue, rank_words
from meshwright.units import counted, first_words

EXACT = 1e-12
"""Relative tolerance of values in float64; rounding stays far below it."""
ROUNDED, ROUNDING_FACTOR = 1e-10, 3.0
"""Largest relative error of a gradient that rounding may explain, and the safety factor on the change that it is seen
to cause."""
SCALARS = 1e-13
"""Relative tolerance of learning rates."""
GIVEN_ROUNDINGS = 8.0
"""Rounding errors of a clipped gradient, relative to the largest of its tensor."""
WEIGHT_ROUNDINGS, STEP_ROUNDINGS = 8.0, 256.0
"""Rounding errors of a parameter, and of its step relative to the largest."""
ORTHOGONAL_FACTOR = 3.0
"""Safety factor on how much the precision of the run changes the update of a matrix that is made orthogonal."""


class Expected(Protocol):
    """What computes the reference."""

    initial: dict[str, Tensor]
    """Full parameters and saved buffers before the first step."""

    @property
    def roles(self) -> Mapping[str, Role]:
        """Roles of the trained parameters."""

    @property
    def bias_rates(self) -> Mapping[str, float]:
        """Per counting buffer of a layer with a balancing bias: the step by which the bias changes."""

    def batch(self, step: int) -> list[int]:
        """Return the samples of a step's global batch, in order."""

    def step(self, step: int, weights: Mapping[str, Tensor]) -> StepReference:
        """Evaluate a step at full weights and saved buffers."""

    def contributions(self, step: int, weights: Mapping[str, Tensor]) -> Contributions:
        """Evaluate a step by micro-batches of data-parallel ranks."""

    def units(self, step: int) -> Tensor:
        """Return the numbers of loss units of each micro-batch, [data_parallel, num_microbatches]."""

    def by_stage(self, step: int, weights: Mapping[str, Tensor], stages: StagePlacement) -> dict[str, Tensor]:
        """Return each stage's contribution to the gradient of each shared parameter: by key, [stage, *shape]."""


class Tolerances:
    """Relative tolerances; those of an exact proof, unless they are overridden."""

    noisy = False
    """Whether values are rounded, so that errors are those of norms."""
    initial = EXACT
    """Of initial weights."""

    def gradient(self, name: str, step: int) -> float:
        """Return the tolerance of a gradient."""
        return EXACT

    def loss(self, step: int) -> float:
        """Return the tolerance of a loss."""
        return EXACT

    def norm(self, unit: float) -> float:
        """Return the tolerance of a norm, given the rounding unit of gradients."""
        return EXACT


@dataclass(frozen=True, eq=False)
class Sides:
    """Both sides of a proof: the evidence, and the reference at the weights that the layout held."""

    evidence: Evidence
    expected: Expected
    train: TrainConfig
    limits: tuple[float, ...]
    """Largest norm of the gradient in each step."""
    counts: LayoutCounts
    _contributions: dict[int, Contributions] = field(default_factory=dict)

    @cached_property
    def weights(self) -> list[dict[str, Tensor]]:
        """Full parameters and saved buffers before the first step and after each; where no rank holds an element, that
        of the reference before the first step."""
        found = []
        for step in range(self.evidence.num_steps + 1):
            shards = self.evidence.weights(step)
            found.append({name: self._full(name, value, shards) for name, value in self.expected.initial.items()})
        return found

    def _full(self, name: str, initial: Tensor, shards: Shards) -> Tensor:
        full = assemble(name, shards.get(name, []), tuple(initial.shape), self.counts.axes)
        replica = next(full.replicas(), None)
        if replica is None:
            return initial
        value = torch.from_numpy(replica.value)
        return torch.where(value.isnan(), initial.double(), value) if full.faults else value

    @cached_property
    def references(self) -> list[StepReference]:
        """The reference of each step."""
        return [self.expected.step(step, self.weights[step - 1]) for step in self.steps]

    def rounding(self, step: int) -> dict[str, float]:
        """Return how much the gradients of a step change where every parameter changes by at most a rounding error,
        relative to the largest value of each."""
        due, generator = to_arrays(self.references[step - 1].gradients), torch.Generator().manual_seed(step)
        scales, weights = tensor_scales(due), dict(self.weights[step - 1])
        for name in self.expected.roles:
            noise = torch.rand(weights[name].shape, generator=generator, dtype=torch.float64) * 2 - 1
            weights[name] = weights[name].double() * (1 + torch.finfo(torch.float64).eps * noise)
        found = to_arrays(self.expected.step(step, weights).gradients)
        return {name: safe_ratio(max_magnitude(found[name] - value), scales[name]) for name, value in due.items()}

    @property
    def steps(self) -> range:
        """Numbers of the steps, from 1."""
        return range(1, self.evidence.num_steps + 1)

    def contributions(self, step: int) -> Contributions:
        """Return the reference's contributions to a step, by micro-batches of data-parallel ranks."""
        if step not in self._contributions:
            self._contributions[step] = self.expected.contributions(step, self.weights[step - 1])
        return self._contributions[step]

    def gradient_parts(self, step: int, name: str) -> Array | None:
        """Return the contributions to a gradient: [data-parallel rank, micro-batch, *shape]."""
        value = self.contributions(step).gradients.get(name)
        return None if value is None else to_arrays({"": value})[""]

    def units_of_steps(self) -> Iterator[tuple[int, str]]:
        """Yield what may be counted in place of steps, and how many there are in one."""
        stages = self.evidence.stages
        for number, what in (
            (self.counts.num_microbatches, "micro-batches"),
            (1 if stages is None else len(stages.ranks) // stages.num_ranks, "the rank's model chunks"),
            (self.counts.axes.data_parallel(), "data-parallel ranks' steps"),
            (self.train.global_batch, "samples"),
        ):
            if number > 1:
                yield number, what

    def unit(self, name: str) -> float:
        """Return the rounding unit of a parameter or buffer; 0 of an integer."""
        for record in self.evidence.ranks:
            if name in record.initial:
                dtype = record.initial[name][1].dtype
                return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        return 0.0


@dataclass(frozen=True, eq=False)
class StepComparison:
    """Verdicts on the values of a step."""

    step: int
    loss: StepValue
    gradients: Verdicts
    norm: StepValue
    rate: StepValue
    given: dict[int, list[str]]
    """Per rank, the gradients of which the optimizer was given something else than the clipped ones."""
    updates: Verdicts
    """Parameters and saved buffers after the step."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Verdicts on all values of a proof, without causes."""

    sides: Sides
    initial: Verdicts
    steps: tuple[StepComparison, ...]


def compare(sides: Sides, tolerances: Tolerances) -> Comparison:
    """Compare all values with the reference."""
    initial = compare_tensors(
        sides.evidence.weights(0), to_arrays(sides.expected.initial), sides.counts, tolerances.initial
    )
    replay = Replay(sides.train, sides.expected.roles)
    return Comparison(sides, initial, tuple(_compare_step(sides, step, tolerances, replay) for step in sides.steps))


def _compare_step(sides: Sides, step: int, tolerances: Tolerances, replay: Replay) -> StepComparison:
    evidence, reference = sides.evidence, sides.references[step - 1]
    expected = to_arrays(reference.gradients)
    limits = {name: tolerances.gradient(name, step) for name in expected}
    compared = partial(
        compare_tensors, evidence.gradients(step), expected, sides.counts, limits,
        step=step, noisy=tolerances.noisy, contributions=partial(sides.gradient_parts, step),
    )  # fmt: skip
    gradients = compared()
    if not tolerances.noisy and any(EXACT < one.result.error.relative <= ROUNDED for one in gradients.values()):
        # Sums that cancel, as where a shift changes nothing, are rounded by more than their value shows.
        for name, rounding in sides.rounding(step).items():
            limits[name] = min(max(limits[name], ROUNDING_FACTOR * rounding), ROUNDED)
        gradients = compared()
    unit = max((sides.unit(name) for name in expected), default=0.0)
    return StepComparison(
        step,
        compare_step(step, evidence.series("loss", step), reference.loss, tolerances.loss(step)),
        gradients,
        compare_step(step, evidence.series("grad_norm", step), recorded_norm(gradients), tolerances.norm(unit)),
        compare_step(step, _rates(sides, step), plain_learning_rate(step, sides.train), SCALARS),
        dict(_given(sides, step)),
        _compare_updates(sides, step, replay, noisy=tolerances.noisy),
    )


def _rates(sides: Sides, step: int) -> list[float]:
    """Return the learning rates that ranks used; the right one on a rank that took no step."""
    due = plain_learning_rate(step, sides.train)
    return [due if math.isnan(rate) else rate for rate in sides.evidence.series("lr", step)]


def recorded_norm(gradients: Verdicts) -> float:
    """Return the norm of recorded gradients, with replicas averaged."""
    squares = 0.0
    for verdict in gradients.values():
        assembly = verdict.suspect.assembly
        with np.errstate(invalid="ignore", over="ignore"):
            total = sum(float((shard.value**2).sum()) for shard in assembly.shards)
        squares += total / assembly.num_replicas()
    return math.sqrt(squares) if squares >= 0.0 else math.nan


def due_factor(sides: Sides, step: int, rank: int) -> float:
    """Return what a rank must multiply gradients by, given the norm that it reports."""
    return clip_factor(sides.evidence.ranks[rank].steps[step - 1]["grad_norm"], sides.limits[step - 1])


def _given(sides: Sides, step: int) -> Iterator[tuple[int, list[str]]]:
    """Yield the ranks whose optimizer was given something else than the clipped gradients, with the parameters."""
    for rank, record in enumerate(sides.evidence.ranks):
        found = record.steps[step - 1]
        if not found["given"]:
            continue
        factor, wrong = due_factor(sides, step, rank), []
        for name, (_, gradient) in found["gradients"].items():
            if name not in found["given"]:
                wrong.append(name)
                continue
            limit = (
                GIVEN_ROUNDINGS * torch.finfo(gradient.dtype).eps * float(gradient.abs().max())
                if gradient.numel()
                else 0.0
            )
            off = (found["given"][name][1] - factor * gradient).abs() if gradient.numel() else gradient
            if off.numel() and not float(off.max()) <= limit:
                wrong.append(name)
        if wrong:
            yield rank, wrong


def _compare_updates(sides: Sides, step: int, replay: Replay, *, noisy: bool) -> Verdicts:
    evidence, old = sides.evidence, sides.weights[step - 1]
    due = dict(old)
    if not all(evidence.series("skipped", step)):
        given = {name: value for name, value in given_gradients(sides, step).items() if name in old}
        due |= replay.step(step, plain_rate(sides, step), old, given)
        due |= sides.references[step - 1].buffers
    after, found = evidence.weights(step), {}
    expected, before = to_arrays(due), to_arrays(old)
    for name, value in expected.items():
        largest = max_magnitude(value - before[name])
        assembly = assemble(name, after.get(name, []), value.shape, sides.counts.axes)
        scale = largest or max_magnitude(value) or 1.0
        unit = sides.unit(name)
        limit = unit * (WEIGHT_ROUNDINGS * max_magnitude(value) + STEP_ROUNDINGS * largest)
        limit += ORTHOGONAL_FACTOR * replay.rounding.get(name, 0.0)
        if noisy and name not in sides.expected.roles and largest:
            limit = math.inf  # counts of experts' tokens, whose choices rounding may turn
        suspect = SuspectTensor(assembly, value, scale, limit / scale, sides.counts)
        found[name] = TensorVerdict(verdict_on(suspect, suspect.error(), step), suspect)
    return found


def plain_rate(sides: Sides, step: int) -> float:
    """Return the learning rate that ranks used in a step: the first that took one."""
    return next((rate for rate in sides.evidence.series("lr", step) if not math.isnan(rate)), 0.0)


def given_gradients(sides: Sides, step: int) -> dict[str, Tensor]:
    """Return the full gradients that the optimizer was given; the clipped ones on ranks that took no step."""
    evidence, found = sides.evidence, {}
    given, recorded = evidence.given(step), evidence.gradients(step)
    for name, reference in sides.references[step - 1].gradients.items():
        have = {shard.rank for shard in given.get(name, [])}
        shards = list(given.get(name, []))
        for shard in recorded.get(name, []):
            if shard.rank not in have:
                value = shard.value * due_factor(sides, step, shard.rank) if shard.value.numel() else shard.value
                shards.append(type(shard)(shard.rank, shard.offset, value))
        full = assemble(name, shards, tuple(reference.shape), sides.counts.axes)
        replica = next(full.replicas(), None)
        if replica is not None:
            found[name] = torch.from_numpy(np.nan_to_num(replica.value) if full.faults else replica.value)
    return found


MAX_NAMES = 4
COPIES_START = "all copies of a shared parameter must start from the weights of the first copy"
COPIES_STAY = "every copy of a shared parameter needs the summed gradient, including several copies on one rank"
LEFT_GATHERED = "weights left gathered: they are not resharded after the backward, so no update reaches them"
Symptoms = Iterator[tuple[str, str]]


def audit_steps(evidence: Evidence, num_steps: int) -> tuple[Diagnosis, ...]:
    """Return findings on ranks or steps that are missing, without which nothing can be compared."""
    return tuple(Diagnosis(FaultKind.EVIDENCE, *found) for found in _steps(evidence, num_steps))


def _steps(evidence: Evidence, num_steps: int) -> Symptoms:
    num_ranks = evidence.axes.num_ranks()
    if num_steps < 1:
        yield "no step was asked for", "nothing was proved"
    if len(evidence.ranks) != num_ranks:
        found = counted(len(evidence.ranks), "rank")
        yield f"records of {found}", f"the layout has {counted(num_ranks, 'rank')} ({evidence.axes})"
    off = [rank for rank, record in enumerate(evidence.ranks) if len(record.steps) != num_steps]
    if off:
        steps = counted(len(evidence.ranks[off[0]].steps), "step")
        yield f"records of {steps} on {rank_words(off)}", f"the proof has {counted(num_steps, 'step')}"


def audit(sides: Sides) -> tuple[Diagnosis, ...]:
    """Return the findings on evidence that is inconsistent or vacuous, or an empty tuple."""
    gathered = tuple(_left_gathered(sides))
    if gathered:
        return gathered
    found = [*_names(sides), *_batches(sides), *_reference(sides)]
    unequal = _unequal(sides.evidence.unequal())
    return (*(Diagnosis(FaultKind.EVIDENCE, symptom, cause) for symptom, cause in found), *unequal)


def _unequal(copies: Iterable[UnequalCopies]) -> Iterator[Diagnosis]:
    """Yield one finding per kind of compared value; later findings may follow from the first."""
    by_value: dict[str, list[UnequalCopies]] = defaultdict(list)
    for pair in copies:
        by_value[pair.what].append(pair)
    for at, (what, found) in enumerate(by_value.items()):
        names, locations = (list(dict.fromkeys(values)) for values in ([f.name for f in found], map(_location, found)))
        largest = max(f.largest for f in found)
        which, where = first_words(names, MAX_NAMES), first_words(locations, MAX_NAMES)
        symptom = f"{what}: the copies of {which} {where} differ by up to {largest:.2g}"
        kind = FaultKind.CONSEQUENCE if at else FaultKind.REPLICAS_DIFFER
        cause = COPIES_START if what == INITIAL else COPIES_STAY
        yield Diagnosis(kind, symptom, f"may follow from differing copies: {next(iter(by_value))}" if at else cause)


def _location(copies: UnequalCopies) -> str:
    return f"on stages {copies.stages[0]} and {copies.stages[1]} of rank {copies.rank}"


def _names(sides: Sides) -> Symptoms:
    evidence, expected = sides.evidence, sides.expected
    pairs: list[tuple[str, Collection[str], Collection[str]]] = [
        ("initial weight", evidence.weights(0), expected.initial)
    ]
    for step in sides.steps:
        # A gradient that is not there is one of a parameter, and has a cause of its own.
        due = sides.references[step - 1].gradients
        pairs.append((f"gradient of step {step}", {**due, **evidence.gradients(step)}, due))
        pairs.append((f"parameter after step {step}", evidence.weights(step), expected.initial))
    told: set[tuple[str, ...]] = set()
    for what, ours, theirs in pairs:
        for side, names, stages in (
            ("the reference but not in the layout", [name for name in theirs if name not in ours], evidence.stages),
            ("the layout but not in the reference", [name for name in ours if name not in theirs], None),
        ):
            if names and (side, *names) not in told:
                told.add((side, *names))
                yield f"{what} in {side}: {first_words(names, MAX_NAMES)}", _differs(names, stages)


def _differs(names: list[str], stages: StagePlacement | None) -> str:
    expected = "" if stages is None else f": expected on {stages.describe(stages.stages_with_any(names))}"
    return f"the two sides do not hold the same parameters{expected}"


def _batches(sides: Sides) -> Symptoms:
    num_contributions = sides.counts.axes.data_parallel() * sides.counts.num_microbatches
    batch = sides.expected.batch(1)
    if not batch or len(batch) % num_contributions:
        symptom = f"the batch of step 1 has {counted(len(batch), 'sample')}"
        yield symptom, f"data-parallel ranks × micro-batches ({num_contributions}) must divide the batch"


def _reference(sides: Sides) -> Symptoms:
    """Yield findings for a reference that is not finite or proves nothing."""
    cause, nothing = "the reference is at fault, not the layout", "nothing was proved"
    if not sides.expected.initial:
        yield "the reference has no parameters", nothing
    for step, reference in zip(sides.steps, sides.references, strict=True):
        if not reference.gradients:
            yield "the reference has no gradients", nothing
            return
        if all(bool(value.isfinite().all()) for value in sides.weights[step - 1].values()):
            bad = [name for name, value in reference.gradients.items() if not bool(value.isfinite().all())]
            if bad:
                yield f"gradient of step {step} not finite in the reference: {first_words(bad, MAX_NAMES)}", cause
            if not torch.tensor(reference.loss).isfinite():
                yield f"the loss of step {step} is not finite in the reference", cause
        if step == 1 and not any(bool(value.any()) for value in reference.gradients.values()):
            yield "all gradients of the reference are zero", nothing


def _left_gathered(sides: Sides) -> Iterator[Diagnosis]:
    """Yield the finding of ranks that hold full parameters after a step, of which they had a shard before it."""
    evidence = sides.evidence
    before, full = evidence.weights(0), {name: tuple(value.shape) for name, value in sides.expected.initial.items()}
    for step in sides.steps:
        found: dict[str, set[int]] = {}
        for name, shards in evidence.weights(step).items():
            had = {shard.rank: tuple(shard.value.shape) for shard in before.get(name, [])}
            held = {s.rank for s in shards if tuple(s.value.shape) == full.get(name) != had.get(s.rank)}
            if held:
                found[name] = held
        if found:
            ranks, names = rank_words({rank for held in found.values() for rank in held}), first_words([*found], 3)
            symptom = f"after step {step}, parameters of which {ranks} had a shard are held in full: {names}"
            yield Diagnosis(FaultKind.EVIDENCE, symptom, LEFT_GATHERED)
            return
