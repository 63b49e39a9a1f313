"""References with known faults of the optimizer, for a proof whose gradients are right and whose parameters are not."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.config.schema import RunConfig
from meshwright.models.contract.family import TrainingData
from meshwright.prove.record.evidence import Variant
from meshwright.prove.record.plain_optimizer import PlainAdamW
from meshwright.prove.record.reference_run import compute_reference

MANY = 1_000_000
"""More steps than a proof has."""

FAULTS: tuple[tuple[str, str, PlainAdamW], ...] = (
    ("gradients that are not clipped", "clipping is missing", PlainAdamW(clip="none")),
    (
        "each tensor's gradient clipped by its own norm",
        "clipping uses the norm of each tensor instead of the global norm",
        PlainAdamW(clip="tensor"),
    ),
    ("gradients clipped twice", "clipping is applied twice", PlainAdamW(clip="twice")),
    ("moments without bias correction", "the bias correction is missing", PlainAdamW(corrects_bias=False)),
    (
        "a first moment that starts from zero in every step",
        "the first moment is stale: it is not kept from step to step",
        PlainAdamW(keeps_first=False),
    ),
    (
        "a second moment that starts from zero in every step",
        "the second moment is stale: it is not kept from step to step",
        PlainAdamW(keeps_second=False),
    ),
    (
        "moments that start from zero in every step",
        "both moments are stale: they are not kept from step to step",
        PlainAdamW(keeps_first=False, keeps_second=False),
    ),
    ("no weight decay", "weight decay is missing", PlainAdamW(decay="none")),
    ("weight decay of all parameters", "norms and biases decay too, and should not", PlainAdamW(decay="all")),
    ("weight decay of vectors only", "weight decay is applied to the wrong parameters", PlainAdamW(decay="vectors")),
    (
        "weight decay in the gradient",
        "weight decay is added to the gradient (L2 regularisation) instead of to the weights",
        PlainAdamW(decay="gradient"),
    ),
    ("twice the weight decay", "weight decay is applied twice", PlainAdamW(decay_factor=2.0)),
    ("epsilon under the root", "epsilon is added to the variance, not to its root", PlainAdamW(epsilon_inside=True)),
    ("the learning rate of the step before", "the learning rate is one step behind", PlainAdamW(late=1)),
    ("the learning rate of the next step", "the learning rate is one step ahead", PlainAdamW(late=-1)),
    ("the learning rate without warm-up", "the learning rate's schedule is missing", PlainAdamW(constant=True)),
    ("each update applied twice", "the optimizer steps twice", PlainAdamW(times=2)),
    ("Nesterov momentum", "the update uses Nesterov momentum (NAdam)", PlainAdamW(nesterov=True)),
    (
        "gradients summed over the steps",
        "gradients are not cleared between steps",
        PlainAdamW(sums_gradients=True),
    ),
)  # fmt: skip
"""What differs, the cause, and the optimizer."""

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
        for what, cause, optimizer in FAULTS:
            yield self._run(what, cause, self._config, optimizer)
        for late, what, cause in LATE_WEIGHTS:
            evidence = compute_reference(self._config, self._data, num_steps=self._num_steps, weights_late=late)
            yield Variant(what, cause, evidence)
        train = self._config.train
        for keys, cause in self._settings(train.beta1, train.beta2, train.eps):
            listed = ", ".join(f"{key} = {value:g}" for key, value in keys.items())
            due = ", ".join(f"{getattr(train, key):g}" for key in keys)
            other = self._config.with_keys({f"train.{key}": value for key, value in keys.items()})
            yield self._run(listed, f"{cause}: {listed} instead of {due}", other, PlainAdamW())

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

    def _run(self, what: str, cause: str, config: RunConfig, optimizer: PlainAdamW) -> Variant:
        evidence = compute_reference(config, self._data, num_steps=self._num_steps, optimizer=optimizer)
        return Variant(what, cause, evidence)
