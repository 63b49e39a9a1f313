"""What passes and what does not: rounding passes, the smallest fault does not, and noise is given no cause."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.mesh.axes import Axes
from meshwright.prove.conclude import rounding_notes
from meshwright.prove.report import to_json
from meshwright.prove.result import FaultKind
from tests.prove.synthetic import EVERY, MATRIX, REPLICATED_OVER_TP, STEPS, Case, Reference, hold

AXES = [Axes(), Axes(dp_shard=2), Axes(dp_shard=3), Axes(dp_replicate=2, dp_shard=2), Axes(dp_shard=2, tp=2),
        Axes(dp_replicate=2, dp_shard=2, tp=2), Axes(dp_shard=2, cp=2, tp=2), Axes(dp_shard=4, tp=4)]  # fmt: skip
HONEST = {FaultKind.UNRECOGNISED, FaultKind.REPLICAS_DIFFER}
drawn = st.sampled_from(AXES[:-2])


def randn(draw, *shape):
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize(("axes", "micro"), zip(AXES, [1, 3] * (len(AXES) // 2), strict=True), ids=str)
def test_a_faultless_layout_passes(axes, micro):
    result = Case(axes, micro).proof()
    assert result.passed and all(one.gradient.replicas_equal for one in result.parameters)
    for one in result.parameters:
        over = {"dp_replicate", "cp", *(["tp"] if one.name in REPLICATED_OVER_TP else [])}
        assert set(one.gradient.replicated) == over & set(axes.used())


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_rounding_passes(axes):
    case, draw = Case(axes, 2), torch.Generator().manual_seed(1)
    for pieces in case.layout.by_step:
        for shards in pieces.values():
            for shard in shards:
                shard.value.mul_(1 + 1e-15 * randn(draw, *shard.value.shape))
    case.layout.after = lambda rank, step, name, old, new: new * (1 + 4e-16)
    for rank in range(axes.num_ranks()):
        case.layout.losses[rank][rank % STEPS] *= 1 + 1e-15
        case.layout.norms[rank, 3] = case.layout.norm(3) * (1 - 1e-15)
    assert case.proof().passed


@dataclass
class Cancelling(Reference):
    """A reference of which one gradient changes by many rounding errors where its parameter changes by one."""

    many: float = 1e4
    due: dict = field(default_factory=dict)

    def step(self, step, weights):
        due, found = self.due.setdefault(step, weights["gate.bias"]), super().step(step, weights)
        found.gradients["gate.bias"] += self.many * (weights["gate.bias"] - due)
        return found


@pytest.mark.parametrize(
    ("name", "error", "passes"),
    [("gate.bias", 2e-12, True), ("gate.bias", 5e-10, False), (MATRIX, 2e-12, False), (MATRIX, 5e-10, False)],
)
def test_only_what_rounding_changes_as_much_may_differ_by_more(name, error, passes):
    case = Case(Axes(dp_shard=2))
    case.reference = Cancelling(2, 1)
    case.give(lambda rank, parts: parts.sum((0, 1)) * (1 + error), [name])
    result = case.proof()
    assert result.passed == passes
    tolerances = {one.name: one.gradient.tolerance for one in result.parameters}
    assert tolerances[MATRIX] == 1e-12
    if error < 1e-10:
        assert 2e-12 < tolerances["gate.bias"] < 1e-10
        assert [name in note for note in rounding_notes(result)] == [True] * passes


def test_rounding_explains_no_more_than_a_bound():
    case = Case(Axes(dp_shard=2))
    case.reference = Cancelling(2, 1, many=1e8)
    case.give(lambda rank, parts: parts.sum((0, 1)) * (1 + 2e-12), ["gate.bias"])
    (found,) = (one.gradient for one in case.proof().parameters if one.name == "gate.bias")
    assert found.ok and found.tolerance == 1e-10


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize(
    ("what", "error", "passes"),
    [(what, *one) for what in ("gradient", "loss", "norm") for one in ((5e-13, True), (2e-12, False))]
    + [("update", 1e-16, True), ("update", 1e-13, False), ("clipping", 1e-16, True), ("clipping", 1e-13, False)],
)
def test_each_step_is_held_to_the_same_tolerance(what, error, passes, step):
    case = Case(Axes(dp_shard=2))
    layout, at = case.layout, (1, step, MATRIX)
    if what == "gradient":
        due = case.reference.gradients(step)[MATRIX]
        layout.by_step[step - 1][MATRIX][1].value[0, 0] += error * due.abs().max()
    elif what == "loss":
        layout.losses[1][step - 1] *= 1 + error
    elif what == "norm":
        layout.norms[1, step] = layout.norm(step) * (1 + error)
    elif what == "clipping":
        layout.given = lambda *of: of[-1] + error * of[-1].abs().max() * (of[:3] == at)
    else:
        layout.after = lambda *of: of[-1] + error * (of[:3] == at)
    result = case.proof()
    assert result.passed is passes
    # Gradients don't depend on the weights here, so that they may well be those at weights of another step.
    assert passes or [(one.about, one.step) for one in result.findings if one.about != "forward"] == [(what, step)]


@settings(max_examples=20)
@given(
    axes=drawn,
    micro=st.sampled_from([1, 2]),
    name=st.sampled_from(EVERY),
    about=st.sampled_from(["initial", "gradient", "update"]),
    step=st.integers(1, STEPS),
    sign=st.sampled_from([-1, 1]),
    exponent=st.floats(-10.9, 3),  # from here on it is not that of gradients at other weights
    data=st.data(),
)
def test_one_wrong_element_never_passes(axes, micro, name, about, step, sign, exponent, data):
    """… and is not called a factor, a share or a micro-batch."""
    case = Case(axes, micro)
    pieces = (case.layout.initial if about == "initial" else case.layout.by_step[step - 1])[name]
    piece = data.draw(st.sampled_from([shard for shard in pieces if shard.value.numel()]))
    index = data.draw(st.integers(0, piece.value.numel() - 1))
    full = case.reference.gradients(step) if about == "gradient" else case.reference.initial
    error = sign * 10**exponent * float(full[name].abs().max())

    added = torch.zeros_like(piece.value)
    added.view(-1)[index] = error
    if about == "update":
        case.layout.after = lambda *of: of[-1] + added if of[:3] == (piece.rank, step, name) else of[-1]
    else:
        piece.value.add_(added)
    result = case.proof()
    assert not result.passed
    (wrong,) = (p for p in result.parameters if not p.ok)
    found = wrong.tensors()[about]
    assert wrong.name == name and wrong.about == about and found.step == (step if about != "initial" else 0)
    if piece.value.numel() > 1:
        assert found.diagnosis.kind in HONEST
    assert found.error.max_abs == pytest.approx(abs(error), rel=1e-3)
    json.dumps(to_json(result, loss_unit="nats/token"), allow_nan=False)


@settings(max_examples=8)
@given(axes=drawn, micro=st.sampled_from([1, 2, 4]), seed=st.integers(0, 10**6), size=st.floats(-11, 2))
def test_noise_is_given_no_cause(axes, micro, seed, size):
    """All gradients carry noise, on each rank its own or the same on all: no factor, no share, no sum fits that."""
    case, draw = Case(axes, micro), torch.Generator().manual_seed(seed)
    for name, due in case.reference.gradients().items():
        noise = 10**size * due.abs().max() * randn(draw, *due.shape)
        if seed % 2:
            hold(case.layout.gradients, axes, name, lambda rank, full=due + noise: full)
        else:
            for shard in case.layout.gradients[name]:
                shard.value.add_(10**size * due.abs().max() * randn(draw, *shard.value.shape))
    assert {p.gradient.diagnosis.kind for p in case.proof().parameters if not p.gradient.ok} <= HONEST
    assert not case.proof().passed


@settings(max_examples=8)
@given(axes=drawn, seed=st.integers(0, 10**6), size=st.floats(-8, 1))
def test_noise_in_the_parameters_is_no_step_and_no_decay(axes, seed, size):
    case = Case(axes)

    def after(rank, step, name, old, new):
        coordinates = axes.coordinate(rank)
        draw = torch.Generator().manual_seed(seed + step + 100 * coordinates["dp_shard"] + 1000 * coordinates["tp"])
        return new + 10**size * randn(draw, *new.shape)

    case.layout.after = after
    assert {one.diagnosis.kind for one in case.proof().findings} <= {*HONEST, FaultKind.CONSEQUENCE}


@pytest.mark.parametrize(("factor", "noise"), [(1e-17, 1e-9), (0.0, 1e-3)])
def test_a_gradient_of_rounding_or_zero_is_measured_against_the_largest(factor, noise):
    """As that of the bias of an attention's keys: rounding differs between any two computations."""
    case, name = Case(Axes(dp_shard=2)), "gate.bias"
    case.reference.parts[0][name].mul_(factor)
    hold(case.layout.gradients, case.axes, name, lambda rank: -0.3 * case.reference.gradients()[name])
    assert case.proof().passed
    case.layout.gradients[name][0].value[0] += noise
    assert all(one.text for one in case.diagnoses([name]))
