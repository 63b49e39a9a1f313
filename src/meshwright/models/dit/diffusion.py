"""Diffusion: noise schedules, the forward (noising) process, prediction targets, DDIM sampling and random draws.

x_t = alpha_t · x + sigma_t · noise, with alpha² + sigma² = 1 (Ho et al. 2020; Kingma et al. 2021). Timesteps start at
0, the least noisy; no timestep is free of noise.

Each draw is a function of the seed, the sample's index in the run and its purpose. It is therefore the same on every
layout, micro-batch size and pipeline stage, and in a resumed run.

Shapes: b batch; samples are [b, …].
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

MAX_BETA = 0.999
"""Upper bound on beta, against singularities in the last steps (Nichol and Dhariwal 2021)."""


class NoiseSchedule(Enum):
    COSINE = "cosine"
    """The signal's variance falls as a squared cosine (Nichol and Dhariwal 2021, equation 17)."""
    LINEAR = "linear"
    """Beta grows linearly (Ho et al. 2020), scaled to the number of steps."""


class Prediction(Enum):
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


@dataclass(frozen=True)
class Diffusion:
    """Noising process and prediction target. Computes in the samples' dtype, with factors computed in float64."""

    num_timesteps: int = 1000
    schedule: NoiseSchedule = NoiseSchedule.COSINE
    prediction: Prediction = Prediction.NOISE

    def signal_and_noise(self, timestep_b: Tensor) -> tuple[Tensor, Tensor]:
        """Return alpha and sigma of each timestep, in float64."""
        variances = signal_variances(self.schedule, self.num_timesteps)
        variance_b = torch.tensor(variances, dtype=torch.float64, device=timestep_b.device)[timestep_b]
        return variance_b.sqrt(), (1.0 - variance_b).sqrt()

    def add_noise(self, x: Tensor, noise: Tensor, timestep_b: Tensor) -> Tensor:
        """Return the noisy samples x_t."""
        alpha, sigma = self._factors(timestep_b, x)
        return alpha * x + sigma * noise

    def target(self, x: Tensor, noise: Tensor, timestep_b: Tensor) -> Tensor:
        """Return the prediction target for these samples with this noise added."""
        if self.prediction is Prediction.NOISE:
            return noise
        alpha, sigma = self._factors(timestep_b, x)
        return alpha * noise - sigma * x

    def to_noise_and_sample(self, prediction: Tensor, x_t: Tensor, timestep_b: Tensor) -> tuple[Tensor, Tensor]:
        """Convert a prediction into the noise and the clean sample it implies."""
        alpha, sigma = self._factors(timestep_b, x_t)
        if self.prediction is Prediction.NOISE:
            return prediction, (x_t - sigma * prediction) / alpha
        return sigma * x_t + alpha * prediction, alpha * x_t - sigma * prediction

    def ddim_timesteps(self, num_steps: int) -> list[int]:
        """Return the sampling timesteps, evenly spaced, starting from the noisiest.

        Includes the last timestep, where the model was trained on nearly pure noise (Lin et al. 2023, section 3.3).
        """
        assert 1 <= num_steps <= self.num_timesteps, f"{num_steps} steps of {self.num_timesteps}"
        return [self.num_timesteps * step // num_steps - 1 for step in range(num_steps, 0, -1)]

    def ddim_step(
        self, prediction: Tensor, x_t: Tensor, timestep_b: Tensor, next_b: Tensor | None, *, clamp_sample: bool = False
    ) -> Tensor:
        """Take one step of deterministic DDIM sampling (Song et al. 2021, equation 12 with no noise added).

        The last step, where `next_b` is None, returns clean samples. `clamp_sample` clamps the predicted clean sample
        to [-1, 1], the range of the data.
        """
        noise, sample = self.to_noise_and_sample(prediction, x_t, timestep_b)
        if clamp_sample:
            sample = sample.clamp(-1.0, 1.0)
            alpha, sigma = self._factors(timestep_b, x_t)
            noise = (x_t - alpha * sample) / sigma
        return sample if next_b is None else self.add_noise(sample, noise, next_b)

    def _factors(self, timestep_b: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return alpha and sigma, broadcastable to samples and in their dtype."""
        alpha_b, sigma_b = self.signal_and_noise(timestep_b)
        shape = (-1, *[1] * (like.dim() - 1))
        return alpha_b.view(shape).to(like.dtype), sigma_b.view(shape).to(like.dtype)


def apply_guidance(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Apply classifier-free guidance (Ho and Salimans 2022).

    A scale of 1 returns the conditional prediction, 0 the unconditional one.
    """
    return conditional + (scale - 1.0) * (conditional - unconditional)


def draw_timesteps(seed: int, samples: range, num_timesteps: int) -> Tensor:
    """Draw a uniformly distributed timestep for each sample; int64."""
    # Bias of the remainder of a 63-bit number: relative differences of at most num_timesteps / 2⁶³.
    return torch.tensor([_number(seed, "timestep", i) % num_timesteps for i in samples], dtype=torch.int64)


def draw_label_drops(seed: int, samples: range, rate: float) -> Tensor:
    """Draw a bool for each sample that is true if its label is dropped."""
    return torch.tensor([_number(seed, "drop", i) < rate * 2.0**63 for i in samples], dtype=torch.bool)


def draw_noise(seed: int, samples: range, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Draw standard normal noise [b, *shape] on the CPU, in float32 and then cast, so that dtypes agree to rounding."""
    noise = torch.empty((len(samples), *shape), dtype=torch.float32)
    for row, sample in zip(noise, samples, strict=True):
        row.normal_(generator=torch.Generator().manual_seed(_number(seed, "noise", sample)))
    return noise.to(dtype)


def _number(seed: int, site: str, sample: int) -> int:
    """Hash the arguments to a 63-bit integer."""
    digest = hashlib.sha256(f"draw/{seed}/{site}/{sample}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
