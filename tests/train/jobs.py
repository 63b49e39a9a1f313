"""Jobs without a launcher, in this process or on a gang: what their steps computed, to compare layouts by."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.config.load import load
from meshwright.config.schema import RunConfig
from meshwright.data.loader import Loader
from meshwright.data.sampler import Order
from meshwright.data.text import num_windows
from meshwright.train.build import Job, build_job
from meshwright.train.context import RankContext, StatusBoard
from meshwright.train.corpus import open_training_corpus
from meshwright.train.step import StepResult, TrainStep
from tests.helpers import SMALL

warnings.filterwarnings("ignore", message="Redistributing .* shard")


@dataclass
class Trace:
    """What one rank saw of some steps; every rank sees the same losses and norms."""

    results: list[StepResult] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    """By step, this rank's samples in order."""
    initial: dict[str, Tensor] = field(default_factory=dict)
    final: dict[str, Tensor] = field(default_factory=dict)

    @property
    def losses(self) -> Tensor:
        return torch.tensor([result.loss for result in self.results], dtype=torch.float64)

    @property
    def norms(self) -> Tensor:
        return torch.tensor([result.grad_norm for result in self.results], dtype=torch.float64)


def make_job(rank: int, world_size: int, words: Sequence[str]) -> tuple[Job, TrainStep]:
    """A small job of the default preset on this rank; the process group exists if it needs one."""
    torch.set_num_threads(1)
    config = load(None, [*SMALL, *words])
    context = RankContext(rank, world_size, rank, world_size, None, StatusBoard([0] * StatusBoard.length(world_size)))
    job = build_job(config, context, torch.device("cpu"))
    return job, TrainStep(job, make_loader(config), lambda: False)


def make_loader(config: RunConfig) -> Loader:
    """What a run of `config` reads its samples from."""
    train = open_training_corpus(config).train
    order = Order(num_windows(train, config.train.seq_len), config.train.seed)
    return Loader(train, order, config.train.seq_len, torch.device("cpu"))


def whole(job: Job, *, gradients: bool = False) -> dict[str, Tensor]:
    """Copies of the full parameters, or of their gradients; all ranks call it."""
    parameters = {name: p.grad if gradients else p.detach() for name, p in job.model.named_parameters()}
    return {name: (x.full_tensor() if isinstance(x, DTensor) else x).clone() for name, x in parameters.items()}


def trace(
    rank: int,
    world_size: int,
    words: Sequence[str],
    num_steps: int,
    *,
    weights: bool = False,
    tamper: Callable[[Job, TrainStep, int], None] | None = None,
) -> Trace:
    """Run steps 1 … `num_steps`; `tamper(job, step, number)` is called before each."""
    job, step = make_job(rank, world_size, words)
    found = Trace()
    if weights:
        found.initial = whole(job)
    for number in range(1, num_steps + 1):
        if tamper is not None:
            tamper(job, step, number)
        found.samples.append([i for part in step.samples(number) for i in part])
        found.results.append(step(number))
    if weights:
        found.final = whole(job)
    return found
