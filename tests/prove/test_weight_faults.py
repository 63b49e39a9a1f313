"""Seeded faults of initial weights, of clipping, of learning rates and of the optimizer's step."""

from __future__ import annotations

import math

import pytest
import torch

from meshwright.config.schema import TrainConfig
from meshwright.mesh.axes import Axes
from meshwright.plan.rules import load
from meshwright.prove.explain.updates import hypotheses
from meshwright.prove.record.plain_optimizer import UpdateFault, clip_factor, plain_learning_rate
from meshwright.prove.result import FaultKind as K
from tests.prove.synthetic import EVERY, MATRIX, SHAPES, STEPS, TRAIN, Case, cut

MATRICES = [name for name, (shape, _) in SHAPES.items() if len(shape) > 1]
VECTORS = [name for name in EVERY if name not in MATRICES]
TWO, FOUR, HSDP, FSDP_TP = Axes(dp_shard=2), Axes(dp_shard=4), Axes(dp_replicate=2, dp_shard=2), Axes(dp_shard=2, tp=2)
LAYOUTS = (TWO, HSDP, FOUR, FSDP_TP)


def faulty(names=EVERY, **fault):
    """The optimizer has a fault, for some parameters."""
    return lambda case: case.layout.faults.update(dict.fromkeys(names, UpdateFault(**fault)))


def after(change):
    """Ranks hold something else of one matrix after a step."""

    def damage(case):
        case.layout.after = lambda rank, step, name, old, new: (
            change(case, rank, step, old, new) if name == MATRIX else new
        )

    return damage


def only(rank, step=None):
    """Whether it is that rank, and that step or any."""
    return lambda at, number: at == rank and step in (None, number)


def unmoved(where):
    return after(lambda case, rank, step, old, new: old if where(rank, step) else new)


def noisy(where):
    draw = torch.Generator().manual_seed(0)
    return after(
        lambda case, rank, step, old, new: (
            new + 1e-6 * torch.randn(new.shape, generator=draw).double() if where(rank, step) else new
        )
    )


def exchange(case):
    """Ranks 2 and 3 hold each other's piece after the first step."""
    held = {}
    for rank in range(4):
        case.layout.after = lambda at, step, name, old, new, rank=rank: (
            held.setdefault(rank, new) if (at, step, name) == (rank, 1, MATRIX) else new
        )
        case.layout.records()
    case.layout.after = lambda rank, step, name, old, new: (
        held[5 - rank] if step == 1 and name == MATRIX and rank > 1 else new
    )


NEVER = "never updated, still at its initial value"
UPDATES = {
    "never updated": (LAYOUTS, faulty([MATRIX, "gate.bias"], times=0),
        [f"{NEVER} on every rank: the parameter is not in the optimizer"], [MATRIX, "gate.bias"], K.NOT_UPDATED, 1),
    "not in the second step": ((TWO,), unmoved(lambda rank, step: step == 2),
        ["not updated in step 2 on every rank: the parameter is not in the optimizer"], [MATRIX], K.NOT_UPDATED, 2),
    "not on one rank": ((FOUR,), unmoved(only(1)), [f"{NEVER} only on rank 1: the optimizer skipped rank 1's shard"],
        [MATRIX], K.NOT_UPDATED, 1),
    "twice the rate": (LAYOUTS, faulty(rate=2.0),
        ["updated by 2.000 × the reference step on every rank", "2 times the learning rate"], EVERY, K.STEP_SCALED, 1),
    "any other rate": ((TWO,), faulty(MATRICES, rate=0.7), ["updated by 0.700 × the reference step"],
        MATRICES, K.STEP_SCALED, 1),
    "the opposite direction": ((TWO,), faulty(rate=-1.0), ["updated by −1.000 ×", "opposite direction"],
        MATRICES, K.STEP_SCALED, 1),
    "no decay": ((FSDP_TP,), faulty(decay="none"), ["weight decay is missing"], MATRICES, K.WEIGHT_DECAY, 1),
    "decay where none is due": ((FSDP_TP,), faulty(decay="all"), ["norms and biases decay too"],
        VECTORS, K.WEIGHT_DECAY, 1),
    "any other decay": ((TWO,), faulty(MATRICES, decay_factor=3.0),
        ["updated with 3.000 × the weight decay on every rank", "weight decay has a wrong factor"],
        MATRICES, K.WEIGHT_DECAY, 1),
    "exchanged": ((FOUR,), exchange, ["ranks 2 and 3 hold each other's shard"], [MATRIX], K.MISPLACED, 1),
    "replicas drift apart": ((HSDP,), noisy(only(3, 2)),
        ["replicas differ between ranks 1 and 3 along dp_replicate: only rank 3 differs from the reference"], [MATRIX],
        K.REPLICAS_DIFFER, 2),
    "rounded": ((TWO,), after(lambda case, rank, step, old, new: new.bfloat16().double()),
        ["all changed values are bfloat16 numbers on every rank", "kept in bfloat16"], [MATRIX], K.ROUNDED, 1),
    "unknown": ((TWO,), noisy(only(1, 3)),
        ["not recognised: only rank 1's shard differs", "gradients that the optimizer was given are right"], [MATRIX],
        K.UNRECOGNISED, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", UPDATES)
def test_a_wrong_update_is_named(name):
    """In the first step in which it is wrong; of exactly these parameters; and nothing else is said."""
    layouts, damage, words, names, kind, step = UPDATES[name]
    for axes in layouts:
        case = Case(axes)
        damage(case)
        case.says(*words, names=EVERY if name == "the opposite direction" else names, kind=None, about="update")
        findings = [one for one in case.proof().findings if not one.is_consequence]
        assert {(one.about, one.step) for one in findings} == {("update", step)}
        assert findings[0].diagnosis.kind is kind and set(findings[0].members) >= set(names)


def train(*words: str) -> TrainConfig:
    return load("llama-tiny", ["train.warmup_steps=1", "train.max_grad_norm=5.0", *words]).train


OPTIMIZERS = {"adamw": TRAIN, "sgd": train("train.optimizer=sgd", "train.lr=0.01"),
              "muon": train("train.optimizer=muon", "train.lr=0.01")}  # fmt: skip
KNOWN = [
    pytest.param(optimizer, one, id=f"{optimizer}: {one.what}")
    for optimizer, settings in OPTIMIZERS.items()
    for one in hypotheses(settings, {1})
]


BELOW_THE_ROUNDING = {
    "muon": ("updated with a decay by the peak learning rate", "updated as if momentum is rounded to float32")
}
"""Faults that the rounding of matrices that are made orthogonal hides."""


@pytest.mark.parametrize(("optimizer", "known"), KNOWN)
def test_every_known_fault_of_an_optimizer_is_named(optimizer, known):
    settings = OPTIMIZERS[optimizer]
    case = Case(Axes() if optimizer == "muon" else TWO, train=settings)
    assert case.proof().passed
    case.layout.train = settings.model_copy(update=dict(known.keys))
    case.layout.faults = dict.fromkeys(EVERY, known.fault)
    causes = {one.diagnosis.cause for one in case.proof().findings}
    if known.what in BELOW_THE_ROUNDING.get(optimizer, ()):
        return
    if not known.fault.moves:  # vectors, which don't decay, stay as they are
        causes = {cause for cause in causes if "not in the optimizer" not in cause}
    is_tiny = dict(known.keys).get("eps", 1.0) < 1e-11  # no different from others that are as small
    assert causes == {known.cause} or (is_tiny and "the optimizer has another epsilon" in causes.pop()), causes


# ---- what the optimizer is given


def factor(case, step):
    return clip_factor(case.layout.norm(step), TRAIN.max_grad_norm)


def multiplied(by):
    """Clipped gradients are multiplied by `by(case, rank, step, name)`."""

    def damage(case):
        case.layout.given = lambda rank, step, name, clipped: clipped * by(case, rank, step, name)

    return damage


def with_epsilon(epsilon):
    return multiplied(lambda case, rank, step, name: case.layout.norm(step) / (case.layout.norm(step) + epsilon))


def by_tensor(case, rank, step, name):
    own = clip_factor(float(case.reference.gradients(step)[name].norm()), TRAIN.max_grad_norm)
    return own / factor(case, step)


def decayed(case):
    """L2 regularisation, in the first step."""
    case.layout.given = lambda rank, step, name, clipped: (
        clipped + 0.1 * cut(case.reference.initial[name], name, rank, case.axes) if step == 1 else clipped
    )


def of_matrix(change):
    def damage(case):
        case.layout.given = lambda rank, step, name, clipped: change(clipped) if name == MATRIX else clipped

    return damage


LIMIT = "the optimizer is given gradients scaled by"
CLIPPING = {
    "not clipped": (multiplied(lambda case, rank, step, name: 1 / factor(case, step)),
        [f"{LIMIT} 1 on every rank", "clipping is missing"], K.CLIPPING),
    "not clipped on one rank": (multiplied(lambda case, rank, step, name: 1 / factor(case, step) if rank else 1.0),
        ["scaled by 1 only on rank 1", "clipping is missing"], K.CLIPPING),
    "another factor on one rank": (multiplied(lambda case, rank, step, name: 1.5 if rank else 1.0),
        ["only on rank 1", "1.500 × the right factor"], K.CLIPPING),
    "another factor on each rank": (multiplied(lambda case, rank, step, name: 2.0 + rank),
        ["on every rank", "ranks clip by different factors"], K.CLIPPING),
    "clipped twice": (multiplied(lambda case, rank, step, name: factor(case, step)), ["clipping is applied twice"],
        K.CLIPPING),
    "by tensor": (multiplied(by_tensor), ["the norm of each tensor instead of the global norm"], K.CLIPPING),
    "an epsilon": (with_epsilon(1e-6), ["an epsilon of 1e-06 added: the factor is limit / (norm + 1e-06)"],
        K.CLIPPING),
    "a larger epsilon": (with_epsilon(1e-3), ["an epsilon of 0.001 added"], K.CLIPPING),
    "another limit": (multiplied(lambda case, rank, step, name: 2.0), ["2.000 × the right factor"], K.CLIPPING),
    "one by one": (multiplied(lambda case, rank, step, name: 1.0 + 0.01 * len(name)),
        ["scaled one by one between clipping and the step"], K.CLIPPING),
    "L2 regularisation": (decayed, ["weight decay is added to the gradient (L2 regularisation)"], K.WEIGHT_DECAY),
    "cleared": (of_matrix(lambda clipped: None), [f"the gradient of {MATRIX} was cleared before the step"],
        K.NOT_UPDATED),
    "something else": (of_matrix(lambda clipped: clipped.roll(1, 1)), ["they change between clipping and the step"],
        K.UNRECOGNISED),
}  # fmt: skip


@pytest.mark.parametrize("name", CLIPPING)
def test_what_the_optimizer_is_given_is_named(name):
    """… and updates by it are right."""
    damage, words, kind = CLIPPING[name]
    case = Case(TWO)
    damage(case)
    assert case.says_of("clipping", *words, kind=kind).step == 1
    about = {one.about for one in case.proof().findings}
    assert about == ({"clipping", "update"} if name == "cleared" else {"clipping"})


# ---- learning rates


def due(step):
    return plain_learning_rate(step, TRAIN)


RATES = {
    "behind": (lambda rank, step: due(max(1, step - 1)), ["of step 2", "one step behind"]),
    "ahead": (lambda rank, step: due(step + 1), ["of step 1", "on every rank", "one step ahead"]),
    "no schedule": (lambda rank, step: TRAIN.lr, ["of step 2", "schedule is missing: it is train.lr in every step"]),
    "a factor": (lambda rank, step: 3 * due(step), ["3.000 times the learning rate in every step"]),
    "one step": (lambda rank, step: due(step) * (1 + (step == 3)), ["of step 3", "2.000 × the right one",
        "differs from its closed form"]),
    "one rank": (lambda rank, step: due(step) * (1 + rank), ["only on rank 1", "2.000 times the learning rate"]),
}  # fmt: skip


@pytest.mark.parametrize("name", RATES)
def test_a_wrong_learning_rate_is_named(name):
    rate, words = RATES[name]
    case = Case(TWO)
    case.layout.rates = {(rank, step): rate(rank, step) for rank in range(2) for step in range(1, STEPS + 1)}
    case.says_of("learning rate", *words, kind=K.LEARNING_RATE)


# ---- initial weights


def test_initial_weights_that_differ_are_told_once():
    case = Case(FOUR)
    case.layout.initial[MATRIX][2].value.add_(torch.randn(2, 6, dtype=torch.float64))
    (finding,) = case.proof().findings
    assert (finding.about, finding.members) == ("initial", (MATRIX,))
    assert finding.diagnosis.text.startswith("initial weights differ on rank 2: ranks start from different weights")


def test_a_step_that_one_rank_skips():
    """Its norm isn't finite there, so that it takes no step."""
    case = Case(TWO)
    case.layout.norms[1, 2] = math.nan
    case.says_of("norm", "not finite only on rank 1")
    assert case.says_of("update", "not updated in step 2 only on rank 1", "it took no step there").step == 2
