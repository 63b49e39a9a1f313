"""Pictures from a model under training, on whatever layout it lies: every rank runs the same forward passes.

DDIM (Song et al. 2021) with classifier-free guidance (Ho and Salimans 2022).

Shapes: n pictures, c channels, f frames, y height, x width; r rows of a forward pass: two for each picture, with its
class and without, or one where guidance is 1 and what is predicted without a class does not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.comm.collectives import broadcast
from meshwright.config.schema import DiffusionConfig
from meshwright.models.diffusion import Diffusion, guided
from meshwright.models.draws import draw_noise
from meshwright.parallel.data import reshard
from meshwright.pipeline.lower import forward_only, lower
from meshwright.train.build import COMPUTE_DTYPES, MASTER_DTYPES
from meshwright.train.stages import Pipeline, SimpleBatch

MAX_ROWS = 256
"""Of a forward pass: pictures are drawn in parts when there are more."""

FIRST_SAMPLE = 1 << 41
"""Pictures start from the noise of samples of these numbers, which neither training nor validation reaches."""


@dataclass(frozen=True)
class Wanted:
    """The pictures to be drawn."""

    labels: list[int]
    fps: list[int]
    shape: tuple[int, ...]
    """Of each: c, f, y, x."""
    null_class: int
    seed: int


def draw_pictures(pipeline: Pipeline, diffusion: Diffusion, wanted: Wanted, settings: DiffusionConfig) -> Tensor:
    """Draw them: numbers around -1 … 1, [n, c, f, y, x], the same on every rank."""
    job = pipeline.job
    count, precision = len(wanted.labels), job.config.train.precision
    samples = range(FIRST_SAMPLE, FIRST_SAMPLE + count)
    x = draw_noise(wanted.seed, samples, wanted.shape, MASTER_DTYPES[precision]).to(job.device)
    is_guided = settings.guidance != 1
    labels = [*wanted.labels, *[wanted.null_class] * count] if is_guided else wanted.labels
    fps = wanted.fps * 2 if is_guided else wanted.fps
    model = _Model(pipeline, labels, fps, COMPUTE_DTYPES[precision])
    job.model.eval()
    timesteps = diffusion.ddim_timesteps(settings.sampling_steps)
    for timestep, following in zip(timesteps, [*timesteps[1:], None], strict=True):
        prediction = model(torch.cat((x, x)) if is_guided else x, timestep).to(x.dtype)
        if is_guided:
            conditional, unconditional = prediction.chunk(2)
            prediction = guided(conditional, unconditional, settings.guidance)
        at = torch.full((count,), timestep, device=x.device)
        to = None if following is None else torch.full_like(at, following)
        x = diffusion.ddim_step(prediction, x, at, to, clamps=True)
    job.model.train()
    reshard(job.model)
    return x


class _Model:
    """The model as a function of noisy rows, on all ranks alike."""

    def __init__(self, pipeline: Pipeline, labels: list[int], fps: list[int], dtype: torch.dtype) -> None:
        job, num_rows = pipeline.job, len(labels)
        self._pipeline, self._dtype = pipeline, dtype
        self._labels, self._fps = (torch.tensor(numbers, device=job.device) for numbers in (labels, fps))
        self._size = min(MAX_ROWS, num_rows)
        self._num_parts = -(-num_rows // self._size)
        table = lower(forward_only(self._num_parts, job.schedule.stage_ranks))
        self._executor = pipeline.executor(table, batch_size=self._size)
        self._source = job.axes.rank(pp=job.schedule.stage_ranks[-1])

    def __call__(self, rows: Tensor, timestep: int) -> Tensor:
        """The prediction for every row, [r, c, f, y, x]."""
        missing = self._num_parts * self._size - len(rows)  # the last part is filled up with the first rows
        x, labels, fps = (torch.cat((y, y[:missing])) for y in (rows.to(self._dtype), self._labels, self._fps))
        steps = torch.full((self._size,), timestep, device=x.device)
        found: list[Tensor] = []

        def batch(number: int) -> SimpleBatch:
            part = slice(number * self._size, (number + 1) * self._size)
            return SimpleBatch(x[part], (steps, labels[part], fps[part]))

        def finish(out: Tensor, targets: Tensor) -> Tensor:
            found.append(out)
            return out

        self._pipeline.feed.batch, self._pipeline.feed.finish = batch, finish
        self._executor.run()
        out = torch.cat(found) if found else torch.empty_like(x)
        return broadcast(out.contiguous(), src=self._source)[: len(rows)]
