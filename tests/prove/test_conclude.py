"""What passes and what does not: rounding passes, the smallest fault does not, and noise is given no cause."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.mesh.axes import Axes
from meshwright.prove.compare.conclude import compare
from meshwright.prove.compare.result import FaultKind
from meshwright.prove.report import to_json
from tests.prove.synthetic import REPLICATED_OVER_TP, SHAPES, hold, make_layout, make_reference

AXES = [Axes(), Axes(dp_shard=2), Axes(dp_shard=3), Axes(dp_replicate=2, dp_shard=2), Axes(dp_shard=2, tp=2),
        Axes(dp_replicate=2, dp_shard=2, tp=2), Axes(dp_shard=2, cp=2, tp=2), Axes(dp_shard=4, tp=4)]  # fmt: skip
DRAWN = AXES[:-2]
HONEST = {FaultKind.UNRECOGNISED, FaultKind.REPLICAS_DIFFER}


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("micro", [1, 3])
def test_a_faultless_layout_passes(axes, micro):
    reference = make_reference(axes.data_parallel(), micro)
    result = compare(make_layout(reference, axes), reference)
    assert result.passed
    for parameter in result.parameters:
        assert parameter.gradient.replicas_equal
        over = {axis for axis in axes.used() if axis in ("dp_replicate", "cp")}
        over |= {"tp"} & set(axes.used()) if parameter.name in REPLICATED_OVER_TP else set()
        assert set(parameter.gradient.replicated) == over


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_rounding_passes(axes):
    reference = make_reference(axes.data_parallel(), 2)
    layout = make_layout(reference, axes)
    draw = torch.Generator().manual_seed(1)
    for pieces, size in ((layout.gradients, 1e-15), (layout.parameters, 1e-12), (layout.after_first, 1e-12)):
        for name in SHAPES:
            for shard in pieces[name]:
                shard.value.mul_(1 + size * torch.randn(shard.value.shape, generator=draw, dtype=torch.float64))
    for rank in range(axes.num_ranks()):
        layout.losses[rank][0] *= 1 + 1e-15
        layout.grad_norms[rank][2] *= 1 - 1e-11
    assert compare(layout, reference).passed


def test_step_1_is_held_to_the_tight_tolerance_and_later_steps_to_the_other():
    axes, reference = Axes(dp_shard=2), make_reference(2, 1)
    for what, error, passes in (("gradients", 5e-13, True), ("gradients", 2e-12, False),
                                ("parameters", 5e-10, True), ("parameters", 2e-9, False)):  # fmt: skip
        layout = make_layout(reference, axes)
        due = getattr(reference, what)["embed.weight"]
        getattr(layout, what)["embed.weight"][1].value[0, 0] += error * due.abs().max()
        assert compare(layout, reference).passed is passes, (what, error)
    for series in ("losses", "grad_norms"):
        for step, error, passes in ((0, 3e-12, False), (0, 5e-13, True), (1, 3e-12, True), (2, 3e-9, False)):
            layout = make_layout(reference, axes)
            getattr(layout, series)[1][step] *= 1 + error
            assert compare(layout, reference).passed is passes, (series, step, error)


@settings(max_examples=30)
@given(
    axes=st.sampled_from(DRAWN),
    micro=st.sampled_from([1, 2]),
    name=st.sampled_from(list(SHAPES)),
    tensors=st.sampled_from(["gradients", "parameters", "initial", "after_first"]),
    sign=st.sampled_from([-1, 1]),
    exponent=st.floats(-11.5, 3),
    data=st.data(),
)
def test_one_wrong_element_never_passes(axes, micro, name, tensors, sign, exponent, data):
    """… and is not called a factor, a share or a micro-batch."""
    reference = make_reference(axes.data_parallel(), micro)
    layout = make_layout(reference, axes)
    pieces = [shard for shard in getattr(layout, tensors)[name] if shard.value.numel()]
    piece = data.draw(st.sampled_from(pieces))
    index = data.draw(st.integers(0, piece.value.numel() - 1))
    tolerance = 1 if tensors in ("gradients", "initial") else 1e3
    error = sign * 10**exponent * tolerance * float(getattr(reference, tensors)[name].abs().max())
    piece.value.view(-1)[index] += error
    result = compare(layout, reference)
    assert not result.passed
    (wrong,) = (p for p in result.parameters if not p.ok)
    assert wrong.name == name
    if piece.value.numel() > 1:
        assert wrong.root.diagnosis.kind in HONEST
    assert wrong.root.error.max_abs == pytest.approx(abs(error), rel=1e-3)
    json.dumps(to_json(result, loss_unit="nats/token"), allow_nan=False)


@settings(max_examples=30)
@given(
    axes=st.sampled_from(DRAWN),
    name=st.sampled_from(list(SHAPES)),
    factor=st.floats(-1e6, 1e6).filter(lambda c: abs(c - 1) > 1e-11),
    ranks=st.sets(st.integers(0, 15), min_size=1),
)
def test_one_scaled_gradient_never_passes(axes, name, factor, ranks):
    reference = make_reference(axes.data_parallel(), 2)
    layout = make_layout(reference, axes)
    touched = [s for s in layout.gradients[name] if s.rank in {r % axes.num_ranks() for r in ranks}]
    touched = [s for s in touched if s.value.numel()] or [s for s in layout.gradients[name] if s.value.numel()]
    for shard in touched:
        shard.value.mul_(factor)
    result = compare(layout, reference)
    # A piece far smaller than the tensor's scale can hide a factor of nearly 1 under the tolerance.
    error = max(float((s.value / factor).abs().max()) * abs(factor - 1) if factor else 1.0 for s in touched)
    if error > 2e-12 * float(reference.gradients[name].abs().max()):
        assert not result.passed
        (wrong,) = (p for p in result.parameters if not p.ok)
        assert wrong.name == name
        assert wrong.gradient.diagnosis.text


@settings(max_examples=15)
@given(
    axes=st.sampled_from(DRAWN), micro=st.sampled_from([1, 2, 4]), seed=st.integers(0, 10**6), size=st.floats(-11, 2)
)
def test_noise_is_given_no_cause(axes, micro, seed, size):
    """All gradients carry noise, on each rank its own or the same on all: no factor, no share, no sum fits that."""
    reference = make_reference(axes.data_parallel(), micro)
    layout = make_layout(reference, axes)
    draw = torch.Generator().manual_seed(seed)
    for name, due in reference.gradients.items():
        noise = 10**size * due.abs().max() * torch.randn(due.shape, generator=draw, dtype=torch.float64)
        if seed % 2:
            hold(layout.gradients, axes, name, lambda rank, full=due + noise: full)
        else:
            for shard in layout.gradients[name]:
                add = torch.randn(shard.value.shape, generator=draw, dtype=torch.float64)
                shard.value.add_(10**size * due.abs().max() * add)
    result = compare(layout, reference)
    assert not result.passed
    kinds = {p.gradient.diagnosis.kind for p in result.parameters if p.gradient.diagnosis is not None}
    assert kinds <= HONEST


@given(axes=st.sampled_from(DRAWN), seed=st.integers(0, 10**6), size=st.floats(-8, 1))
def test_noise_in_the_parameters_is_no_step_and_no_decay(axes, seed, size):
    reference = make_reference(axes.data_parallel(), 1)
    layout = make_layout(reference, axes)
    layout.after_first.clear()
    draw = torch.Generator().manual_seed(seed)
    for name, due in reference.parameters.items():
        noise = 10**size * due.abs().max() * torch.randn(due.shape, generator=draw, dtype=torch.float64)
        hold(layout.parameters, axes, name, lambda rank, full=due + noise: full)
    kinds = {p.final.diagnosis.kind for p in compare(layout, reference).parameters if not p.final.ok}
    assert kinds == {FaultKind.UNRECOGNISED}


def bias_of(layout, reference):
    """What is said of the gradient of the bias of an attention's keys. The norm stays the old one."""
    return next(one for one in compare(layout, reference).parameters if one.name == "gate.bias").gradient


@pytest.mark.parametrize(("scale", "noise"), [(1e-17, 1e-9), (0.0, 1e-3)])
def test_a_gradient_of_rounding_or_zero_is_measured_against_the_largest(scale, noise):
    """Rounding differs between any two computations."""
    reference = make_reference(2, 1)
    for full in (reference.gradients["gate.bias"], reference.partial_gradients["gate.bias"]):
        full.mul_(scale)
    layout = make_layout(reference, Axes(dp_shard=2))
    for shard in layout.gradients["gate.bias"]:
        shard.value.mul_(-0.3)
    assert bias_of(layout, reference).ok
    layout.gradients["gate.bias"][0].value[0] += noise
    assert not bias_of(layout, reference).ok and bias_of(layout, reference).diagnosis.text
