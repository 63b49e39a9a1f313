"""Random draws for diffusion training samples: timesteps, noise and label dropout.

Each draw is a function of the seed, the sample's index in the run and its purpose. It is therefore the same on every
layout, micro-batch size and pipeline stage, and in a resumed run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


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
