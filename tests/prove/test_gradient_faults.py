"""Damaged gradients, each to be named: factors, lost or repeated parts, missing sums, wrong places."""

from __future__ import annotations

import pytest
import torch

from meshwright.mesh.axes import Axes
from meshwright.prove.result import FaultKind as K
from tests.prove.synthetic import (
    EVERY,
    MATRIX,
    REPLICATED_OVER_TP,
    SHAPES,
    Case,
    Fault,
    box,
    by_layout,
    cut,
    hold,
    scale,
)

SHARD2, HSDP, FSDP, TP4 = Axes(dp_shard=2), Axes(dp_replicate=2, dp_shard=2), Axes(dp_shard=4), Axes(tp=4)
FSDP_TP, ODD, ALL = Axes(dp_shard=2, tp=2), Axes(dp_shard=3, tp=2), Axes(dp_replicate=2, dp_shard=2, tp=2)
LAYOUTS = (HSDP, FSDP, FSDP_TP, ODD, ALL)
ONE, SQUARE, COPIES = [MATRIX], ["square.weight"], REPLICATED_OVER_TP
MATRICES = [name for name, (shape, _) in SHAPES.items() if len(shape) > 1]


def total(parts):
    return parts.sum((0, 1))


def scaled(factor, *words, names=EVERY, ranks=None, kind=K.SCALED, **more):
    """Gradients are multiplied, on some ranks or on all."""
    return Fault(lambda case: scale(case.layout.gradients, names, factor, ranks), words, kind, names, **more)


def given(full_of, *words, names=EVERY, kind=K.CONTRIBUTIONS, micro=2, layouts=LAYOUTS, unsaid=None):
    """Each rank holds its piece of `full_of(case, rank, parts)` of shares and micro-batches."""

    def damage(case):
        case.give(lambda rank, parts: full_of(case, rank, parts), names)

    return Fault(damage, words, kind, names, layouts=layouts, num_microbatches=micro, unsaid=unsaid)


def held(change, *words, name=MATRIX, kind=None, layouts=LAYOUTS):
    """All ranks hold their piece of a changed gradient."""

    def damage(case):
        full = change(case.reference.gradients())
        hold(case.layout.gradients, case.axes, name, lambda rank: full)

    return Fault(damage, words, kind, [name], layouts=layouts)


def region(index, factor, *words, by=0.0):
    def change(gradients):
        full = gradients[MATRIX].clone()
        full[index] = full[index] * factor + by
        return full

    return held(change, *words, layouts=(SHARD2,))


def pieces(change, *words, kind=None, layouts=(FSDP_TP,), also=()):
    """Change the list of what ranks hold of one matrix."""
    return Fault(lambda case: change(case.layout.gradients[MATRIX]), words, kind, ONE, layouts=layouts, also=also)


def along(axis):
    """The sum over one of two data-parallel axes is missing."""

    def group(case, rank, parts):
        at = case.axes.coordinate(rank)[axis]
        return total(parts[[s for s in range(4) if divmod(s, 2)[axis == "dp_shard"] == at]])

    words = f"the sum over {axis} is missing", f"its own {axis} coordinate"
    return given(group, *words, kind=K.SUM_MISSING, layouts=(HSDP, ALL))


def copies(layouts, *words, factor=1):
    """Copies along tp add up to the reference, or their mean is it."""

    def damage(case):
        draw = torch.Generator().manual_seed(5)
        for name in COPIES:
            full = case.reference.gradients()[name]
            some = torch.randn(case.axes.tp, *full.shape, generator=draw, dtype=torch.float64)
            some[-1] = factor * full - some[:-1].sum(0)
            hold(case.layout.gradients, case.axes, name, lambda r, some=some: some[case.axes.coordinate(r)["tp"]])

    return Fault(damage, words, K.SUM_MISSING, COPIES, layouts=layouts)


def two_sums(case):
    for name in COPIES:
        parts = case.reference.parts[0][name].sum(1)
        some = torch.randn_like(parts)
        halves = some, parts - some
        hold(case.layout.gradients, ALL, name,
             lambda rank, halves=halves: halves[ALL.coordinate(rank)["tp"]][case.share(rank)])  # fmt: skip


def accumulated(num_ranks, factor=1.0):
    """Sum what has accumulated over so many ranks after each micro-batch, which sums those before it again."""

    def full(case, rank, parts):
        found = 0.0 * parts[:, 0].sum(0)
        for microbatch in parts.sum(0):
            found = num_ranks * found + microbatch
        return factor * found

    return full


def weighted(weights, names, axes):
    """Micro-batches have weights that are no sums of accumulated gradients."""

    def full(case, rank, parts):
        return weights[0] * parts[:, 0].sum(0) + weights[1] * parts[:, 1].sum(0)

    return given(full, kind=None, names=names, layouts=(axes,), unsaid="accumulated gradient is summed")


AMBIGUOUS = "gradient accumulation adds it"
IN_EACH = "the accumulated gradient is summed over {} ({} ranks) in each of {} backwards, not once after the last"
OWN, NO_GRADIENT, OTHER = "its local contribution: the", "no gradient reached", "blocks.1.attn.q.weight"
CELL = "micro-batch 0 of data-parallel rank 1 is missing and micro-batch 1 of"
FAULTS = {
    # Factors; which counts are behind them: `test_fit_contributions`.
    "a tiny one is summed": scaled(2.0, "2.000 × the reference on every rank: summed over dp_replicate (2 ranks)",
        names=["gate.bias"], layouts=(Axes(dp_replicate=2),)),
    "of what tp replicates": scaled(2.0, "summed over tp (2 ranks) instead of averaged, on exactly the parameters "
        "replicated over tp", names=COPIES, layouts=(FSDP_TP,)),
    "sum over micro-batches": scaled(5.0, "summed over the 5 micro-batches instead of averaged", layouts=LAYOUTS,
        num_microbatches=5),
    "a sum and a mean": scaled(1.5, "summed over dp_shard (3 ranks) instead of averaged, and averaged over tp",
        layouts=(ODD,)),
    "one rank": scaled(2.0, "2.000 × the reference only on rank 1", names=ONE, ranks={1}, layouts=LAYOUTS),
    "one coordinate": scaled(3.0, "3.000 × the reference only on ranks 1, 3, 5 and 7 (tp = 1)", ranks={1, 3, 5, 7},
        layouts=(ALL,)),
    # Parts of the batch.
    "a share is dropped": given(lambda c, r, p: total(p) - p[1].sum(0),
        "the contribution of data-parallel rank 1 is missing"),
    "the only share there is": given(lambda c, r, p: p[0].sum(0),
        "the contribution of data-parallel rank 1 is missing", "the sum over dp_shard is missing: only contributions "
        "of data-parallel rank 0 (ranks 0 and 1) are included", micro=1, layouts=(FSDP_TP,)),
    "another rank's samples": given(lambda c, r, p: total(p) - p[1].sum(0) + p[0].sum(0), "data-parallel rank 1 "
        "missing and data-parallel rank 0 counted twice", "read the samples of data-parallel rank 0"),
    "the last of 4": given(lambda c, r, p: p[:, -1].sum(0), "only the last micro-batch", "accumulation is missing",
        micro=4),
    "one in another's place": given(lambda c, r, p: total(p) - p[:, 1].sum(0) + p[:, 0].sum(0),
        "micro-batch 1 is missing and micro-batch 0 counted twice", micro=3),
    "one lost on one share": given(lambda c, r, p: total(p) - p[1, 0], "for data-parallel rank 1 (rank",
        "only the last micro-batch (1) is present"),
    "cells exchanged": given(lambda c, r, p: total(p) - p[1, 0] + p[2, 1], f"{CELL} data-parallel rank 2 counted twice",
        layouts=(FSDP,)),
    "any combination": given(lambda c, r, p: total(p) + 2 * p[1, 0] - 0.5 * p[2, 1], "data-parallel rank 1 "
        "micro-batch 0 × 3.000", "data-parallel rank 2 micro-batch 1 × 0.5", names=MATRICES, layouts=(FSDP,)),
    # Missing sums.
    "own part": given(lambda c, r, p: p[c.share(r)].sum(0), f"each rank holds only {OWN} sum over DATA is missing",
        kind=K.SUM_MISSING),
    "own mean": given(lambda c, r, p: p[c.share(r)].sum(0) * c.axes.data_parallel(), f"× {OWN} mean over DATA is",
        "missing", kind=K.SUM_MISSING),
    "not over dp_replicate": along("dp_replicate"),
    "not over dp_shard": along("dp_shard"),
    "copies to be added": copies((FSDP_TP, ODD, ALL, TP4),
        "replicas differ between ranks 0 and 1 along tp: the sum over tp is missing"),
    "copies to be averaged": copies((FSDP_TP,), "the mean over tp is missing", factor=2),
    "two at once": Fault(two_sums, ["the sum over tp is missing, and in the sum of the replicas", "local contribution"],
        None, COPIES, layouts=(ALL,)),
    "accumulated 3 times": given(accumulated(2), IN_EACH.format("tp", 2, 3), names=COPIES, micro=3,
        layouts=(FSDP_TP, ODD), unsaid=AMBIGUOUS),
    "accumulated, tp 4": given(accumulated(4), IN_EACH.format("tp", 4, 2), names=COPIES, layouts=(TP4,),
        unsaid=AMBIGUOUS),
    "accumulated, of two axes": given(accumulated(2), "summed over dp_replicate (2 ranks) or over tp (2 ranks) in each "
        "of 3", names=COPIES, micro=3, kind=None, layouts=(ALL,)),
    "accumulated and scaled": given(accumulated(2, 0.5), IN_EACH.format("tp", 2, 3), "in addition, averaged over",
        names=SQUARE, micro=3, kind=None, layouts=(FSDP_TP,)),
    "accumulated, or one twice": given(accumulated(2), IN_EACH.format("tp", 2, 2), AMBIGUOUS, names=COPIES,
        layouts=(FSDP_TP,)),
    "the last counted twice": weighted((1.0, 2.0), COPIES[:3], FSDP_TP),
    "the first twice, also of what tp shards": weighted((2.0, 1.0), EVERY, FSDP_TP),
    "the first 4 times, and nothing replicated": weighted((4.0, 1.0), EVERY, FSDP),
    "the first twice, on tp 4": weighted((2.0, 1.0), COPIES[:3], TP4),
    # What is missing, misplaced or damaged.
    "none": Fault(lambda case: case.layout.gradients.pop(MATRIX), [f"no gradient on every rank: {NO_GRADIENT}"], None,
        ONE, layouts=LAYOUTS),
    "zero on a rank": scaled(0.0, f"zero only on rank 2: {NO_GRADIENT} rank 2's shard", names=ONE, ranks={2},
        kind=K.ZERO, layouts=(FSDP_TP,)),
    "none on a rank": pieces(lambda p: p.pop(2), f"no gradient only on rank 2: {NO_GRADIENT} rank 2's shard",
        kind=K.ZERO, also=("norm",)),
    "of another rank": pieces(lambda p: p[2].value.copy_(p[3].value), "rank 2 holds rank 3's shard", kind=K.MISPLACED,
        layouts=(FSDP,)),
    "shifted": held(lambda g: g[MATRIX].roll(1, 0), "the reference shifted by 1 along dim 0", kind=K.MISPLACED),
    "of another parameter": held(lambda g: g[OTHER], f"the reference of {OTHER}", kind=K.MISPLACED),
    "transposed": held(lambda g: g[SQUARE[0]].T, "the transpose of the reference", name=SQUARE[0], kind=K.MISPLACED),
    "one element": region((5, 2), 1, "not recognised", "largest at [5, 2]", "wrong at element [5, 2] only", by=1e-9),
    "some rows": region(slice(2, 4), 2, "2.000 × the reference at dim 0: 2…3", "summed over dp_shard"),
    "some rows are zero": region(slice(2, 4), 0, "zero at dim 0: 2…3", f"{NO_GRADIENT} this region"),
    "a copy strays": pieces(lambda p: p[2].value[0, 0].add_(1e-6), "replicas differ between ranks 0 and 2 "
        "along dp_replicate: only rank 2 differs from the reference", kind=K.REPLICAS_DIFFER, layouts=(HSDP,),
        also=("update",)),
}  # fmt: skip


@pytest.mark.parametrize(("name", "layouts"), by_layout(FAULTS))
def test_a_wrong_gradient_is_named(name, layouts):
    FAULTS[name].assert_named(layouts)


def test_a_hole_an_overlap_and_a_misfit_are_findings():
    case = Case(FSDP)
    of_ranks = case.layout.gradients[MATRIX]
    for offset, words in (
        ((0, 0), ("no rank holds", "dim 0: 2…3", "ranks 0 and 1 hold the same elements")),
        ((7, 0), ("rank 1's shard of shape (2, 6) at (7, 0) is out of bounds for (8, 6)",)),
    ):
        of_ranks[1] = type(of_ranks[1])(1, offset, cut(case.reference.gradients()[MATRIX], MATRIX, 0, FSDP))
        [found] = case.diagnoses([MATRIX])
        assert all(word in found.text for word in words), found.text


def test_pieces_of_the_synthetic_layout_tile():
    """The tests' own layout cuts as FSDP2 on tensor parallel does, empty pieces included."""
    assert box("gate.bias", 3, FSDP) == ((3,), (0,))
    assert box("blocks.0.ffn.up.weight", 3, FSDP_TP) == ((7, 0), (2, 6))
