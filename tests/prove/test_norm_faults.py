"""Seeded faults in the global gradient norm: whoever is left out of it or counted too often is named."""

from __future__ import annotations

import math

import pytest

from meshwright.mesh.axes import Axes
from meshwright.prove.compare.result import FaultKind
from tests.prove.synthetic import REPLICATED_OVER_TP, SHAPES, Case, hold, scale

LAYOUTS = [
    Axes(dp_replicate=2, dp_shard=2),
    Axes(dp_shard=4),
    Axes(dp_shard=2, tp=2),
    Axes(dp_shard=3, tp=2),
    Axes(dp_replicate=2, dp_shard=2, tp=2),
]


class Norms(Case):
    """A faultless layout whose norm of step 1 a test replaces."""

    def __init__(self, axes):
        super().__init__(axes)
        self.due = self.reference.grad_norms[0]

    def square(self, name):
        return float((self.reference.gradients[name] ** 2).sum())

    def local(self, rank, weight=lambda name: 1.0):
        """Sum of squares of what a rank holds."""
        pieces = self.layout.gradients
        return sum(weight(name) * float((pieces[name][rank].value ** 2).sum()) for name in pieces)

    def copies(self, name, but=()):
        over = {"dp_replicate", "cp"} | ({"tp"} if name in REPLICATED_OVER_TP else set())
        return math.prod(self.axes.size(axis) for axis in over - set(but))

    def report(self, squares_of_rank):
        for rank in range(self.axes.num_ranks()):
            self.layout.grad_norms[rank][0] = math.sqrt(squares_of_rank(rank))

    def says(self, *words, kind=None):
        self.says_of("grad_norm", *words, kind=kind)


@pytest.mark.parametrize(
    ("axes", "name"), [*((LAYOUTS[-1], name) for name in SHAPES), *((axes, "head.weight") for axes in LAYOUTS[:-1])]
)
def test_a_parameter_left_out(axes, name):
    case = Norms(axes)
    case.report(lambda rank: case.due**2 - case.square(name))
    case.says(f"left out of the norm: {name}", kind=FaultKind.NORM_MEMBERS)


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_a_parameter_counted_twice(axes):
    case = Norms(axes)
    case.report(lambda rank: case.due**2 + case.square("head.weight"))
    case.says("counted twice: head.weight", kind=FaultKind.NORM_MEMBERS)


def test_a_class_of_parameters_left_out():
    case = Norms(LAYOUTS[2])
    case.report(lambda rank: case.due**2 - sum(map(case.square, REPLICATED_OVER_TP)))
    case.says("left out of the norm: parameters replicated over tp", kind=FaultKind.NORM_MEMBERS)
    for label, picked in (
        ("blocks.*.attn.q.weight", lambda name: name.endswith("attn.q.weight")),
        ("blocks.1.*", lambda name: name.startswith("blocks.1.")),
        ("parameters sharded over tp", lambda name: name not in REPLICATED_OVER_TP),
    ):
        members = [name for name in SHAPES if picked(name)]
        case.report(lambda rank, members=members: case.due**2 - sum(map(case.square, members)))
        case.says(f"left out of the norm: {label}")


@pytest.mark.parametrize("axes", LAYOUTS[2:], ids=str)
def test_replicated_parameters_counted_once_a_rank(axes):
    case = Norms(axes)
    extra = (axes.tp - 1) * sum(map(case.square, REPLICATED_OVER_TP))
    case.report(lambda rank: case.due**2 + extra)
    case.says(f"counted tp ({axes.tp}) times: parameters replicated over tp", kind=FaultKind.NORM_MEMBERS)


def test_all_parameters_counted_once_a_replica():
    case = Norms(LAYOUTS[0])
    case.report(lambda rank: 2 * case.due**2)
    case.says("counted dp_replicate (2) times: all parameters", kind=FaultKind.NORM_MEMBERS)


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_local_norms(axes):
    case = Norms(axes)
    case.report(case.local)
    case.says("report different norms", "not reduced over", "dp_shard", kind=FaultKind.NORM_MEMBERS)


@pytest.mark.parametrize("axis", ["dp_shard", "tp"])
def test_norms_reduced_over_one_axis_only(axis):
    """Sums of squares over the other axis; each copy counted by its share, as it should be."""
    case = Norms(Axes(dp_shard=2, tp=2))

    def squares(rank):
        at = case.axes.coordinate(rank)[axis]
        line = [r for r in range(4) if case.axes.coordinate(r)[axis] == at]
        return sum(case.local(r, lambda name: 1 / case.copies(name)) for r in line)

    case.report(squares)
    case.says(f"local norms not reduced over {axis}", kind=FaultKind.NORM_MEMBERS)


def test_what_a_rank_holds_left_out():
    case = Norms(Axes(dp_shard=4))
    case.report(lambda rank: case.due**2 - case.local(2))
    case.says("left out of the norm: the shards of rank 2")


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_the_right_sum_in_a_wrong_form(axes):
    case = Norms(axes)
    case.report(lambda rank: case.due**4)
    case.says("the square root is missing", kind=FaultKind.NORM_FORM)
    case.report(lambda rank: case.due)
    case.says("the square root is taken twice", kind=FaultKind.NORM_FORM)
    case.report(lambda rank: sum(math.sqrt(case.square(name)) for name in SHAPES) ** 2)
    case.says("norms of parameters are added instead of their squares", kind=FaultKind.NORM_FORM)


def test_a_factor():
    case = Norms(Axes(dp_shard=3, tp=2))
    case.report(lambda rank: 9 * case.due**2)
    case.says("3.000 × the norm of the reference", "summed over dp_shard (3 ranks) instead of averaged")
    case.report(lambda rank: 3 * case.due**2)
    case.says("3.000 × the sum of squares of the reference", "dp_shard (3 ranks)")


def test_one_rank_with_another_norm():
    case = Norms(Axes(dp_shard=4))
    case.layout.grad_norms[2][0] *= 1.01
    case.says("wrong only on rank 2: not recognised", "ratio 1.010", kind=FaultKind.UNRECOGNISED)


def test_a_norm_that_is_not_finite():
    case = Norms(Axes(dp_shard=2))
    case.layout.grad_norms[1][0] = float("nan")
    case.says("not finite only on rank 1", kind=FaultKind.NON_FINITE)


def test_no_cause_is_made_up():
    case = Norms(Axes(dp_shard=2, tp=2))
    case.report(lambda rank: 1.2345 * case.due**2)
    case.says("not recognised", kind=FaultKind.UNRECOGNISED)


def test_the_norm_of_wrong_gradients_follows_from_them():
    case = Norms(Axes(dp_shard=2, tp=2))
    scale(case.layout.gradients, list(SHAPES), 2.0)
    case.report(lambda rank: 4 * case.due**2)
    case.says("follows from the wrong gradients", kind=FaultKind.CONSEQUENCE)


def test_later_norms():
    case = Norms(Axes(dp_shard=2))
    for norms in case.layout.grad_norms:
        norms[1] = case.reference.grad_norms[0]
    case.says("gradient norm of step 2 matches step 1 of the reference", "one step behind", kind=FaultKind.OUT_OF_STEP)
    case = Norms(Axes(dp_shard=2))
    case.layout.grad_norms[0][2] *= 1.5
    case.says("gradient norm correct in step 1, wrong from step 3 on", "not recognised")
    hold(case.layout.after_first, case.axes, "head.weight", lambda rank: case.reference.initial["head.weight"])
    case.says("follows from a wrong update", kind=FaultKind.CONSEQUENCE)
