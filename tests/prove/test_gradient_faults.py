"""Seeded faults of gradients, each to be named: factors, lost or repeated parts, missing sums, wrong places, damage."""

from __future__ import annotations

import pytest
import torch

from meshwright.mesh.axes import Axes
from meshwright.prove.result import FaultKind as K
from tests.prove.synthetic import EVERY, MATRIX, REPLICATED_OVER_TP, SHAPES, Case, box, cut, hold, scale

HSDP = Axes(dp_replicate=2, dp_shard=2)
FSDP = Axes(dp_shard=4)
FSDP_TP = Axes(dp_shard=2, tp=2)
ODD = Axes(dp_shard=3, tp=2)
ALL = Axes(dp_replicate=2, dp_shard=2, tp=2)
TP4 = Axes(tp=4)
LAYOUTS = (HSDP, FSDP, FSDP_TP, ODD, ALL)
SQUARE = ["square.weight"]


def scaled(factor, names=EVERY, ranks=None):
    """Gradients are multiplied, on some ranks or on all."""
    return lambda case: scale(case.layout.gradients, names, factor, ranks)


def given(full_of, names=EVERY):
    """Each rank holds its piece of `full_of(parts)` of shares and micro-batches."""
    return lambda case: case.give(lambda rank, parts: full_of(parts), names)


def total(parts):
    return parts.sum((0, 1))


REPLICAS = "summed over tp (2 ranks) instead of averaged, on exactly the parameters replicated over tp"
FACTORS = {
    "sum over dp_shard": ((Axes(dp_shard=2),), 1, scaled(2.0),
        "2.000 × the reference on every rank: summed over dp_shard (2 ranks) instead of averaged", EVERY),
    "sum over dp_shard 3, of one": ((Axes(dp_shard=3),), 1, scaled(3.0, [MATRIX]),
        "3.000 × the reference on every rank: summed over dp_shard (3 ranks) instead of averaged", [MATRIX]),
    "sum over dp_replicate, of a tiny one": ((Axes(dp_replicate=2),), 1, scaled(2.0, ["gate.bias"]),
        "2.000 × the reference on every rank: summed over dp_replicate (2 ranks) instead of averaged", ["gate.bias"]),
    "sum over tp": ((Axes(tp=2),), 1, scaled(2.0),
        "2.000 × the reference on every rank: summed over tp (2 ranks) instead of averaged", EVERY),
    "mean over dp_shard": ((Axes(dp_shard=3),), 1, scaled(1 / 3), "averaged over dp_shard (3 ranks) instead", EVERY),
    "mean over replicas": ((Axes(dp_replicate=4),), 1, scaled(0.25), "averaged over dp_replicate (4 ranks)", EVERY),
    "two axes of one size": ((FSDP_TP,), 1, scaled(2.0), "summed over dp_shard (2 ranks) or over tp (2 ranks)", EVERY),
    "of what tp replicates": ((FSDP_TP,), 1, scaled(2.0, REPLICATED_OVER_TP), REPLICAS, REPLICATED_OVER_TP),
    "a product of axes": ((HSDP,), 3, scaled(4.0),
        "4.000 × the reference on every rank: summed over dp_replicate × dp_shard (4 ranks) instead of averaged",
        EVERY),
    "sum over micro-batches": (LAYOUTS, 5, scaled(5.0), "summed over the 5 micro-batches instead of averaged", EVERY),
    "mean over micro-batches": (LAYOUTS, 5, scaled(0.2), "averaged over the 5 micro-batches instead of summed", EVERY),
    "sum over samples": ((Axes(dp_shard=3),), 1, scaled(6.0), "summed over the 6 samples of the batch", EVERY),
    "a sum and a mean": ((ODD,), 1, scaled(1.5),
        "summed over dp_shard (3 ranks) instead of averaged, and averaged over tp (2 ranks)", EVERY),
    "a sign": (LAYOUTS, 1, scaled(-1.0), "−1.000 × the reference on every rank: the sign is flipped", EVERY),
    "no cause": ((FSDP_TP,), 1, scaled(1.7, [MATRIX]),
        "1.700 × the reference on every rank: a factor that no axis", [MATRIX]),
    "one rank": (LAYOUTS, 1, scaled(2.0, [MATRIX], {1}), "2.000 × the reference only on rank 1", [MATRIX]),
    "one coordinate": ((ALL,), 1, scaled(3.0, EVERY, {1, 3, 5, 7}),
        "3.000 × the reference only on ranks 1, 3, 5 and 7 (tp = 1)", EVERY),
}  # fmt: skip


@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_is_named_by_axis_ranks_and_parameters(name):
    layouts, micro, damage, words, names = FACTORS[name]
    for axes in layouts:
        case = Case(axes, micro)
        damage(case)
        case.says(words, kind=K.SCALED, names=names)


ONLY_LAST, CELL = "only the last micro-batch", "micro-batch 0 of data-parallel rank 1 is missing and micro-batch 1 of"
PARTS = {
    "a share is dropped": (LAYOUTS, 2, lambda p: total(p) - p[1].sum(0),
        ["the contribution of data-parallel rank 1 is missing"]),
    "the only share there is": ((FSDP_TP,), 1, lambda p: p[0].sum(0),
        ["the contribution of data-parallel rank 1 is missing",
         "the sum over dp_shard is missing: only contributions of data-parallel rank 0 (ranks 0 and 1) are included"]),
    "another rank's samples": (LAYOUTS, 2, lambda p: total(p) - p[1].sum(0) + p[0].sum(0),
        ["data-parallel rank 1 missing and data-parallel rank 0 counted twice",
         "read the samples of data-parallel rank 0"]),
    "the last of 2": (LAYOUTS, 2, lambda p: p[:, -1].sum(0), [ONLY_LAST, "accumulation is missing"]),
    "the last of 4": (LAYOUTS, 4, lambda p: p[:, -1].sum(0), [ONLY_LAST, "accumulation is missing"]),
    "one twice": (LAYOUTS, 2, lambda p: total(p) + p[:, 0].sum(0), ["micro-batch 0 counted twice"]),
    "one of 4 lost": (LAYOUTS, 4, lambda p: total(p) - p[:, 1].sum(0), ["micro-batch 1 is missing"]),
    "one in another's place": (LAYOUTS, 3, lambda p: total(p) - p[:, 1].sum(0) + p[:, 0].sum(0),
        ["micro-batch 1 is missing and micro-batch 0 counted twice"]),
    "one lost on one share": (LAYOUTS, 2, lambda p: total(p) - p[1, 0],
        ["for data-parallel rank 1 (rank", "only the last micro-batch (1) is present"]),
    "cells exchanged": ((FSDP,), 2, lambda p: total(p) - p[1, 0] + p[2, 1],
        [f"{CELL} data-parallel rank 2 counted twice"]),
    "any combination": ((FSDP,), 2, lambda p: total(p) + 2 * p[1, 0] - 0.5 * p[2, 1],
        ["data-parallel rank 1 micro-batch 0 × 3.000", "data-parallel rank 2 micro-batch 1 × 0.5"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_lost_and_repeated_parts_are_named(name):
    layouts, micro, full_of, words = PARTS[name]
    names = EVERY if name != "any combination" else [name for name, (shape, _) in SHAPES.items() if len(shape) > 1]
    for axes in layouts:
        case = Case(axes, micro)
        given(full_of, names)(case)
        case.says(*words, kind=K.CONTRIBUTIONS, names=names)


@pytest.mark.parametrize(("axes", "micro"), [*((axes, 2) for axes in LAYOUTS), (FSDP_TP, 1)], ids=str)
def test_every_rank_keeps_its_own_part(axes, micro):
    over = " and ".join(axis for axis in axes.used() if axis.startswith("dp_"))
    for factor, words in (
        (1, f"each rank holds only its local contribution: the sum over {over} is missing"),
        (axes.data_parallel(), f"× its local contribution: the mean over {over} is missing"),
    ):
        case = Case(axes, micro)
        case.give(lambda rank, parts, c=case, factor=factor: parts[c.share(rank)].sum(0) * factor)
        case.says(words, kind=K.SUM_MISSING)


@pytest.mark.parametrize("axes", [HSDP, ALL], ids=str)
@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
def test_one_of_two_data_axes_is_not_summed(axes, axis):
    case = Case(axes, 2)

    def group(rank, parts):
        at = axes.coordinate(rank)[axis]
        return total(parts[[s for s in range(4) if divmod(s, 2)[axis == "dp_shard"] == at]])

    case.give(group)
    case.says(f"the sum over {axis} is missing", f"its own {axis} coordinate", kind=K.SUM_MISSING)


@pytest.mark.parametrize(("axes", "factor"), [*((a, 1) for a in (FSDP_TP, ODD, ALL, Axes(tp=2), TP4)), (FSDP_TP, 2)])
def test_copies_that_add_up_to_the_reference_or_whose_mean_is_it(axes, factor):
    case, draw = Case(axes), torch.Generator().manual_seed(5)
    for name in REPLICATED_OVER_TP:
        full = case.reference.gradients()[name]
        some = torch.randn(axes.tp, *full.shape, generator=draw, dtype=torch.float64)
        some[-1] = factor * full - some[:-1].sum(0)
        hold(case.layout.gradients, axes, name, lambda rank, some=some: some[axes.coordinate(rank)["tp"]])
    what = "replicas differ between ranks 0 and 1 along tp: the sum over" if factor == 1 else "the mean over"
    case.says(f"{what} tp is missing", kind=K.SUM_MISSING, names=REPLICATED_OVER_TP)


def test_two_missing_sums_at_once():
    case = Case(ALL)
    for name in REPLICATED_OVER_TP:
        parts = case.reference.parts[0][name].sum(1)
        some = torch.randn_like(parts)
        halves = some, parts - some

        def mine(rank, halves=halves):
            return halves[ALL.coordinate(rank)["tp"]][case.share(rank)]

        hold(case.layout.gradients, ALL, name, mine)
    words = "the sum over tp is missing, and in the sum of the replicas", "its local contribution"
    case.says(*words, names=REPLICATED_OVER_TP)


IN_EACH = "the accumulated gradient is summed over {} ({} ranks) in each of {} backwards, not once after the last"


def accumulated(case, num_ranks, names, factor=1.0):
    """Sum what has accumulated over so many ranks after each micro-batch, which sums those before it again."""

    def full(rank, parts):
        found = 0.0 * parts[:, 0].sum(0)
        for microbatch in parts.sum(0):
            found = num_ranks * found + microbatch
        return factor * found

    case.give(full, names)


@pytest.mark.parametrize("axes", [FSDP_TP, ODD, TP4], ids=str)
@pytest.mark.parametrize("micro", [2, 3])
def test_accumulated_gradients_are_summed_over_tp_again_in_each_backward(axes, micro):
    case, names = Case(axes, micro), REPLICATED_OVER_TP
    accumulated(case, axes.tp, names)
    case.says(IN_EACH.format("tp", axes.tp, micro), kind=K.CONTRIBUTIONS, names=names)
    is_ambiguous = axes.tp == micro == 2
    assert all("gradient accumulation adds it" in one.cause for one in case.diagnoses(names)) == is_ambiguous


def test_accumulated_gradients_that_are_scaled_too_or_may_be_of_two_axes():
    case = Case(ALL, 3)
    accumulated(case, 2, REPLICATED_OVER_TP)
    case.says("summed over dp_replicate (2 ranks) or over tp (2 ranks) in each of 3", names=REPLICATED_OVER_TP)
    case = Case(FSDP_TP, 3)
    accumulated(case, 2, SQUARE, 0.5)
    case.says(IN_EACH.format("tp", 2, 3), "in addition, averaged over", names=SQUARE)


def test_other_weights_of_microbatches_are_no_sums_of_accumulated_gradients():
    for axes, names, weights in (
        (FSDP_TP, REPLICATED_OVER_TP[:3], (1.0, 2.0)),  # the wrong one is counted twice
        (FSDP_TP, EVERY, (2.0, 1.0)),  # parameters that tp shards, too
        (FSDP, EVERY, (4.0, 1.0)),  # nothing is replicated
        (TP4, REPLICATED_OVER_TP[:3], (2.0, 1.0)),  # not the size of an axis
    ):
        case = Case(axes, 2)
        case.give(lambda rank, parts, w=weights: w[0] * parts[:, 0].sum(0) + w[1] * parts[:, 1].sum(0), names)
        assert all("accumulated gradient is summed" not in one.text for one in case.diagnoses(names))


def pieces(change):
    return lambda case: change(case.layout.gradients[MATRIX])


def add_noise(case, rank, size):
    value = case.layout.gradients[MATRIX][rank].value
    value.add_(size * torch.randn(value.shape, dtype=torch.float64))


def held(change, name=MATRIX):
    """All ranks hold their piece of a changed gradient."""

    def damage(case):
        full = change(case.reference.gradients())
        hold(case.layout.gradients, case.axes, name, lambda rank: full)

    return damage


def changed(index, factor, by=0.0):
    def change(gradients):
        full = gradients[MATRIX].clone()
        full[index] = full[index] * factor + by
        return full

    return held(change)


def exchange(of_ranks):
    first = of_ranks[0].value.clone()
    of_ranks[0].value.copy_(of_ranks[1].value)
    of_ranks[1].value.copy_(first)


OTHER, SHARD2 = "blocks.1.attn.q.weight", Axes(dp_shard=2)
PLACES = {
    "zero": (LAYOUTS, scaled(0.0, [MATRIX]), ["zero on every rank: no gradient reached this parameter"], K.ZERO),
    "none": (LAYOUTS, lambda case: case.layout.gradients.pop(MATRIX),
        ["no gradient on every rank: no gradient reached this parameter"], None),
    "zero on a rank": ((FSDP_TP,), scaled(0.0, [MATRIX], {2}),
        ["zero only on rank 2: no gradient reached rank 2's shard"], K.ZERO),
    "none on a rank": ((FSDP_TP,), pieces(lambda p: p.pop(2)),
        ["no gradient only on rank 2: no gradient reached rank 2's shard"], K.ZERO),
    "NaN": ((FSDP_TP,), pieces(lambda p: p[3].value[0, 0].fill_(float("nan"))),
        ["not finite only on rank 3", "on rank 3"], K.NON_FINITE),
    "infinite": ((FSDP_TP,), pieces(lambda p: p[3].value[0, 0].fill_(float("inf"))),
        ["not finite only on rank 3", "on rank 3"], K.NON_FINITE),
    "exchanged": ((FSDP,), pieces(exchange), ["ranks 0 and 1 hold each other's shard"], K.MISPLACED),
    "of another rank": ((FSDP,), pieces(lambda p: p[2].value.copy_(p[3].value)), ["rank 2 holds rank 3's shard"],
        K.MISPLACED),
    "shifted": (LAYOUTS, held(lambda g: g[MATRIX].roll(1, 0)), ["the reference shifted by 1 along dim 0"], K.MISPLACED),
    "of another parameter": (LAYOUTS, held(lambda g: g[OTHER]), [f"the reference of {OTHER}"], K.MISPLACED),
    "noise on a rank": ((FSDP,), lambda case: add_noise(case, 3, 1e-3),
        ["not recognised: only rank 3's shard differs; relative error", "on rank 3"], None),
    "one element": ((FSDP_TP,), changed((5, 2), 1, 1e-9),
        ["not recognised", "largest at [5, 2]", "wrong at element [5, 2] only"], None),
    "some rows": ((SHARD2,), changed(slice(2, 4), 2), ["2.000 × the reference at dim 0: 2…3", "summed over dp_shard"],
        None),
    "some rows are zero": ((SHARD2,), changed(slice(2, 4), 0),
        ["zero at dim 0: 2…3", "no gradient reached this region"], None),
    "a copy strays": ((HSDP,), lambda case: add_noise(case, 2, 1e-6),
        ["replicas differ between ranks 0 and 2 along dp_replicate: only rank 2 differs from the reference"],
        K.REPLICAS_DIFFER),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_what_is_missing_misplaced_or_damaged_is_placed(name):
    layouts, damage, words, kind = PLACES[name]
    for axes in layouts:
        case = Case(axes)
        damage(case)
        case.says(*words, kind=kind, names=[MATRIX])


def test_a_transpose_is_named():
    case = Case(ODD)
    held(lambda g: g["square.weight"].T, "square.weight")(case)
    case.says("the transpose of the reference", kind=K.MISPLACED, names=SQUARE)


def test_a_hole_an_overlap_and_a_misfit_are_findings():
    case = Case(FSDP)
    of_ranks = case.layout.gradients[MATRIX]
    of_ranks[1] = type(of_ranks[1])(1, (0, 0), cut(case.reference.gradients()[MATRIX], MATRIX, 0, FSDP))
    case.says("no rank holds", "dim 0: 2…3", "ranks 0 and 1 hold the same elements", names=[MATRIX])
    of_ranks[1] = type(of_ranks[1])(1, (7, 0), of_ranks[1].value)
    case.says("rank 1's shard of shape (2, 6) at (7, 0) is out of bounds for (8, 6)", names=[MATRIX])


def test_pieces_of_the_synthetic_layout_tile():
    """The tests' own layout cuts as FSDP2 on tensor parallel does, empty pieces included."""
    assert box("gate.bias", 3, FSDP) == ((3,), (0,))
    assert box("blocks.0.ffn.up.weight", 3, FSDP_TP) == ((7, 0), (2, 6))
