"""Damaged losses, norms of gradients, learning rates and numbers of samples, each to be named."""

from __future__ import annotations

import math

import pytest

from meshwright.mesh.axes import Axes
from meshwright.prove.record.plain_optimizer import plain_learning_rate
from meshwright.prove.result import FaultKind as K
from tests.prove.synthetic import REPLICATED_OVER_TP, SHAPES, STEPS, TRAIN, Case, Fault, by_layout, scale

TWO, HSDP, FSDP, FSDP_TP = Axes(dp_shard=2), Axes(dp_replicate=2, dp_shard=2), Axes(dp_shard=4), Axes(dp_shard=2, tp=2)
ODD, ALL = Axes(dp_shard=3, tp=2), Axes(dp_replicate=2, dp_shard=2, tp=2)
LAYOUTS = (HSDP, FSDP, FSDP_TP, ODD, ALL)


def loss(of_rank, *words, kind=K.UNRECOGNISED, micro=1, layouts=(TWO, HSDP, FSDP_TP, ODD), step=1):
    """Ranks report `of_rank(case, rank, losses)` of shares and micro-batches."""

    def damage(case):
        for rank in range(case.axes.num_ranks()):
            case.layout.losses[rank][step - 1] = float(of_rank(case, rank, case.reference.losses[step - 1]))

    return Fault(damage, words, kind, about="loss", num_microbatches=micro, layouts=layouts, step=step)


def norm(squares, *words, kind=K.NORM_MEMBERS, layouts=(FSDP_TP,), also=()):
    """Ranks report the root of `squares(case, rank)`. A rank without one takes no step, and copies come apart."""

    def damage(case):
        for rank in range(case.axes.num_ranks()):
            case.layout.norms[rank, 1] = math.sqrt(squares(case, rank))

    return Fault(damage, words, kind, about="norm", layouts=layouts, also=also)


def due(case):
    return case.layout.norm(1)


def squares(case, names=SHAPES):
    return sum(float((case.reference.gradients()[name] ** 2).sum()) for name in names)


def local(case, rank, weight=lambda name: 1.0):
    """Sum of squares of what a rank holds."""
    pieces = case.layout.gradients
    return sum(weight(name) * float((pieces[name][rank].value ** 2).sum()) for name in pieces)


def without(names, *words, **more):
    return norm(lambda c, r: due(c) ** 2 - squares(c, names), "left out of the norm: " + "".join(words), **more)


def counted(names, times, *words, **more):
    return norm(lambda c, r: due(c) ** 2 + (times(c.axes) - 1) * squares(c, names), *words, **more)


def reduced_over(axis):
    """Sums of squares over the other axis; each copy counted by its share, as it should be."""

    def of_line(case, rank):
        at = FSDP_TP.coordinate(rank)[axis]
        line = [r for r in range(4) if FSDP_TP.coordinate(r)[axis] == at]
        return sum(local(case, r, lambda name: 0.5 if name in REPLICATED_OVER_TP else 1.0) for r in line)

    return norm(of_line, f"local norms not reduced over {axis}", also=("update",) if axis == "tp" else ())


def rate(of, *words, step=1):
    """Ranks report the learning rate `of(rank, step)`."""

    def damage(case):
        case.layout.rates = {(rank, at): of(rank, at) for rank in range(2) for at in range(1, STEPS + 1)}

    return Fault(damage, words, K.LEARNING_RATE, about="learning rate", step=step)


def right(step):
    return plain_learning_rate(step, TRAIN)


def samples(damage, *words, micro=2, layouts=(TWO,), step=1):
    return Fault(lambda case: damage(case.layout.samples), words, about="samples", num_microbatches=micro,
                 layouts=layouts, step=step)  # fmt: skip


def first(*samples_of_rank):
    """Other samples in the first step."""
    return lambda read: [read[rank].__setitem__(0, list(found)) for rank, found in enumerate(samples_of_rank)]


def of_the_first_ranks(read):
    for rank in (2, 3):
        read[rank] = [list(batch) for batch in read[0]]


IN_Q, IN_BLOCK_1 = "blocks.{}.attn.q.weight", [name for name in SHAPES if name.startswith("blocks.1.")]
SHARDED = [name for name in SHAPES if name not in REPLICATED_OVER_TP]
LOCAL = "report different norms", "not reduced over", "dp_shard"
HEAD, OWN, LAST = "head.weight", "its local contribution: the", "only the last micro-batch (2)"
FAULTS = {
    "own loss": loss(lambda c, r, x: x[c.share(r)].sum(), f"each rank holds only {OWN} sum over", kind=K.SUM_MISSING),
    "own mean loss": loss(lambda c, r, x: x[c.share(r)].sum() * c.axes.data_parallel(), f"{OWN} mean over", micro=3,
        kind=K.SUM_MISSING),
    "mean loss of the last": loss(lambda c, r, x: x[:, -1].sum() * 3, f"{LAST} is present, counted 3 times", micro=3,
        kind=K.CONTRIBUTIONS, layouts=(TWO,)),
    "any loss": loss(lambda c, r, x: x.sum() * 1.01, "not recognised: the forward pass differs", layouts=(HSDP,)),
    "loss of one rank": loss(lambda c, r, x: x.sum() * (1 + 0.01 * (r == 2)), "report different losses", "on rank 2",
        layouts=(HSDP,)),
    "infinite loss": loss(lambda c, r, x: math.inf if r == 1 else x.sum(), "not finite only on rank 1",
        kind=K.NON_FINITE, layouts=(HSDP,)),
    "loss of a later step": loss(lambda c, r, x: 2 * x.sum(), "2.000 × the reference", "summed over dp_shard",
        kind=K.SCALED, layouts=(TWO,), step=3),
    **{f"norm without {name}": without([name], name, layouts=(ALL,)) for name in SHAPES},
    "the head twice in the norm": counted([HEAD], lambda axes: 2, f"counted twice: {HEAD}", layouts=LAYOUTS),
    "norm without replicas": without(REPLICATED_OVER_TP, "parameters replicated over tp"),
    "norm without queries": without([IN_Q.format(at) for at in range(2)], IN_Q.format("*")),
    "norm without block 1": without(IN_BLOCK_1, "blocks.1.*"),
    "norm without what tp shards": without(SHARDED, "parameters sharded over tp"),
    "replicas once a rank": counted(REPLICATED_OVER_TP, lambda axes: axes.tp,
        "counted tp (2) times: parameters replicated over tp", layouts=LAYOUTS[2:]),
    "all once a replica": norm(lambda c, r: 2 * due(c) ** 2, "counted dp_replicate (2) times: all parameters",
        layouts=(HSDP,)),
    "local norm": norm(local, *LOCAL, layouts=(HSDP, FSDP)),
    "local norm beside copies": norm(local, *LOCAL, layouts=(FSDP_TP, ODD, ALL), also=("update",)),
    "norm reduced over tp": reduced_over("dp_shard"),
    "norm reduced over dp_shard": reduced_over("tp"),
    "norm without a rank": norm(lambda c, r: due(c) ** 2 - local(c, 2), "left out of the norm: the shards of rank 2",
        kind=None, layouts=(FSDP,)),
    "no root": norm(lambda c, r: due(c) ** 4, "the square root is missing", kind=K.NORM_FORM, layouts=LAYOUTS),
    "two roots": norm(lambda c, r: due(c), "the square root is taken twice", kind=K.NORM_FORM, layouts=LAYOUTS),
    "norms added": norm(lambda c, r: sum(math.sqrt(squares(c, [name])) for name in SHAPES) ** 2,
        "norms of parameters are added instead of their squares", kind=K.NORM_FORM, layouts=LAYOUTS),
    "3 norms": norm(lambda c, r: 9 * due(c) ** 2, "3.000 × the norm of the reference",
        "summed over dp_shard (3 ranks) instead of averaged", kind=None, layouts=(ODD,)),
    "3 squares": norm(lambda c, r: 3 * due(c) ** 2, "3.000 × the sum of squares of the reference",
        "dp_shard (3 ranks)", kind=None, layouts=(ODD,)),
    "norm of one rank": norm(lambda c, r: (due(c) * (1.01 if r == 2 else 1.0)) ** 2,
        "wrong only on rank 2: not recognised", "ratio 1.010", kind=K.UNRECOGNISED, layouts=(FSDP,)),
    "any norm": norm(lambda c, r: 1.2345 * due(c) ** 2, "not recognised", kind=K.UNRECOGNISED),
    "rate a step ahead": rate(lambda r, step: right(step + 1), "of step 1", "on every rank", "one step ahead"),
    "rate of one step": rate(lambda r, step: right(step) * (1 + (step == 3)), "of step 3", "2.000 × the right one",
        "differs from its closed form", step=3),
    "rate of one rank": rate(lambda r, step: right(step) * (1 + r), "only on rank 1", "2.000 times the learning rate"),
    "another share": samples(of_the_first_ranks, "rank 2 read samples 0…3 instead of 4…7 (the samples of ranks 0 and "
        "1): a rank reads another rank's samples", "in every step, on ranks 2 and 3", layouts=(FSDP_TP,)),
    "micro-batches": samples(first(range(4), [6, 7, 4, 5]), "rank 1 read samples 6, 7, 4, 5 instead of 4…7",
        "micro-batches in a different order", "step 1"),
    "order": samples(lambda read: read[1].__setitem__(2, [21, 20, 22, 23]),
        "the correct samples, in a different order", "in step 3", step=3),
    "reversed": samples(lambda read: read[1].__setitem__(2, [23, 22, 21, 20]), "samples, in reverse order", step=3),
    "not divided": samples(first(range(8), range(8)), "read 8 samples (0…7) instead of 4 (0…3)",
        "the rank reads all of it"),
    "interleaved": samples(first(range(0, 8, 2), range(1, 8, 2)),
        "samples are interleaved instead of split into contiguous blocks"),
    "twice": samples(first([0, 1, 1, 2]), "samples are read more than once"),
    "outside": samples(first([0, 1, 2, 300]), "samples from outside the batch of the step"),
    "none": samples(first([]), "read 0 samples (none) instead of 4 (0…3)"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "layouts"), by_layout(FAULTS))
def test_a_wrong_number_is_named(name, layouts):
    FAULTS[name].assert_named(layouts)


def test_a_norm_is_that_of_the_gradients_as_they_are() -> None:
    """Wrong gradients have a norm, too; and each step's is compared."""
    case = Case(FSDP_TP)
    scale(case.layout.gradients, list(SHAPES), 2.0)
    assert all(step.ok for step in case.proof().norms)
    case.layout.norms[0, 3] = 1.5 * case.layout.norm(3)
    [found] = [one for one in case.proof().findings if one.about == "norm"]
    assert found.step == 3 and "not recognised" in found.diagnosis.text
