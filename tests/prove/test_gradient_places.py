"""Seeded faults that leave gradients out, put them in a wrong place or damage some of them."""

from __future__ import annotations

import pytest
import torch

from meshwright.mesh.axes import Axes
from meshwright.prove.compare.conclude import compare
from meshwright.prove.compare.result import FaultKind
from tests.prove.gradient_case import EVERY, FSDP, FSDP_TP, HSDP, LAYOUTS, MATRIX, Case
from tests.prove.synthetic import SHAPES, box, cut, hold, scale


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_no_gradient_at_all(axes):
    case = Case(axes)
    scale(case.layout.gradients, [MATRIX, "gate.bias"], 0.0)
    case.says("zero on every rank: no gradient reached this parameter", names=[MATRIX, "gate.bias"])
    case = Case(axes)
    case.layout.gradients.pop(MATRIX)
    case.says("no gradient on every rank: no gradient reached this parameter", names=[MATRIX])


def test_no_gradient_on_one_rank():
    case = Case(FSDP_TP)
    scale(case.layout.gradients, [MATRIX], 0.0, ranks={2})
    case.says("zero only on rank 2: no gradient reached rank 2's shard", kind=FaultKind.ZERO, names=[MATRIX])
    case = Case(FSDP_TP)
    case.layout.gradients[MATRIX].pop(2)
    case.says("no gradient only on rank 2: no gradient reached rank 2's shard", kind=FaultKind.ZERO, names=[MATRIX])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_names_the_ranks(value):
    case = Case(FSDP_TP)
    case.layout.gradients[MATRIX][3].value[0, 0] = value
    case.says("not finite only on rank 3", "on rank 3", kind=FaultKind.NON_FINITE, names=[MATRIX])


def test_pieces_exchanged_between_ranks():
    case = Case(FSDP)
    pieces = case.layout.gradients[MATRIX]
    first = pieces[0].value.clone()
    pieces[0].value.copy_(pieces[1].value)
    pieces[1].value.copy_(first)
    case.says("ranks 0 and 1 hold each other's shard", kind=FaultKind.MISPLACED, names=[MATRIX])


def test_a_piece_of_another_rank():
    case = Case(FSDP)
    pieces = case.layout.gradients[MATRIX]
    pieces[2].value.copy_(pieces[3].value)
    case.says("rank 2 holds rank 3's shard", kind=FaultKind.MISPLACED, names=[MATRIX])


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_right_numbers_in_a_wrong_place(axes):
    case = Case(axes)
    hold(case.layout.gradients, axes, MATRIX, lambda rank: case.reference.gradients[MATRIX].roll(1, 0))
    case.says("the reference shifted by 1 along dim 0", kind=FaultKind.MISPLACED, names=[MATRIX])
    case = Case(axes)
    hold(case.layout.gradients, axes, "square.weight", lambda rank: case.reference.gradients["square.weight"].T)
    case.says("the transpose of the reference", kind=FaultKind.MISPLACED, names=["square.weight"])
    case = Case(axes)
    other = "blocks.1.attn.q.weight"
    hold(case.layout.gradients, axes, MATRIX, lambda rank: case.reference.gradients[other])
    case.says(f"the reference of {other}", kind=FaultKind.MISPLACED, names=[MATRIX])


def test_noise_on_one_rank_is_placed_and_not_explained():
    case = Case(FSDP)
    case.layout.gradients[MATRIX][3].value.add_(1e-3 * torch.randn(2, 6, dtype=torch.float64))
    case.says("not recognised: only rank 3's shard differs; relative error", "on rank 3", names=[MATRIX])


def test_one_element_is_named():
    case = Case(FSDP_TP)
    full = case.reference.gradients[MATRIX].clone()
    full[5, 2] += 1e-9
    hold(case.layout.gradients, case.axes, MATRIX, lambda rank: full)
    case.says("not recognised", "largest at [5, 2]", "wrong at element [5, 2] only", names=[MATRIX])


def test_a_factor_in_some_rows_only():
    case = Case(Axes(dp_shard=2))
    full = case.reference.gradients[MATRIX].clone()
    full[2:4] *= 2
    hold(case.layout.gradients, case.axes, MATRIX, lambda rank: full)
    case.says("2.000 × the reference at dim 0: 2…3", "summed over dp_shard", names=[MATRIX])
    full[2:4] = 0
    hold(case.layout.gradients, case.axes, MATRIX, lambda rank: full)
    case.says("zero at dim 0: 2…3", "no gradient reached this region", names=[MATRIX])


def test_a_copy_that_strays_is_named_beside_those_that_are_right():
    case = Case(HSDP)
    case.layout.gradients[MATRIX][2].value.add_(1e-6 * torch.randn(4, 6, dtype=torch.float64))
    words = "replicas differ between ranks 0 and 2 along dp_replicate: only rank 2 differs from the reference"
    case.says(words, kind=FaultKind.REPLICAS_DIFFER, names=[MATRIX])


def test_a_hole_an_overlap_and_a_misfit_are_findings():
    case = Case(FSDP)
    pieces = case.layout.gradients[MATRIX]
    pieces[1] = type(pieces[1])(1, (0, 0), cut(case.reference.gradients[MATRIX], MATRIX, 0, FSDP))
    case.says("no rank holds", "dim 0: 2…3", "ranks 0 and 1 hold the same elements", names=[MATRIX])
    pieces[1] = type(pieces[1])(1, (7, 0), pieces[1].value)
    case.says("rank 1's shard of shape (2, 6) at (7, 0) is out of bounds for (8, 6)", names=[MATRIX])


def test_a_backward_pass_that_breaks_midway_is_placed():
    case = Case(FSDP_TP)
    upto = EVERY[: EVERY.index("blocks.1.norm.weight")]
    for name in upto:
        wrong = case.reference.gradients[name] + 1e-3 * torch.randn(SHAPES[name][0], dtype=torch.float64)
        hold(case.layout.gradients, case.axes, name, lambda rank, wrong=wrong: wrong)
    result = compare(case.layout, case.reference)
    words = "gradients are wrong up to blocks.0.ffn.up.weight and correct from blocks.1.norm.weight on"
    assert any(words in note for note in result.notes)
    case.says("not recognised", kind=FaultKind.UNRECOGNISED, names=upto)


def test_without_parts_the_plain_causes_are_still_found():
    case = Case(FSDP_TP)
    case.reference.partial_gradients.clear()
    scale(case.layout.gradients, EVERY, 0.5, ranks={0, 1})
    case.says("0.500 × the reference only on ranks 0 and 1 (dp_shard = 0)")
    scale(case.layout.gradients, EVERY, 3.0, ranks={2, 3})
    case.says("different combinations", "ranks 2 and 3: 3.000 × the reference")


def test_pieces_of_the_synthetic_layout_tile():
    """The tests' own layout cuts as FSDP2 on tensor parallel does, empty pieces included."""
    assert box("gate.bias", 3, FSDP) == ((3,), (0,))
    assert box("blocks.0.ffn.up.weight", 3, FSDP_TP) == ((7, 0), (2, 6))
