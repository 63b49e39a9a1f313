"""Noise schedules and prediction types of a diffusion."""

from __future__ import annotations

import functools
import math
from enum import Enum

MAX_BETA = 0.999
"""Upper bound on beta, against singularities in the last steps (Nichol and Dhariwal 2021)."""


class NoiseSchedule(Enum):
    """Noise schedule over the timesteps."""

    COSINE = "cosine"
    """The signal's variance falls as a squared cosine (Nichol and Dhariwal 2021, equation 17)."""
    LINEAR = "linear"
    """Beta grows linearly (Ho et al. 2020), scaled to the number of steps."""


class Prediction(Enum):
    """Prediction target of the model."""

    NOISE = "noise"
    """The noise that was added (Ho et al. 2020)."""
    VELOCITY = "velocity"
    """Velocity alpha · noise − sigma · sample (Salimans and Ho 2022), informative at both ends of the schedule."""


@functools.lru_cache
def signal_variances(schedule: NoiseSchedule, num_timesteps: int) -> tuple[float, ...]:
    """Return alpha² of each timestep, the least noisy first; sigma² is 1 − alpha²."""
    betas = _cosine_betas(num_timesteps) if schedule is NoiseSchedule.COSINE else _linear_betas(num_timesteps)
    variance, variances = 1.0, []
    for beta in betas:
        variance *= 1.0 - min(beta, MAX_BETA)
        variances.append(variance)
    return tuple(variances)


def _cosine_betas(num_timesteps: int) -> list[float]:
    offset = 0.008

    def level(step: int) -> float:
        return math.cos((step / num_timesteps + offset) / (1 + offset) * math.pi / 2) ** 2

    return [1.0 - level(step + 1) / level(step) for step in range(num_timesteps)]


def _linear_betas(num_timesteps: int) -> list[float]:
    first, last = 0.1 / num_timesteps, 20.0 / num_timesteps  # 0.0001 and 0.02 for the paper's 1000 steps
    return [first + (last - first) * step / max(1, num_timesteps - 1) for step in range(num_timesteps)]
