"""Seeded faults of models of transformers, planted on a built job, and the gang's body that records with one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from meshwright.config.schema import RunConfig
from meshwright.models.hf import stage as stage_module
from meshwright.prove.record.layout_run import RankRecord, record_rank
from meshwright.testing.gang import GangPool
from meshwright.train.build_job import Job
from meshwright.train.launch.rank_context import RankContext, StatusBoard
from meshwright.train.train_step import TrainStep
from tests.helpers import open_data
from tests.prove.proofs import FEW_STEPS, REPLACED, restored
from tests.prove.seeded_faults import skip_partial_sums_over_tp


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
    stage_module._documents = lambda layout, ids: {}


FAULTS = {
    # Gradients of norms of heads stay those of the rank's own heads, as if the norms were replicated.
    "norms of heads are not summed over tp": skip_partial_sums_over_tp,
    "float32 inside of one side": float32_inside,
    "experts of the other rank": other_ranks_experts,
    "packed documents see each other": documents_in_one,
}


def record(rank: int, world_size: int, config: RunConfig, fault: str, num_steps: int) -> RankRecord:
    """Gang body: train as this rank, with a fault if one is named."""
    board = StatusBoard([0] * StatusBoard.length(world_size))
    context = RankContext(rank, world_size, rank, world_size, None, board)
    with restored(*REPLACED, stage_module):
        tamper = FAULTS[fault] if fault else None
        return record_rank(config, context, open_data(config), num_steps=num_steps, tamper=tamper, nonfinite=False)


def records_of(gang: GangPool, config: RunConfig, fault: str = "", num_steps: int = FEW_STEPS) -> list[RankRecord]:
    """Records of all ranks."""
    return gang(config.mesh.axes().num_ranks()).run(record, config, fault, num_steps)
