"""Run the jobs of `bench packing`: the same training on three kinds of samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from time import process_time
from typing import Any

import numpy as np
import torch

from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.data.packed_windows import PackedWindows
from meshwright.data.text_corpus import Corpus
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.train.build_job import build_job
from meshwright.train.launch.rank_context import RankContext
from meshwright.train.train_step import StepResult, TrainStep
from meshwright_bench.alternate import alternate
from meshwright_bench.packing.cases import ALONE, PACKED, STREAM, PackingTask


def measure(context: RankContext, task: PackingTask) -> None:
    """Measure the sides, and write their figures to the task's result file."""
    task.result.write_text(json.dumps(measure_sides(context, task)), "utf-8")


def measure_sides(context: RankContext, task: PackingTask) -> dict[str, Any]:
    """Return seconds of processor time per step and round, and the share of tokens with a target, by side."""
    stream, documents = (
        load(task.words[0], [*task.words[1:], f"data.packing={name}"]) for name in ("none", "documents")
    )
    packed = open_corpus(documents)
    alone = one_per_sample(packed)
    sides = {STREAM: (stream, open_corpus(stream)), PACKED: (documents, packed), ALONE: (documents, alone)}
    steps = {side: NextStep(config, corpus, context) for side, (config, corpus) in sides.items()}
    for step in steps.values():
        step()  # warm up
    timed = alternate(steps, timer=processor_seconds, rounds=task.rounds, steps=task.steps)
    fill = {side: 1.0 if corpus.packed is None else corpus.packed.train.fill for side, (_, corpus) in sides.items()}
    return {"seconds": {side: list(values) for side, values in timed.seconds.items()}, "fill": fill}


def one_per_sample(corpus: Corpus) -> Corpus:
    """Return the packed corpus with each piece of a document in a training window of its own."""
    assert corpus.packed is not None, "the corpus is not packed"
    train = corpus.packed.train
    alone: PackedWindows = replace(train, first_pieces=np.arange(len(train.pieces) + 1))
    return replace(corpus, packed=replace(corpus.packed, train=alone))


def open_corpus(config: RunConfig) -> Corpus:
    """Return the text of a configuration."""
    corpus = config.family.open_data(run_facts(config))
    assert isinstance(corpus, Corpus), "the model reads text"
    return corpus


class NextStep:
    """Runs the next training step of a job with every call."""

    def __init__(self, config: RunConfig, corpus: Corpus, context: RankContext) -> None:
        device = torch.device("cpu")
        task = config.family.task(run_facts(config), corpus, device)
        job = build_job(config, make_plan(config), context, device)
        self.model = job.model
        self._step, self._number = TrainStep(job, task, lambda: False), 0

    def __call__(self) -> StepResult:
        """Run it, and return its result."""
        self._number += 1
        return self._step(self._number)


def processor_seconds(work: Callable[[], None]) -> float:
    """Run the work, and return this process's time on processors, which waiting for a core isn't."""
    start = process_time()
    work()
    return process_time() - start
