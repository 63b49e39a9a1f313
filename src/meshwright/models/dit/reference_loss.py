"""Reference implementation of the diffusion loss, sample by sample, against which proofs compare the task.

Shares `diffusion.py` with the task; the selection of image, noise and class for each sample and the loss are
implemented independently.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from meshwright.data.images import ImageDataset
from meshwright.data.sampler import WindowOrder
from meshwright.models.contract.family import RunFacts
from meshwright.models.dit.description import DiffusionConfig, DiTConfig
from meshwright.models.dit.diffusion import (
    Diffusion,
    NoiseSchedule,
    Prediction,
    draw_label_drops,
    draw_noise,
    draw_timesteps,
)
from meshwright.nn.attention.mask_spec import TokenLayout

DTYPE = torch.float64


class ImageReference:
    """Mean squared error of the prediction on samples of an image dataset."""

    def __init__(self, f: RunFacts, dataset: ImageDataset) -> None:
        self._seed, self._global_batch, self._dataset = f.seed, f.global_batch, dataset
        model = f.section(DiTConfig)
        self._settings, self._null_class = f.section(DiffusionConfig), model.num_classes
        self._num_tokens = model.spec().num_tokens()
        self.order = WindowOrder(len(dataset.train), f.seed)
        kinds = NoiseSchedule(self._settings.schedule), Prediction(self._settings.prediction)
        self._diffusion = Diffusion(self._settings.num_timesteps, *kinds)

    def loss(self, model: nn.Module, indices: list[int]) -> Tensor:
        terms = [self._error(model, index) for index in indices]
        return torch.stack(terms).sum() / self._global_batch

    def sample(self, index: int) -> Mapping[str, Tensor]:
        """Return the noisy sample [c, f, y, x], its target, timestep, label and frame rate."""
        seed, sample, settings = self._seed, range(index, index + 1), self._settings
        chosen = int(self.order.windows(sample)[0])
        clean = torch.from_numpy(self._dataset.train[chosen : chosen + 1]).to(DTYPE) / 127.5 - 1
        timestep = draw_timesteps(seed, sample, settings.num_timesteps)
        noise = draw_noise(seed, sample, clean.shape[1:], DTYPE)
        is_dropped = bool(draw_label_drops(seed, sample, settings.label_dropout))
        return {
            "inputs": self._diffusion.add_noise(clean, noise, timestep)[0],
            "targets": self._diffusion.target(clean, noise, timestep)[0],
            "timesteps": timestep[0],
            "labels": torch.tensor(self._null_class if is_dropped else int(self._dataset.train_labels[chosen])),
            "frame rates": torch.tensor(int(self._dataset.train_fps[chosen])),
        }

    def _error(self, model: nn.Module, index: int) -> Tensor:
        noisy, target, timestep, label, rate = (part[None] for part in self.sample(index).values())
        out = model(noisy, timestep, label, rate, TokenLayout(self._num_tokens, samples=(index,)))
        error: Tensor = out - target
        return error.square().mean()
