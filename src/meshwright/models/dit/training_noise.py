"""What is drawn for a training sample of a diffusion: its timestep, its noise, and whether its label is dropped.

Each is a function of the seed, the sample's number in the whole run, and what it is for. So it is the same on every
layout, for every micro-batch size and on every stage, and a run that goes on draws what it would have drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def draw_timesteps(seed: int, samples: range, num_timesteps: int) -> Tensor:
    """A timestep for each sample, all as likely; int64."""
    # The remainder of a 63-bit number: no timestep is likelier than another by more than 1 in 2⁶³ / num_timesteps.
    return torch.tensor([_number(seed, "timestep", i) % num_timesteps for i in samples], dtype=torch.int64)


def draw_label_drops(seed: int, samples: range, rate: float) -> Tensor:
    """Whether the model isn't told the label of each sample; bool."""
    return torch.tensor([_number(seed, "drop", i) < rate * 2.0**63 for i in samples], dtype=torch.bool)


def draw_noise(seed: int, samples: range, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Standard normal noise [b, *shape] on the CPU: drawn in float32, so that every dtype has the same to rounding."""
    noise = torch.empty((len(samples), *shape), dtype=torch.float32)
    for row, sample in zip(noise, samples, strict=True):
        row.normal_(generator=torch.Generator().manual_seed(_number(seed, "noise", sample)))
    return noise.to(dtype)


def _number(seed: int, site: str, sample: int) -> int:
    """63 bits that look random."""
    digest = hashlib.sha256(f"draw/{seed}/{site}/{sample}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
