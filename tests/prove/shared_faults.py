"""Seeded faults of the sum over copies of shared parameters, on real ranks: diffusion transformers and a tied Llama.

As in `seeded_faults`. All of them come after the start-up check, which would see what ranks declare and hold.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from meshwright.mesh.local_shards import to_local
from meshwright.parallel import pipeline_shared_gradients
from meshwright.prove.record.layout_run import Tamper
from meshwright.train.build_job import Job
from meshwright.train.train_step import TrainStep
from tests.prove.pipeline_faults import norm_with_copies
from tests.prove.seeded_faults import Fault, on, replacing, wrapping


def sync_times(times: int) -> Tamper:
    return wrapping("step.pipeline.shared.sync", lambda job, real: lambda number: [real(number) for _ in range(times)])


def scale_sum(factor: Callable[[Job], float]) -> Tamper:
    """Scale the sum."""

    def tamper(job: Job, step: TrainStep) -> None:
        shared, real = step.pipeline.shared, step.pipeline.shared.sync

        def sync(number: int) -> None:
            real(number)
            for copy in (copy for copies in shared._groups[number].copies.values() for copy in copies):
                to_local(copy.grad).mul_(factor(job))

        shared.sync = sync

    return tamper


average_over_ranks = scale_sum(lambda job: 1 / job.axes.pp)


def rank_1_differs(key: str, *, adds_zeros: bool) -> Tamper:
    """Rank 1 is in the sum, but adds zeros for a key, or its copies of the key don't get the result."""

    def tamper(job: Job, step: TrainStep) -> None:
        shared, real = step.pipeline.shared, step.pipeline.shared.sync

        def sync(number: int) -> None:
            mine = [to_local(copy.grad) for copy in shared._groups[number].copies.get(key, [])]
            kept = [gradient.clone() for gradient in mine]
            if adds_zeros:
                torch._foreach_zero_(mine)
            real(number)
            if not adds_zeros:
                torch._foreach_copy_(mine, kept)

        shared.sync = sync

    return on_rank_1(tamper)


def on_rank_1(change: Tamper) -> Tamper:
    return on(lambda job: job.pipeline_rank == 1, change)


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


leave_out_chunks = replacing(pipeline_shared_gradients, "_sum", lambda job, real: lambda copies: copies[0].clone())
"""Of a rank's copies only the first enters the sum."""
hand_out_to_the_first = replacing(
    pipeline_shared_gradients,
    "_scatter_to_copies",
    lambda job, real: lambda flat, values: real(flat, [copies[:1] for copies in values]),
)
"""Of a rank's copies only the first gets the sum."""


@torch.no_grad()
def copy_starts_elsewhere(job: Job, step: TrainStep) -> None:
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
    "off, one process": Fault(sync_times(0), ONE, ("the sum over the chunks of a rank is missing",), LABELS),
    "off, tied": Fault(sync_times(0), TIED, ("the sum over pp is missing", "on stages 0 and 1"), EMBED),
    "twice": Fault(sync_times(2), DIT, ("4.000 × the reference", "summed twice over its 4 copies", DUE), LABELS),
    "twice, tied": Fault(sync_times(2), TIED, ("2.000 × the reference", "summed over pp (2 ranks)"), EMBED),
    "averaged over ranks": Fault(average_over_ranks, DIT, ("0.500 × the reference",
        "averaged over pp (2 ranks) instead of summed"), LABELS),
    "averaged over copies": Fault(scale_sum(lambda job: 1 / job.schedule.num_stages), DIT, ("0.250 × the reference",
        "averaged over its 4 copies instead of summed"), LABELS),
    "averaged, pp 4": Fault(average_over_ranks, DIT_4, ("0.250 × the reference",
        "averaged over pp (4 ranks) instead of summed"), LABELS),
    "a key is missing on rank 1": Fault(rank_1_differs(LABELS, adds_zeros=True), DIT, ("label_embed.weight",
        "the contributions of stages 1 and 3 (pp rank 1) are missing", "do not enter the sum over pp"), LABELS),
    "rank 1 does not get a key's sum": Fault(rank_1_differs(LABELS, adds_zeros=False), DIT,
        ("rank 1 holds only the contribution of stage 1 (pp rank 1)",), LABELS),
    "rank 1 does not get a key's sum, sharded": Fault(rank_1_differs(LABELS, adds_zeros=False), SHARDED,
        ("ranks 2 and 3 hold only the contribution of stage 1 (pp rank 1)", "the sum over pp"), LABELS),
    "two keys are exchanged on rank 1": Fault(on_rank_1(exchange(BIAS_1, BIAS_2)), DIT,
        ("contributions of time_embed.fc2.bias replace its own", "pp ranks 0 and 1 reduce", "in different orders"),
        BIAS_1),
    "chunks are not added up": Fault(leave_out_chunks, DIT, ("the contributions of stages 2 and 3",
        "the sum over the chunks of a rank is missing"), LABELS),
    "chunks are not added up, one process": Fault(leave_out_chunks, ONE,
        ("the sum over the chunks of a rank is missing",), LABELS),
    "the second chunk does not get the sum": Fault(hand_out_to_the_first, DIT, ("time_embed.fc2.bias",
        "on stages 0 and 2 of rank 0", "including several copies on one rank")),
    "the second chunk does not get the sum, one process": Fault(hand_out_to_the_first, ONE, ("time_embed.fc2.bias",
        "on stages 0 and 1 of rank 0 differ")),
    "the second chunk starts elsewhere": Fault(on_rank_1(copy_starts_elsewhere), DIT,
        ("initial weight: the copies of label_embed.weight on stages 1 and 3 of rank 1 differ", "all copies", "start")),
    "the norm counts copies": Fault(norm_with_copies, DIT, ("counted 4 times", COPIES_COUNTED)),
    "the norm counts copies, one process": Fault(norm_with_copies, ONE, ("counted 2 times", COPIES_COUNTED)),
    "the norm counts copies, pp 4": Fault(norm_with_copies, DIT_4, ("counted pp (4) times",)),
}  # fmt: skip
