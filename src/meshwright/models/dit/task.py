"""Denoising task of a diffusion transformer on images and videos.

The image, timestep, noise and label dropout of a sample depend only on the seed and the sample's index, so all pipeline
stages and layouts draw the same.

Shapes: b batch, c channels, f frames, y height, x width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.data.images import ImageDataset, write_animation, write_grid, write_strip
from meshwright.data.loader import validation_windows
from meshwright.data.sampler import WindowOrder
from meshwright.data.text_documents import DIGITS
from meshwright.models.contract.loss_unit import LossUnit
from meshwright.models.contract.run_facts import RunFacts
from meshwright.models.contract.task import Batch, BatchUse, Forward, HostBatch, Task
from meshwright.models.dit.config import DiffusionConfig, DiTConfig
from meshwright.models.dit.diffusion import Diffusion
from meshwright.models.dit.noise_schedule import NoiseSchedule, Prediction
from meshwright.models.dit.sample_images import SampleRequest, sample_images
from meshwright.models.dit.training_noise import draw_label_drops, draw_noise, draw_timesteps
from meshwright.nn.attention.mask_spec import TokenLayout
from meshwright.output_files import writing

FIRST_VALIDATION_SAMPLE = 1 << 40
"""First sample index for validation timesteps and noise, never reached in training."""


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Batch of noisy samples; what was not prepared ahead is made lazily, on the stages that use it."""

    task: ImageTask
    pixels: NDArray[np.uint8]
    labels: Tensor
    fps: Tensor
    samples: range
    counted: int
    """Number of rows that count; the rest is padding."""
    moved: tuple[Tensor, ...] = ()
    """Tensors of `host_conditions` and maybe `host_samples` on the device, if they were prepared ahead."""

    def host_conditions(self) -> tuple[Tensor, Tensor, Tensor]:
        """Draw the timesteps, and return them with labels and frame rates, [b] each on the CPU."""
        return draw_timesteps(self.task.seed, self.samples, self.task.diffusion.num_timesteps), self.labels, self.fps

    def host_samples(self) -> tuple[Tensor, Tensor]:
        """Draw the noise, and return clean samples and noise, [b, c, f, y, x] each on the CPU."""
        noise = draw_noise(self.task.seed, self.samples, self.pixels.shape[1:], self.task.dtype)
        return to_floats(self.pixels, self.task.dtype), noise

    @property
    def conditions(self) -> tuple[Any, ...]:
        """Timesteps, class labels and frame rates, [b] each, and the placement of the patches."""
        return *self._device_conditions, TokenLayout(self.task.num_tokens, samples=tuple(self.samples))

    @cached_property
    def _device_conditions(self) -> tuple[Tensor, ...]:
        return self.moved[:3] or tuple(x.to(self.task.device) for x in self.host_conditions())

    @cached_property
    def _clean_and_noise(self) -> tuple[Tensor, Tensor]:
        clean, noise = self.moved[3:] or self.host_samples()
        return clean.to(self.task.device), noise.to(self.task.device)

    @property
    def timesteps(self) -> Tensor:
        """Timesteps [b]."""
        return self._device_conditions[0]

    @property
    def inputs(self) -> Tensor:
        """Noisy samples [b, c, f, y, x]."""
        noisy = self.task.diffusion.add_noise(*self._clean_and_noise, self.timesteps)
        return noisy.to(self.task.compute_dtype)

    @property
    def targets(self) -> Tensor:
        """Prediction targets [b, c, f, y, x]; NaN in padding rows."""
        targets = self.task.diffusion.target(*self._clean_and_noise, self.timesteps).clone()  # may alias the noise
        targets[self.counted :] = torch.nan
        return targets


class ImageTask(Task):
    """Denoising task on images or videos, read in the run's sample order."""

    unit = LossUnit("squared error")

    def __init__(self, f: RunFacts, dataset: ImageDataset, device: torch.device) -> None:
        self._settings, self._dataset = f.section(DiffusionConfig), dataset
        self._num_validation_samples = f.validation_samples
        self.device, self.seed = device, f.seed
        self.dtype: torch.dtype = getattr(torch, f.master_precision)
        self.compute_dtype: torch.dtype = getattr(torch, f.precision)
        self.diffusion = diffusion_of(self._settings)
        model = f.section(DiTConfig)
        self._null_class, self.num_tokens = model.num_classes, model.spec().num_tokens()
        self._order = WindowOrder(len(dataset.train), f.seed)
        self.units_a_sample: int = int(np.prod(dataset.train.shape[1:]))

    def batch(self, samples: range) -> Batch:
        """Return the noisy training samples, some with dropped labels."""
        return self._training_batch(samples)

    def prepare(self, samples: range, use: BatchUse) -> HostBatch:
        """Draw timesteps, and on stages that read samples or targets the noise."""
        batch = self._training_batch(samples)
        reads_samples = use.inputs or use.targets
        host = (*batch.host_conditions(), *(batch.host_samples() if reads_samples else ()))
        return HostBatch(host, lambda tensors: replace(batch, moved=tensors))

    def _training_batch(self, samples: range) -> ImageBatch:
        chosen = self._order.windows(samples)
        labels = torch.from_numpy(self._dataset.train_labels[chosen])
        drops = draw_label_drops(self.seed, samples, self._settings.label_dropout)
        labels = torch.where(drops, self._null_class, labels)
        fps = torch.from_numpy(self._dataset.train_fps[chosen])
        return ImageBatch(self, self._dataset.train[chosen], labels, fps, samples, len(samples))

    def loss_sum(self, out: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of squared errors of the prediction [b, c, f, y, x]."""
        return (out.to(targets.dtype) - targets).square().sum()

    def validation(self, *, batch_size: int, data_parallel: int, data_index: int) -> list[Batch]:
        """Return this rank's held-out samples, evenly spread over the split and always with the same noise."""
        dataset = self._dataset
        chosen = validation_windows(len(dataset.validation), self._num_validation_samples)
        first, last = (len(chosen) * index // data_parallel for index in (data_index, data_index + 1))
        num_rows = -(-len(chosen) // data_parallel)
        batches: list[Batch] = []
        for start in range(0, num_rows, batch_size):
            local = chosen[first + start : min(first + start + batch_size, last)]
            rows = np.concatenate([local, np.zeros(batch_size - len(local), dtype=np.int64)])
            number = FIRST_VALIDATION_SAMPLE + first + start
            labels, fps = (torch.from_numpy(x[rows]) for x in (dataset.validation_labels, dataset.validation_fps))
            samples = range(number, number + batch_size)
            batches.append(ImageBatch(self, dataset.validation[rows], labels, fps, samples, len(local)))
        return batches

    def validation_sums(self, out: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss sum and the number of loss terms, ignoring padding rows."""
        counted = ~targets.flatten(1).isnan().any(1)
        return self.loss_sum(out[counted], targets[counted]), counted.sum() * self.units_a_sample

    def after_validation(self, forward: Forward, step: int, folder: Path) -> Mapping[str, float | Path]:
        """Generate samples of every class into `samples/`; for digits, return how many a classifier recognises."""
        settings = self._settings
        if not settings.num_samples:
            return {}
        request = self._sample_request(settings.num_samples)
        dtypes = self.dtype, self.compute_dtype
        generated = to_bytes(sample_images(forward, self.diffusion, request, settings, dtypes=dtypes))
        if forward.rank != 0:
            return {}
        path = folder / "samples" / f"step-{step:08d}.png"
        self._write(generated, request, path)
        images = {"samples": path}
        if self._dataset.source != DIGITS:
            return images
        return {**images, **recognition_rates(self._dataset, generated, np.asarray(request.labels))}

    def _sample_request(self, count: int) -> SampleRequest:
        """Return a request ordered by class; videos cycle through the training frame rates."""
        labels = [number * self._dataset.num_classes // count for number in range(count)]
        rates = sorted(set(self._dataset.train_fps.tolist()))
        fps = [rates[number % len(rates)] for number in range(count)]
        return SampleRequest(labels, fps, tuple(self._dataset.train.shape[1:]), self._null_class, self.seed)

    def _write(self, generated: NDArray[np.uint8], request: SampleRequest, path: Path) -> None:
        columns = max(1, -(-len(generated) // self._dataset.num_classes))
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if generated.shape[2] == 1:
                write_grid(path, generated, columns=columns)
            else:
                write_strip(path, generated)
                for rate in sorted(set(request.fps)):
                    videos = generated[np.array(request.fps) == rate]
                    write_animation(path.with_suffix(f".{rate}fps.gif"), videos, columns=columns, fps=rate)


def diffusion_of(settings: DiffusionConfig) -> Diffusion:
    """Return the diffusion for a configuration."""
    return Diffusion(settings.num_timesteps, NoiseSchedule(settings.schedule), Prediction(settings.prediction))


def to_floats(pixels: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    """Convert bytes to floats in [-1, 1]."""
    return torch.from_numpy(pixels).to(dtype) / 127.5 - 1


def to_bytes(samples: Tensor) -> NDArray[np.uint8]:
    """Convert floats in [-1, 1] to bytes, clamping values outside."""
    scaled = ((samples.float() + 1) * 127.5).round().clamp(0, 255)
    pixels: NDArray[np.uint8] = scaled.to(torch.uint8).cpu().numpy()
    return pixels


def recognition_rates(
    dataset: ImageDataset, generated: NDArray[np.uint8], labels: NDArray[np.int64]
) -> Mapping[str, float]:
    """Return the accuracy of a support-vector machine on generated and on real held-out images.

    Args:
        dataset: real images; the classifier is trained on its training split.
        generated: generated images [n, c, 1, h, w].
        labels: the class each image was generated for.
    """
    from sklearn.svm import SVC

    def features(pixels: NDArray[np.uint8]) -> NDArray[np.float64]:
        return pixels.reshape(len(pixels), -1) / 255.0

    classifier = SVC().fit(features(dataset.train), dataset.train_labels)
    return {
        "drawn_recognised": float(np.mean(classifier.predict(features(generated)) == labels)),
        "real_recognised": float(classifier.score(features(dataset.validation), dataset.validation_labels)),
    }
