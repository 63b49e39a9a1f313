"""Seeded faults in losses and in the order of samples."""

from __future__ import annotations

import pytest

from meshwright.mesh.axes import Axes
from meshwright.prove.result import FaultKind as K
from tests.prove.synthetic import Case

TWO = Axes(dp_shard=2)
HSDP = Axes(dp_replicate=2, dp_shard=2)
LAYOUTS = (TWO, HSDP, Axes(dp_shard=2, tp=2), Axes(dp_shard=3, tp=2))


def share(c, rank):
    """The loss of a rank's share of the samples."""
    return c.reference.losses[0][c.share(rank)].sum()


def last(c):
    return c.reference.losses[0][:, -1].sum()


OWN, LAST = "each rank holds only its local contribution: the sum over", "only the last micro-batch (2)"
LOSSES = {
    "own": (LAYOUTS, 1, lambda c, r: share(c, r), [OWN], K.SUM_MISSING),
    "own of 3": (LAYOUTS, 3, lambda c, r: share(c, r), [OWN], K.SUM_MISSING),
    "own mean": (LAYOUTS, 3, lambda c, r: share(c, r) * c.axes.data_parallel(),
        ["its local contribution: the mean over"], K.SUM_MISSING),
    "sum": (LAYOUTS, 5, lambda c, r: c.reference.losses[0].sum() * 5,
        ["5.000 × the reference on every rank: summed over the 5 micro-batches"], K.SCALED),
    "mean": (LAYOUTS, 5, lambda c, r: c.reference.losses[0].sum() / 5, ["averaged over the 5 micro-batches instead of"],
        K.SCALED),
    "last": ((TWO,), 3, lambda c, r: last(c), [LAST], K.CONTRIBUTIONS),
    "mean of last": ((TWO,), 3, lambda c, r: last(c) * 3, [f"{LAST} is present, counted 3 times"], K.CONTRIBUTIONS),
    "anything": ((HSDP,), 1, lambda c, r: c.reference.losses[0].sum() * 1.01,
        ["not recognised: the forward pass differs"], K.UNRECOGNISED),
    "one rank": ((HSDP,), 1, lambda c, r: c.reference.losses[0].sum() * (1 + 0.01 * (r == 2)),
        ["report different losses", "on rank 2"], K.UNRECOGNISED),
    "infinite": ((HSDP,), 1, lambda c, r: float("inf") if r == 1 else c.reference.losses[0].sum(),
        ["not finite only on rank 1"], K.NON_FINITE),
}  # fmt: skip


def with_losses(case, loss_of_rank):
    for rank in range(case.axes.num_ranks()):
        case.layout.losses[rank][0] = float(loss_of_rank(case, rank))
    return case


@pytest.mark.parametrize("name", LOSSES)
def test_a_wrong_loss_is_named(name):
    layouts, micro, loss_of_rank, words, kind = LOSSES[name]
    for axes in layouts:
        with_losses(Case(axes, micro), loss_of_rank).says_of("loss", *words, kind=kind)


def test_the_losses_of_later_steps_are_compared_like_the_first() -> None:
    case = Case(TWO)
    for losses in case.layout.losses:
        losses[2] *= 2
    assert case.says_of("loss", "2.000 × the reference", "summed over dp_shard", kind=K.SCALED).step == 3


def first(*samples_of_rank):
    """Other samples in the first step."""

    def damage(read):
        for rank, samples in enumerate(samples_of_rank):
            read[rank][0] = list(samples)

    return damage


def one_step_behind(read):
    for batches in read:
        batches[1] = list(batches[0])


def of_the_first_ranks(read):
    for rank in (2, 3):
        read[rank] = [list(batch) for batch in read[0]]


SAMPLES = {
    "another share": (Axes(dp_shard=2, tp=2), 2, of_the_first_ranks, [
        "rank 2 read samples 0…3 instead of 4…7 (the samples of ranks 0 and 1): a rank reads another rank's samples",
        "in every step, on ranks 2 and 3"]),
    "micro-batches": (TWO, 2, first(range(4), [6, 7, 4, 5]),
        ["rank 1 read samples 6, 7, 4, 5 instead of 4…7", "micro-batches in a different order", "step 1"]),
    "order": (TWO, 2, lambda read: read[1].__setitem__(2, [21, 20, 22, 23]),
        ["the correct samples, in a different order", "in step 3"]),
    "reversed": (TWO, 2, lambda read: read[1].__setitem__(2, [23, 22, 21, 20]), ["samples, in reverse order"]),
    "a step behind": (TWO, 1, one_step_behind,
        ["rank 0 read samples 0, 1 instead of 4, 5 (its samples of step 1)", "the sampler is 1 step behind"]),
    "not divided": (TWO, 2, first(range(8), range(8)),
        ["read 8 samples (0…7) instead of 4 (0…3)", "the rank reads all of it"]),
    "interleaved": (TWO, 2, first(range(0, 8, 2), range(1, 8, 2)),
        ["samples are interleaved instead of split into contiguous blocks"]),
    "twice": (TWO, 2, first([0, 1, 1, 2]), ["samples are read more than once"]),
    "outside": (TWO, 2, first([0, 1, 2, 300]), ["samples from outside the batch of the step"]),
    "none": (TWO, 2, first([]), ["read 0 samples (none) instead of 4 (0…3)"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_wrong_samples_are_named(name):
    axes, micro, damage, words = SAMPLES[name]
    case = Case(axes, micro)
    damage(case.layout.samples)
    result = case.proof()
    text = " / ".join(one.diagnosis.text for one in result.findings if one.about == "samples")
    assert not result.passed and all(word in text for word in words), text
