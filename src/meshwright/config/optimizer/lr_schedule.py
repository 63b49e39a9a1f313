"""Learning rate schedules: cosine with warm-up, warm-up–stable–decay (Hu et al. 2024), and the user's own."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator
from functools import cache
from numbers import Real
from typing import Any

from meshwright.config.schema import RunConfig, TrainConfig
from meshwright.config.translate import value_named
from meshwright.errors import ConfigError
from meshwright.settings.import_object import OBJECT_NAME, import_object, raised
from meshwright.settings.violation import Violation

KEY = "train.lr_schedule"
COSINE, WSD = "cosine", "wsd"
RULE = f"a schedule is {COSINE}, {WSD}, or package.module:function for your own"
OWN_RULE = "a function of the step, from 1, and the train section gives the learning rate: finite, and at least 0"
MAX_TRIED = 1000
"""Steps of an own schedule that are tried before a run."""


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate for `step`, which counts from 1; proofs go beyond `config.steps`.

    Raises:
        ConfigError: an own schedule raises, or gives no learning rate.
    """
    if config.lr_schedule not in (COSINE, WSD):
        return own_rate(step, config)
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.lr_schedule == COSINE:
        progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
        factor = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    else:
        stable_until = config.steps - config.decay_steps
        factor = 1.0 if step <= stable_until else max(0.0, (config.steps - step) / max(1, config.decay_steps))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * factor)


def own_rate(step: int, config: TrainConfig) -> float:
    """Return what the user's function gives for a step.

    Raises:
        ConfigError: it can't be imported, raises, or gives no learning rate.
    """
    name = config.lr_schedule
    function = _own(name)
    try:
        rate = function(step, config)
    except Exception as error:
        raise _bad(f"{name} raises {raised(error)} in step {step}") from error
    if isinstance(rate, bool) or not isinstance(rate, Real) or not 0 <= float(rate) < math.inf:
        raise _bad(f"{name} gives {rate!r} in step {step}")
    return float(rate)


@cache
def _own(name: str) -> Callable[[int, TrainConfig], Any]:
    found: Callable[[int, TrainConfig], Any] = import_object(
        name, key=KEY, rule=OWN_RULE, format_setting=lambda path: f"{KEY}={path}"
    )
    return found


def _bad(what: str) -> ConfigError:
    return ConfigError(what, where=KEY, rule=OWN_RULE, fix=f"correct it, or {KEY}={COSINE}")


def schedule_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield violations of the rules for `train.lr_schedule` and its lengths; an own schedule is tried on some steps.

    Raises:
        ConfigError: an own schedule can't be imported, raises, or gives no learning rate.
    """
    train = config.train
    if train.lr_schedule not in (COSINE, WSD):
        if OBJECT_NAME.fullmatch(train.lr_schedule) is None:
            name = train.lr_schedule
            near = value_named(KEY, name) or next(iter(difflib.get_close_matches(name.lower(), (COSINE, WSD))), COSINE)
            yield Violation(ConfigError, f"unknown schedule: {name}", KEY, RULE, [{KEY: near}])
            return
        for step in range(1, train.steps + 1, -(-train.steps // MAX_TRIED)):
            own_rate(step, train)
        own_rate(train.steps, train)
    room = max(0, train.steps - train.warmup_steps)
    if train.lr_schedule == WSD and train.decay_steps > room:
        yield Violation(
            ConfigError,
            f"warm-up of {train.warmup_steps} and decay of {train.decay_steps} exceed {train.steps} steps",
            "train.decay_steps",
            "warmup_steps + decay_steps ≤ steps",
            [{"train.decay_steps": room}, {"train.steps": train.warmup_steps + train.decay_steps}],
        )


def warmup_notes(config: TrainConfig) -> Iterator[str]:
    """Yield a note if the warm-up is longer than the run, which is common in short trials of long runs."""
    if config.warmup_steps > config.steps and config.lr_schedule in (COSINE, WSD):
        reached = learning_rate(config.steps, config)
        yield (
            f"train.warmup_steps = {config.warmup_steps} exceeds train.steps = {config.steps}: "
            f"the learning rate only reaches {reached:.3g}, not train.lr = {config.lr:g}"
        )
