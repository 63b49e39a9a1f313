"""Jobs without a launcher, in this process or on a gang: what their steps computed, to compare layouts by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.mesh.local_shards import local_box, to_local
from meshwright.models.contract.task import Task
from meshwright.models.tasks.next_token import generate
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.plan.run_plan import RunPlan
from meshwright.train.build_job import Job, build_job
from meshwright.train.forward_only import PipelineForward
from meshwright.train.pipeline_stages import Pipeline
from meshwright.train.train_step import StepResult, TrainStep
from tests.helpers import SMALL, for_pictures, open_data, rank_context


@dataclass(frozen=True)
class Piece:
    """What one rank holds of a tensor."""

    index: tuple[slice, ...]
    values: Tensor

    def of(self, full: Tensor) -> Tensor:
        """The same part of another tensor."""
        return full[self.index]


Pieces = dict[str, Piece]


@dataclass
class Trace:
    """What one rank saw of some steps; every rank sees the same losses and norms."""

    results: list[StepResult] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    """By step, this rank's samples in order."""
    initial: Pieces = field(default_factory=dict)
    final: Pieces = field(default_factory=dict)

    @property
    def losses(self) -> Tensor:
        return torch.tensor([result.loss for result in self.results], dtype=torch.float64)

    @property
    def norms(self) -> Tensor:
        return torch.tensor([result.grad_norm for result in self.results], dtype=torch.float64)


def make_job(rank: int, world_size: int, words: Sequence[str]) -> tuple[Job, TrainStep]:
    """A small job of the default preset on this rank; the process group exists if it needs one."""
    return job_of(load_words(words), rank, world_size)


def job_of(config: RunConfig, rank: int, world_size: int, plan: RunPlan | None = None) -> tuple[Job, TrainStep]:
    """A job of a configuration, or of a plan for it."""
    torch.set_num_threads(1)
    context = rank_context(rank, world_size)
    job = build_job(config, plan or make_plan(config), context, torch.device("cpu"))
    return job, TrainStep(job, make_task(config), lambda: False)


def load_words(words: Sequence[str]) -> RunConfig:
    """The words of a small run; one of them may be a preset's name."""
    preset = next((word for word in words if "=" not in word), "llama-tiny")
    small = for_pictures(SMALL) if preset.startswith("dit") else SMALL
    if preset.startswith(("hf", "module")):
        small = tuple(word for word in small if not word.startswith("model."))
    return load(preset, [*small, *(word for word in words if "=" in word)])


def make_task(config: RunConfig) -> Task:
    """What a run of `config` trains on."""
    return config.family.task(run_facts(config), open_data(config), torch.device("cpu"))


def generate_on(job: Job, prompt: Sequence[int], **named: Any) -> list[int]:
    """Tokens that a job's model writes."""
    return generate(PipelineForward(Pipeline(job)), prompt, seq_len=job.config.train.seq_len, **named)


def pieces(job: Job, *, gradients: bool = False) -> Pieces:
    """Copies of this rank's pieces of the parameters, or of their gradients. Moves nothing between ranks."""
    found = {name: p.grad if gradients else p.detach() for name, p in job.model.named_parameters()}
    return {name: Piece(local_box(x).slices(), to_local(x).clone()) for name, x in found.items()}


def trace(rank: int, world_size: int, words: Sequence[str], num_steps: int) -> Trace:
    """Run steps 1 … `num_steps`."""
    job, step = make_job(rank, world_size, words)
    found = Trace(initial=pieces(job))
    for number in range(1, num_steps + 1):
        found.samples.append([i for part in step.samples(number) for i in part])
        found.results.append(step(number))
    found.final = pieces(job)
    return found


def run_on(gang: Callable[[int], Any], world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a body on a gang; a world of one is this process, without any process group."""
    return gang(world_size).run(body, *args, timeout_s=300) if world_size > 1 else [body(0, 1, *args)]
