"""Seeded faults in the global gradient norm: whoever is left out of it or counted too often is named."""

from __future__ import annotations

import math

import pytest

from meshwright.mesh.axes import Axes
from meshwright.prove.result import FaultKind as K
from tests.prove.synthetic import REPLICATED_OVER_TP, SHAPES, Case, scale

HSDP, FSDP, FSDP_TP = Axes(dp_replicate=2, dp_shard=2), Axes(dp_shard=4), Axes(dp_shard=2, tp=2)
ODD, ALL = Axes(dp_shard=3, tp=2), Axes(dp_replicate=2, dp_shard=2, tp=2)
LAYOUTS = (HSDP, FSDP, FSDP_TP, ODD, ALL)


class Norms(Case):
    """A faultless layout whose norm of step 1 a test replaces."""

    def __init__(self, axes):
        super().__init__(axes)
        self.due = self.layout.norm(1)

    def squares(self, names=SHAPES):
        return sum(float((self.reference.gradients()[name] ** 2).sum()) for name in names)

    def local(self, rank, weight=lambda name: 1.0):
        """Sum of squares of what a rank holds."""
        pieces = self.layout.gradients
        return sum(weight(name) * float((pieces[name][rank].value ** 2).sum()) for name in pieces)

    def copies(self, name):
        over = {"dp_replicate", "cp"} | ({"tp"} if name in REPLICATED_OVER_TP else set())
        return math.prod(self.axes.size(axis) for axis in over)

    def report(self, squares_of_rank):
        for rank in range(self.axes.num_ranks()):
            self.layout.norms[rank, 1] = math.sqrt(squares_of_rank(rank))

    def says(self, *words, kind=None):
        self.says_of("norm", *words, kind=kind)


def without(names):
    return lambda c, rank: c.due**2 - c.squares(names)


def counted(names, times):
    return lambda c, rank: c.due**2 + (times(c.axes) - 1) * c.squares(names)


IN_Q = [name for name in SHAPES if name.endswith("attn.q.weight")]
IN_BLOCK_1 = [name for name in SHAPES if name.startswith("blocks.1.")]
SHARDED = [name for name in SHAPES if name not in REPLICATED_OVER_TP]
HEAD, WRONG = "head.weight", "left out of the norm: "
FAULTS = {
    **{f"without {name}": ((ALL,), without([name]), [WRONG + name], K.NORM_MEMBERS) for name in SHAPES},
    "without the head": (LAYOUTS, without([HEAD]), [WRONG + HEAD], K.NORM_MEMBERS),
    "the head twice": (LAYOUTS, counted([HEAD], lambda axes: 2), [f"counted twice: {HEAD}"], K.NORM_MEMBERS),
    "without replicas": ((FSDP_TP,), without(REPLICATED_OVER_TP), [f"{WRONG}parameters replicated over tp"],
        K.NORM_MEMBERS),
    "without queries": ((FSDP_TP,), without(IN_Q), [f"{WRONG}blocks.*.attn.q.weight"], K.NORM_MEMBERS),
    "without block 1": ((FSDP_TP,), without(IN_BLOCK_1), [f"{WRONG}blocks.1.*"], K.NORM_MEMBERS),
    "without what tp shards": ((FSDP_TP,), without(SHARDED), [f"{WRONG}parameters sharded over tp"], K.NORM_MEMBERS),
    "replicas once a rank": (LAYOUTS[2:], counted(REPLICATED_OVER_TP, lambda axes: axes.tp),
        ["counted tp (2) times: parameters replicated over tp"], K.NORM_MEMBERS),
    "all once a replica": ((HSDP,), lambda c, rank: 2 * c.due**2, ["counted dp_replicate (2) times: all parameters"],
        K.NORM_MEMBERS),
    "local": (LAYOUTS, lambda c, rank: c.local(rank), ["report different norms", "not reduced over", "dp_shard"],
        K.NORM_MEMBERS),
    "without a rank's shards": ((FSDP,), lambda c, rank: c.due**2 - c.local(2), [f"{WRONG}the shards of rank 2"], None),
    "no root": (LAYOUTS, lambda c, rank: c.due**4, ["the square root is missing"], K.NORM_FORM),
    "two roots": (LAYOUTS, lambda c, rank: c.due, ["the square root is taken twice"], K.NORM_FORM),
    "norms added": (LAYOUTS, lambda c, rank: sum(math.sqrt(c.squares([name])) for name in SHAPES) ** 2,
        ["norms of parameters are added instead of their squares"], K.NORM_FORM),
    "a factor": ((ODD,), lambda c, rank: 9 * c.due**2,
        ["3.000 × the norm of the reference", "summed over dp_shard (3 ranks) instead of averaged"], None),
    "a factor of squares": ((ODD,), lambda c, rank: 3 * c.due**2,
        ["3.000 × the sum of squares of the reference", "dp_shard (3 ranks)"], None),
    "one rank": ((FSDP,), lambda c, rank: (c.due * (1.01 if rank == 2 else 1.0)) ** 2,
        ["wrong only on rank 2: not recognised", "ratio 1.010"], K.UNRECOGNISED),
    "NaN": ((Axes(dp_shard=2),), lambda c, rank: float("nan") if rank == 1 else c.due**2,
        ["not finite only on rank 1"], K.NON_FINITE),
    "anything": ((FSDP_TP,), lambda c, rank: 1.2345 * c.due**2, ["not recognised"], K.UNRECOGNISED),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_norm_is_named(name):
    layouts, squares, words, kind = FAULTS[name]
    for axes in layouts:
        case = Norms(axes)
        case.report(lambda rank, case=case: squares(case, rank))
        case.says(*words, kind=kind)


@pytest.mark.parametrize("axis", ["dp_shard", "tp"])
def test_norms_reduced_over_one_axis_only(axis):
    """Sums of squares over the other axis; each copy counted by its share, as it should be."""
    case = Norms(FSDP_TP)

    def squares(rank):
        at = case.axes.coordinate(rank)[axis]
        line = [r for r in range(4) if case.axes.coordinate(r)[axis] == at]
        return sum(case.local(r, lambda name: 1 / case.copies(name)) for r in line)

    case.report(squares)
    case.says(f"local norms not reduced over {axis}", kind=K.NORM_MEMBERS)


def test_a_norm_is_that_of_the_gradients_as_they_are() -> None:
    """Wrong gradients have a norm, too; and each step's is compared."""
    case = Norms(FSDP_TP)
    scale(case.layout.gradients, list(SHAPES), 2.0)
    assert all(step.ok for step in case.proof().norms)
    case.layout.norms[0, 3] = 1.5 * case.layout.norm(3)
    assert case.says_of("norm", "not recognised").step == 3
