"""Seeded faults that lose, repeat or fail to sum parts of gradients, each to be named."""

from __future__ import annotations

import pytest
import torch

from meshwright.mesh.axes import Axes
from meshwright.prove.compare.result import FaultKind
from tests.prove.gradient_case import ALL, EVERY, FSDP, FSDP_TP, HSDP, LAYOUTS, ODD, WITH_MICRO, Case
from tests.prove.synthetic import REPLICATED_OVER_TP, SHAPES, hold


@pytest.mark.parametrize(("axes", "micro"), WITH_MICRO, ids=str)
def test_every_rank_keeps_its_own_part(axes, micro):
    case = Case(axes, micro)
    case.give(lambda rank, parts: parts[case.share(rank)].sum(0))
    over = " and ".join(axis for axis in axes.used() if axis.startswith("dp_"))
    case.says(
        f"each rank holds only its local contribution: the sum over {over} is missing", kind=FaultKind.SUM_MISSING
    )


@pytest.mark.parametrize(("axes", "micro"), WITH_MICRO, ids=str)
def test_every_rank_keeps_the_mean_of_its_own_share(axes, micro):
    case = Case(axes, micro)
    case.give(lambda rank, parts: parts[case.share(rank)].sum(0) * axes.data_parallel())
    over = " and ".join(axis for axis in axes.used() if axis.startswith("dp_"))
    case.says(f"× its local contribution: the mean over {over} is missing", kind=FaultKind.SUM_MISSING)


@pytest.mark.parametrize("axes", [HSDP, ALL], ids=str)
@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
def test_one_of_two_data_axes_is_not_summed(axes, axis):
    case = Case(axes, 2)

    def group(rank, parts):
        at = axes.coordinate(rank)[axis]
        keep = [s for s in range(4) if divmod(s, 2)[axis == "dp_shard"] == at]
        return parts[keep].sum((0, 1))

    case.give(group)
    case.says(f"the sum over {axis} is missing", f"its own {axis} coordinate", kind=FaultKind.SUM_MISSING)


@pytest.mark.parametrize(("axes", "micro"), WITH_MICRO, ids=str)
def test_a_share_is_dropped(axes, micro):
    case = Case(axes, micro)
    case.give(lambda rank, parts: parts.sum((0, 1)) - parts[1].sum(0))
    case.says("the contribution of data-parallel rank 1 is missing", kind=FaultKind.CONTRIBUTIONS)


def test_the_only_share_there_is_names_the_missing_sum():
    case = Case(FSDP_TP)
    case.give(lambda rank, parts: parts[0].sum(0))
    case.says(
        "the contribution of data-parallel rank 1 is missing",
        "the sum over dp_shard is missing: only contributions of data-parallel rank 0 (ranks 0 and 1) are included",
    )


@pytest.mark.parametrize(("axes", "micro"), WITH_MICRO, ids=str)
def test_a_rank_works_through_another_ranks_samples(axes, micro):
    case = Case(axes, micro)
    case.give(lambda rank, parts: parts.sum((0, 1)) - parts[1].sum(0) + parts[0].sum(0))
    case.says(
        "data-parallel rank 1 missing and data-parallel rank 0 counted twice",
        "read the samples of data-parallel rank 0",
        kind=FaultKind.CONTRIBUTIONS,
    )


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
@pytest.mark.parametrize("micro", [2, 4])
def test_only_the_last_microbatch_is_kept(axes, micro):
    case = Case(axes, micro)
    case.give(lambda rank, parts: parts[:, -1].sum(0))
    words = "only the last micro-batch", "accumulation is missing"
    case.says(*words, kind=FaultKind.CONTRIBUTIONS)


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
@pytest.mark.parametrize("micro", [2, 4])
def test_a_microbatch_is_lost_or_counted_twice(axes, micro):
    case = Case(axes, micro)
    case.give(lambda rank, parts: parts.sum((0, 1)) + parts[:, 0].sum(0))
    case.says("micro-batch 0 counted twice", kind=FaultKind.CONTRIBUTIONS)
    case = Case(axes, micro)
    case.give(lambda rank, parts: parts.sum((0, 1)) - parts[:, 1].sum(0))
    case.says("micro-batch 1 is missing", kind=FaultKind.CONTRIBUTIONS)


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_a_microbatch_in_another_ones_place(axes):
    case = Case(axes, 3)
    case.give(lambda rank, parts: parts.sum((0, 1)) - parts[:, 1].sum(0) + parts[:, 0].sum(0))
    case.says("micro-batch 1 is missing and micro-batch 0 counted twice", kind=FaultKind.CONTRIBUTIONS)


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_a_microbatch_lost_on_one_share(axes):
    case = Case(axes, 2)
    case.give(lambda rank, parts: parts.sum((0, 1)) - parts[1, 0])
    case.says(
        "for data-parallel rank 1 (rank", "only the last micro-batch (1) is present", kind=FaultKind.CONTRIBUTIONS
    )


def test_cells_of_two_shares_exchanged_for_one_another():
    case = Case(FSDP, 2)
    case.give(lambda rank, parts: parts.sum((0, 1)) - parts[1, 0] + parts[2, 1])
    case.says(
        "micro-batch 0 of data-parallel rank 1 is missing and micro-batch 1 of data-parallel rank 2 counted twice"
    )


def test_any_other_combination_lists_the_weights():
    case = Case(FSDP, 2)
    names = [name for name, (shape, _) in SHAPES.items() if len(shape) > 1]
    case.give(lambda rank, parts: parts.sum((0, 1)) + 2 * parts[1, 0] - 0.5 * parts[2, 1], names)
    case.says(
        "data-parallel rank 1 micro-batch 0 × 3.000",
        "data-parallel rank 2 micro-batch 1 × 0.5",
        kind=FaultKind.CONTRIBUTIONS,
        names=names,
    )


@pytest.mark.parametrize("axes", [FSDP_TP, ODD, ALL, Axes(tp=2), Axes(tp=4)], ids=str)
def test_copies_that_add_up_to_the_reference(axes):
    case = Case(axes)
    draw = torch.Generator().manual_seed(5)
    for name in REPLICATED_OVER_TP:
        full = case.reference.gradients[name]
        some = torch.randn(axes.tp, *full.shape, generator=draw, dtype=torch.float64)
        some[-1] = full - some[:-1].sum(0)
        hold(case.layout.gradients, axes, name, lambda rank, some=some: some[axes.coordinate(rank)["tp"]])
    words = "replicas differ between ranks 0 and 1 along tp: the sum over tp is missing"
    case.says(words, kind=FaultKind.SUM_MISSING, names=REPLICATED_OVER_TP)


def test_copies_whose_mean_is_the_reference():
    case = Case(FSDP_TP)
    for name in REPLICATED_OVER_TP:
        full, some = case.reference.gradients[name], torch.randn(SHAPES[name][0], dtype=torch.float64)
        both = some, 2 * full - some
        hold(case.layout.gradients, case.axes, name, lambda rank, both=both: both[case.axes.coordinate(rank)["tp"]])
    case.says("the mean over tp is missing", kind=FaultKind.SUM_MISSING, names=REPLICATED_OVER_TP)


def test_two_missing_sums_at_once():
    case = Case(ALL)
    for name in REPLICATED_OVER_TP:
        parts = case.reference.partial_gradients[name].sum(1)
        some = torch.randn_like(parts)
        halves = some, parts - some

        def mine(rank, halves=halves):
            return halves[ALL.coordinate(rank)["tp"]][case.share(rank)]

        hold(case.layout.gradients, ALL, name, mine)
    case.says(
        "the sum over tp is missing, and in the sum of the replicas", "its local contribution", names=REPLICATED_OVER_TP
    )


IN_EACH = "the accumulated gradient is summed over {} ({} ranks) in each of {} backwards, not once after the last"


def accumulated(case, num_ranks, names, factor=1.0):
    """Sum what has accumulated over so many ranks after each micro-batch, which sums those before it again."""

    def full(rank, parts):
        total = 0.0 * parts[:, 0].sum(0)
        for microbatch in parts.sum(0):
            total = num_ranks * total + microbatch
        return factor * total

    case.give(full, names)


@pytest.mark.parametrize("axes", [FSDP_TP, ODD, Axes(tp=4)], ids=str)
@pytest.mark.parametrize("micro", [2, 3])
def test_accumulated_gradients_are_summed_over_tp_again_in_each_backward(axes, micro):
    case, names = Case(axes, micro), REPLICATED_OVER_TP
    accumulated(case, axes.tp, names)
    case.says(IN_EACH.format("tp", axes.tp, micro), kind=FaultKind.CONTRIBUTIONS, names=names)
    is_ambiguous = axes.tp == micro == 2
    assert all("gradient accumulation adds it" in one.cause for one in case.diagnoses(names)) == is_ambiguous


def test_accumulated_gradients_are_summed_over_one_of_two_axes_of_one_size():
    case = Case(ALL, 3)
    accumulated(case, 2, REPLICATED_OVER_TP)
    case.says("summed over dp_replicate (2 ranks) or over tp (2 ranks) in each of 3", names=REPLICATED_OVER_TP)


def test_accumulated_gradients_that_are_scaled_too():
    case = Case(FSDP_TP, 3)
    accumulated(case, 2, ["square.weight"], 0.5)
    case.says(IN_EACH.format("tp", 2, 3), "in addition, averaged over", names=["square.weight"])


def test_other_weights_of_microbatches_are_no_sums_of_accumulated_gradients():
    for axes, names, weights in (
        (FSDP_TP, REPLICATED_OVER_TP[:3], (1.0, 2.0)),  # the wrong one is counted twice
        (FSDP_TP, EVERY, (2.0, 1.0)),  # parameters that tp shards, too
        (FSDP, EVERY, (4.0, 1.0)),  # nothing is replicated
        (Axes(tp=4), REPLICATED_OVER_TP[:3], (2.0, 1.0)),  # not the size of an axis
    ):
        case = Case(axes, 2)
        case.give(lambda rank, parts, w=weights: w[0] * parts[:, 0].sum(0) + w[1] * parts[:, 1].sum(0), names)
        assert all("accumulated gradient is summed" not in one.text for one in case.diagnoses(names))
