"""Search for settings with which a run that is too large would fit. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.config.rules import repair
from meshwright.config.schema import RunConfig
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import SHARED, predict_memory, predict_process_memory
from meshwright.plan.rules import violations
from meshwright.plan.run_plan import RunPlan
from meshwright.settings.violation import Fix, format_fix

MAX_TIMES = 1024
"""Largest factor by which more ranks are suggested."""
MAX_MICROBATCHES = 64
"""Most micro-batches that are suggested: each is a column of the table, which takes time to make."""
RECOMPUTED: Fix = {"recompute.policy": "full", "recompute.blocks": ()}


def needed_bytes(plan: RunPlan, *, num_ranks: int, on_cpu: bool) -> int:
    """Return the predicted memory of some ranks of a plan: of processes on the CPU, else of tensors on a device."""
    if on_cpu:
        return num_ranks * (predict_process_memory(plan) - SHARED) + SHARED
    return num_ranks * predict_memory(plan).total()


def memory_fixes(config: RunConfig, *, num_ranks: int, num_bytes: int, on_cpu: bool, what: str) -> list[str]:
    """Return settings with which the predicted memory of some ranks fits, in words, the least change first.

    Args:
        config: a run that doesn't fit.
        num_ranks: ranks that share the memory.
        num_bytes: the memory.
        on_cpu: whether the memory is the CPU's.
        what: what has this memory, in the plural: `machines` or `devices`.
    """

    def fits(fix: Fix) -> Fix | None:
        complete = repair(config, None, violations, fix)
        if complete is None or complete.get("train.num_microbatches", 1) > MAX_MICROBATCHES:
            return None
        needed = needed_bytes(make_plan(config.with_keys(complete)), num_ranks=num_ranks, on_cpu=on_cpu)
        return complete if needed <= num_bytes else None

    found = []
    if here := next(filter(None, map(fits, _on_the_same_ranks(config))), None):
        found.append(format_fix(_changes(config, here)))
    for times in _doubled(MAX_TIMES):
        more: Fix = {"mesh.dp_shard": config.mesh.dp_shard * times}
        if spread := fits(more) or fits({**more, **RECOMPUTED}):
            found.append(f"{format_fix(_changes(config, spread))} on {times} times as many {what}")
            break
    return found


def _on_the_same_ranks(config: RunConfig) -> Iterator[Fix]:
    """Yield settings that need less memory: recomputation, smaller micro-batches, then both."""
    present = config.train.num_microbatches
    smaller: list[Fix] = [
        {"train.num_microbatches": present * times} for times in _doubled(MAX_MICROBATCHES // present)
    ]
    yield RECOMPUTED
    yield from smaller
    yield from ({**RECOMPUTED, **one} for one in smaller)


def _doubled(limit: int) -> Iterator[int]:
    times = 2
    while times <= limit:
        yield times
        times *= 2


def _changes(config: RunConfig, fix: Fix) -> Fix:
    """Return the part of a fix that is not so already."""
    values = config.model_dump()
    return {key: value for key, value in fix.items() if values[key.split(".")[0]][key.split(".")[1]] != value}
