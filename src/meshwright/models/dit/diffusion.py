"""Diffusion: the forward (noising) process, prediction targets and DDIM sampling.

x_t = alpha_t · x + sigma_t · noise, with alpha² + sigma² = 1 (Ho et al. 2020; Kingma et al. 2021). Timesteps start at
0, the least noisy; no timestep is free of noise.

Shapes: b batch; samples are [b, …].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.models.dit.noise_schedule import NoiseSchedule, Prediction, signal_variances


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

        Args:
            prediction: the model's prediction for x_t.
            x_t: noisy samples at `timestep_b`.
            timestep_b: current timesteps.
            next_b: next timesteps; None for the last step, which returns clean samples.
            clamp_sample: clamp the predicted clean sample to [-1, 1], the range of the data.
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
