"""Causes of wrong gradients, from ratios, contributions to the reference gradient, and sums over replicas; and of any
wrong tensor, from its shards alone: missing, not finite, moved, or of another step.

Causes are tried from simple to complex; the first that explains every wrong shard up to rounding is reported.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from meshwright.mesh.axes import Axes
from meshwright.prove.explain.contributions import (
    MIN_SPARE,
    FitProblem,
    common_factor,
    contribution_weights,
    scale_diagnosis,
    unequal_units,
    uniform_words,
    weights_diagnosis,
)
from meshwright.prove.explain.shared_parameters import StageContributions, diagnose_shared
from meshwright.prove.judge.tensors import (
    NOTHING_FITS,
    Array,
    LayoutCounts,
    LocalShard,
    close,
    factor_cause,
    max_difference,
    max_magnitude,
    to_arrays,
)
from meshwright.prove.judge.verdicts import PROGRESS, RESIDUAL, SuspectTensor, TensorVerdict, Verdicts
from meshwright.prove.result import (
    EVERYWHERE,
    Diagnosis,
    FaultKind,
    box_words,
    coordinates,
    number_words,
    rank_words,
    scope_words,
)
from meshwright.units import join_words

ROUNDED = (torch.bfloat16, torch.float16, torch.float32)
"""Precisions that gradients may be rounded to, the lowest first: a bfloat16 number is a float32 number, too."""
ROUNDINGS = 8.0
"""Largest error of rounded gradients in units of the precision, relative to the largest element."""


@dataclass(frozen=True)
class GradientContext:
    """What gradients are explained with, besides their contributions."""

    references: Mapping[str, Array]
    """Reference gradients of the step, by name."""
    shared: StageContributions | None = None
    """Contribution of each stage to the gradients of shared parameters."""
    tokens: Callable[[str], Array | None] = lambda name: None
    """Compute the contributions of the tokens of context-parallel ranks: [data-parallel × cp rank, micro-batch, …]."""
    chunks: Callable[[str], Array | None] = lambda name: None
    """Compute the contributions of the chunks of tokens by which the head's loss is computed: [chunk, …]."""
    num_chunks: int = 0
    """Number of them in a micro-batch; 0 if all logits are computed at once."""
    before: tuple[Mapping[str, Array], ...] = ()
    """Gradients of the step before: as the optimizer was given them, and the reference's."""
    follows: str = ""
    """Fault of the step from which wrong gradients follow, or an empty string."""
    units: Callable[[], Array | None] = lambda: None
    """Compute the numbers of loss units: [data-parallel rank, micro-batch]."""
    divisors: Callable[[], tuple[int, dict[str, int]]] = lambda: (0, {})
    """Find the number of loss units of the batch, and other numbers that the loss may be divided by, by words."""


def diagnose_gradient(suspect: SuspectTensor, context: GradientContext) -> Diagnosis:
    """Return the likely cause of a wrong gradient."""
    found = incomplete(suspect) or non_finite(suspect) or _no_gradient(suspect)
    return (
        found
        or _multiple(suspect, context)
        or _step_before(suspect, context)
        or _weighted_contributions(suspect, context)
        or _rounded(suspect)
        or _missing_reduction(suspect)
        or diagnose_shared(suspect, context.shared)
        or misplaced(suspect, context.references)
        or _wrong_region(suspect)
        or _follows(suspect, context)
        or _tokens(suspect, context)
        or _chunks(suspect, context)
        or replicas_differ(suspect)
        or unrecognised(suspect)
    )


def _chunks(suspect: SuspectTensor, context: GradientContext) -> Diagnosis | None:
    """Diagnose wrong weights of the chunks of tokens of the head's loss, alike in all micro-batches."""
    if context.num_chunks < 2 or (parts := context.chunks(suspect.assembly.name)) is None:
        return None
    counts = LayoutCounts(Axes(), len(parts), len(parts))
    by_chunks = replace(suspect, counts=counts)
    weights = contribution_weights(_fit_problem(by_chunks, list(suspect.wrong_shards), parts[None]))
    if weights is None:
        return None
    symptom = uniform_words(weights, counts)[0].replace("micro-batch", "chunk")
    cause = "the loss by chunks of tokens (train.loss_chunk) leaves them out or counts them more than once"
    return Diagnosis(FaultKind.CONTRIBUTIONS, f"of the head's loss, {symptom} {suspect.scope_text()}", cause)


def _follows(suspect: SuspectTensor, context: GradientContext) -> Diagnosis | None:
    if not context.follows:
        return None
    return Diagnosis(FaultKind.CONSEQUENCE, f"wrong {suspect.scope_text()}", f"follows from {context.follows}")


def _no_gradient(suspect: SuspectTensor) -> Diagnosis | None:
    if not suspect.wrong_shards or any(shard.value.any() for shard in suspect.wrong_shards):
        return None
    scope = suspect.scope_text()
    whose = "this parameter" if scope == EVERYWHERE else f"{rank_words(suspect.wrong_ranks)}'s shard of it"
    return Diagnosis(FaultKind.ZERO, f"zero {scope}", f"no gradient reached {whose}")


def _multiple(suspect: SuspectTensor, context: GradientContext) -> Diagnosis | None:
    """Diagnose the same multiple of the reference on all wrong ranks, which takes no contributions."""
    weights = contribution_weights(_fit_problem(suspect, list(suspect.wrong_shards), None))
    if weights is None:
        return None
    found = _by_weights(suspect, dict.fromkeys(suspect.wrong_ranks, weights))
    if found.factor is None:
        return found
    known = factor_cause(found.factor, suspect.counts)
    for factor, how in ((context.num_chunks, "multiplied"), (1 / max(1, context.num_chunks), "divided")):
        if context.num_chunks > 1 and close(factor, found.factor):
            cause = f"the head's gradients are {how} by the {context.num_chunks} chunks of its loss (train.loss_chunk)"
            return replace(found, cause=f"{known}, or {cause}" if known else cause)
    if known:
        return found
    due, others = context.divisors()
    used = [f"{number} ({what})" for what, number in others.items() if close(due / number, found.factor)]
    if not used:
        return found
    return replace(found, cause=f"the loss is divided by {join_words(used, last='or')} instead of {due} targets")


def _step_before(suspect: SuspectTensor, context: GradientContext) -> Diagnosis | None:
    """Diagnose gradients to which those of the step before were added, or which are those."""
    scope = suspect.scope_text()
    for left in (found.get(suspect.assembly.name) for found in context.before):
        if left is None or not left.any():
            continue
        for due, symptom, cause in (
            (suspect.expected + left, "is added", "gradients are not cleared between steps"),
            (left, "is there again", "the gradient is not renewed in this step, or used before it is"),
        ):
            if all(suspect.matches(s.value, s.slice_of(due), _error(suspect, s)) for s in suspect.wrong_shards):
                symptom = f"the gradient of the step before {symptom} {scope}"
                return Diagnosis(FaultKind.OTHER_STEP, symptom, cause)
    return None


def _rounded(suspect: SuspectTensor) -> Diagnosis | None:
    """Diagnose gradients that are numbers of a lower precision than float64, or become such ones by what isn't."""
    if suspect.noisy or not suspect.wrong_shards:
        return None
    for dtype in ROUNDED:
        name = str(dtype).removeprefix("torch.")
        if _is_rounded(suspect, dtype, None):
            cause = f"all elements are {name} numbers: gradients are reduced, summed or kept in {name}"
            return Diagnosis(FaultKind.ROUNDED, f"rounded to {name} {suspect.scope_text()}", cause)
    parts = suspect.contributions
    for dtype in ROUNDED if parts is not None else ():
        assert parts is not None, "only known contributions are tried"
        name = str(dtype).removeprefix("torch.")
        # The first micro-batch that is added is rounded exactly like the sum of all but the last.
        if parts.shape[1] > 1 and any(_is_rounded(suspect, dtype, last) for last in parts.sum(0)):
            cause = f"less its last micro-batch, it consists of {name} numbers: gradients accumulate in {name}"
            return Diagnosis(
                FaultKind.ROUNDED, f"rounded to {name} between micro-batches {suspect.scope_text()}", cause
            )
        rounded = _rounded_to(parts.sum(1), dtype).sum(0)
        if all(suspect.matches(s.value, s.slice_of(rounded), _error(suspect, s)) for s in suspect.wrong_shards):
            cause = f"gradients are rounded to {name} before they are reduced"
            symptom = f"the sum of contributions rounded to {name} {suspect.scope_text()}"
            return Diagnosis(FaultKind.ROUNDED, symptom, cause)
    return None


def _rounded_to(values: Array, dtype: torch.dtype) -> Array:
    return to_arrays({"": torch.from_numpy(values).to(dtype)})[""]


def _is_rounded(suspect: SuspectTensor, dtype: torch.dtype, added: Array | None) -> bool:
    """Return whether wrong shards, less what was added to them, are numbers of a dtype near the right ones."""
    for shard in suspect.wrong_shards:
        value = shard.value if added is None else shard.value - shard.slice_of(added)
        limit = 0.0 if added is None else RESIDUAL * suspect.scale
        if max_magnitude(value - _rounded_to(value, dtype)) > limit:
            return False
        if _error(suspect, shard) > ROUNDINGS * torch.finfo(dtype).eps * suspect.scale:
            return False
    return True


def _error(suspect: SuspectTensor, shard: LocalShard) -> float:
    return suspect.distance(shard.value, shard.slice_of(suspect.expected))


def _weighted_contributions(suspect: SuspectTensor, context: GradientContext | None = None) -> Diagnosis | None:
    """Diagnose a multiple of the reference, or missing or duplicated contributions."""
    weights = weights_by_rank(suspect, suspect.wrong_shards)
    if weights is None:
        return None
    first = next(iter(weights.values()))
    units = context.units() if context is not None else None
    if units is not None and all(np.allclose(first, other, rtol=1e-9) for other in weights.values()):
        cause = unequal_units(first, units)
        if cause is not None:
            symptom = f"contributions are weighted by their numbers of targets {suspect.scope_text()}"
            return Diagnosis(FaultKind.CONTRIBUTIONS, symptom, cause)
    return _by_weights(suspect, weights)


def _by_weights(suspect: SuspectTensor, weights: dict[int, Array]) -> Diagnosis:
    ranks = suspect.informative_ranks
    if suspect.noisy and len(ranks) == 1:  # as good as all ranks: the shards of others are zero
        weights = dict.fromkeys(suspect.assembly.ranks(), weights[ranks[0]])
    return weights_diagnosis(weights, sorted({*ranks, *weights}), suspect.counts)


def _tokens(suspect: SuspectTensor, context: GradientContext) -> Diagnosis | None:
    """Diagnose missing or repeated contributions of the tokens of context-parallel ranks."""
    parts = context.tokens(suspect.assembly.name)
    if parts is None:
        return None
    counts = replace(suspect.counts, by_context=True)
    by_tokens = replace(suspect, counts=counts, find_contributions=lambda: parts)
    return _weighted_contributions(by_tokens) or _missing_reduction(by_tokens)


def weights_by_rank(
    suspect: SuspectTensor, shards: Iterable[LocalShard], *, max_error: float = math.inf
) -> dict[int, Array] | None:
    """Return the weights of the contributions on each rank, or None if they do not explain all `shards`.

    Shards with equal weights are fitted together, since a small shard may have too few elements for a fit.

    Args:
        suspect: the gradient.
        shards: shards to explain.
        max_error: upper bound on the error to explain, if smaller than the error of `shards`.
    """
    chosen, contributions = list(shards), suspect.contributions
    for key in (lambda rank: 0, suspect.counts.part, lambda rank: rank):
        pools: dict[int, list[LocalShard]] = defaultdict(list)
        for shard in chosen:
            pools[key(shard.rank)].append(shard)
        found: dict[int, Array] = {}
        for pool in pools.values():
            is_local = len({suspect.counts.part(shard.rank) for shard in pool}) == 1
            rank = pool[0].rank if is_local else None
            weights = contribution_weights(_fit_problem(suspect, pool, contributions, rank, max_error))
            if weights is None:
                break
            found |= {shard.rank: weights for shard in pool}
        else:
            return dict(sorted(found.items())) or None
    return None


def _fit_problem(
    suspect: SuspectTensor,
    pool: list[LocalShard],
    contributions: Array | None,
    rank: int | None = None,
    max_error: float = math.inf,
) -> FitProblem:
    value_n = np.concatenate([shard.value.reshape(-1) for shard in pool]) if pool else np.zeros(0)
    contributions = suspect.expected[None, None] if contributions is None else contributions
    grid, inside = contributions.shape[:2], [np.zeros((*contributions.shape[:2], 0))]
    for shard in pool:
        inside.append(contributions[(slice(None), slice(None), *shard.slices())].reshape(*grid, -1))
    num_distinct = sum({(shard.start, shard.stop): shard.value.size for shard in pool}.values())
    noise = suspect.tolerance if suspect.noisy else 0.0
    return FitProblem(value_n, np.concatenate(inside, axis=2), suspect.counts, num_distinct, rank, max_error, noise)


def _missing_reduction(suspect: SuspectTensor) -> Diagnosis | None:
    """Diagnose a missing reduction: replicas differ along some axes, and their sum there is the reference."""
    axes_apart = [mismatch.axis for mismatch in suspect.large_mismatches]
    for num in range(1, len(axes_apart) + 1):
        for chosen in itertools.combinations(axes_apart, num):
            cause = _reduction_cause(suspect, chosen)
            if cause is not None:
                mismatch = next(mismatch for mismatch in suspect.large_mismatches if mismatch.axis in chosen)
                symptom = f"replicas differ between {rank_words(mismatch.ranks)} along {' and '.join(chosen)}"
                detail = f"by up to {mismatch.largest:.2g} at {list(mismatch.index)}"
                return Diagnosis(FaultKind.SUM_MISSING, symptom, cause, detail)
    return None


def _reduction_cause(suspect: SuspectTensor, chosen: tuple[str, ...]) -> str | None:
    wrong = {id(shard) for shard in suspect.wrong_shards}
    groups = [group for group in suspect.assembly.replica_groups(chosen) if any(id(shard) in wrong for shard in group)]
    size, over = math.prod(suspect.counts.axes.size(axis) for axis in chosen), " and ".join(chosen)
    sums = [LocalShard(group[0].rank, group[0].start, np.sum([p.value for p in group], axis=0)) for group in groups]
    apart = [suspect.distance(shard.value, shard.slice_of(suspect.expected)) for shard in suspect.wrong_shards]
    error = max(apart, default=0.0)
    if all(suspect.matches(shard.value, shard.slice_of(suspect.expected), error) for shard in sums):
        return f"the sum over {over} is missing: the replicas sum to the reference"
    weights = weights_by_rank(suspect, sums, max_error=error)
    if weights is None:
        return None
    first = next(iter(weights.values()))
    if all((found == first.flat[0]).all() for found in weights.values()):
        factor = float(first.flat[0])
        if close(factor, size, suspect.counts.rounding):
            return f"the mean over {over} is missing: the replicas average to the reference"
        why = factor_cause(factor, suspect.counts) or NOTHING_FITS
        return f"the sum over {over} is missing: the replicas sum to {number_words(factor)} × the reference ({why})"
    rest = weights_diagnosis(weights, [shard.rank for shard in sums], suspect.counts)
    return f"the sum over {over} is missing, and in the sum of the replicas {rest.symptom}: {rest.cause}"


def _wrong_region(suspect: SuspectTensor) -> Diagnosis | None:
    """Diagnose a tensor that is zero or a multiple of the reference in one region and correct elsewhere."""
    mask = wrong_mask(suspect)
    if int(mask.sum()) < MIN_SPARE or (where := box_words(mask)) == "everywhere":
        return None
    inside = [mask[shard.slices()] for shard in suspect.wrong_shards]
    value_n = np.concatenate([shard.value[at] for shard, at in zip(suspect.wrong_shards, inside, strict=True)])
    expected = [shard.slice_of(suspect.expected)[at] for shard, at in zip(suspect.wrong_shards, inside, strict=True)]
    expected_n = np.concatenate(expected)
    scope = f"at {where}, {scope_words(suspect.wrong_ranks, suspect.informative_ranks, suspect.counts.axes)}"
    if not value_n.any():
        return Diagnosis(FaultKind.ZERO, f"zero {scope}", "no gradient reached this region of the parameter")
    factor = common_factor(FitProblem(value_n, expected_n[None, None], suspect.counts, int(mask.sum())))
    return None if factor is None else scale_diagnosis(factor, scope, suspect.counts)


def name_accumulated_sums(verdicts: Verdicts, counts: LayoutCounts) -> Verdicts:
    """Replace the diagnoses of gradients whose micro-batches have the weights of such sums, on every rank.

    Only parameters that are replicated over an axis are summed over it, so all that have the same weights must be. What
    repeats the first of two micro-batches on two ranks may also be an accumulation that counts it twice.
    """
    members: dict[tuple[float, ...], list[str]] = {}
    for name, verdict in verdicts.items():
        if (weights := _microbatch_weights(verdict)) is not None:
            members.setdefault(weights, []).append(name)
    result = dict(verdicts)
    for weights, names in members.items():
        axes = [
            axis
            for axis, size in counts.axes.used().items()
            if _are_powers(weights, size, counts.rounding)
            and all(axis in verdicts[name].result.replicated for name in names)
        ]
        for name in names if axes else ():
            found = verdicts[name].result.diagnosis
            assert found is not None, "only findings have weights"
            cause = _cause(weights, axes, found, counts)
            result[name] = verdicts[name].with_diagnosis(replace(found, cause=cause, microbatches=()))
    return result


def _microbatch_weights(verdict: TensorVerdict) -> tuple[float, ...] | None:
    """Return the weights of micro-batches if they are the same on all ranks."""
    found, suspect = verdict.result.diagnosis, verdict.suspect
    if found is None or found.kind is not FaultKind.CONTRIBUTIONS or suspect.scope_text() != EVERYWHERE:
        return None
    by_rank = weights_by_rank(suspect, suspect.wrong_shards)
    rows = {tuple(row) for weights in (by_rank or {}).values() for row in weights.tolist()}
    return rows.pop() if len(rows) == 1 else None


def _are_powers(weights: tuple[float, ...], size: int, rounding: float) -> bool:
    last = len(weights) - 1
    return last > 0 and all(close(w, weights[-1] * size ** (last - at), rounding) for at, w in enumerate(weights))


def _cause(weights: tuple[float, ...], axes: list[str], found: Diagnosis, counts: LayoutCounts) -> str:
    over = join_words([f"over {axis} ({counts.axes.size(axis)} ranks)" for axis in axes], last="or")
    causes = [f"the accumulated gradient is summed {over} in each of {len(weights)} backwards, not once after the last"]
    if not close(weights[-1], 1.0, counts.rounding):
        causes.append(f"in addition, {factor_cause(weights[-1], counts) or NOTHING_FITS}")
    elif weights == (2.0, 1.0):
        causes[0] += f", or {found.cause}"
    return "; ".join(causes)


def incomplete(suspect: SuspectTensor) -> Diagnosis | None:
    """Diagnose shards that do not form the full tensor."""
    if not np.isfinite(suspect.expected).all():
        return Diagnosis(FaultKind.EVIDENCE, "the reference is not finite", "the reference is at fault, not the layout")
    faults = suspect.assembly.faults
    if not suspect.assembly.shards and not faults:
        faults = ("no rank holds a shard",)
    return Diagnosis(FaultKind.EVIDENCE, "the shards do not make up the tensor", "; ".join(faults)) if faults else None


def non_finite(suspect: SuspectTensor) -> Diagnosis | None:
    """Diagnose NaN or infinite values."""
    bad = [shard for shard in suspect.assembly.shards if not np.isfinite(shard.value).all()]
    if not bad:
        return None
    nans = sum(int(np.isnan(shard.value).sum()) for shard in bad)
    infs = sum(int(np.isinf(shard.value).sum()) for shard in bad)
    scope = scope_words({shard.rank for shard in bad}, suspect.informative_ranks, suspect.counts.axes)
    index = max_difference(bad[0].value, bad[0].slice_of(suspect.expected))[1]
    full = [a + i for a, i in zip(bad[0].start, index, strict=True)]
    detail = f"{nans} NaN and {infs} infinite entries, the first at {full} on rank {bad[0].rank}"
    return Diagnosis(FaultKind.NON_FINITE, f"not finite {scope}", "NaN or infinity entered the computation", detail)


def misplaced(suspect: SuspectTensor, references: Mapping[str, Array]) -> Diagnosis | None:
    """Diagnose correct values at the wrong position: another shard, shifted rows, a transpose or another tensor."""
    return _swapped_shards(suspect) or _rearranged(suspect, references)


def _swapped_shards(suspect: SuspectTensor) -> Diagnosis | None:
    boxes = {(shard.start, shard.stop): shard for shard in suspect.assembly.shards}
    holds: dict[int, int] = {}
    for shard in suspect.wrong_shards:
        own = shard.slice_of(suspect.expected)
        error = suspect.distance(shard.value, own)
        for other in boxes.values():
            target = other.slice_of(suspect.expected)
            if target.shape == own.shape and suspect.matches(shard.value, target, error):
                holds[shard.rank] = _nearest(suspect, shard.rank, other)
                break
        else:
            return None
    if not holds:
        return None
    pairs = sorted({tuple(sorted((a, b))) for a, b in holds.items() if holds.get(b) == a})
    if pairs and len(pairs) * 2 == len(holds):
        swaps = [f"ranks {a} and {b} hold each other's shard" for a, b in pairs]
        cause = "shards are swapped between ranks"
    else:
        swaps = [f"rank {a} holds rank {b}'s shard" for a, b in sorted(holds.items())]
        cause = "shards were sent to the wrong ranks"
    more = [f"{len(swaps) - 4} more"] if len(swaps) > 4 else []
    return Diagnosis(FaultKind.MISPLACED, ", ".join(swaps[:4] + more), cause)


def _nearest(suspect: SuspectTensor, rank: int, other: LocalShard) -> int:
    """Return the rank closest to `rank` (fewest differing axes) that holds shard `other`."""
    axes, home = suspect.counts.axes, coordinates(suspect.counts.axes)[rank]
    same = [p.rank for p in suspect.assembly.shards if (p.start, p.stop) == (other.start, other.stop)]
    return min(same, key=lambda r: sum(home[axis] != at for axis, at in coordinates(axes)[r].items()))


def _rearranged(suspect: SuspectTensor, references: Mapping[str, Array]) -> Diagnosis | None:
    words = set()
    for copy in suspect.assembly.replicas():
        error = suspect.distance(copy.value, suspect.expected)
        if error <= suspect.tolerance * suspect.scale:
            continue
        words.add(_rearrangement(suspect, copy.value, error, references))
    if len(words) != 1 or None in words:
        return None
    return Diagnosis(FaultKind.MISPLACED, f"{words.pop()} {suspect.scope_text()}", "correct values in the wrong place")


def _rearrangement(suspect: SuspectTensor, value: Array, error: float, references: Mapping[str, Array]) -> str | None:
    expected = suspect.expected
    if expected.ndim == 2 and expected.shape[0] == expected.shape[1] and suspect.matches(value, expected.T, error):
        return "the transpose of the reference"
    for dim, size in enumerate(expected.shape):
        fronts = np.moveaxis(expected, dim, 0).reshape(size, -1)
        first = np.moveaxis(value, dim, 0).reshape(size, -1)[0]
        near = np.abs(fronts - first).max(axis=1) <= PROGRESS * error
        for k in np.flatnonzero(near):
            if k > 0 and suspect.matches(value, np.roll(expected, -int(k), axis=dim), error):
                shift = int(k) if 2 * k <= size else int(k) - size
                return f"the reference shifted by {-shift} along dim {dim}"
    for name, other in references.items():
        same = other is not expected and other.shape == expected.shape and name != suspect.assembly.name
        if same and suspect.matches(value, other, error):
            return f"the reference of {name}"
    return None


def wrong_initial(suspect: SuspectTensor, references: Mapping[str, Array]) -> Diagnosis:
    """Return the likely cause of wrong initial weights."""
    found = incomplete(suspect) or non_finite(suspect) or misplaced(suspect, references)
    if found is not None:
        return found
    if (found := _merged_adapter(suspect, references)) is not None:
        return found
    right = [rank for rank in suspect.informative_ranks if rank not in suspect.wrong_ranks]
    where = "on " + rank_words(suspect.wrong_ranks) if right else EVERYWHERE
    cause = "ranks start from different weights than the reference (seed, order of initialization, missing broadcast)"
    base = replicas_differ(suspect) or unrecognised(suspect)
    detail = f"{base.symptom}; {base.detail}" if base.kind is FaultKind.REPLICAS_DIFFER else base.detail
    return Diagnosis(base.kind, f"initial weights differ {where}", cause, detail)


ADAPTED = ".base_layer.weight"
"""End of the name of a frozen weight that has an adapter (LoRA; Hu et al. 2022)."""


def _merged_adapter(suspect: SuspectTensor, references: Mapping[str, Array]) -> Diagnosis | None:
    """Diagnose a frozen weight to which the product of its adapter's matrices is added."""
    path = suspect.assembly.name.removesuffix(ADAPTED)
    factors = [next((x for n, x in references.items() if n.startswith(f"{path}.lora_{one}.")), None) for one in "AB"]
    if not suspect.assembly.name.endswith(ADAPTED) or any(one is None or one.ndim != 2 for one in factors):
        return None
    whole: Array = factors[1] @ factors[0]  # type: ignore[operator]
    for product in (whole, whole.T):  # of a layer that holds its weight the other way
        if product.shape == suspect.expected.shape and all(_adds(suspect, s, product) for s in suspect.wrong_shards):
            symptom = f"the product of the adapter's matrices is added to the frozen weight {suspect.scope_text()}"
            cause = "the adapter is merged already, and its forward adds it again"
            return Diagnosis(FaultKind.MISPLACED, symptom, cause)
    return None


def _adds(suspect: SuspectTensor, shard: LocalShard, other: Array) -> bool:
    """Return whether a shard is right but for a multiple of another tensor."""
    due, part = shard.slice_of(suspect.expected), shard.slice_of(other)
    scale = float(np.vdot(shard.value - due, part)) / max(float(np.vdot(part, part)), 1e-300)
    return suspect.matches(shard.value, due + scale * part, _error(suspect, shard))


def replicas_differ(suspect: SuspectTensor) -> Diagnosis | None:
    """Diagnose replicas that differ for a reason other than a missing reduction."""
    if not suspect.large_mismatches:
        return None
    mismatch = suspect.large_mismatches[0]
    symptom = f"replicas differ between {rank_words(mismatch.ranks)} along {mismatch.axis}"
    right = sorted(set(suspect.assembly.ranks()) - set(suspect.wrong_ranks))
    if right:
        one = len(suspect.wrong_ranks) == 1
        cause = f"only {rank_words(suspect.wrong_ranks)} differ{'s' if one else ''} from the reference"
    else:
        cause = "neither any rank nor the sum or mean of the replicas agrees with the reference"
    detail = f"by up to {mismatch.largest:.2g} at {list(mismatch.index)}; {describe_error(suspect)}"
    return Diagnosis(FaultKind.REPLICAS_DIFFER, symptom, cause, detail)


def unrecognised(suspect: SuspectTensor) -> Diagnosis:
    """Report the location of an error with an unknown cause."""
    one_of_many = len(suspect.wrong_ranks) == 1 and len(suspect.informative_ranks) > 1
    where = (
        f"only {rank_words(suspect.wrong_ranks)}'s shard differs" if one_of_many else f"wrong {suspect.scope_text()}"
    )
    return Diagnosis(FaultKind.UNRECOGNISED, "not recognised", where, describe_error(suspect))


def describe_error(suspect: SuspectTensor) -> str:
    """Describe the size of the error, the location of its maximum, and the affected region."""
    error = suspect.error()
    text = (
        f"relative error {error.relative:.1e}, largest at {list(error.index)} on rank {error.rank}: "
        f"{error.observed:.6g}, expected {error.expected:.6g}"
    )
    box = "everywhere" if suspect.noisy else box_words(wrong_mask(suspect))
    return text if box == "everywhere" else f"{text}; wrong at {box} only"


def wrong_mask(suspect: SuspectTensor) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Return a mask of the elements of the full tensor that exceed the tolerance on any rank."""
    mask = np.zeros(suspect.expected.shape, dtype=np.bool_)
    for shard in suspect.wrong_shards:
        with np.errstate(invalid="ignore"):
            bad = ~(np.abs(shard.value - shard.slice_of(suspect.expected)) <= suspect.tolerance * suspect.scale)
        mask[shard.slices()] |= bad
    return mask
