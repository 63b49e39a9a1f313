"""Seeded faults of initial weights and of the optimizer's step."""

from __future__ import annotations

import pytest
import torch

from meshwright.mesh.axes import Axes
from meshwright.prove.compare.conclude import compare
from meshwright.prove.compare.result import FaultKind
from tests.prove.synthetic import EVERY, MATRIX, SHAPES, Case, Optimizer, hold, optimize, scale

MATRICES = [name for name, (shape, _) in SHAPES.items() if len(shape) > 1]
VECTORS = [name for name in EVERY if name not in MATRICES]
LAYOUTS = [Axes(dp_shard=2), Axes(dp_replicate=2, dp_shard=2), Axes(dp_shard=4), Axes(dp_shard=2, tp=2)]


class Weights(Case):
    """A faultless layout whose weights a test replaces."""

    def __init__(self, axes, *, after_first=True):
        super().__init__(axes)
        if not after_first:
            self.layout.after_first.clear()

    def optimize_with(self, names=EVERY, **settings):
        """Some parameters come from an optimizer with other settings."""
        for pieces, num_steps in ((self.layout.after_first, 1), (self.layout.parameters, 3)):
            settings_now = Optimizer(**{"num_steps": num_steps, **settings})
            wrong = optimize(self.reference.initial, self.reference.gradients, settings_now)
            for name in names if pieces else ():
                hold(pieces, self.axes, name, lambda rank, full=wrong[name]: full)

    def says(self, *words, names, kind=None, first=True):
        """What is said of the first update (or of the last value) of exactly these parameters."""
        super().says(*words, names=names, kind=kind, tensors="first" if first else "final")
        return compare(self.layout, self.reference)


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
@pytest.mark.parametrize("first", [True, False])
def test_a_parameter_that_is_never_updated(axes, first):
    case = Weights(axes, after_first=first)
    case.optimize_with([MATRIX, "gate.bias"], num_steps=0)
    words = "never updated, still at its initial value on every rank: the parameter is not in the optimizer"
    case.says(words, names=[MATRIX, "gate.bias"], kind=FaultKind.NOT_UPDATED, first=first)


def test_a_parameter_that_misses_the_first_step_only():
    case = Weights(LAYOUTS[0])
    hold(case.layout.after_first, case.axes, MATRIX, lambda rank: case.reference.initial[MATRIX])
    case.says("not updated in step 1, still at its initial value", names=[MATRIX], kind=FaultKind.NOT_UPDATED)


@pytest.mark.parametrize("first", [True, False])
def test_one_ranks_piece_is_not_updated(first):
    case = Weights(Axes(dp_shard=4), after_first=first)
    for pieces in (case.layout.after_first, case.layout.parameters):
        if pieces:
            pieces[MATRIX][1].value.copy_(case.layout.initial[MATRIX][1].value)
    words = "never updated, still at its initial value only on rank 1: the optimizer skipped rank 1's shard"
    case.says(words, names=[MATRIX], kind=FaultKind.NOT_UPDATED, first=first)


def test_what_differs_elsewhere_may_follow_from_a_rank_that_is_not_updated():
    case = Weights(Axes(dp_shard=4), after_first=False)
    for name in EVERY:
        scale(case.layout.parameters, [name], 1.001, ranks={0, 2, 3})
        case.layout.parameters[name][1].value.copy_(case.layout.initial[name][1].value)
    words = "never updated", "rank 1", "differ too, which may be a consequence"
    names = [name for name in EVERY if case.layout.initial[name][1].value.numel()]
    result = compare(case.layout, case.reference)
    for parameter in result.parameters:
        if parameter.name in names:
            assert all(word in parameter.final.diagnosis.text for word in words)


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_twice_the_learning_rate(axes):
    case = Weights(axes)
    case.optimize_with(lr=2e-3)
    words = "updated by 2.000 × the reference step on every rank", "2 times the learning rate"
    result = case.says(*words, names=EVERY, kind=FaultKind.STEP_SCALED)
    assert all("follows from its wrong update in step 1" in p.final.diagnosis.text for p in result.parameters)


def test_another_learning_rate_is_only_about_known_after_several_steps():
    case = Weights(Axes(dp_shard=2), after_first=False)
    case.optimize_with(MATRICES, lr=0.5e-3)
    case.says("updated by about 0.5 × the reference step", names=MATRICES, kind=FaultKind.STEP_SCALED, first=False)


def test_an_update_in_the_opposite_direction():
    case = Weights(Axes(dp_shard=2))
    case.optimize_with(lr=-1e-3)
    case.says("updated by −1.000 ×", "opposite direction", names=EVERY, kind=FaultKind.STEP_SCALED)


@pytest.mark.parametrize("first", [True, False])
def test_weight_decay_is_missing(first):
    case = Weights(Axes(dp_shard=2, tp=2), after_first=first)
    case.optimize_with(decay=0.0)
    case.says("weight decay is missing", names=MATRICES, kind=FaultKind.WEIGHT_DECAY, first=first)


def test_weight_decay_where_none_is_due():
    case = Weights(Axes(dp_shard=2, tp=2))
    case.optimize_with(decay_all=True)
    words = "off by −0.0001 × the weights", "weight decay is applied where it should not be"
    case.says(*words, names=VECTORS, kind=FaultKind.WEIGHT_DECAY)


def test_updated_pieces_exchanged_between_ranks():
    case = Weights(Axes(dp_shard=4))
    for pieces in (case.layout.after_first, case.layout.parameters):
        held = pieces[MATRIX]
        first = held[2].value.clone()
        held[2].value.copy_(held[3].value)
        held[3].value.copy_(first)
    case.says("ranks 2 and 3 hold each other's shard", names=[MATRIX], kind=FaultKind.MISPLACED)


def test_replicas_that_drift_apart():
    case = Weights(Axes(dp_replicate=2, dp_shard=2))
    case.layout.parameters[MATRIX][3].value.add_(1e-6 * torch.randn(4, 6, dtype=torch.float64))
    words = "replicas differ between ranks 1 and 3 along dp_replicate: only rank 3 differs from the reference"
    result = case.says(words, names=[MATRIX], kind=FaultKind.REPLICAS_DIFFER, first=False)
    assert not next(p for p in result.parameters if p.name == MATRIX).final.replicas_agree


def test_an_unknown_fault_of_the_optimizer():
    case = Weights(Axes(dp_shard=2))
    case.layout.parameters[MATRIX][1].value.add_(1e-6 * torch.randn(4, 6, dtype=torch.float64))
    words = "not recognised: only rank 1's shard differs; everything is correct up to the first update"
    case.says(words, names=[MATRIX], kind=FaultKind.UNRECOGNISED, first=False)


def test_weights_after_wrong_gradients_follow_from_them():
    case = Weights(Axes(dp_shard=2))
    scale(case.layout.gradients, [MATRIX], 2.0)
    for name in EVERY:
        scale(case.layout.parameters, [name], 1.01)
    result = compare(case.layout, case.reference)
    for parameter in result.parameters:
        assert parameter.final.diagnosis.kind is FaultKind.CONSEQUENCE
        own = parameter.name == MATRIX
        words = "follows from its wrong gradient" if own else "follows from wrong gradients of other parameters"
        assert words in parameter.final.diagnosis.text
    assert next(p for p in result.parameters if p.name == MATRIX).root.diagnosis.kind is FaultKind.SCALED


def test_initial_weights_that_differ():
    case = Weights(Axes(dp_shard=4))
    for pieces in (case.layout.initial, case.layout.gradients):
        pieces[MATRIX][2].value.add_(torch.randn(2, 6, dtype=torch.float64))
    (wrong,) = (p for p in compare(case.layout, case.reference).parameters if not p.ok)
    assert wrong.initial.diagnosis.text.startswith(
        "initial weights differ on rank 2: ranks start from different weights"
    )
    assert "follows from initial weights that differ" in wrong.gradient.diagnosis.text


def test_initial_weights_that_were_not_recorded_are_a_note():
    case = Weights(Axes(dp_shard=2))
    case.layout.initial.clear()
    result = compare(case.layout, case.reference)
    assert result.passed
    assert "initial weights were not recorded" in result.notes
