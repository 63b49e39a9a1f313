"""Learning rate schedules: cosine with warm-up, and warm-up–stable–decay (Hu et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwright.config.schema import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate for `step`, which counts from 1 to `config.steps`."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.lr_schedule == "cosine":
        progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
        factor = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    else:
        stable_until = config.steps - config.decay_steps
        factor = 1.0 if step <= stable_until else max(0.0, (config.steps - step) / config.decay_steps)
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * factor)


def warmup_notes(config: TrainConfig) -> Iterator[str]:
    """Yield a note if the warm-up is longer than the run, which is common in short trials of long runs."""
    if config.warmup_steps > config.steps:
        reached = learning_rate(config.steps, config)
        yield (
            f"train.warmup_steps = {config.warmup_steps} exceeds train.steps = {config.steps}: "
            f"the learning rate only reaches {reached:.3g}, not train.lr = {config.lr:g}"
        )
