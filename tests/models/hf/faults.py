"""Seeded faults of models of transformers, planted on a built job, and the gang's body that records with one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from meshwright.config.schema import RunConfig
from meshwright.models.foreign import stage as stage_module
from meshwright.models.hf import origin as origin_module
from meshwright.plan.make_plan import make_plan
from meshwright.prove.compare.result import ProofResult
from meshwright.prove.locate.conclude import find_place, step_to_locate, with_place
from meshwright.prove.locate.layout_pass import RankPass, record_activations
from meshwright.prove.record.layout_run import RankRecord, record_rank
from meshwright.train.build_job import Job
from meshwright.train.train_step import TrainStep
from tests.gangs.gang import GangPool
from tests.helpers import open_data, rank_context
from tests.prove.proofs import FEW_STEPS, REPLACED, prove_with, restored
from tests.prove.seeded_faults import skip_partial_sums_over_tp, sum_accumulated_over_tp


def float32_inside(job: Job, step: TrainStep) -> None:
    """Ranks keep the model's casts to float32; the reference, in another process, has none."""
    stage_module.Float64Mode = nullcontext  # type: ignore[assignment,misc]


def other_ranks_experts(job: Job, step: TrainStep) -> None:
    """Ranks compute the tokens of the other rank's experts with their own."""
    for module in job.model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(_shift_experts, prepend=True)


def _shift_experts(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    x, index, *others = inputs
    return x, (index + module.num_experts) % (2 * module.num_experts), *others


def documents_in_one(job: Job, step: TrainStep) -> None:
    """Ranks give models no positions that restart; the reference runs each document alone."""
    origin_module.restarting_positions = lambda layout, device: {}


def averaged_adapters(job: Job, step: TrainStep) -> None:
    """Ranks average over tp what the first matrices of adapters should get the sum of."""
    for module in job.model.modules():
        for first in getattr(module, "lora_A", {}).values():
            first.register_forward_hook(lambda module, inputs, out: out / 2 + (out / 2).detach())


FAULTS = {
    "adapters are averaged over tp": averaged_adapters,
    # Gradients of norms of heads stay those of the rank's own heads, as if the norms were replicated.
    "norms of heads are not summed over tp": skip_partial_sums_over_tp,
    "accumulated norms of heads are summed over tp in every backward": sum_accumulated_over_tp,
    "float32 inside of one side": float32_inside,
    "experts of the other rank": other_ranks_experts,
    "packed documents see each other": documents_in_one,
}


def record(rank: int, world_size: int, config: RunConfig, fault: str, num_steps: int) -> RankRecord:
    """Gang body: train as this rank, with a fault if one is named."""
    context, data = rank_context(rank, world_size), open_data(config)
    with restored(*REPLACED, stage_module, origin_module):
        tamper = FAULTS[fault] if fault else None
        return record_rank(config, context, data, num_steps=num_steps, tamper=tamper, nonfinite=False)


def record_pass(rank: int, world_size: int, config: RunConfig, fault: str, step: int) -> RankPass:
    """Gang body: the second pass of this rank, with the same fault."""
    context, data, plan = rank_context(rank, world_size), open_data(config), make_plan(config)
    with restored(*REPLACED, stage_module, origin_module):
        return record_activations(config, context, data, step=step, plan=plan, tamper=FAULTS[fault])


def proof_of(gang: GangPool, config: RunConfig, fault: str = "") -> ProofResult:
    """The proof with a fault, if one is named, and the second pass that looks for its place where one is due."""
    ranks = gang(config.mesh.axes().num_ranks())
    result = prove_with(ranks.run(record, config, fault, FEW_STEPS), config)
    step = step_to_locate(result)
    if step is None:
        return result
    passes = ranks.run(record_pass, config, fault, step)
    return with_place(result, find_place(config, open_data(config), make_plan(config), passes, step=step))


def records_of(gang: GangPool, config: RunConfig, fault: str = "", num_steps: int = FEW_STEPS) -> list[RankRecord]:
    """Records of all ranks."""
    return gang(config.mesh.axes().num_ranks()).run(record, config, fault, num_steps)
