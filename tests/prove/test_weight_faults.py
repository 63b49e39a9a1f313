"""Damaged initial weights, clipping and steps of the optimizer, each to be named."""

from __future__ import annotations

import math

import pytest
import torch

from meshwright.config.schema import TrainConfig
from meshwright.mesh.axes import Axes
from meshwright.plan.rules import load
from meshwright.prove.explain.optimizer_faults import hypotheses
from meshwright.prove.record.plain_optimizer import UpdateFault, clip_factor
from meshwright.prove.result import FaultKind as K
from tests.prove.synthetic import EVERY, MATRIX, SHAPES, TRAIN, Case, Fault

MATRICES = [name for name, (shape, _) in SHAPES.items() if len(shape) > 1]
TWO, FOUR, HSDP = Axes(dp_shard=2), Axes(dp_shard=4), Axes(dp_replicate=2, dp_shard=2)
LAYOUTS = (TWO, HSDP, FOUR, Axes(dp_shard=2, tp=2))


def faulty(*words, kind=K.STEP_SCALED, names=EVERY, layouts=(TWO,), **fault):
    """The optimizer has a fault, for some parameters."""

    def damage(case):
        case.layout.faults.update(dict.fromkeys(names, UpdateFault(**fault)))

    return Fault(damage, words, kind, names, about="update", layouts=layouts)


def after(change, *words, kind=None, axes=TWO, step=1, where=lambda rank, step: True):
    """Ranks hold `change(old, new)` of one matrix after some steps."""

    def damage(case):
        case.layout.after = lambda rank, at, name, old, new: (
            change(old, new) if name == MATRIX and where(rank, at) else new
        )

    return Fault(damage, words, kind, [MATRIX], about="update", layouts=(axes,), step=step)


def only(rank, step=None):
    """Whether it is that rank, and that step or any."""
    return lambda at, number: at == rank and step in (None, number)


def unmoved(old, new):
    return old


def noisy(old, new):
    return new + 1e-6 * torch.randn(new.shape, generator=torch.Generator().manual_seed(0)).double()


def exchange(case):
    """Ranks 2 and 3 hold each other's piece after the first step."""
    right = [record.steps[0]["weights"][MATRIX][1] for record in case.layout.records()]
    case.layout.after = lambda rank, step, name, old, new: (
        right[5 - rank] if step == 1 and name == MATRIX and rank > 1 else new
    )


def given(by, *words, kind=K.CLIPPING, also=()):
    """The optimizer is given `by(case, rank, step, name, clipped)`."""

    def damage(case):
        case.layout.given = lambda *of: by(case, *of)

    return Fault(damage, words, kind, about="clipping", also=also)


def scaled(by, *words, kind=K.CLIPPING):
    """Clipped gradients are multiplied by `by(case, rank, step, name)`."""
    return given(lambda *of: of[-1] * by(*of[:-1]), *words, kind=kind)


def factor(case, step):
    return clip_factor(case.layout.norm(step), TRAIN.max_grad_norm)


def of_matrix(change):
    return lambda case, rank, step, name, clipped: change(clipped) if name == MATRIX else clipped


NEVER, NOT_IN = "never updated, still at its initial value", "the parameter is not in the optimizer"
FAULTS = {
    "never updated": faulty(f"{NEVER} on every rank: {NOT_IN}", kind=K.NOT_UPDATED, names=[MATRIX, "gate.bias"],
        layouts=LAYOUTS, times=0),
    "not in the second step": after(unmoved, f"not updated in step 2 on every rank: {NOT_IN}", kind=K.NOT_UPDATED,
        step=2, where=lambda rank, step: step == 2),
    "twice the rate": faulty("updated by 2.000 × the reference step on every rank", "2 times the learning rate",
        layouts=LAYOUTS, rate=2.0),
    "any other rate": faulty("updated by 0.700 × the reference step", names=MATRICES, rate=0.7),
    "the opposite direction": faulty("updated by −1.000 ×", "opposite direction", names=MATRICES, rate=-1.0),
    "exchanged": Fault(exchange, ["ranks 2 and 3 hold each other's shard"], K.MISPLACED, [MATRIX], about="update",
        layouts=(FOUR,)),
    "replicas drift apart": after(noisy, "replicas differ between ranks 1 and 3 along dp_replicate: only rank 3 "
        "differs from the reference", kind=K.REPLICAS_DIFFER, axes=HSDP, step=2, where=only(3, 2)),
    "rounded": after(lambda old, new: new.bfloat16().double(),
        "all changed values are bfloat16 numbers on every rank", "kept in bfloat16", kind=K.ROUNDED),
    "unknown": after(noisy, "not recognised: only rank 1's shard differs",
        "gradients that the optimizer was given are right", kind=K.UNRECOGNISED, step=3, where=only(1, 3)),
    "another factor on one rank": scaled(lambda c, rank, *_: 1.5 if rank else 1.0, "only on rank 1",
        "1.500 × the right factor"),
    "another factor on each rank": scaled(lambda c, rank, *_: 2.0 + rank, "on every rank",
        "ranks clip by different factors"),
    "one by one": scaled(lambda *of: 1.0 + 0.01 * len(of[-1]), "scaled one by one between clipping and the step"),
    "cleared": given(of_matrix(lambda clipped: None), f"the gradient of {MATRIX} was cleared before the step",
        kind=K.NOT_UPDATED, also=("update",)),
    "something else": given(of_matrix(lambda clipped: clipped.roll(1, 1)), "they change between clipping and the step",
        kind=K.UNRECOGNISED),
    "another start": Fault(lambda case: case.layout.initial[MATRIX][2].value[1].add_(1.0),
        ["initial weights differ on rank 2: ranks start from different weights"], None, [MATRIX], about="initial",
        step=0, layouts=(FOUR,)),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_of_weights_is_named(name):
    FAULTS[name].assert_named()


def train(*words: str) -> TrainConfig:
    return load("llama-tiny", ["train.warmup_steps=1", "train.max_grad_norm=5.0", *words]).train


OPTIMIZERS = {"adamw": TRAIN, "sgd": train("train.optimizer=sgd", "train.lr=0.01"),
              "muon": train("train.optimizer=muon", "train.lr=0.01")}  # fmt: skip
FOUND = [(optimizer, one) for optimizer, settings in OPTIMIZERS.items() for one in hypotheses(settings, {1}, {})]
FIRST = {one.what: optimizer for optimizer, one in reversed(FOUND)}
KNOWN = [
    pytest.param(
        optimizer, one, id=f"{optimizer}: {one.what}", marks=[pytest.mark.slow] * (FIRST[one.what] != optimizer)
    )
    for optimizer, one in FOUND
]
"""Each fault of each optimizer; slow where another one has it too."""


HIDDEN = {
    "muon": (
        "updated with a decay by the peak learning rate",
        "updated as if momentum is rounded to float32",
        "updated with the norm of all stacked matrices",
    )
}
"""Faults that the rounding of matrices that are made orthogonal hides, or that only stacks of them have."""


def case_of(optimizer):
    return Case(Axes() if optimizer == "muon" else TWO, train=OPTIMIZERS[optimizer])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_right_optimizer_is_proved(optimizer):
    assert case_of(optimizer).proof().passed


@pytest.mark.parametrize(("optimizer", "known"), KNOWN)
def test_every_known_fault_of_an_optimizer_is_named(optimizer, known):
    settings, case = OPTIMIZERS[optimizer], case_of(optimizer)
    case.layout.train = settings.model_copy(update=dict(known.keys))
    case.layout.faults = dict.fromkeys(EVERY, known.fault)
    causes = {one.diagnosis.cause for one in case.proof().findings}
    if known.what in HIDDEN.get(optimizer, ()):
        return
    if not known.fault.moves:  # vectors, which don't decay, stay as they are
        causes = {cause for cause in causes if "not in the optimizer" not in cause}
    is_tiny = dict(known.keys).get("eps", 1.0) < 1e-11  # no different from others that are as small
    assert causes == {known.cause} or (is_tiny and "the optimizer has another epsilon" in causes.pop()), causes


def test_a_step_that_one_rank_skips():
    """Its norm isn't finite there, so that it takes no step."""
    case = Case(TWO)
    case.layout.norms[1, 2] = math.nan
    norm, update = (one for one in case.proof().findings if not one.is_consequence)
    assert (norm.about, update.about, update.step) == ("norm", "update", 2)
    assert all(words in update.diagnosis.text for words in ("not updated in step 2 only on rank 1", "it took no step"))
