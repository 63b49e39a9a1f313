"""References with known faults of the optimizer, for a proof whose gradients are right and whose parameters are not."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.models.contract.family import TrainingData
from meshwright.models.contract.task import Reference
from meshwright.prove.record.evidence import ReferenceEvidence, Variant
from meshwright.prove.record.plain_optimizer import PlainOptimizer
from meshwright.prove.record.plain_updates import UpdateFaults
from meshwright.prove.record.reference_run import compute_reference

ADAMW, SGD, MUON = "adamw", "sgd", "muon"
MANY = 1_000_000
"""More steps than a proof has."""

FAULTS: tuple[tuple[str, str, PlainOptimizer], ...] = (
    ("gradients that are not clipped", "clipping is missing", PlainOptimizer(clip="none")),
    (
        "each tensor's gradient clipped by its own norm",
        "clipping uses the norm of each tensor instead of the global norm",
        PlainOptimizer(clip="tensor"),
    ),
    ("gradients clipped twice", "clipping is applied twice", PlainOptimizer(clip="twice")),
    ("no weight decay", "weight decay is missing", PlainOptimizer(decay="none")),
    ("weight decay of all parameters", "norms and biases decay too, and should not", PlainOptimizer(decay="all")),
    (
        "weight decay of vectors only",
        "weight decay is applied to the wrong parameters",
        PlainOptimizer(decay="vectors"),
    ),
    (
        "weight decay in the gradient",
        "weight decay is added to the gradient (L2 regularisation) instead of to the weights",
        PlainOptimizer(decay="gradient"),
    ),
    ("twice the weight decay", "weight decay is applied twice", PlainOptimizer(decay_factor=2.0)),
    ("the learning rate of the step before", "the learning rate is one step behind", PlainOptimizer(late=1)),
    ("the learning rate of the next step", "the learning rate is one step ahead", PlainOptimizer(late=-1)),
    ("the learning rate without warm-up", "the learning rate's schedule is missing", PlainOptimizer(constant=True)),
    ("each update applied twice", "the optimizer steps twice", PlainOptimizer(times=2)),
    (
        "gradients summed over the steps",
        "gradients are not cleared between steps",
        PlainOptimizer(sums_gradients=True),
    ),
)  # fmt: skip
"""What differs, the cause, and the optimizer."""

ADAMW_FAULTS = (
    ("moments without bias correction", "the bias correction is missing", UpdateFaults(corrects_bias=False)),
    (
        "a first moment that starts from zero in every step",
        "the first moment is stale: it is not kept from step to step",
        UpdateFaults(keeps_first=False),
    ),
    (
        "a second moment that starts from zero in every step",
        "the second moment is stale: it is not kept from step to step",
        UpdateFaults(keeps_second=False),
    ),
    (
        "moments that start from zero in every step",
        "both moments are stale: they are not kept from step to step",
        UpdateFaults(keeps_first=False, keeps_second=False),
    ),
    ("epsilon under the root", "epsilon is added to the variance, not to its root", UpdateFaults(epsilon_inside=True)),
    ("Nesterov momentum", "the update uses Nesterov momentum (NAdam)", UpdateFaults(nesterov=True)),
)
SGD_FAULTS = (
    (
        "momentum that starts from zero in every step",
        "momentum is stale: it is not kept from step to step",
        UpdateFaults(keeps_momentum=False),
    ),
)
MUON_FAULTS = (
    *SGD_FAULTS,
    ("momentum that is not Nesterov's", "the momentum is not Nesterov's", UpdateFaults(plain_momentum=True)),
    ("six iterations", "Newton and Schulz iterate once too often", UpdateFaults(rounds=6)),
    ("four iterations", "Newton and Schulz iterate once too little", UpdateFaults(rounds=4)),
)

LATE_WEIGHTS = (
    (
        1,
        "the weights of the step before",
        "forward and backward use weights that are one step late: they are gathered before the update",
    ),
    (
        MANY,
        "the initial weights in every step",
        "forward and backward never see the updates: gathered weights are kept and not gathered again",
    ),
)
"""Steps by which the weights are late, what differs, and the cause."""


class OptimizerVariants:
    """Faulty references of the optimizer."""

    def __init__(self, config: RunConfig, data: TrainingData, *, num_steps: int) -> None:
        self._config, self._data, self._num_steps = config, data, num_steps

    def of_first_step(self) -> Iterator[Variant]:
        """Yield nothing: gradients don't depend on the optimizer."""
        yield from ()

    def of_later_steps(self) -> Iterator[Variant]:
        """Yield the variants, computed for all steps."""
        faults = (*FAULTS, *((what, cause, PlainOptimizer(update=fault)) for what, cause, fault in self._updates()))
        for what, cause, optimizer in faults:
            yield self._run(what, cause, self._config, optimizer)
        for late, what, cause in LATE_WEIGHTS:
            yield Variant(what, cause, self._reference(self._config, weights_late=late))
        train = self._config.train
        if train.optimizer not in (ADAMW, MUON):
            return
        for keys, cause in self._settings(train.beta1, train.beta2, train.eps):
            listed = ", ".join(f"{key} = {value:g}" for key, value in keys.items())
            due = ", ".join(f"{getattr(train, key):g}" for key in keys)
            other = self._config.with_keys({f"train.{key}": value for key, value in keys.items()})
            yield self._run(listed, f"{cause}: {listed} instead of {due}", other, PlainOptimizer())

    def _updates(self) -> Iterator[tuple[str, str, UpdateFaults]]:
        """Yield faults of the configured optimizer's update."""
        name, axes = self._config.train.optimizer, self._config.mesh.axes()
        if name in (ADAMW, MUON):
            yield from ADAMW_FAULTS
        if name == SGD:
            yield from SGD_FAULTS
        if name == MUON:
            yield from MUON_FAULTS
            for parts in sorted({axes.dp_shard * axes.cp, axes.tp, axes.dp_shard * axes.cp * axes.tp} - {1}):
                cause = "each rank makes its own shard orthogonal, instead of the whole matrix"
                yield (
                    f"{parts} parts of a matrix's rows made orthogonal one by one",
                    cause,
                    UpdateFaults(row_parts=parts),
                )

    def _settings(self, beta1: float, beta2: float, eps: float) -> Iterator[tuple[dict[str, float], str]]:
        betas = "the optimizer has other betas"
        yield {"beta1": beta2, "beta2": beta1}, "the betas are exchanged"
        for first, second in ((0.9, 0.999), (0.9, 0.95), (0.9, 0.98), (0.0, beta2), (beta1, beta1), (beta2, beta2)):
            changed = {"beta1": first} if first != beta1 else {}
            changed |= {"beta2": second} if second != beta2 else {}
            if changed:
                yield changed, betas
        for other in (0.999, 0.95, 0.98, 0.99):
            if other != beta2:
                yield {"beta2": other}, betas
        for exponent in (-16, -15, -12, -10, -8, -7, -6, -5, -4, -3):
            if 10.0**exponent != eps:
                yield {"eps": 10.0**exponent}, "the optimizer has another epsilon"

    def _run(self, what: str, cause: str, config: RunConfig, optimizer: PlainOptimizer) -> Variant:
        return Variant(what, cause, self._reference(config, optimizer=optimizer))

    def _reference(self, config: RunConfig, **fault: Any) -> ReferenceEvidence:
        return compute_reference(config, self._data, num_steps=self._num_steps, samples_of=self._samples, **fault)

    @cached_property
    def _samples(self) -> Reference:
        return self._config.family.reference(run_facts(self._config), self._data)
