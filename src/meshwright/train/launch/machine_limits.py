"""Checks of the number of ranks and the predicted memory against this machine, made before ranks are started.

Torch-free. Both limits are generous: they catch mistakes, such as a mesh or model meant for a cluster, and allow runs
that may just fit.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.cluster.host import host_memory_bytes, num_cores
from meshwright.config.rules import repair
from meshwright.config.schema import RunConfig
from meshwright.errors import LayoutError
from meshwright.plan.memory import predict_memory
from meshwright.plan.rules import violations
from meshwright.plan.run_plan import RunPlan
from meshwright.settings.violation import format_fix
from meshwright.train.launch.memory_fixes import memory_fixes
from meshwright.units import counted, format_bytes

RANKS_PER_CORE = 32
"""Maximum number of ranks per core."""
EXCESS = 1.5
"""Ratio of predicted to available memory too large to be explained by prediction error."""
CUDA_CONTROL = Path("/dev/nvidiactl")


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
        check_memory(config, plan, num_ranks=num_ranks, num_bytes=host_memory_bytes(), place="this machine")


def check_memory(
    config: RunConfig, plan: RunPlan, *, num_ranks: int, num_bytes: int | None, place: str, what: str = "machines"
) -> None:
    """Check that the ranks of a run that share a memory may fit into it.

    Args:
        config: the run.
        plan: its plan.
        num_ranks: ranks that share the memory.
        num_bytes: the memory; None if it is unknown, which skips the check.
        place: what has the memory, in words.
        what: several of these, in words.

    Raises:
        LayoutError: the predicted memory far exceeds `num_bytes`; the fix is settings that would fit.
    """
    per_rank = predict_memory(plan).total()
    if num_bytes is None or num_ranks * per_rank <= EXCESS * num_bytes:
        return
    ranks = counted(num_ranks, "rank")
    raise LayoutError(
        f"{ranks} would need {format_bytes(num_ranks * per_rank)}, but {place} has {format_bytes(num_bytes)}",
        where=f"model, train.global_batch = {plan.batch.global_batch}, {plan.batch.tokens} tokens per sample",
        rule=f"the predicted memory is at most {EXCESS:g} times the available memory",
        fix=" or ".join(memory_fixes(config, num_ranks=num_ranks, num_bytes=num_bytes, what=what))
        or "a smaller model.dim, model.num_layers, train.global_batch or train.seq_len",
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
