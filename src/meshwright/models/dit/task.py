"""ImageDataset and videos: a diffusion transformer learns to take noise out of them.

Which picture a sample is, its timestep, its noise and whether it is told its class depend on the seed and the sample's
number alone, so every stage and every layout draws the same.

Shapes: b batch, c channels, f frames, y height, x width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.data.image_grid import write_animation, write_grid, write_strip
from meshwright.data.images import DIGITS, ImageDataset
from meshwright.data.loader import validation_windows
from meshwright.data.sampler import WindowOrder
from meshwright.models.contract.loss_unit import LossUnit
from meshwright.models.contract.run_facts import RunFacts
from meshwright.models.contract.task import Batch, Forward, Task
from meshwright.models.dit.config import DiffusionConfig, DiTConfig
from meshwright.models.dit.diffusion import Diffusion
from meshwright.models.dit.digit_classifier import recognition_rates
from meshwright.models.dit.noise_schedule import NoiseSchedule, Prediction
from meshwright.models.dit.sample_images import SampleRequest, sample_images
from meshwright.models.dit.training_noise import draw_label_drops, draw_noise, draw_timesteps
from meshwright.output_files import writing

FIRST_VALIDATION_SAMPLE = 1 << 40
"""Validation draws timesteps and noise as samples of these numbers, which no training reaches."""


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Noisy pictures; noise is drawn only where it is asked for."""

    task: ImageTask
    pixels: NDArray[np.uint8]
    labels: Tensor
    fps: Tensor
    samples: range
    counted: int
    """ImageDataset that count; those after them only fill up."""

    @cached_property
    def timesteps(self) -> Tensor:
        """[b]"""
        task = self.task
        return draw_timesteps(task.seed, self.samples, task.diffusion.num_timesteps).to(task.device)

    @cached_property
    def _clean_and_noise(self) -> tuple[Tensor, Tensor]:
        task = self.task
        shape = self.pixels.shape[1:]
        noise = draw_noise(task.seed, self.samples, shape, task.dtype)
        return to_floats(self.pixels, task.dtype).to(task.device), noise.to(task.device)

    @property
    def inputs(self) -> Tensor:
        """Noisy pictures [b, c, f, y, x]."""
        noisy = self.task.diffusion.add_noise(*self._clean_and_noise, self.timesteps)
        return noisy.to(self.task.compute_dtype)

    @property
    def targets(self) -> Tensor:
        """What is to be predicted, [b, c, f, y, x]; NaN in those that only fill up."""
        targets = self.task.diffusion.target(*self._clean_and_noise, self.timesteps).clone()  # may be the noise itself
        targets[self.counted :] = torch.nan
        return targets

    @property
    def conditions(self) -> tuple[Any, ...]:
        """Timesteps, classes and frame rates, [b] each."""
        return self.timesteps, self.labels.to(self.task.device), self.fps.to(self.task.device)


class ImageTask(Task):
    """Reads pictures in the run's order."""

    unit = LossUnit("squared error")

    def __init__(self, f: RunFacts, pictures: ImageDataset, device: torch.device) -> None:
        self._settings, self._pictures = f.section(DiffusionConfig), pictures
        self._num_validated = f.validation_samples
        self.device, self.seed = device, f.seed
        self.dtype: torch.dtype = getattr(torch, f.master_precision)
        self.compute_dtype: torch.dtype = getattr(torch, f.precision)
        self.diffusion = diffusion_of(self._settings)
        self._null_class = f.section(DiTConfig).num_classes
        self._order = WindowOrder(len(pictures.train), f.seed)
        self.units_a_sample: int = int(np.prod(pictures.train.shape[1:]))

    def batch(self, samples: range) -> Batch:
        """ImageDataset with noise; some without their class."""
        chosen = self._order.windows(samples)
        labels = torch.from_numpy(self._pictures.train_labels[chosen])
        drops = draw_label_drops(self.seed, samples, self._settings.label_dropout)
        labels = torch.where(drops, self._null_class, labels)
        fps = torch.from_numpy(self._pictures.train_fps[chosen])
        return ImageBatch(self, self._pictures.train[chosen], labels, fps, samples, len(samples))

    def loss_sum(self, out: Tensor, targets: Tensor) -> Tensor:
        """Squared errors of the prediction [b, c, f, y, x]."""
        return (out.to(targets.dtype) - targets).square().sum()

    def validation(self, *, batch_size: int, data_parallel: int, data_index: int) -> list[Batch]:
        """Held-out pictures, evenly spread, always with the same noise."""
        pictures = self._pictures
        chosen = validation_windows(len(pictures.validation), self._num_validated)
        first, last = (len(chosen) * index // data_parallel for index in (data_index, data_index + 1))
        num_rows = -(-len(chosen) // data_parallel)
        found: list[Batch] = []
        for start in range(0, num_rows, batch_size):
            own = chosen[first + start : min(first + start + batch_size, last)]
            rows = np.concatenate([own, np.zeros(batch_size - len(own), dtype=np.int64)])
            number = FIRST_VALIDATION_SAMPLE + first + start
            labels, fps = (torch.from_numpy(x[rows]) for x in (pictures.validation_labels, pictures.validation_fps))
            samples = range(number, number + batch_size)
            found.append(ImageBatch(self, pictures.validation[rows], labels, fps, samples, len(own)))
        return found

    def validation_sums(self, out: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """ImageDataset that only fill up count for nothing."""
        counted = ~targets.flatten(1).isnan().any(1)
        return self.loss_sum(out[counted], targets[counted]), counted.sum() * self.units_a_sample

    def after_validation(self, forward: Forward, step: int, folder: Path) -> Mapping[str, float]:
        """Draw pictures of every class into `samples/`, and see how many a classifier takes for what they should be."""
        settings = self._settings
        if not settings.num_samples:
            return {}
        wanted = self._wanted(settings.num_samples)
        dtypes = self.dtype, self.compute_dtype
        drawn = to_bytes(sample_images(forward, self.diffusion, wanted, settings, dtypes=dtypes))
        if forward.rank != 0:
            return {}
        self._write(drawn, wanted, folder / "samples" / f"step-{step:08d}.png")
        if self._pictures.source != DIGITS:
            return {}
        return recognition_rates(self._pictures, drawn, np.asarray(wanted.labels))

    def _wanted(self, count: int) -> SampleRequest:
        """Class after class; videos at the rates that the training has, in turn."""
        labels = [number * self._pictures.num_classes // count for number in range(count)]
        rates = sorted(set(self._pictures.train_fps.tolist()))
        fps = [rates[number % len(rates)] for number in range(count)]
        return SampleRequest(labels, fps, tuple(self._pictures.train.shape[1:]), self._null_class, self.seed)

    def _write(self, drawn: NDArray[np.uint8], wanted: SampleRequest, path: Path) -> None:
        columns = max(1, -(-len(drawn) // self._pictures.num_classes))
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if drawn.shape[2] == 1:
                write_grid(path, drawn, columns=columns)
            else:
                write_strip(path, drawn)
                for rate in sorted(set(wanted.fps)):
                    videos = drawn[np.array(wanted.fps) == rate]
                    write_animation(path.with_suffix(f".{rate}fps.gif"), videos, columns=columns, fps=rate)


def diffusion_of(settings: DiffusionConfig) -> Diffusion:
    """The diffusion that a configuration asks for."""
    return Diffusion(settings.num_timesteps, NoiseSchedule(settings.schedule), Prediction(settings.prediction))


def to_floats(pixels: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    """Bytes as numbers from -1 to 1."""
    return torch.from_numpy(pixels).to(dtype) / 127.5 - 1


def to_bytes(pictures: Tensor) -> NDArray[np.uint8]:
    """Numbers from -1 to 1, and what lies beyond, as bytes."""
    scaled = ((pictures.float() + 1) * 127.5).round().clamp(0, 255)
    found: NDArray[np.uint8] = scaled.to(torch.uint8).cpu().numpy()
    return found
