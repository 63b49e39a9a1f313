"""Made-up records of a script's ranks: what the comparison says of each way in which they can differ."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.errors import InputError, RunError
from meshwright.prove.report import title
from meshwright.prove.script.conclude import compare_script
from meshwright.prove.script.evidence import GRADIENT, INITIAL, gather, measure_tolerances
from meshwright.prove.script.layout_choice import ScriptRun, parse_layout
from meshwright.prove.script.recorder import ScriptRecord
from meshwright.prove.script.samples import SET_EPOCH, diagnose_epochs

SHAPES = {"embed": (6, 4), "norm": (4,), "head": (6, 4)}
STEPS = 3


def record(*, seed=0, perturbed=0.0):
    """What one process records that does everything."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {
        kind: {name: ((0,) * len(shape), torch.randn(shape, generator=draw)) for name, shape in SHAPES.items()}
        for kind in ("initial", "gradients", "after_first", "parameters")
    }
    for kind, by_name in tensors.items():
        by_name["head"] = by_name["embed"]
        if kind != "initial":
            tensors[kind] = {name: (offset, value * (1 + perturbed)) for name, (offset, value) in by_name.items()}
    norm = sum(float((tensors["gradients"][name][1].double() ** 2).sum()) for name in ("embed", "norm")) ** 0.5
    steps = [
        {
            "samples": [4 * step + row for row in range(4)],
            "targets": [-1],
            "microbatches": 1,
            "loss": [2.0 - step / 10],
            "grad_norm": [norm + step],
            "options": [{"lr": [0.1], "betas": [0.9, 0.99]}],
            "gradients": {},
            "weights": {},
        }
        for step in range(STEPS)
    ]
    steps[0] |= {"gradients": tensors["gradients"], "weights": tensors["after_first"]}
    steps[-1] |= {"weights": tensors["parameters"]}
    return ScriptRecord(
        initial=tensors["initial"],
        steps=steps,
        shapes=SHAPES,
        trainable=dict.fromkeys(SHAPES, True),
        optimized=dict.fromkeys(SHAPES, True),
        tied=[["embed", "head"]],
        scaled=[0.5],
        dtype="float32",
        computed_in="float32",
    )


def tensors_of(one):
    """The recorded tensors of a rank, by kind."""
    first, last = one.steps[0], one.steps[-1]
    return {
        "initial": one.initial,
        "gradients": first["gradients"],
        "after_first": first["weights"],
        "parameters": last["weights"],
    }


def put(one, name, values):
    """Let a rank record a value of each step."""
    for step, value in zip(one.steps, values, strict=True):
        step[name] = value


def evidence(records):
    return gather(ScriptRun(Path("train.py"), parse_layout(str(len(records))), (), STEPS, Path(), 1.0), records)


def data_parallel():
    """Two ranks with DDP, each with half of the samples."""
    ranks = [deepcopy(record()) for _ in range(2)]
    for rank, one in enumerate(ranks):
        put(one, "samples", [step["samples"][rank::2] for step in one.steps])
    return ranks


def compared(ranks):
    reference = evidence([record()])
    tolerances = measure_tolerances(reference, [evidence([record(perturbed=1e-7)])])
    return compare_script(evidence(ranks), reference, tolerances)


def causes_of(result):
    """The findings that follow from no other."""
    return [one for one in result.findings if not one.is_consequence]


def says(ranks, *words):
    causes = causes_of(compared(ranks))
    text = "\n".join(f"{one.about}: {title(one)} {one.diagnosis.text} {one.diagnosis.detail}" for one in causes)
    assert causes and all(word in text for word in words), text
    return causes


def change(ranks, kind, name, how, *, only=(0, 1)):
    for rank in only:
        tensors = tensors_of(ranks[rank])[kind]
        offset, value = tensors[name]
        tensors[name] = offset, how(value)


def test_equal_records_pass_and_rounding_is_tolerated():
    ranks = data_parallel()
    assert compared(ranks).passed
    change(ranks, "gradients", "norm", lambda value: value * (1 + 1e-6))
    assert compared(ranks).passed
    change(ranks, "gradients", "norm", lambda value: value * (1 + 1e-3))
    assert not compared(ranks).passed


def test_local_losses_may_differ_if_their_mean_is_right():
    ranks = data_parallel()
    for rank, one in enumerate(ranks):
        put(one, "loss", [[step["loss"][0] + (0.3, -0.3)[rank]] for step in one.steps])
    assert compared(ranks).passed
    ranks[0].steps[0]["loss"] = [2.5]
    says(ranks, "loss:")


@pytest.mark.parametrize("step", [0, 2])
def test_a_value_that_is_not_finite_never_passes(step):
    for name in ("loss", "grad_norm"):
        ranks = data_parallel()
        ranks[1].steps[step][name] = [float("nan")]
        assert not compared(ranks).passed


def test_a_partial_gradient_is_summed_over_its_mesh_dim():
    ranks = data_parallel()
    for one in ranks:
        one.lines, one.partial = {"dp": [0, 1]}, {"norm": ["dp"]}
    change(ranks, "gradients", "norm", lambda value: value.square(), only=[0])
    change(ranks, "gradients", "norm", lambda value: value - value.square(), only=[1])
    assert compared(ranks).passed
    for one in ranks:
        one.partial = {}
    says(ranks, "norm", "the sum over dp_replicate is missing")


def test_copies_of_a_tied_weight_on_two_stages_must_have_the_sum():
    ranks = [deepcopy(record()) for _ in range(2)]
    for one, lacks in zip(ranks, (("norm", "head"), ("embed",)), strict=True):
        one.shapes = {name: shape for name, shape in one.shapes.items() if name not in lacks}
        for by_name in (*tensors_of(one).values(), one.trainable, one.optimized):
            for name in lacks:
                del by_name[name]
        one.tied = []
    assert compared(ranks).passed
    change(ranks, "gradients", "embed", lambda value: value.square(), only=[0])
    expected = tensors_of(record())["gradients"]["head"][1]
    change(ranks, "gradients", "head", lambda value: expected - expected.square(), only=[1])
    found = says(ranks, "the sum over the copies of the tied weight is missing")
    assert found[0].members == ("embed", "head")


FAULTS = {
    "untied": (lambda one: one.tied.clear(), "tied weights", "embed and head do not share one tensor"),
    "frozen": (lambda one: one.trainable.update(norm=False), "frozen", "norm", "frozen by mistake"),
    "lost": (lambda one: one.optimized.update(norm=False), "optimizer", "lacks norm"),
    "rate": (lambda one: put(one, "options", [[{"lr": [0.2]}]] * STEPS), "learning rate", "number of data-parallel"),
    "late rate": (lambda one: one.steps[2].update(options=[{"lr": [0.05]}]), "0.05 in step 3", "another learning rate"),
    "late option": (lambda one: one.steps[2]["options"][0].update(betas=[0.9, 0.5]),
        "betas is 0.9, 0.5 in step 3 on rank 0, 0.9, 0.99 in the reference", "another betas"),
    "scaled": (lambda one: one.scaled.__setitem__(0, 0.6), "scaled by 0.6, by 0.5", "another norm or limit"),
    "norm": (lambda one: one.steps[0].update(grad_norm=[2.0]), "norm:", "2, expected"),
    "epoch": (lambda one: one.steps[2].update(samples=one.steps[0]["samples"]),
        "step 3 reads the samples of step 1", SET_EPOCH),
    "behind": (lambda one: put(one, "samples", [*(s["samples"] for s in one.steps[1:]), [1]]),
        "samples of step 2 of the ref", "ahead"),
    "fewer": (lambda one: one.steps[1]["samples"].pop(),
        "step 2 reads 2 samples, 4 in the reference", "another global batch"),
    "other": (lambda one: one.steps[1]["samples"].__setitem__(0, 99),
        "sample 0 of rank 0 is not in", "another seed, order"),
    "name": (lambda one: one.shapes.pop("norm") and one.shapes.update(bias=(4,)), "needs names="),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_difference_is_named(fault):
    damage, *words = FAULTS[fault]
    ranks = data_parallel()
    for one in ranks:
        one.shapes = dict(one.shapes)
        damage(one)
    found = says(ranks, *words)
    assert len(found) == 1 or fault == "name", [one.diagnosis.text for one in found]


def test_consequences_follow_the_first_fault():
    ranks = data_parallel()
    for kind in ("gradients", "after_first", "parameters"):
        change(ranks, kind, "norm", lambda value: 2 * value)
    result = compared(ranks)
    (cause,) = causes_of(result)
    assert "summed over dp_replicate (2 ranks) instead of averaged" in cause.diagnosis.cause
    assert len(result.findings) == 2
    assert "follows from its wrong gradient" in result.findings[1].diagnosis.cause


def test_two_faults_are_both_named():
    ranks = data_parallel()
    for one in ranks:
        put(one, "options", [[{"lr": [0.2]}]] * STEPS)
        one.steps[0]["grad_norm"] = [2.0]
        del one.steps[0]["gradients"]["norm"]
    says(ranks, "learning rate", "no gradient reached this parameter")
    ranks = data_parallel()
    for one in ranks:
        put(one, "options", [[{"lr": [0.2]}]] * STEPS)
        one.steps[0]["grad_norm"] = [2.0]
    says(ranks, "learning rate", "norm: norm 2, expected")


def test_elements_whose_gradient_is_rounding_are_not_compared_after_the_step():
    reference = record()
    tensors_of(reference)["gradients"]["norm"][1][1] = 1e-9
    ranks = data_parallel()
    change(ranks, "gradients", "norm", lambda value: torch.cat([value[:1], -torch.full((1,), 1e-9), value[2:]]))
    change(ranks, "after_first", "norm", lambda value: value + torch.tensor([0.0, 0.2, 0.0, 0.0]))
    expected = evidence([reference])
    tolerances = measure_tolerances(expected, [])
    result = compare_script(evidence(ranks), expected, tolerances)
    assert result.passed and "1 of 52 elements" in result.notes[0], result.findings
    change(ranks, "after_first", "norm", lambda value: value + torch.tensor([0.2, 0.0, 0.0, 0.0]))
    assert not compare_script(evidence(ranks), expected, tolerances).passed


def test_an_order_that_repeats_is_a_fault_only_with_a_sampler_that_shuffles():
    one = record()
    put(one, "samples", [[1, 2], [3, 4], [1, 2]])
    assert diagnose_epochs(evidence([one])) is None
    one.fixed_samplers = 1
    assert diagnose_epochs(evidence([one])).cause == SET_EPOCH
    put(one, "samples", [[1, 2]] * 3)
    assert diagnose_epochs(evidence([one])) is None, "one batch for the whole run"


def test_runs_that_differ_by_more_than_rounding_are_refused():
    with pytest.raises(InputError, match="not deterministic.*different gradients"):
        measure_tolerances(evidence([record()]), [evidence([record(perturbed=1e-2)])])
    with pytest.raises(InputError, match="not deterministic.*different weights"):
        measure_tolerances(evidence([record()]), [evidence([record(seed=1)])])


def test_a_reference_without_all_elements_is_refused():
    ranks = data_parallel()
    for one in ranks:
        one.lines, one.sharded = {"dp": [0, 1]}, ["dp"]
        one.initial["embed"] = (0, 0), one.initial["embed"][1][:2]
    with pytest.raises(RunError, match="do not make it up"):
        evidence(ranks).fulls(INITIAL)
    assert np.isfinite(evidence(ranks).fulls(GRADIENT)["norm"]).all()
