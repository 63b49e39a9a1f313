"""With dropout, every layout drops the same elements as one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from meshwright.train.build_job import Job
from meshwright.train.train_step import TrainStep
from tests.gangs.gang import GangPool
from tests.prove.proofs import assert_proved, proof, small_config, small_dit_config, small_expert_config
from tests.prove.seeded_faults import Fault

DROPOUT = "train.dropout=0.25"
QUICK = {
    "tp with sequence parallel, recomputed": ("mesh.tp=2", "recompute.policy=full"),
}
SLOW = {
    "tp without sequence parallel": ("mesh.tp=2", "mesh.sequence_parallel=false"),
    "cp, packed": ("mesh.cp=2", "data.packing=documents", "train.num_microbatches=2"),
    "zb-v, recomputed": (
        "mesh.pp=2", "pipeline.schedule=zb-v", "model.num_layers=4", "train.num_microbatches=4",
        "recompute.policy=full",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_layout_drops_what_one_device_drops(gang: GangPool, name: str) -> None:
    assert_proved(gang, small_config(DROPOUT, *(QUICK | SLOW)[name]))


@pytest.mark.slow
def test_experts_and_images(gang: GangPool) -> None:
    assert_proved(gang, small_expert_config(DROPOUT, "mesh.dp_shard=2", "mesh.ep=2", "recompute.policy=full"))
    assert_proved(gang, small_dit_config(DROPOUT, "mesh.dp_shard=2"))


def number_local_tokens(job: Job, step: TrainStep) -> None:
    """Number tokens by their place on the rank, as a generator on each rank would."""
    step.pipeline.tokens._stream = (0, 2)


def same_mask_in_every_step(job: Job, step: TrainStep) -> None:
    """Number samples within the micro-batch."""
    task: Any = cast(Any, step._task)._task  # what the proof records is what the model reads
    batch = task.batch

    def renumbered(samples: range) -> Any:
        found = batch(samples)
        return replace(found, layout=replace(found.layout, samples=tuple(range(len(samples)))))

    task.batch = renumbered


def another_site(job: Job, step: TrainStep) -> None:
    """Give one block's first branch the number of the second."""
    block = next(m for m in job.model.modules() if hasattr(m, "ffn_add"))
    block.attention_add.key = block.ffn_add.key


FAULTS = {
    "tokens numbered by rank": Fault(number_local_tokens, ("mesh.tp=2",), ()),
    "samples numbered by micro-batch": Fault(same_mask_in_every_step, ("mesh.dp_shard=2",), ()),
    "a site used twice": Fault(another_site, ("mesh.dp_shard=2",), ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_other_masks_fail(gang: GangPool, name: str) -> None:
    config = small_config(DROPOUT, *FAULTS[name].layout)
    assert not proof(gang, config, "tests.prove.test_dropout", "FAULTS", name, few=True).passed
