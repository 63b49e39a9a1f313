"""Tolerances of a proof as run, and what it checks besides: dtypes of sums, error feedback and dropouts.

Each rank records what its dropouts did, so those that differ between tensor-parallel ranks that should agree are
found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.comm.compression.catalogue import is_lossy
from meshwright.config.schema import RunConfig
from meshwright.mesh.axes import Axes
from meshwright.plan.run_plan import RunPlan
from meshwright.prove.as_run.rounding import (
    Growth,
    PlainCodec,
    Rounded,
    RoundedReference,
    compressed_units,
    relative_codec_errors,
)
from meshwright.prove.judge.judge import Comparison, Sides, Tolerances
from meshwright.prove.judge.tensors import assemble
from meshwright.prove.placement import ExpertPlacement
from meshwright.prove.record.evidence import DropoutCall, RankRecord
from meshwright.prove.record.reference_run import PlainModel
from meshwright.prove.result import Diagnosis, FaultKind, Feedback, Finding, ProofResult, rank_words
from meshwright.prove.spec import has_feedback
from meshwright.units import counted

ROUNDING_FACTOR = 3.0
"""Safety factor on the measured sensitivity to rounding: ranks add up in other orders than the plain module, and a few
perturbations don't find the largest deviation."""
LAYER_NORM_ROUNDINGS = 0.5
"""Rounding errors of the gradients of a LayerNorm's weight and bias, times the root of the number of tokens: on a CPU,
PyTorch adds up those of a forward in the precision of the run. (A sixth was measured, with 8 to 512 tokens.)"""
CODEC_FACTOR = 1.5
"""Safety factor on the error of a plain quantiser: its groups may differ from the layout's, as those of experts do."""
LOSS_ROUNDINGS = 4
"""Rounding errors of a loss, relative to the dtype of the masters."""
SUM_ROUNDINGS = 256
"""Rounding errors of a norm, relative to its dtype."""


@dataclass
class MeasuredTolerances(Tolerances):
    """What rounding and codecs may change in each step."""

    rounded: list[Rounded]
    unit: float
    """Rounding unit of the masters."""
    codec: list[dict[str, float]] = field(default_factory=list)
    """Relative errors of gradients in each step expected of a plain quantiser."""
    sums: dict[str, float] = field(default_factory=dict)
    """Relative errors of gradients that PyTorch adds up over the tokens of a forward in the precision of the run."""
    noisy = True
    initial = 1e-6  # drawn in float64, and rounded to the dtype of the masters

    def gradient(self, name: str, step: int) -> float:
        """Return the tolerance of a gradient in a step.

        A step's few evaluations may happen to deviate little, so all steps together count as well. A gradient that
        rounding changes by more than its size, as of adapters that are scaled by far too much, tells nothing.
        """
        measured = [one.gradients[name] for one in self.rounded]
        rounding = ROUNDING_FACTOR * max(measured[step - 1], float(np.sqrt(np.mean(np.square(measured)))))
        rounding += self.rounded[step - 1].choices.get(name, 0.0) + self.sums.get(name, 0.0)
        found = rounding + CODEC_FACTOR * self.codec[step - 1].get(name, 0.0)
        return found if found < 1.0 else math.inf

    def loss(self, step: int) -> float:
        """Return the tolerance of a loss, which is summed in the masters' dtype: perturbations may not show that."""
        return LOSS_ROUNDINGS * self.unit + ROUNDING_FACTOR * max(one.loss for one in self.rounded)

    def norm(self, unit: float) -> float:
        """Return the tolerance of a norm, given the rounding unit of gradients."""
        return SUM_ROUNDINGS * unit


def measure(
    config: RunConfig, plan: RunPlan, plain: PlainModel, sides: Sides
) -> tuple[MeasuredTolerances, Feedback | None]:
    """Measure what rounding and codecs change in the reference, and how the errors of a codec with feedback grow."""
    reference = RoundedReference(plain, plan)
    rounded = [
        reference.step(step, sides.weights[step - 1], due)
        for step, due in zip(sides.steps, sides.references, strict=True)
    ]
    unit = max((sides.unit(name) for name in plain.roles), default=0.0)
    found = MeasuredTolerances(rounded, unit, [{} for _ in rounded])
    num_cells = sides.counts.axes.data_parallel() * config.train.num_microbatches
    tokens = plan.batch.tokens * config.train.global_batch // num_cells
    error = LAYER_NORM_ROUNDINGS * torch.finfo(getattr(torch, config.train.precision)).eps * tokens**0.5
    found.sums = {
        name: error
        for prefix, module in plain.module.named_modules()
        if type(module) is nn.LayerNorm and plain.device.type == "cpu"
        for name, _ in module.named_parameters(prefix)
    }
    units = compressed_units(plan)
    names = {name for one in units for name in one.names}
    codecs, growths = [PlainCodec(config, plan, feedback) for feedback in (True, False)], [Growth() for _ in range(3)]
    for step, due in zip(sides.steps, sides.references, strict=True) if names else ():
        sent = rounded[step - 1].contributions
        (with_feedback, squares), (without, _) = (codec.reduce(sent) for codec in codecs)
        errors = {name: with_feedback[name] - sent[name].sum((0, 1)) for name in squares}
        found.codec[step - 1] = relative_codec_errors(errors, squares, due.gradients)
        observed = {}
        for name, shards in sides.evidence.gradients(step).items():
            full = assemble(name, shards, tuple(due.gradients[name].shape), sides.counts.axes)
            if full.shards:
                observed[name] = torch.from_numpy(next(full.replicas()).value)
        for growth, values in zip(growths, (observed, with_feedback, without), strict=True):
            growth.add(values, due.gradients, names)
    if not has_feedback(plan):
        return found, None
    return found, Feedback(units[0].method.name, *(growth.value() for growth in growths))


def further_findings(
    config: RunConfig,
    plan: RunPlan,
    plain: PlainModel,
    comparison: Comparison,
    rounded: list[Rounded],
    feedback: Feedback | None,
) -> Iterator[Finding]:
    """Yield findings on gradients that tell nothing, dropouts, dtypes of sums and error feedback."""
    gradients = [verdict.result for one in comparison.steps for verdict in one.gradients.values()]
    if gradients and all(math.isinf(one.tolerance) for one in gradients):
        symptom = f"rounding to {config.train.precision} changes every gradient by more than its size"
        cause = "no gradient can be told from a wrong one; without --as-run, the layout is proved in float64"
        yield Finding("evidence", Diagnosis(FaultKind.EVIDENCE, symptom, cause))
    for feature in plain.features:
        yield from (Finding("state", found, step=step) for step, found in feature.findings())
    yield from diagnose_dropouts(list(comparison.sides.evidence.ranks), plan)
    if config.train.precision != "float64" and not compressed_units(plan):
        yield from low_precision_sums(comparison, rounded)
    if feedback is not None and not feedback.ok:
        steps = counted(len(comparison.steps), "step")
        symptom = (
            f"comm.gradients={feedback.method}: over {steps} the errors grow to "
            f"{feedback.observed:.1f} × that of one step: {feedback.with_feedback:.1f} with error feedback, "
            f"{feedback.without:.1f} without"
        )
        cause = "the error feedback is missing: each step's error is lost instead of entering the next step"
        yield Finding("error feedback", Diagnosis(FaultKind.UNRECOGNISED, symptom, cause))


def as_run_notes(config: RunConfig, plan: RunPlan, result: ProofResult) -> Iterator[str]:
    """Yield what a proof as run doesn't cover."""
    comm = (config.comm.gradients, config.comm.weights)
    by = " and ".join([config.train.precision, *(name for name in comm if is_lossy(name))])
    for what, loose in (
        ("gradients", [one.name for one in result.parameters if one.gradient is not None and not one.gradient.proves]),
        ("updates", [one.name for one in result.parameters if not one.update.proves and one.gradient is not None]),
    ):
        if loose:
            shown = ", ".join(loose[:2]) + (f" and {len(loose) - 2} more" if len(loose) > 2 else "")
            yield f"not proved: the {what} of {shown}; rounding to {by} changes them like a fault"
    norms = [norm for step in result.norms for norm in step.observed]
    if norms and max(norms) <= config.train.max_grad_norm:
        yield f"not proved: clipping, as no norm exceeded train.max_grad_norm = {config.train.max_grad_norm:g}"
    if result.feedback is not None and not result.feedback.tells:
        yield "not proved: error feedback, without which the errors grow as little, as other rounding outweighs them"
    if compressed_units(plan):
        yield "not proved: the dtype of reductions, as the codec rounds gradients"


def diagnose_dropouts(records: list[RankRecord], plan: RunPlan) -> Iterator[Finding]:
    """Yield the first dropout that tensor-parallel ranks don't compute as they should.

    Without sequence parallelism they hold the same stream, and the same inputs must give the same output. With it each
    holds other tokens, so no number of a token may appear on two ranks.
    """
    tp = plan.mesh.view("tp")
    if not tp:
        return
    lines = {plan.mesh.line(rank, tp) for rank in range(plan.mesh.num_ranks())}
    for first, *others in sorted(lines):
        for other in others:
            for a, b in zip(records[first].dropouts, records[other].dropouts, strict=False):
                found = _sharded(a, b, other) if plan.sequence_parallel else _replicated(a, b, first, other)
                if found is not None:
                    yield Finding("dropout", replace(found, symptom=f"at {a[0]}, {found.symptom}"), step=1)
                    return


def _replicated(a: DropoutCall, b: DropoutCall, first: int, other: int) -> Diagnosis | None:
    if a[1] != b[1] or a[2] == b[2]:
        return None
    symptom = f"{rank_words((first, other))} along tp have the same inputs and different outputs"
    cause = f"rank {other} drops other elements than rank {first}: masks differ between tp ranks that should agree"
    return Diagnosis(FaultKind.REPLICAS_DIFFER, symptom, cause)


def _sharded(a: DropoutCall, b: DropoutCall, other: int) -> Diagnosis | None:
    twice = set(a[3]) & set(b[3])
    if not twice:
        return None
    symptom = f"rank {other} drops by the numbers of tokens of another tp rank, such as {min(twice)}"
    return Diagnosis(FaultKind.REPLICAS_DIFFER, symptom, "masks repeat: tokens are numbered by their place on the rank")


NEARLY_ALL = 0.98
MIN_ELEMENTS = 48
"""Fewest sums to judge by: of right ones, up to about half are bfloat16 numbers by chance."""
COMPARABLE = 2.0**-6
"""A contribution below this fraction of the largest one may be lost in rounding by chance."""
STAGES = {"the micro-batches": 2, "dp_shard": 1}
"""Sums before the last one, by the dim of contributions [r, s, m, *shape]; later dims are summed before."""
MIN_TOLD = 2000
"""Fewest elements to tell shares of bfloat16 numbers by."""
MIN_APART = 0.2
"""Least difference between the shares of bfloat16 numbers of right and wrong sums to tell them apart."""


def low_precision_sums(comparison: Comparison, rounded: list[Rounded]) -> Iterator[Finding]:
    """Yield a finding per sum of right gradients that is made in bfloat16.

    Args:
        comparison: verdicts on all values.
        rounded: the reference of each step in the precision of the run.
    """
    members: dict[Diagnosis, list[str]] = {}
    names = list(comparison.steps[0].gradients)
    for name in names:
        if all(one.gradients[name].result.ok for one in comparison.steps):
            found = _found(comparison, rounded, name)
            members.setdefault(found, []).append(name) if found is not None else None
    for diagnosis, wrong in members.items():
        yield Finding("gradient", diagnosis, tuple(wrong), len(names), 1)


def _found(comparison: Comparison, rounded: list[Rounded], name: str) -> Diagnosis | None:
    evidence = comparison.sides.evidence
    pairs = [(one.gradients[name].suspect.assembly, step.contributions[name]) for one, step in
             zip(comparison.steps, rounded, strict=True)]  # fmt: skip
    values = [(shard.value, shard.slices(), parts) for assembly, parts in pairs for shard in assembly.shards]
    held = [(torch.from_numpy(value), at, parts) for value, at, parts in values]
    if _all_on_grid(held, evidence.axes, evidence.num_microbatches, _own(evidence.experts, name)):
        cause = "gradients are reduced or accumulated in bfloat16 where float32 was asked"
        symptom = "sums of several contributions, and all values are bfloat16 numbers"
        return Diagnosis(FaultKind.ROUNDED, symptom, cause)
    if _own(evidence.experts, name) is not None:
        return None  # their contributions are those of groups of ranks, in no order of axes
    shares = Shares()
    for assembly, parts in pairs:
        whole = torch.from_numpy(next(assembly.replicas()).value)
        shares.add(whole, parts.reshape(evidence.axes.dp_replicate, evidence.axes.dp_shard, *parts.shape[1:]))
    if low := shares.low_sum():
        cause = f"the sum over {low} is made in bfloat16 where float32 was asked"
        return Diagnosis(FaultKind.ROUNDED, "more values are bfloat16 numbers than of float32 sums", cause)
    return None


def _own(experts: ExpertPlacement | None, name: str) -> ExpertPlacement | None:
    return experts if experts is not None and name in experts.parameters else None


def _all_on_grid(
    held: Iterable[tuple[Tensor, tuple[slice, ...], Tensor]], axes: Axes, micro: int, experts: ExpertPlacement | None
) -> bool:
    divisors = tuple({1, axes.data_parallel(), micro, axes.cp, axes.num_ranks()})
    on_grid = num = 0
    for value, at, parts in held:
        if experts is not None and len(parts) % experts.size:
            return False  # groups span context-parallel ranks, whose contributions are not known
        if experts is not None:
            # The ranks of a group send the tokens of an expert to one of them, which multiplies them together.
            parts = parts.reshape(-1, experts.size, *parts.shape[1:]).sum(1)
        chosen = value[is_summed(parts.flatten(0, 1))[at]]
        on_grid, num = on_grid + int(is_on_grid(chosen, divisors).sum()), num + chosen.numel()
    return looks_rounded(on_grid, num)


def is_on_grid(value: Tensor, divisors: tuple[int, ...] = (1,)) -> Tensor:
    """Return which float32 elements, times one of the divisors of a mean, are bfloat16 numbers."""
    found = torch.zeros(value.shape, dtype=torch.bool)
    for divisor in divisors:
        scaled = value.float() * divisor
        found |= scaled.bfloat16().float() == scaled
    return found


def is_summed(contributions: Tensor) -> Tensor:
    """Return which elements are sums of at least two contributions of comparable size, given [contribution, *shape]."""
    if len(contributions) < 2:
        return torch.zeros(contributions.shape[1:], dtype=torch.bool)
    top = contributions.abs().topk(2, dim=0).values
    return (top[1] > 0) & (top[1] >= COMPARABLE * top[0])


def looks_rounded(num_on_grid: int, num_elements: int) -> bool:
    """Return whether so many elements are bfloat16 numbers that all of them were rounded."""
    return num_elements >= MIN_ELEMENTS and num_on_grid >= NEARLY_ALL * num_elements


@dataclass
class Shares:
    """Numbers of elements that are bfloat16 numbers: of a gradient, and of its reference summed in several ways."""

    num: int = 0
    observed: int = 0
    right: int = 0
    wrong: dict[str, int] = field(default_factory=dict)
    """By the sum that is made in bfloat16."""

    def add(self, observed: Tensor, contributions_rsm: Tensor) -> None:
        """Add a step, given the reference's contributions in the precision of the run."""
        summed = is_summed(contributions_rsm.flatten(0, 2))
        self.num += int(summed.sum())
        self.observed += int(is_on_grid(observed)[summed].sum())
        exact = contributions_rsm.float()
        self.right += int(is_on_grid(exact.sum((0, 1, 2)))[summed].sum())
        for name, dim in STAGES.items():
            if exact.shape[dim] > 1 and exact.shape[:dim].numel() > 1:
                total = exact.sum(tuple(range(dim, 3)), keepdim=True).bfloat16().float().sum((0, 1, 2))
                self.wrong[name] = self.wrong.get(name, 0) + int(is_on_grid(total)[summed].sum())

    def low_sum(self) -> str:
        """Return the sum that was made in bfloat16 by the looks of it, or an empty string."""
        told = {name: wrong for name, wrong in self.wrong.items() if wrong - self.right >= MIN_APART * self.num}
        if self.num < MIN_TOLD or not told:
            return ""
        nearest = min(told, key=lambda name: abs(told[name] - self.observed))
        return nearest if self.observed > (self.right + told[nearest]) / 2 else ""
