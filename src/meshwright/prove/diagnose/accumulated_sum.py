"""Recognise accumulated gradients that are summed over an axis in every backward, not once after the last.

The sum after micro-batch m sums those before it again: of M micro-batches on n ranks, the first has weight n^(M-1), the
last 1. It is what a hook on the accumulated gradient does, as transformers' tensor parallelism does to norms of heads.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.prove.compare.result import Diagnosis, FaultKind
from meshwright.prove.compare.tensor_verdict import TensorVerdict, Verdicts
from meshwright.prove.diagnose.factors import NOTHING_FITS, LayoutCounts, close, factor_cause
from meshwright.prove.diagnose.gradients import weights_by_rank
from meshwright.prove.diagnose.phrases import EVERYWHERE
from meshwright.units import join_words


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
