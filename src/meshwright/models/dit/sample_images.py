"""Sample images and videos from a model during training, on any layout: all ranks run the same forward passes.

Uses DDIM (Song et al. 2021) with classifier-free guidance (Ho and Salimans 2022).

Shapes: n samples, c channels, f frames, y height, x width; r rows of a forward pass: two per sample, with and without
its class, or one if guidance is 1 and the unconditional prediction is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.comm.collectives import broadcast
from meshwright.models.contract.task import Forward, RunsForward, SimpleBatch
from meshwright.models.dit.config import DiffusionConfig
from meshwright.models.dit.diffusion import Diffusion, apply_guidance
from meshwright.models.dit.training_noise import draw_noise

MAX_ROWS = 256
"""Maximum rows per forward pass; more are split into batches."""

FIRST_SAMPLE = 1 << 41
"""First sample index for the initial noise, out of reach of training and validation."""


@dataclass(frozen=True)
class SampleRequest:
    """Specification of the samples to generate."""

    labels: list[int]
    fps: list[int]
    shape: tuple[int, ...]
    """Shape of each sample: c, f, y, x."""
    null_class: int
    seed: int


def sample_images(
    forward: Forward,
    diffusion: Diffusion,
    request: SampleRequest,
    settings: DiffusionConfig,
    *,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> Tensor:
    """Generate samples [n, c, f, y, x], with values around -1 … 1, identical on all ranks.

    Args:
        forward: runs the model's forward pass.
        diffusion: the diffusion the model is trained for.
        request: classes, frame rates and seed of the samples.
        settings: sampling steps and guidance.
        dtypes: dtype of the samples, and of the model's inputs.
    """
    count = len(request.labels)
    samples = range(FIRST_SAMPLE, FIRST_SAMPLE + count)
    x = draw_noise(request.seed, samples, request.shape, dtypes[0]).to(forward.device)
    is_guided = settings.guidance != 1
    labels = [*request.labels, *[request.null_class] * count] if is_guided else request.labels
    fps = request.fps * 2 if is_guided else request.fps
    size = min(MAX_ROWS, len(labels))
    num_batches = -(-len(labels) // size)
    timesteps = diffusion.ddim_timesteps(settings.sampling_steps)
    with forward.evaluating(num_batches, size) as run:
        model = _Model(forward, run, labels, fps, dtype=dtypes[1], size=size, num_batches=num_batches)
        for timestep, following in zip(timesteps, [*timesteps[1:], None], strict=True):
            prediction = model(torch.cat((x, x)) if is_guided else x, timestep).to(x.dtype)
            if is_guided:
                conditional, unconditional = prediction.chunk(2)
                prediction = apply_guidance(conditional, unconditional, settings.guidance)
            at = torch.full((count,), timestep, device=x.device)
            to = None if following is None else torch.full_like(at, following)
            x = diffusion.ddim_step(prediction, x, at, to, clamp_sample=True)
    return x


class _Model:
    """The distributed model as a function of noisy rows, called on all ranks."""

    def __init__(
        self,
        forward: Forward,
        run: RunsForward,
        labels: list[int],
        fps: list[int],
        *,
        dtype: torch.dtype,
        size: int,
        num_batches: int,
    ) -> None:
        self._run, self._source, self._dtype = run, forward.source, dtype
        self._labels, self._fps = (torch.tensor(numbers, device=forward.device) for numbers in (labels, fps))
        self._size, self._num_batches = size, num_batches

    def __call__(self, rows: Tensor, timestep: int) -> Tensor:
        """Predict every row, [r, c, f, y, x]."""
        padding = self._num_batches * self._size - len(rows)  # the last batch is padded with the first rows
        x, labels, fps = (torch.cat((y, y[:padding])) for y in (rows.to(self._dtype), self._labels, self._fps))
        steps = torch.full((self._size,), timestep, device=x.device)
        slices = [slice(number * self._size, (number + 1) * self._size) for number in range(self._num_batches)]
        outputs = self._run([SimpleBatch(x[rows_of], (steps, labels[rows_of], fps[rows_of])) for rows_of in slices])
        out = torch.cat(outputs) if outputs else torch.empty_like(x)
        return broadcast(out.contiguous(), src=self._source)[: len(rows)]
