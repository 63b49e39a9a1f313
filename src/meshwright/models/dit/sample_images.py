"""ImageDataset from a model under training, on whatever layout it is: every rank runs the same forward passes.

DDIM (Song et al. 2021) with classifier-free guidance (Ho and Salimans 2022).

Shapes: n pictures, c channels, f frames, y height, x width; r rows of a forward pass: two for each picture, with its
class and without, or one where guidance is 1 and what is predicted without a class does not count.
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
"""Of a forward pass: pictures are drawn in parts when there are more."""

FIRST_SAMPLE = 1 << 41
"""ImageDataset start from the noise of samples of these numbers, which neither training nor validation reaches."""


@dataclass(frozen=True)
class SampleRequest:
    """The pictures to be drawn."""

    labels: list[int]
    fps: list[int]
    shape: tuple[int, ...]
    """Of each: c, f, y, x."""
    null_class: int
    seed: int


def sample_images(
    forward: Forward,
    diffusion: Diffusion,
    wanted: SampleRequest,
    settings: DiffusionConfig,
    *,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> Tensor:
    """Draw them: numbers around -1 … 1, [n, c, f, y, x], the same on every rank.

    Args:
        forward: of the model.
        diffusion: that it is trained for.
        wanted: classes, rates and noise.
        settings: sampling steps and guidance.
        dtypes: of the samples, and of the model's inputs.
    """
    count = len(wanted.labels)
    samples = range(FIRST_SAMPLE, FIRST_SAMPLE + count)
    x = draw_noise(wanted.seed, samples, wanted.shape, dtypes[0]).to(forward.device)
    is_guided = settings.guidance != 1
    labels = [*wanted.labels, *[wanted.null_class] * count] if is_guided else wanted.labels
    fps = wanted.fps * 2 if is_guided else wanted.fps
    size = min(MAX_ROWS, len(labels))
    num_parts = -(-len(labels) // size)
    timesteps = diffusion.ddim_timesteps(settings.sampling_steps)
    with forward.evaluating(num_parts, size) as run:
        model = _Model(forward, run, labels, fps, dtype=dtypes[1], size=size, num_parts=num_parts)
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
    """The model as a function of noisy rows, on all ranks alike."""

    def __init__(
        self,
        forward: Forward,
        run: RunsForward,
        labels: list[int],
        fps: list[int],
        *,
        dtype: torch.dtype,
        size: int,
        num_parts: int,
    ) -> None:
        self._run, self._source, self._dtype = run, forward.source, dtype
        self._labels, self._fps = (torch.tensor(numbers, device=forward.device) for numbers in (labels, fps))
        self._size, self._num_parts = size, num_parts

    def __call__(self, rows: Tensor, timestep: int) -> Tensor:
        """The prediction for every row, [r, c, f, y, x]."""
        missing = self._num_parts * self._size - len(rows)  # the last part is filled up with the first rows
        x, labels, fps = (torch.cat((y, y[:missing])) for y in (rows.to(self._dtype), self._labels, self._fps))
        steps = torch.full((self._size,), timestep, device=x.device)
        parts = [slice(number * self._size, (number + 1) * self._size) for number in range(self._num_parts)]
        found = self._run([SimpleBatch(x[part], (steps, labels[part], fps[part])) for part in parts])
        out = torch.cat(found) if found else torch.empty_like(x)
        return broadcast(out.contiguous(), src=self._source)[: len(rows)]
