"""Checks of the number of ranks and the predicted memory against this machine, made before ranks are started.

Both limits are generous: they catch mistakes, such as a mesh or model meant for a cluster, and allow runs
that may just fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from meshwright.cluster.host import host_memory_bytes, num_cores
from meshwright.config.rules import repair
from meshwright.config.schema import RunConfig
from meshwright.errors import LayoutError
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import SHARED, predict_memory, predict_process_memory
from meshwright.plan.rules import violations
from meshwright.plan.run_plan import RunPlan
from meshwright.settings.violation import Fix, format_fix
from meshwright.units import counted, format_bytes

RANKS_PER_CORE = 32
"""Maximum number of ranks per core."""
EXCESS, EXCESS_EAGER_CPU = 1.5, 1.1
"""Ratio of predicted to available memory too large to be explained by prediction error.

On CPUs the prediction is within 10 % (docs/planning.md); compiled blocks keep less than is predicted, and allocators of
devices were not measured.
"""
CUDA_CONTROL = Path("/dev/nvidiactl")
MAX_TIMES = 1024
"""Largest factor by which more ranks are suggested."""
MAX_MICROBATCHES = 64
"""Most micro-batches that are suggested: each is a column of the table, which takes time to make."""
RECOMPUTED: Fix = {"recompute.policy": "full", "recompute.blocks": ()}


def check_ranks(num_ranks: int, *, fix: str = "a mesh of fewer ranks") -> None:
    """Check the number of ranks against this machine's cores.

    Raises:
        LayoutError: there are too many ranks.
    """
    most = RANKS_PER_CORE * num_cores()
    if num_ranks > most:
        raise LayoutError(
            f"the mesh has {counted(num_ranks, 'rank')}, but this machine has {counted(num_cores(), 'core')}",
            where="mesh",
            rule=f"at most {RANKS_PER_CORE} ranks per core, {most} on this machine",
            fix=f"{fix}; or start the ranks on several machines with torchrun",
        )


def check_machine(config: RunConfig, plan: RunPlan) -> None:
    """Check that a run may fit on this machine alone; on CUDA, each rank checks its own device later.

    Raises:
        LayoutError: too many ranks, or the predicted memory far exceeds what is available.
    """
    num_ranks = config.mesh.axes().num_ranks()
    check_ranks(num_ranks, fix=_smaller_mesh(config))
    if config.train.device == "cpu" or (config.train.device == "auto" and not CUDA_CONTROL.exists()):
        check_memory(
            config, plan, num_ranks=num_ranks, num_bytes=host_memory_bytes(), on_cpu=True, place="this machine"
        )


def check_memory(
    config: RunConfig,
    plan: RunPlan,
    *,
    num_ranks: int,
    num_bytes: int | None,
    on_cpu: bool,
    place: str,
    what: str = "machines",
) -> None:
    """Check that the ranks of a run that share a memory may fit into it.

    Args:
        config: the run.
        plan: its plan.
        num_ranks: ranks that share the memory.
        num_bytes: the memory; None if it is unknown, which skips the check.
        on_cpu: whether the memory is the CPU's, which also holds the processes and their libraries.
        place: what has the memory, in words.
        what: several of these, in words.

    Raises:
        LayoutError: the predicted memory far exceeds `num_bytes`; the fix is settings that would fit.
    """
    needed = needed_bytes(plan, num_ranks=num_ranks, on_cpu=on_cpu)
    excess = EXCESS_EAGER_CPU if on_cpu and not config.train.compile else EXCESS
    if num_bytes is None or needed <= excess * num_bytes:
        return
    ranks = counted(num_ranks, "rank")
    raise LayoutError(
        f"{ranks} would need {format_bytes(needed)}, but {place} has {format_bytes(num_bytes)}",
        where=f"model, train.global_batch = {plan.batch.global_batch}, {plan.batch.tokens} tokens per sample",
        rule=f"the predicted memory is at most {excess:g} times the available memory",
        fix=" or ".join(memory_fixes(config, num_ranks=num_ranks, num_bytes=num_bytes, on_cpu=on_cpu, what=what))
        or "recompute.policy=full, more ranks, or a smaller train.global_batch, train.seq_len or model",
    )


def _smaller_mesh(config: RunConfig) -> str:
    """Return overrides that shrink one mesh axis until the run fits without violating a rule."""
    most, axes = RANKS_PER_CORE * num_cores(), config.mesh.axes()
    for axis in ("dp_shard", "dp_replicate", "tp", "pp"):
        rest = axes.num_ranks() // getattr(axes, axis)
        for size in range(min(most // rest, getattr(axes, axis)), 0, -1):
            changed = config.model_copy(update={"mesh": config.mesh.model_copy(update={axis: size})})
            if repair(changed, None, violations) == {}:
                return format_fix({f"mesh.{axis}": size})
    return "a mesh of fewer ranks"


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
