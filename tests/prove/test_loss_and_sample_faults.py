"""Seeded faults in losses and in the order of samples."""

from __future__ import annotations

import pytest

from meshwright.mesh.axes import Axes
from meshwright.prove.compare.conclude import compare
from meshwright.prove.compare.result import FaultKind
from tests.prove.synthetic import Case

LAYOUTS = [Axes(dp_shard=2), Axes(dp_replicate=2, dp_shard=2), Axes(dp_shard=2, tp=2), Axes(dp_shard=3, tp=2)]


class Losses(Case):
    """A faultless layout whose losses or samples a test replaces."""

    def lose(self, loss_of_rank):
        for rank in range(self.axes.num_ranks()):
            self.layout.losses[rank][0] = float(loss_of_rank(rank))

    def loss_says(self, *words, kind=None):
        self.says_of("losses", *words, kind=kind)

    def samples_say(self, *words):
        result = compare(self.layout, self.reference)
        assert not result.passed
        text = " / ".join(one.text for one in result.samples)
        for word in words:
            assert word in text, text


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
@pytest.mark.parametrize("micro", [1, 3])
def test_a_loss_of_the_own_share(axes, micro):
    case = Losses(axes, micro)
    parts = case.reference.partial_losses
    case.lose(lambda rank: parts[axes.data_index(rank)].sum())
    case.loss_says("each rank holds only its local contribution: the sum over", kind=FaultKind.SUM_MISSING)
    case.lose(lambda rank: parts[axes.data_index(rank)].sum() * axes.data_parallel())
    case.loss_says("its local contribution: the mean over", kind=FaultKind.SUM_MISSING)


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_losses_that_add_up_need_no_partial_losses(axes):
    case = Losses(axes)
    parts = case.reference.partial_losses.sum(1)
    case.lose(lambda rank: parts[axes.data_index(rank)] * axes.data_parallel())
    object.__setattr__(case.reference, "partial_losses", None)
    case.loss_says(
        "ranks report different losses, each its local contribution", "the mean over", kind=FaultKind.SUM_MISSING
    )
    case.lose(lambda rank: parts[axes.data_index(rank)])
    case.loss_says("the sum over", kind=FaultKind.SUM_MISSING)


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_losses_summed_over_microbatches(axes):
    case = Losses(axes, 5)
    case.lose(lambda rank: case.reference.losses[0] * 5)
    case.loss_says("5.000 × the reference on every rank: summed over the 5 micro-batches", kind=FaultKind.SCALED)
    case.lose(lambda rank: case.reference.losses[0] / 5)
    case.loss_says("averaged over the 5 micro-batches instead of summed", kind=FaultKind.SCALED)


def test_the_last_microbatchs_loss_only():
    case = Losses(LAYOUTS[0], 3)
    case.lose(lambda rank: case.reference.partial_losses[:, -1].sum())
    case.loss_says("only the last micro-batch (2)", kind=FaultKind.CONTRIBUTIONS)
    case.lose(lambda rank: case.reference.partial_losses[:, -1].sum() * 3)
    case.loss_says("only the last micro-batch (2) is present, counted 3 times", kind=FaultKind.CONTRIBUTIONS)


def test_a_loss_that_nothing_explains():
    case = Losses(LAYOUTS[1])
    case.lose(lambda rank: case.reference.losses[0] * 1.01)
    case.loss_says("not recognised: the forward pass differs", kind=FaultKind.UNRECOGNISED)
    case.lose(lambda rank: case.reference.losses[0] * (1 + 0.01 * (rank == 2)))
    case.loss_says("report different losses", "on rank 2", kind=FaultKind.UNRECOGNISED)
    case.lose(lambda rank: float("inf") if rank == 1 else case.reference.losses[0])
    case.loss_says("not finite only on rank 1", kind=FaultKind.NON_FINITE)


def test_later_losses():
    case = Losses(LAYOUTS[0])
    for losses in case.layout.losses:
        losses[1:] = losses[:-1]
    case.loss_says("loss of step 2 matches step 1 of the reference: one step behind", kind=FaultKind.OUT_OF_STEP)
    case = Losses(LAYOUTS[0])
    case.layout.losses[1][2] += 1e-3
    case.loss_says("loss correct in step 1, wrong from step 3 on", "not recognised")


def test_a_rank_reads_another_ranks_share():
    case = Losses(Axes(dp_shard=2, tp=2), 2)
    for rank in (2, 3):
        case.layout.samples[rank] = [list(batch) for batch in case.layout.samples[0]]
    case.samples_say(
        "rank 2 read samples 0…3 instead of 4…7 (the samples of ranks 0 and 1): a rank reads another rank's samples",
        "in every step, on ranks 2 and 3",
    )


def test_microbatches_in_another_order():
    case = Losses(Axes(dp_shard=2), 2)
    case.layout.samples[1][0] = [6, 7, 4, 5]
    case.samples_say("rank 1 read samples 6, 7, 4, 5 instead of 4…7", "micro-batches in a different order", "step 1")


def test_samples_in_another_order():
    case = Losses(Axes(dp_shard=2), 2)
    case.layout.samples[1][2] = [21, 20, 22, 23]
    case.samples_say("the correct samples, in a different order", "in step 3")
    case.layout.samples[1][2] = [23, 22, 21, 20]
    case.samples_say("the correct samples, in reverse order")


def test_samples_of_the_step_before():
    case = Losses(Axes(dp_shard=2))
    for rank in (0, 1):
        case.layout.samples[rank][1] = list(case.layout.samples[rank][0])
    case.samples_say("rank 0 read samples 0, 1 instead of 4, 5 (its samples of step 1)", "the sampler is 1 step behind")


def test_a_batch_that_is_not_divided_or_divided_otherwise():
    case = Losses(Axes(dp_shard=2), 2)
    for rank in (0, 1):
        case.layout.samples[rank][0] = list(range(8))
    case.samples_say("read 8 samples (0…7) instead of 4 (0…3)", "the rank reads all of it")
    for rank in (0, 1):
        case.layout.samples[rank][0] = list(range(rank, 8, 2))
    case.samples_say("samples are interleaved instead of split into contiguous blocks")
    case.layout.samples[0][0] = [0, 1, 1, 2]
    case.samples_say("samples are read more than once")
    case.layout.samples[0][0] = [0, 1, 2, 300]
    case.samples_say("samples from outside the batch of the step")
    case.layout.samples[0][0] = []
    case.samples_say("read 0 samples (none) instead of 4 (0…3)")
