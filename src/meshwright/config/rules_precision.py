"""Rules of numbers that must not vanish in what they are computed in."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError
from meshwright.settings.violation import Violation

SMALLEST_FLOAT32 = 2.0**-126
"""The smallest normal one: devices may take smaller ones for 0."""


def number_violations(config: RunConfig) -> Iterator[Violation]:
    """The epsilons that are 0 where they are added, so that 0 is divided by 0."""
    if config.train.precision == "float64":
        return
    for section, name in ((config.train, "eps"), (config.model, "norm_eps")):
        value = getattr(section, name, 1.0)
        if value < SMALLEST_FLOAT32:
            key = f"{'train' if section is config.train else 'model'}.{name}"
            yield Violation(
                ConfigError,
                f"{key} = {value} is 0 in float32",
                key,
                f"an epsilon keeps 0 from being divided by 0: with train.precision = {config.train.precision} "
                f"it is at least {SMALLEST_FLOAT32:.3g}",
                [{key: type(section).model_fields[name].default}, {"train.precision": "float64"}],
            )
