"""Seeded faults that multiply gradients: each must fail the proof, with the right words about the factor."""

from __future__ import annotations

import pytest

from meshwright.mesh.axes import Axes
from meshwright.prove.compare.result import FaultKind
from tests.prove.gradient_case import ALL, EVERY, FSDP_TP, HSDP, LAYOUTS, MATRIX, ODD, Case
from tests.prove.synthetic import REPLICATED_OVER_TP, scale


@pytest.mark.parametrize("axes", [Axes(dp_shard=2), Axes(dp_shard=3), Axes(dp_replicate=2), Axes(tp=2)], ids=str)
@pytest.mark.parametrize("names", [EVERY, [MATRIX], ["gate.bias"]], ids=["all", "one", "tiny"])
def test_a_sum_where_a_mean_was_due_names_the_axis(axes, names):
    (axis, size), *_ = axes.used().items()
    case = Case(axes)
    scale(case.layout.gradients, names, float(size))
    words = f"{size}.000 × the reference on every rank: summed over {axis} ({size} ranks) instead of averaged"
    case.says(words, kind=FaultKind.SCALED, names=names)


@pytest.mark.parametrize("axes", [Axes(dp_shard=2), Axes(dp_shard=3), Axes(dp_replicate=4)], ids=str)
def test_a_mean_where_a_sum_was_due_names_the_axis(axes):
    (axis, size), *_ = axes.used().items()
    case = Case(axes)
    scale(case.layout.gradients, EVERY, 1 / size)
    case.says(f"averaged over {axis} ({size} ranks) instead of summed", kind=FaultKind.SCALED)


def test_two_axes_of_one_size_are_both_named():
    case = Case(FSDP_TP)
    scale(case.layout.gradients, EVERY, 2.0)
    case.says("summed over dp_shard (2 ranks) or over tp (2 ranks) instead of averaged")


def test_the_axis_over_which_the_wrong_parameters_are_replicated_is_blamed():
    case = Case(FSDP_TP)
    scale(case.layout.gradients, REPLICATED_OVER_TP, 2.0)
    words = "summed over tp (2 ranks) instead of averaged, on exactly the parameters replicated over tp"
    case.says(words, names=REPLICATED_OVER_TP)


def test_products_of_axes_are_recognised():
    case = Case(HSDP, 3)
    scale(case.layout.gradients, EVERY, 4.0)
    case.says("4.000 ×", "summed over dp_replicate × dp_shard (4 ranks) instead of averaged")


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_the_number_of_microbatches_is_recognised(axes):
    case = Case(axes, 5)
    scale(case.layout.gradients, EVERY, 5.0)
    case.says("summed over the 5 micro-batches instead of averaged")
    case = Case(axes, 5)
    scale(case.layout.gradients, EVERY, 0.2)
    case.says("averaged over the 5 micro-batches instead of summed")


def test_a_sum_over_samples_is_recognised():
    case = Case(Axes(dp_shard=3), 1)
    scale(case.layout.gradients, EVERY, 6.0)
    case.says("summed over the 6 samples of the batch instead of averaged")


def test_sum_over_one_axis_and_mean_over_another():
    case = Case(ODD)
    scale(case.layout.gradients, EVERY, 1.5)
    case.says("summed over dp_shard (3 ranks) instead of averaged, and averaged over tp (2 ranks)")


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_a_flipped_sign(axes):
    case = Case(axes)
    scale(case.layout.gradients, EVERY, -1.0)
    case.says("−1.000 × the reference on every rank: the sign is flipped")


def test_a_factor_without_a_cause_is_said_to_have_none():
    case = Case(FSDP_TP)
    scale(case.layout.gradients, [MATRIX], 1.7)
    case.says("1.700 × the reference on every rank: a factor that no axis", names=[MATRIX])


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_a_factor_on_one_rank_only(axes):
    case = Case(axes)
    scale(case.layout.gradients, [MATRIX], 2.0, ranks={1})
    case.says("2.000 × the reference only on rank 1", kind=FaultKind.SCALED, names=[MATRIX])


def test_a_factor_on_one_coordinate_of_an_axis_names_it():
    case = Case(ALL)
    scale(case.layout.gradients, EVERY, 3.0, ranks={1, 3, 5, 7})
    case.says("3.000 × the reference only on ranks 1, 3, 5 and 7 (tp = 1)")
