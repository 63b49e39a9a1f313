"""Find dropouts that differ between tensor-parallel ranks that should agree, from what each rank recorded of them."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.plan.run_plan import RunPlan
from meshwright.prove.as_run.record_run import AsRunRecord, DropoutCall
from meshwright.prove.as_run.result import Finding
from meshwright.prove.compare.result import Diagnosis, FaultKind
from meshwright.prove.diagnose.phrases import rank_words


def diagnose_dropouts(records: list[AsRunRecord], plan: RunPlan) -> Iterator[Finding]:
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
                    yield Finding(f"dropout at {a[0]}", found)
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
