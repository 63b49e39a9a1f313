"""What the reference trains on, read sample by sample, and the loss written out plainly.

The diffusion and its draws are the model's own (`models/diffusion`, `models/draws`); which picture, noise and class
belong to a sample, and what is done with them, is worked out here again.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from numpy import int64
from torch import Tensor, nn

from meshwright.config.schema import DiTConfig, RunConfig
from meshwright.data.pictures import Pictures
from meshwright.data.sampler import Order
from meshwright.data.text import Corpus
from meshwright.models.diffusion import Diffusion
from meshwright.models.diffusion_spec import NoiseSchedule, Prediction
from meshwright.models.draws import draw_drops, draw_noise, draw_timesteps

DTYPE = torch.float64


class Samples(Protocol):
    """The run's samples, by number from its start."""

    def loss(self, model: nn.Module, indices: list[int]) -> Tensor:
        """What some of a batch's samples add to the mean loss of the batch."""


class TextSamples:
    """Windows of a corpus, and cross-entropy of the next token."""

    def __init__(self, config: RunConfig, corpus: Corpus) -> None:
        self._train, self._tokens = config.train, corpus.train
        self._order = Order((len(corpus.train) - 1) // config.train.seq_len, config.train.seed)

    def loss(self, model: nn.Module, indices: list[int]) -> Tensor:
        """Mean over the batch's tokens."""
        size = self._train.seq_len
        rows = []
        for index in indices:
            start = int(self._order.windows(range(index, index + 1))[0]) * size
            rows.append(torch.from_numpy(self._tokens[start : start + size + 1].astype(int64)))
        tokens = torch.stack(rows)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        return loss / (self._train.global_batch * size)


class PictureSamples:
    """Pictures, and the squared error of what is predicted of their noise."""

    def __init__(self, config: RunConfig, pictures: Pictures) -> None:
        assert isinstance(config.model, DiTConfig), "pictures are for a dit"
        self._config, self._pictures, self._null_class = config, pictures, config.model.num_classes
        self._order = Order(len(pictures.train), config.train.seed)
        settings = config.diffusion
        kinds = NoiseSchedule(settings.schedule), Prediction(settings.prediction)
        self._diffusion = Diffusion(settings.num_timesteps, *kinds)

    def loss(self, model: nn.Module, indices: list[int]) -> Tensor:
        """Mean over the batch's numbers."""
        terms = [self._error(model, index) for index in indices]
        return torch.stack(terms).sum() / self._config.train.global_batch

    def _error(self, model: nn.Module, index: int) -> Tensor:
        seed, sample, settings = self._config.train.seed, range(index, index + 1), self._config.diffusion
        chosen = int(self._order.windows(sample)[0])
        clean = torch.from_numpy(self._pictures.train[chosen : chosen + 1]).to(DTYPE) / 127.5 - 1
        timestep = draw_timesteps(seed, sample, settings.num_timesteps)
        noise = draw_noise(seed, sample, clean.shape[1:], DTYPE)
        is_dropped = bool(draw_drops(seed, sample, settings.label_dropout))
        label = self._null_class if is_dropped else int(self._pictures.train_labels[chosen])
        rate = int(self._pictures.train_fps[chosen])
        noisy = self._diffusion.add_noise(clean, noise, timestep)
        out = model(noisy, timestep, torch.tensor([label]), torch.tensor([rate]))
        error: Tensor = out - self._diffusion.target(clean, noise, timestep)
        return error.square().mean()


def open_samples(config: RunConfig, data: Corpus | Pictures) -> Samples:
    """The samples of a run's data."""
    return PictureSamples(config, data) if isinstance(data, Pictures) else TextSamples(config, data)
