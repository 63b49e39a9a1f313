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
from meshwright.train.train_step import TrainStep
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
    packed = _open(documents)
    sides = {STREAM: (stream, _open(stream)), PACKED: (documents, packed), ALONE: (documents, one_per_sample(packed))}
    steps = {side: _steps(config, corpus, context) for side, (config, corpus) in sides.items()}
    for step in steps.values():
        step()  # warm up
    timed = alternate(steps, timer=_processor_seconds, rounds=task.rounds, steps=task.steps)
    fill = {side: 1.0 if corpus.packed is None else corpus.packed.train.fill for side, (_, corpus) in sides.items()}
    return {"seconds": {side: list(values) for side, values in timed.seconds.items()}, "fill": fill}


def one_per_sample(corpus: Corpus) -> Corpus:
    """Return the packed corpus with each piece of a document in a training window of its own."""
    assert corpus.packed is not None, "the corpus is not packed"
    train = corpus.packed.train
    alone: PackedWindows = replace(train, first_pieces=np.arange(len(train.pieces) + 1))
    return replace(corpus, packed=replace(corpus.packed, train=alone))


def _open(config: RunConfig) -> Corpus:
    corpus = config.family.open_data(run_facts(config))
    assert isinstance(corpus, Corpus), "the model reads text"
    return corpus


def _steps(config: RunConfig, corpus: Corpus, context: RankContext) -> Callable[[], object]:
    """Return a function that runs the next training step on samples of this corpus."""
    device = torch.device("cpu")
    task = config.family.task(run_facts(config), corpus, device)
    step = TrainStep(build_job(config, make_plan(config), context, device), task, lambda: False)
    numbers = iter(range(1, 1_000_000))
    return lambda: step(next(numbers))


def _processor_seconds(work: Callable[[], None]) -> float:
    start = process_time()
    work()
    return process_time() - start
