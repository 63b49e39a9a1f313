"""This machine's limits: ranks and predicted memory, checked before ranks are started, and the threads of a rank.

The checks are generous: they catch mistakes, such as a mesh or model meant for a cluster, and allow runs that may just
fit. What looks for a fix is imported when there is one, since ranks check their memory too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cluster.host import host_memory_bytes, num_cores
from meshwright.config.overlay import flatten
from meshwright.errors import LayoutError
from meshwright.plan.cuda_memory import predict_cuda_memory
from meshwright.plan.memory import SHARED, predict_process_memory
from meshwright.settings.violation import Fix, format_fix
from meshwright.units import counted, format_bytes

if TYPE_CHECKING:
    from meshwright.config.schema import RunConfig
    from meshwright.plan.run_plan import RunPlan

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


def check_ranks(num_ranks: int, config: RunConfig | None = None) -> None:
    """Check the number of ranks against this machine's cores; a configuration is for a fix that it allows.

    Raises:
        LayoutError: there are too many ranks.
    """
    most = RANKS_PER_CORE * num_cores()
    if num_ranks > most:
        raise LayoutError(
            f"the mesh has {counted(num_ranks, 'rank')}, but this machine has {counted(num_cores(), 'core')}",
            where="mesh",
            rule=f"at most {RANKS_PER_CORE} ranks per core, {most} on this machine",
            fix=f"{_smaller_mesh(config, most)}; or start the ranks on several machines with torchrun",
        )


def check_machine(config: RunConfig, plan: RunPlan) -> int | None:
    """Check that a run may fit on this machine alone, and return the predicted memory of a rank's process; on CUDA,
    each rank checks its own device later, and None is returned.

    Raises:
        LayoutError: too many ranks, or the predicted memory far exceeds what is available.
    """
    num_ranks = config.mesh.axes().num_ranks()
    check_ranks(num_ranks, config)
    if config.train.device == "cuda" or (config.train.device == "auto" and CUDA_CONTROL.exists()):
        return None
    memory = host_memory_bytes()
    check_memory(config, plan, num_ranks=num_ranks, num_bytes=memory, on_cpu=True, place="this machine")
    return predict_process_memory(plan)


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


def _smaller_mesh(config: RunConfig | None, most: int) -> str:
    """Return overrides that shrink one mesh axis until there are at most `most` ranks, and no rule is violated."""
    if config is None:
        return "a mesh of fewer ranks"
    axes = config.mesh.axes()
    for axis in ("dp_shard", "dp_replicate", "tp", "pp"):
        rest = axes.num_ranks() // getattr(axes, axis)
        for size in range(min(most // rest, getattr(axes, axis)), 0, -1):
            changed = config.model_copy(update={"mesh": config.mesh.model_copy(update={axis: size})})
            if _repaired(changed) == {}:
                return format_fix({f"mesh.{axis}": size})
    return "a mesh of fewer ranks"


def _repaired(config: RunConfig, fix: Fix | None = None) -> Fix | None:
    """Return `fix` with what else a valid run needs; None if that is not found."""
    from meshwright.config.rules import repair
    from meshwright.plan.rules import violations

    return repair(config, None, violations, fix)


def needed_bytes(plan: RunPlan, *, num_ranks: int, on_cpu: bool) -> int:
    """Return the predicted memory of some ranks of a plan: of processes on the CPU, else of tensors on a device."""
    if on_cpu:
        return num_ranks * (predict_process_memory(plan) - SHARED) + SHARED
    return num_ranks * predict_cuda_memory(plan).total()


def memory_fixes(config: RunConfig, *, num_ranks: int, num_bytes: int, on_cpu: bool, what: str) -> list[str]:
    """Return settings with which the predicted memory of some ranks fits, in words, the least change first."""
    from meshwright.plan.make_plan import make_plan

    def fits(fix: Fix) -> Fix | None:
        complete = _repaired(config, fix)
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


def _doubled(limit: int) -> list[int]:
    return [2**power for power in range(1, limit.bit_length())]


def _changes(config: RunConfig, fix: Fix) -> Fix:
    """Return the part of a fix that is not so already."""
    values = flatten(config.model_dump())
    return {key: value for key, value in fix.items() if values[key] != value}


VARIABLE = "OMP_NUM_THREADS"
LOOK_S = 0.1
"""Shortest time over which business is measured: ten ticks of the kernel's counters."""
STAT = Path("/proc/stat")


def threads_per_rank(chosen: int | None, *, num_ranks: int) -> int:
    """Return the threads of each rank on a machine: `chosen` by `train.threads`, else as OMP_NUM_THREADS says, else an
    equal part of the cores."""
    return chosen or _from_environment() or max(1, num_cores() // num_ranks)


class BusyCores:
    """Measures how many cores other programs use, from its creation on."""

    def __init__(self) -> None:
        self._start_s, self._before = time.perf_counter(), _busy_s()

    def count(self) -> float:
        """Return the number of cores that other programs have used since, on average; 0 if unknown."""
        time.sleep(max(0.0, self._start_s + LOOK_S - time.perf_counter()))
        seconds, busy = time.perf_counter() - self._start_s, _busy_s()
        if busy is None or self._before is None:
            return 0.0
        return max(0.0, (busy - self._before) / seconds)


def advice(chosen: int | None, *, num_ranks: int, others: BusyCores) -> str | None:
    """Return a warning if the default of threads is more than idle cores; None if it isn't, or was not left to us.

    OpenMP's threads wait for each other actively: with more of them than idle cores, a run may be several times slower
    than with one. The number is not changed by itself, since the last bits of sums depend on it.
    """
    threads, cores = threads_per_rank(None, num_ranks=num_ranks), num_cores()
    if chosen or _from_environment() or threads == 1:
        return None
    busy = others.count()
    if threads * num_ranks <= cores - busy + 0.5:
        return None
    return (
        f"other programs use {busy:.1f} of {counted(cores, 'core')}: "
        f"{counted(threads, 'thread')} per rank may be slow; "
        f"train.threads={max(1, int((cores - busy) // num_ranks))} may be faster"
    )


def _from_environment() -> int | None:
    """Return the number in OMP_NUM_THREADS, which may be a list for nested levels; None if there is none."""
    first = os.environ.get(VARIABLE, "").split(",")[0].strip()
    return int(first) if first.isascii() and first.isdigit() and int(first) else None


def _busy_s() -> float | None:
    """Return the time that our cores have been busy with other programs, in seconds; None where it is unknown."""
    try:
        rows = {row[0]: row[1:] for line in STAT.read_text("ascii").splitlines() if (row := line.split())}
        cores = [list(map(int, rows[f"cpu{core}"])) for core in os.sched_getaffinity(0)]
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    own = os.times()
    # User, nice and system time, interrupts, and time taken by other virtual machines; guests are part of user time.
    ticks = sum(sum(row[:3]) + sum(row[5:8]) for row in cores)
    return ticks / os.sysconf("SC_CLK_TCK") - own.user - own.system
