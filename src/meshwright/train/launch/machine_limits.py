"""What can't fit this machine, said before it is tried: its processes, and the memory they are predicted to need.

Torch-free. Both rules are generous: they are for mistakes, such as a mesh or a model meant for a cluster, and not for
runs that may just fit.
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
from meshwright.units import format_bytes

RANKS_A_CORE = 32
"""More processes than this do not train on a core, they take turns."""
EXCESS = 1.5
"""How far a prediction may go over the memory there is before it can't be the prediction that is wrong."""
CUDA_CONTROL = Path("/dev/nvidiactl")


def check_ranks(num_ranks: int, *, fix: str = "a mesh of fewer ranks") -> None:
    """Check that this machine may be asked for so many processes.

    Raises:
        LayoutError: it may not.
    """
    most = RANKS_A_CORE * num_cores()
    if num_ranks > most:
        raise LayoutError(
            f"the mesh has {num_ranks} ranks, for a machine with {num_cores()} cores",
            where="mesh",
            rule=f"a machine is given at most {RANKS_A_CORE} ranks a core, here {most}",
            fix=f"{fix}; or start the ranks on several machines with torchrun",
        )


def check_machine(config: RunConfig, plan: RunPlan) -> None:
    """Check that a run whose processes are all started here may fit; where CUDA devices are, ranks look at theirs.

    Raises:
        LayoutError: too many ranks, or far more memory than there is.
    """
    num_ranks = config.mesh.axes().num_ranks()
    check_ranks(num_ranks, fix=_smaller_mesh(config))
    if config.train.device == "cpu" or (config.train.device == "auto" and not CUDA_CONTROL.exists()):
        check_memory(plan, num_ranks=num_ranks, num_bytes=host_memory_bytes(), place="this machine")


def check_memory(plan: RunPlan, *, num_ranks: int, num_bytes: int | None, place: str) -> None:
    """Check that `num_ranks` ranks may fit into `num_bytes` of memory; None where nobody knows how much there is.

    Raises:
        LayoutError: they are predicted to need far more.
    """
    one = predict_memory(plan).total()
    if num_bytes is None or num_ranks * one <= EXCESS * num_bytes:
        return
    ranks = "a rank" if num_ranks == 1 else f"{num_ranks} ranks"
    raise LayoutError(
        f"{ranks} would need {format_bytes(num_ranks * one)} by prediction, and {place} has {format_bytes(num_bytes)}",
        where=f"model, train.global_batch = {plan.batch.global_batch}, {plan.batch.tokens} tokens a sample",
        rule=f"what a run is predicted to need is at most {EXCESS:g} times the memory there is",
        fix="a smaller model.dim, model.num_layers, train.global_batch or train.seq_len; or torchrun on more machines",
    )


def _smaller_mesh(config: RunConfig) -> str:
    """Words that make the mesh small enough by one axis, as long as no rule is broken."""
    most, axes = RANKS_A_CORE * num_cores(), config.mesh.axes()
    for axis in ("dp_shard", "dp_replicate", "tp", "pp"):
        rest = axes.num_ranks() // getattr(axes, axis)
        for size in range(min(most // rest, getattr(axes, axis)), 0, -1):
            changed = config.model_copy(update={"mesh": config.mesh.model_copy(update={axis: size})})
            if repair(changed, None, violations) == {}:
                return format_fix({f"mesh.{axis}": size})
    return "a mesh of fewer ranks"
