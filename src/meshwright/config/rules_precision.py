"""Rules against underflow in the compute dtype."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError
from meshwright.settings.violation import Violation

SMALLEST_FLOAT32 = 2.0**-126
"""Smallest normal float32; devices may flush subnormal numbers to zero."""


def precision_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield a violation for each epsilon that would underflow to zero and cause a division by zero."""
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
                f"an epsilon prevents division by zero: with train.precision = {config.train.precision} "
                f"it must be at least {SMALLEST_FLOAT32:.3g}",
                [{key: type(section).model_fields[name].default}, {"train.precision": "float64"}],
            )
