"""Seeded faults of initial weights and of the optimizer's step."""

from __future__ import annotations

import pytest
import torch

from meshwright.mesh.axes import Axes
from meshwright.prove.compare.conclude import compare
from meshwright.prove.compare.result import FaultKind as K
from tests.prove.synthetic import EVERY, MATRIX, SHAPES, Case, Optimizer, hold, optimize, scale

MATRICES = [name for name, (shape, _) in SHAPES.items() if len(shape) > 1]
VECTORS = [name for name in EVERY if name not in MATRICES]
TWO, FOUR, HSDP, FSDP_TP = Axes(dp_shard=2), Axes(dp_shard=4), Axes(dp_replicate=2, dp_shard=2), Axes(dp_shard=2, tp=2)
LAYOUTS = (TWO, HSDP, FOUR, FSDP_TP)


class Weights(Case):
    """A faultless layout whose weights a test replaces."""

    def __init__(self, axes, *, after_first=True):
        super().__init__(axes)
        if not after_first:
            self.layout.after_first.clear()

    def updates(self):
        """Weights after the first step, if recorded, and after the last."""
        return [pieces for pieces in (self.layout.after_first, self.layout.parameters) if pieces]

    def add_noise(self, pieces, rank):
        pieces[MATRIX][rank].value.add_(1e-6 * torch.randn(4, 6, dtype=torch.float64))


def optimized(names=EVERY, **settings):
    """Some parameters come from an optimizer with other settings."""

    def damage(case):
        for pieces, num_steps in ((case.layout.after_first, 1), (case.layout.parameters, 3)):
            how = Optimizer(**{"num_steps": num_steps, **settings})
            wrong = optimize(case.reference.initial, case.reference.gradients, how)
            for name in names if pieces else ():
                hold(pieces, case.axes, name, lambda rank, full=wrong[name]: full)

    return damage


def keep_a_piece(case):
    for pieces in case.updates():
        pieces[MATRIX][1].value.copy_(case.layout.initial[MATRIX][1].value)


def exchange(case):
    for pieces in case.updates():
        held = pieces[MATRIX]
        first = held[2].value.clone()
        held[2].value.copy_(held[3].value)
        held[3].value.copy_(first)


def miss_the_first(case):
    hold(case.layout.after_first, case.axes, MATRIX, lambda rank: case.reference.initial[MATRIX])


NEVER = "never updated, still at its initial value"
FIRST, LAST, BOTH = (True,), (False,), (True, False)
FAULTS = {
    "never updated": (LAYOUTS, BOTH, optimized([MATRIX, "gate.bias"], num_steps=0),
        [f"{NEVER} on every rank: the parameter is not in the optimizer"], [MATRIX, "gate.bias"], K.NOT_UPDATED),
    "not in the first step": ((TWO,), FIRST, miss_the_first,
        ["not updated in step 1, still at its initial value"], [MATRIX], K.NOT_UPDATED),
    "not on one rank": ((FOUR,), BOTH, keep_a_piece,
        [f"{NEVER} only on rank 1: the optimizer skipped rank 1's shard"], [MATRIX], K.NOT_UPDATED),
    "twice the rate": (LAYOUTS, FIRST, optimized(lr=2e-3),
        ["updated by 2.000 × the reference step on every rank", "2 times the learning rate"], EVERY, K.STEP_SCALED),
    "another rate, after several steps": ((TWO,), LAST, optimized(MATRICES, lr=0.5e-3),
        ["updated by about 0.5 × the reference step"], MATRICES, K.STEP_SCALED),
    "the opposite direction": ((TWO,), FIRST, optimized(lr=-1e-3),
        ["updated by −1.000 ×", "opposite direction"], EVERY, K.STEP_SCALED),
    "no decay": ((FSDP_TP,), BOTH, optimized(decay=0.0), ["weight decay is missing"], MATRICES, K.WEIGHT_DECAY),
    "decay where none is due": ((FSDP_TP,), FIRST, optimized(decay_all=True),
        ["off by −0.0001 × the weights", "weight decay is applied where it should not be"], VECTORS, K.WEIGHT_DECAY),
    "exchanged": ((FOUR,), FIRST, exchange, ["ranks 2 and 3 hold each other's shard"], [MATRIX], K.MISPLACED),
    "replicas drift apart": ((HSDP,), LAST, lambda case: case.add_noise(case.layout.parameters, 3),
        ["replicas differ between ranks 1 and 3 along dp_replicate: only rank 3 differs from the reference"], [MATRIX],
        K.REPLICAS_DIFFER),
    "unknown": ((TWO,), LAST, lambda case: case.add_noise(case.layout.parameters, 1),
        ["not recognised: only rank 1's shard differs; everything is correct up to the first update"], [MATRIX],
        K.UNRECOGNISED),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_update_is_named(name):
    """Of the first update, or, where it wasn't recorded, of the last value; of exactly these parameters."""
    layouts, recorded, damage, words, names, kind = FAULTS[name]
    for axes in layouts:
        for first in recorded:
            case = Weights(axes, after_first=first or "replicas" in name or name == "unknown")
            damage(case)
            case.says(*words, names=names, kind=kind, tensors="first" if first else "final")
    if name == "replicas drift apart":
        results = compare(case.layout, case.reference).parameters
        assert not next(one for one in results if one.name == MATRIX).final.replicas_agree
    if name == "twice the rate":
        results = compare(case.layout, case.reference).parameters
        assert all("follows from its wrong update in step 1" in one.final.diagnosis.text for one in results)


def test_what_differs_elsewhere_may_follow_from_a_rank_that_is_not_updated():
    case = Weights(FOUR, after_first=False)
    for name in EVERY:
        scale(case.layout.parameters, [name], 1.001, ranks={0, 2, 3})
        case.layout.parameters[name][1].value.copy_(case.layout.initial[name][1].value)
    for parameter in compare(case.layout, case.reference).parameters:
        if case.layout.initial[parameter.name][1].value.numel():
            words = "never updated", "rank 1", "differ too, which may be a consequence"
            assert all(word in parameter.final.diagnosis.text for word in words)


def test_weights_after_wrong_gradients_follow_from_them():
    case = Weights(TWO)
    scale(case.layout.gradients, [MATRIX], 2.0)
    scale(case.layout.parameters, EVERY, 1.01)
    result = compare(case.layout, case.reference)
    for parameter in result.parameters:
        assert parameter.final.diagnosis.kind is K.CONSEQUENCE
        own = parameter.name == MATRIX
        words = "follows from its wrong gradient" if own else "follows from wrong gradients of other parameters"
        assert words in parameter.final.diagnosis.text
    assert next(p for p in result.parameters if p.name == MATRIX).root.diagnosis.kind is K.SCALED


def test_initial_weights_that_differ_or_were_not_recorded():
    case = Weights(FOUR)
    for pieces in (case.layout.initial, case.layout.gradients):
        pieces[MATRIX][2].value.add_(torch.randn(2, 6, dtype=torch.float64))
    (wrong,) = (p for p in compare(case.layout, case.reference).parameters if not p.ok)
    words = "initial weights differ on rank 2: ranks start from different weights"
    assert wrong.initial.diagnosis.text.startswith(words)
    assert "follows from initial weights that differ" in wrong.gradient.diagnosis.text
    case = Weights(TWO)
    case.layout.initial.clear()
    result = compare(case.layout, case.reference)
    assert result.passed and "initial weights were not recorded" in result.notes
