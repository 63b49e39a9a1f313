"""Group wrong gradients, updates and dtypes of a run by cause.

Sums and weights that are kept in bfloat16 where float32 was asked have only values that are bfloat16 numbers. Computing
in bfloat16 rounds as coarsely as reducing in it, so the size of an error can't tell them apart. But the float32 sum of
several bfloat16 contributions needs more digits, in all but about half of the elements. If only one of several
reductions is made in bfloat16, more elements are bfloat16 numbers than should be: the contributions of the reference,
summed either way, tell how many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from meshwright.config.schema import RunConfig
from meshwright.plan.run_plan import RunPlan
from meshwright.prove.as_run.codec_errors import compressed_units
from meshwright.prove.as_run.fit_in_noise import NoisyGradient, diagnose
from meshwright.prove.as_run.record_run import AsRunRecord
from meshwright.prove.as_run.result import Check, Finding
from meshwright.prove.as_run.rounded_reference import StepReference
from meshwright.prove.as_run.update_check import diagnose_updates, update_errors
from meshwright.prove.compare.result import Diagnosis, FaultKind
from meshwright.prove.compare.tensor_shards import AssembledTensor
from meshwright.prove.diagnose.phrases import rank_words
from meshwright.prove.placement import expert_placement_of

NEARLY_ALL = 0.98
MIN_ELEMENTS = 48
"""Fewest sums to judge by: of right ones, up to about half are bfloat16 numbers by chance."""
MIN_WEIGHTS = 4
"""Fewest weights to judge by: of right ones, one in 65,536 is a bfloat16 number by chance."""
COMPARABLE = 2.0**-6
"""A contribution below this fraction of the largest one may be lost in rounding by chance."""
STAGES = {"the micro-batches": 2, "dp_shard": 1}
"""Sums before the last one, by the dim of contributions [r, s, m, *shape]; later dims are summed before."""
MIN_TOLD = 2000
"""Fewest elements to tell shares of bfloat16 numbers by."""
MIN_APART = 0.2
"""Least difference between the shares of bfloat16 numbers of right and wrong sums to tell them apart."""


def gradient_findings(
    checks: dict[str, Check],
    noisy: Callable[[str, int], NoisyGradient],
    *,
    root: str,
    wrong_updates: bool,
    is_compiled: bool,
) -> list[Finding]:
    """Return a finding per cause of wrong gradients.

    Args:
        checks: checks of the gradients.
        noisy: function from a parameter and a step to the gradient.
        root: fault before the gradients from which they may follow; empty if there is none.
        wrong_updates: whether parameters have wrong updates, from which gradients of later steps may follow.
        is_compiled: whether blocks are compiled.
    """
    members: dict[Diagnosis, list[str]] = {}
    for name, check in checks.items():
        if not check.ok:
            found = diagnose(noisy(name, check.step))
            if is_compiled and found.kind is FaultKind.ZERO:
                found = replace(found, cause=f"{found.cause}; a compiled block may have lost it (train.compile)")
            follows = root or ("a wrong update" if wrong_updates and check.step > 1 else "")
            if follows and found.kind in (FaultKind.UNRECOGNISED, FaultKind.REPLICAS_DIFFER):
                found = Diagnosis(FaultKind.CONSEQUENCE, found.symptom, f"may follow: {follows}")
            members.setdefault(found, []).append(name)
    return [Finding("gradients", diagnosis, tuple(names)) for diagnosis, names in members.items()]


def update_findings(config: RunConfig, records: list[AsRunRecord], checks: dict[str, Check]) -> list[Finding]:
    """Return a finding per cause of updates that AdamW doesn't make."""
    members: dict[Diagnosis, list[str]] = {}
    for name, check in checks.items():
        if check.ok:
            continue
        wrong = _wrong_updates(config, records, name)
        if config.train.precision != "float64" and _weights_on_grid(records, name):
            cause = "weights are kept in bfloat16 where float32 was asked"
            found = Diagnosis(FaultKind.UNRECOGNISED, "all values are bfloat16 numbers", cause)
        else:
            found = diagnose_updates(records, wrong, config)
        informative = [rank for rank, record in enumerate(records) if _has_gradient(record, name)]
        if {rank for rank, _ in wrong} < set(informative):
            found = replace(found, symptom=f"{found.symptom}, only on {rank_words(rank for rank, _ in wrong)}")
        members.setdefault(found, []).append(name)
    return [Finding("parameters", diagnosis, tuple(names)) for diagnosis, names in members.items()]


def low_precision_sums(
    config: RunConfig, plan: RunPlan, references: list[StepReference], gradients: dict[str, list[AssembledTensor]]
) -> list[Finding]:
    """Return the finding that float32 sums are made in bfloat16, if they are.

    Args:
        config: configuration of the run.
        plan: plan of the run.
        references: references of all steps.
        gradients: right gradients, by name and step.
    """
    if config.train.precision == "float64" or compressed_units(plan):
        return []
    members: dict[Diagnosis, list[str]] = {}
    for name, found in gradients.items():
        if _sums_on_grid(config, plan, name, references, found):
            cause = "gradients are reduced or accumulated in bfloat16 where float32 was asked"
            symptom = "sums of several contributions, and all values are bfloat16 numbers"
        elif low := _low_sum(config, plan, name, references, found):
            cause = f"the sum over {low} is made in bfloat16 where float32 was asked"
            symptom = "more values are bfloat16 numbers than of float32 sums"
        else:
            continue
        members.setdefault(Diagnosis(FaultKind.UNRECOGNISED, symptom, cause), []).append(name)
    return [Finding("gradients", diagnosis, tuple(names)) for diagnosis, names in members.items()]


def _has_gradient(record: AsRunRecord, name: str) -> bool:
    return any(bool(one["gradients"][name][1].any()) for one in record.steps if name in one["gradients"])


def _weights_on_grid(records: list[AsRunRecord], name: str) -> bool:
    held = [record.weights[at][name][1] for record in records if name in record.weights[0] for at in (0, -1)]
    changed = torch.cat([a[a != b].flatten() for b, a in zip(held[::2], held[1::2], strict=True)] or [torch.zeros(0)])
    return looks_rounded(int(is_on_grid(changed).sum()), changed.numel(), least=MIN_WEIGHTS)


def _sums_on_grid(
    config: RunConfig,
    plan: RunPlan,
    name: str,
    references: list[StepReference],
    gradients: list[AssembledTensor],
) -> bool:
    axes, experts = config.mesh.axes(), expert_placement_of(plan)
    divisors = tuple({1, axes.data_parallel(), config.train.num_microbatches, axes.cp, axes.num_ranks()})
    on_grid = num = 0
    for reference, found in zip(references, gradients, strict=True):
        partial = reference.partial_gradients[name]
        if experts is not None and name in experts.parameters:
            # The ranks of a group send the tokens of an expert to one of them, which multiplies them together.
            partial = partial.reshape(-1, experts.size, *partial.shape[1:]).sum(1)
        summed = is_summed(partial.flatten(0, 1)).numpy()
        for shard in found.shards:
            values = torch.from_numpy(shard.value[shard.slice_of(summed)])
            on_grid, num = on_grid + int(is_on_grid(values, divisors).sum()), num + values.numel()
    return looks_rounded(on_grid, num)


def _low_sum(
    config: RunConfig, plan: RunPlan, name: str, references: list[StepReference], gradients: list[AssembledTensor]
) -> str:
    axes, experts, shares = config.mesh.axes(), expert_placement_of(plan), Shares()
    if experts is not None and name in experts.parameters:
        return ""  # their contributions are those of groups of ranks, in no order of axes
    for reference, found in zip(references, gradients, strict=True):
        partial = reference.rounded[name]
        observed = torch.from_numpy(next(found.replicas()).value)
        shares.add(observed, partial.reshape(axes.dp_replicate, axes.dp_shard, *partial.shape[1:]))
    return shares.low_sum()


def _wrong_updates(config: RunConfig, records: list[AsRunRecord], name: str) -> list[tuple[int, str]]:
    """Return the ranks, each with the parameter, on which its updates are wrong."""
    return [
        (rank, name)
        for rank, record in enumerate(records)
        if name in record.weights[0] and max(update_errors(record, name, config)) > 1.0
    ]


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


def looks_rounded(num_on_grid: int, num_elements: int, *, least: int = MIN_ELEMENTS) -> bool:
    """Return whether so many of at least `least` elements are bfloat16 numbers that all of them were rounded."""
    return num_elements >= least and num_on_grid >= NEARLY_ALL * num_elements


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
