"""Known faults of optimizers: what updates are then, and the cause; replayed by `explain/updates.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshwright.config.schema import TrainConfig
from meshwright.prove.record.plain_optimizer import ADAMW, MUON, SGD, UpdateFault
from meshwright.prove.result import FaultKind


@dataclass(frozen=True)
class Hypothesis:
    """A known fault of an optimizer."""

    what: str
    """What updates then are: the symptom."""
    cause: str
    fault: UpdateFault
    kind: FaultKind = FaultKind.OPTIMIZER
    keys: tuple[tuple[str, float], ...] = ()
    """Other settings of `train`."""


DECAY = FaultKind.WEIGHT_DECAY
GENERAL = (
    Hypothesis(
        "updated by 2.000 × the reference step",
        "the step was taken 2 times, or with 2 times the learning rate",
        UpdateFault(rate=2.0),
        FaultKind.STEP_SCALED,
    ),
    Hypothesis(
        "updated by 0.500 × the reference step",
        "the step was taken with half the learning rate",
        UpdateFault(rate=0.5),
        FaultKind.STEP_SCALED,
    ),
    Hypothesis("updated twice", "the optimizer steps twice", UpdateFault(times=2), FaultKind.STEP_SCALED),
    Hypothesis("updated without weight decay", "weight decay is missing", UpdateFault(decay="none"), DECAY),
    Hypothesis(
        "updated with weight decay",
        "norms and biases decay too, and should not: weight decay is applied to the wrong parameters",
        UpdateFault(decay="all"),
        DECAY,
    ),
    Hypothesis(
        "updated with the weight decay of other parameters",
        "weight decay is applied to the wrong parameters: to vectors, and not to matrices",
        UpdateFault(decay="vectors"),
        DECAY,
    ),
    Hypothesis(
        "updated with 2.000 × the weight decay", "weight decay is applied twice", UpdateFault(decay_factor=2.0), DECAY
    ),
    Hypothesis(
        "updated with a decay by the peak learning rate",
        "weight decay doesn't follow the schedule: it takes the peak learning rate in every step",
        UpdateFault(decays="peak"),
        DECAY,
    ),
    Hypothesis(
        "updated with weight decay in the gradient",
        "weight decay is added to the gradient (L2 regularisation) by the optimizer, instead of decoupled from it",
        UpdateFault(decays="gradient"),
        DECAY,
    ),
    Hypothesis(
        "updated with a decay of the new value",
        "weight decay is applied after the update, not before it",
        UpdateFault(decays="after"),
        DECAY,
    ),
    Hypothesis(
        "decayed but not updated", "the update itself is lost: only weight decay is applied", UpdateFault(moves=False)
    ),
    Hypothesis(
        "updated with the peak learning rate",
        "the learning rate doesn't follow the schedule: it is the peak in every step",
        UpdateFault(is_scheduled=False),
        FaultKind.STEP_SCALED,
    ),
)
OF_GROUPS = (
    Hypothesis(
        "updated with train.lr",
        "the group's own learning rate (train.parameter_groups) is ignored",
        UpdateFault(group_power=0),
        FaultKind.STEP_SCALED,
    ),
    Hypothesis(
        "updated with a learning rate of which the group's multiplier is squared",
        "the multiplier of the group's own learning rate (train.parameter_groups) is applied twice",
        UpdateFault(group_power=2),
        FaultKind.STEP_SCALED,
    ),
)
OF_ADAMW = (
    Hypothesis("updated with biased moments", "the bias correction is missing", UpdateFault(corrects=())),
    Hypothesis(
        "updated with a biased second moment",
        "the bias correction of the second moment is missing",
        UpdateFault(corrects=("first",)),
    ),
    Hypothesis(
        "updated with a biased first moment",
        "the bias correction of the first moment is missing",
        UpdateFault(corrects=("second",)),
    ),
    Hypothesis(
        "updated with the bias correction of step 1",
        "the count of updates is not kept: it is 1 in every step",
        UpdateFault(count=(0, 1)),
    ),
    Hypothesis(
        "updated with the bias correction of the next step",
        "the count of updates is one ahead",
        UpdateFault(count=(1, 1)),
    ),
    Hypothesis(
        "updated with a second moment of gradients before clipping",
        "the second moment is that of unclipped gradients",
        UpdateFault(is_clipped=False),
    ),
    Hypothesis(
        "updated with a first moment of this step's gradient only",
        "the first moment is stale: it is not kept from step to step",
        UpdateFault(keeps=("second", "velocity")),
    ),
    Hypothesis(
        "updated with a second moment of this step's gradient only",
        "the second moment is stale: it is not kept from step to step",
        UpdateFault(keeps=("first", "velocity")),
    ),
    Hypothesis(
        "updated with moments of this step's gradient only",
        "both moments are stale: they are not kept from step to step",
        UpdateFault(keeps=()),
    ),
    Hypothesis(
        "updated with epsilon under the root",
        "epsilon is added to the variance, not to its root",
        UpdateFault(epsilon_inside=True),
    ),
    Hypothesis(
        "updated with Nesterov momentum", "the update uses Nesterov momentum (NAdam)", UpdateFault(nesterov=True)
    ),
)
OF_MOMENTUM = (
    Hypothesis(
        "updated with the momentum of this step's gradient only",
        "momentum is stale: it is not kept from step to step",
        UpdateFault(keeps=("first", "second")),
    ),
)
OF_SGD = (
    Hypothesis("updated with Nesterov momentum", "SGD uses Nesterov momentum", UpdateFault(nesterov=True)),
    Hypothesis(
        "updated with dampened momentum",
        "momentum is dampened: it takes gradients times 1 − train.momentum",
        UpdateFault(is_dampened=True),
    ),
)
OF_MUON = (
    Hypothesis("updated with plain momentum", "the momentum is not Nesterov's", UpdateFault(plain_momentum=True)),
    Hypothesis(
        "updated without the scale of the matrix",
        "the update is not scaled by the larger side of its matrix",
        UpdateFault(scaled=False),
    ),
    Hypothesis(
        "updated with the norm of all stacked matrices",
        "matrices of a stack, such as experts, are made orthogonal together: divided by the norm of all of them",
        UpdateFault(whole_norm=True),
    ),
    Hypothesis("updated by six iterations", "Newton and Schulz iterate once too often", UpdateFault(rounds=6)),
    Hypothesis("updated by four iterations", "Newton and Schulz iterate once too little", UpdateFault(rounds=4)),
    Hypothesis(
        "updated by iterations in bfloat16",
        "matrices are made orthogonal in bfloat16",
        UpdateFault(iterates_in="bfloat16"),
        FaultKind.ROUNDED,
    ),
)
NARROWER = ("bfloat16", "float16", "float32")
STATES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("momentum is", (SGD, MUON), ("velocity",)),
    ("both moments are", (ADAMW, MUON), ("first", "second")),
    ("the first moment is", (ADAMW, MUON), ("first",)),
    ("the second moment is", (ADAMW, MUON), ("second",)),
)
"""States that may be kept in a narrower dtype: words, optimizers, and names."""
BETAS = ((0.9, 0.999), (0.9, 0.95), (0.9, 0.98), (0.9, 0.99))
EPSILONS = tuple(10.0**exponent for exponent in (-16, -15, -12, -10, -8, -7, -6, -5, -4, -3))


def hypotheses(train: TrainConfig, shards: set[int], units: Mapping[int, str]) -> Iterator[Hypothesis]:
    """Yield the known faults of the configured optimizer, common ones first.

    Args:
        train: configuration.
        shards: numbers of shards that a matrix may have.
        units: what may be counted in place of steps, by how many there are in one.
    """
    if any("lr=" in entry.replace(" ", "") for entry in train.parameter_groups):
        yield from OF_GROUPS
    yield from GENERAL
    if train.optimizer in (SGD, MUON):
        yield from OF_MOMENTUM
    if train.optimizer == SGD:
        yield from OF_SGD
    if train.optimizer in (ADAMW, MUON):
        yield from OF_ADAMW
        for num, what in units.items():
            cause = f"the count of updates counts {what}"
            yield Hypothesis(
                f"updated with the bias correction of {num} × the step", cause, UpdateFault(count=(num, 0))
            )
    if train.optimizer == MUON:
        yield from OF_MUON
        for parts in sorted(shards - {1}):
            cause = "each rank makes its own shard orthogonal, instead of the whole matrix"
            yield Hypothesis(f"updated by {parts} parts of each matrix", cause, UpdateFault(row_parts=parts))
            for by in ((parts, 1), (1, parts)):
                cause = "the update is scaled by the larger side of a rank's shard, instead of the matrix's"
                yield Hypothesis("updated with the scale of a shard", cause, UpdateFault(size_parts=by))
    yield from _rounded(train)
    if train.optimizer in (ADAMW, MUON):
        yield from _settings(train)


def _rounded(train: TrainConfig) -> Iterator[Hypothesis]:
    for dtype in NARROWER:
        for what, optimizers, states in STATES:
            if train.optimizer in optimizers:
                fault, cause = UpdateFault(stored=dtype, stores=states), f"{what} kept in {dtype} between steps"
                yield Hypothesis(f"updated as if {what} rounded to {dtype}", cause, fault, FaultKind.ROUNDED)
        cause = f"the change of a step is rounded to {dtype}"
        yield Hypothesis("updated by rounded changes", cause, UpdateFault(change=dtype), FaultKind.ROUNDED)


def _settings(train: TrainConfig) -> Iterator[Hypothesis]:
    first, second, betas = train.beta1, train.beta2, "the optimizer has other betas"
    options = [((second, first), "the betas are exchanged"), *((pair, betas) for pair in BETAS)]
    options += [((value, second), betas) for value in (0.0, second, 0.95, 0.99)]
    options += [((first, value), betas) for value in (first, 0.999, 0.95, 0.98, 0.99)]
    for pair, cause in options:
        due = (("beta1", first, pair[0]), ("beta2", second, pair[1]))
        if changed := tuple((key, value) for key, right, value in due if value != right):
            yield _of_keys(train, changed, cause)
    for value in EPSILONS:
        if value != train.eps:
            yield _of_keys(train, (("eps", value),), "the optimizer has another epsilon")


def _of_keys(train: TrainConfig, keys: tuple[tuple[str, float], ...], cause: str) -> Hypothesis:
    listed = ", ".join(f"{key} = {value:g}" for key, value in keys)
    due = ", ".join(f"{getattr(train, key):g}" for key, _ in keys)
    return Hypothesis(f"updated with {listed}", f"{cause}: {listed} instead of {due}", UpdateFault(), keys=keys)
