"""Seeded faults of the sum over copies of shared parameters, on real ranks: diffusion transformers and a tied Llama.

As in `seeded_faults`. All of them come after the start-up check, which would see what ranks declare and hold.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from meshwright.comm.collectives import all_reduce_sum
from meshwright.mesh.local_shards import to_local
from meshwright.parallel import pipeline_shared_gradients
from meshwright.parallel.pipeline_shared_gradients import SharedGradients
from meshwright.prove.record.layout_run import Tamper
from meshwright.train.build_job import Job
from meshwright.train.train_step import TrainStep
from tests.prove.pipeline_faults import norm_with_copies
from tests.prove.seeded_faults import Fault, on

Sync = Callable[[int], None]


def sync_times(times: int) -> Tamper:
    def tamper(job: Job, step: TrainStep) -> None:
        shared, real = step.pipeline.shared, step.pipeline.shared.sync
        shared.sync = lambda number: [real(number) for _ in range(times)] and None  # type: ignore[method-assign]

    return tamper


def off_on_rank_0(job: Job, step: TrainStep) -> None:
    """One process with several stages; any other would wait for it."""
    step.pipeline.shared.sync = lambda number: None  # type: ignore[method-assign]


def average_over_ranks(job: Job, step: TrainStep) -> None:
    """An all-reduce that takes the mean."""
    scale_sum(job, step, 1 / job.axes.pp)


def average_over_copies(job: Job, step: TrainStep) -> None:
    scale_sum(job, step, 1 / job.schedule.num_stages)


def scale_sum(job: Job, step: TrainStep, factor: float) -> None:
    shared, real = step.pipeline.shared, step.pipeline.shared.sync

    def sync(number: int) -> None:
        real(number)
        for copies in shared._groups[number].copies.values():
            for copy in copies:
                to_local(copy.grad).mul_(factor)  # type: ignore[arg-type]

    shared.sync = sync  # type: ignore[method-assign]


def change_copies(shared: SharedGradients, key: str, *, before: bool, factor: float | None = None) -> None:
    """Zero this rank's gradients of a key before the sum, or put back after it what was there before."""
    real = shared.sync

    def sync(number: int) -> None:
        copies = shared._groups[number].copies.get(key, [])
        kept = [to_local(copy.grad).clone() for copy in copies]  # type: ignore[arg-type]
        if before:
            for copy in copies:
                to_local(copy.grad).zero_()  # type: ignore[arg-type]
        real(number)
        if not before:
            for copy, value in zip(copies, kept, strict=True):
                to_local(copy.grad).copy_(value)  # type: ignore[arg-type]

    shared.sync = sync  # type: ignore[method-assign]


def on_rank_1(change: Tamper) -> Tamper:
    return on(lambda job: job.pipeline_rank == 1, change)


def adds_zeros(key: str) -> Tamper:
    """The rank is in the sum, but what it computed of a key is not."""
    return lambda job, step: change_copies(step.pipeline.shared, key, before=True)


def keeps_its_own(key: str) -> Tamper:
    """The rank is in the sum, but its copies of a key don't get the result."""
    return lambda job, step: change_copies(step.pipeline.shared, key, before=False)


def exchange(first: str, second: str) -> Tamper:
    """Two keys of one shape have each other's place in the flat buffer."""

    def tamper(job: Job, step: TrainStep) -> None:
        for group in step.pipeline.shared._groups:
            if {first, second} <= group.copies.keys():
                order = {first: second, second: first}
                exchanged = {key: group.copies[order.get(key, key)] for key in group.copies}
                group.copies.clear()
                group.copies.update(exchanged)

    return tamper


def leave_out_chunks(job: Job, step: TrainStep) -> None:
    """Of a rank's copies only the first enters the sum."""
    pipeline_shared_gradients._sum = lambda copies: copies[0].clone()  # restored by the test


def hand_out_to_the_first(job: Job, step: TrainStep) -> None:
    """Of a rank's copies only the first gets the sum."""
    real = pipeline_shared_gradients._scatter_to_copies
    pipeline_shared_gradients._scatter_to_copies = lambda flat, values: real(flat, [copies[:1] for copies in values])


def count_chunks_twice(job: Job, step: TrainStep) -> None:
    """The result is handed out, and added up over chunks once more."""
    pipeline_shared_gradients.all_reduce_sum = lambda total, group: all_reduce_sum(total.mul_(2), group=group)


@torch.no_grad()
def second_copy_starts_elsewhere(job: Job, step: TrainStep) -> None:
    if job.pipeline_rank == 1:
        last = list(job.parts().values())[-1]
        to_local(last.module.get_parameter("label_embed.weight")).add_(0.01)


FOUR = ("train.num_microbatches=4", "train.global_batch=8")
DIT = ("dit-digits", "mesh.pp=2", "pipeline.chunks=2", "model.num_layers=4", *FOUR)
SHARDED = (*DIT, "mesh.dp_shard=2")
DIT_4 = ("dit-digits", "mesh.pp=4", "model.num_layers=4", *FOUR)
ONE = ("dit-digits", "pipeline.chunks=2", "model.num_layers=3", *FOUR)
TIED = ("llama-tiny", "mesh.pp=2", "model.num_layers=2", *FOUR)
LABELS, BIAS_1, BIAS_2 = "label_embed.weight", "time_embed.fc1.bias", "time_embed.fc2.bias"
EMBED = "embed.weight"
BOTH_SUMS = "the sum over pp and over the chunks of a rank is missing"
COPIES_COUNTED = "shared parameters, once per stage that holds a copy"
DUE = "a shared parameter needs the sum of its gradients on stages 0, 1, 2 and 3"

SHARED_FAULTS: dict[str, Fault] = {
    "off": Fault(sync_times(0), DIT, (BOTH_SUMS, DUE, "only the contribution of its own first stage"), LABELS),
    "off, pp 4": Fault(sync_times(0), DIT_4, ("the sum over pp is missing", DUE), BIAS_2),
    "off, one process": Fault(off_on_rank_0, ONE, ("the sum over the chunks of a rank is missing",), LABELS),
    "off, tied": Fault(sync_times(0), TIED, ("the sum over pp is missing", "on stages 0 and 1"), EMBED),
    "twice": Fault(sync_times(2), DIT, ("4.000 × the reference", "summed twice over its 4 copies", DUE), LABELS),
    "twice, tied": Fault(sync_times(2), TIED, ("2.000 × the reference", "summed over pp (2 ranks)"), EMBED),
    "averaged over ranks": Fault(average_over_ranks, DIT,
        ("0.500 × the reference", "averaged over pp (2 ranks) instead of summed"), LABELS),
    "averaged over copies": Fault(average_over_copies, DIT,
        ("0.250 × the reference", "averaged over its 4 copies instead of summed"), LABELS),
    "averaged, pp 4": Fault(average_over_ranks, DIT_4,
        ("0.250 × the reference", "averaged over pp (4 ranks) instead of summed"), LABELS),
    "a key is missing on rank 1": Fault(on_rank_1(adds_zeros(LABELS)), DIT,
        ("label_embed.weight", "the contributions of stages 1 and 3 (pp rank 1) are missing",
         "do not enter the sum over pp"), LABELS),
    "rank 1 does not get a key's sum": Fault(on_rank_1(keeps_its_own(LABELS)), DIT,
        ("rank 1 holds only the contribution of stage 1 (pp rank 1)",), LABELS),
    "rank 1 does not get a key's sum, sharded": Fault(on_rank_1(keeps_its_own(LABELS)), SHARDED,
        ("ranks 2 and 3 hold only the contribution of stage 1 (pp rank 1)", "the sum over pp"), LABELS),
    "two keys are exchanged on rank 1": Fault(on_rank_1(exchange(BIAS_1, BIAS_2)), DIT,
        ("contributions of time_embed.fc2.bias replace its own", "pp ranks 0 and 1 reduce", "in different orders"),
        BIAS_1),
    "chunks are not added up": Fault(leave_out_chunks, DIT,
        ("the contributions of stages 2 and 3", "the sum over the chunks of a rank is missing"), LABELS),
    "chunks are not added up, one process": Fault(leave_out_chunks, ONE,
        ("the sum over the chunks of a rank is missing",), LABELS),
    "the second chunk does not get the sum": Fault(hand_out_to_the_first, DIT,
        ("time_embed.fc2.bias", "on stages 0 and 2 of rank 0", "including several copies on one rank")),
    "the second chunk does not get the sum, one process": Fault(hand_out_to_the_first, ONE,
        ("time_embed.fc2.bias", "on stages 0 and 1 of rank 0 differ")),
    "the second chunk starts elsewhere": Fault(second_copy_starts_elsewhere, DIT,
        ("initial weight: the copies of label_embed.weight on stages 1 and 3 of rank 1 differ", "all copies", "start")),
    "the norm counts copies": Fault(norm_with_copies, DIT, ("counted 4 times", COPIES_COUNTED)),
    "the norm counts copies, one process": Fault(norm_with_copies, ONE, ("counted 2 times", COPIES_COUNTED)),
    "the norm counts copies, pp 4": Fault(norm_with_copies, DIT_4, ("counted pp (4) times",)),
}  # fmt: skip
