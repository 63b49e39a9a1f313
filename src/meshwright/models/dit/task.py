"""Denoising task of a diffusion transformer on images and videos, and sampling from the model during training.

The image, timestep, noise and label dropout of a sample depend only on the seed and the sample's index, so all pipeline
stages and layouts draw the same. Sampling is DDIM (Song et al. 2021) with classifier-free guidance (Ho and Salimans
2022); all ranks run the same forward passes.

Shapes: b batch, n samples, c channels, f frames, y height, x width; r rows of a forward pass: two per sample, with and
without its class, or one if guidance is 1 and the unconditional prediction is not needed.
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

from meshwright.comm.collectives import broadcast
from meshwright.data.images import ImageDataset, write_animation, write_grid, write_strip
from meshwright.data.loader import validation_windows
from meshwright.data.sampler import WindowOrder
from meshwright.data.text_documents import DIGITS
from meshwright.models.contract.family import RunFacts
from meshwright.models.contract.model_facts import LossUnit
from meshwright.models.contract.task import Batch, BatchUse, Forward, HostBatch, RunsForward, SimpleBatch, Task
from meshwright.models.dit.description import DiffusionConfig, DiTConfig
from meshwright.models.dit.diffusion import (
    Diffusion,
    NoiseSchedule,
    Prediction,
    apply_guidance,
    draw_label_drops,
    draw_noise,
    draw_timesteps,
)
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
        self.dtype: torch.dtype = getattr(torch, "float32" if f.precision == "bfloat16" else f.precision)
        self.compute_dtype: torch.dtype = getattr(torch, f.precision)
        self.diffusion = diffusion_of(self._settings)
        model = f.section(DiTConfig)
        self._null_class, self.num_tokens = model.num_classes, model.spec().num_tokens()
        self._order = WindowOrder(len(dataset.train), f.seed)
        self.units_per_sample: int = int(np.prod(dataset.train.shape[1:]))

    def batch(self, samples: range) -> Batch:
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
        return self.loss_sum(out[counted], targets[counted]), counted.sum() * self.units_per_sample

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
    """Return a support-vector machine's accuracy on generated images [n, c, 1, h, w] of these labels, and on held-out
    ones."""
    from sklearn.svm import SVC

    def features(pixels: NDArray[np.uint8]) -> NDArray[np.float64]:
        return pixels.reshape(len(pixels), -1) / 255.0

    classifier = SVC().fit(features(dataset.train), dataset.train_labels)
    return {
        "drawn_recognised": float(np.mean(classifier.predict(features(generated)) == labels)),
        "real_recognised": float(classifier.score(features(dataset.validation), dataset.validation_labels)),
    }


MAX_ROWS = 256
"""Maximum rows per forward pass; more are split into batches."""

FIRST_SAMPLE = 1 << 41
"""First sample index for the initial noise, out of reach of training and validation."""


@dataclass(frozen=True)
class SampleRequest:
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

    `dtypes` are those of the samples, and of the model's inputs.
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
