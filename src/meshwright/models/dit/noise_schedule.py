"""What noise a diffusion adds when, as a value: the kinds there are, and the schedules' numbers. Torch-free."""

from __future__ import annotations

import functools
import math
from enum import Enum

MAX_BETA = 0.999
"""Most of the variance that one step may replace (Nichol and Dhariwal 2021): the last steps would replace all."""


class NoiseSchedule(Enum):
    """How the noise grows with the timestep."""

    COSINE = "cosine"
    """The signal's variance falls as a squared cosine (Nichol and Dhariwal 2021, equation 17)."""
    LINEAR = "linear"
    """The variance that a step replaces grows linearly (Ho et al. 2020), scaled to the number of steps."""


class Prediction(Enum):
    """What the model is asked for."""

    NOISE = "noise"
    """The noise that was added (Ho et al. 2020)."""
    VELOCITY = "velocity"
    """alpha · noise − sigma · sample (Salimans and Ho 2022), which asks for something at either end."""


@functools.lru_cache
def signal_variances(schedule: NoiseSchedule, num_timesteps: int) -> tuple[float, ...]:
    """alpha² of each timestep, the least noisy first; sigma² is what is missing to 1."""
    betas = _cosine_betas(num_timesteps) if schedule is NoiseSchedule.COSINE else _linear_betas(num_timesteps)
    kept, variances = 1.0, []
    for beta in betas:
        kept *= 1.0 - min(beta, MAX_BETA)
        variances.append(kept)
    return tuple(variances)


def _cosine_betas(num_timesteps: int) -> list[float]:
    offset = 0.008

    def level(step: int) -> float:
        return math.cos((step / num_timesteps + offset) / (1 + offset) * math.pi / 2) ** 2

    return [1.0 - level(step + 1) / level(step) for step in range(num_timesteps)]


def _linear_betas(num_timesteps: int) -> list[float]:
    first, last = 0.1 / num_timesteps, 20.0 / num_timesteps  # 0.0001 and 0.02 of the paper's 1000 steps
    return [first + (last - first) * step / max(1, num_timesteps - 1) for step in range(num_timesteps)]
