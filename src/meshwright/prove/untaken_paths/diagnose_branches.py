"""Compare what steps beyond those of a proof would do: learning rates, an epoch's end, steps that are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from meshwright.config.facts_for_family import run_facts
from meshwright.config.resolve import learning_rate
from meshwright.config.schema import RunConfig, TrainConfig
from meshwright.data.sampler import SampleOrder, WindowOrder
from meshwright.models.contract.family import TrainingData
from meshwright.models.contract.task import ShowsSamples
from meshwright.prove.compare.result import Diagnosis, FaultKind
from meshwright.prove.diagnose.phrases import rank_words
from meshwright.prove.record.evidence import LayoutEvidence, ReferenceEvidence
from meshwright.prove.record.plain_optimizer import plain_learning_rate
from meshwright.prove.record.recording_task import RecordingTask, sample_digests
from meshwright.units import first_words, join_words

RATE_TOLERANCE = 1e-12
MOST_RATES = 10_000
"""Learning rates that are compared, evenly spread over the run."""
MOST_WINDOWS = 1 << 18
"""Largest number of windows of which two epochs are gone through."""
MAX_NAMES = 3


def diagnose_branches(config: RunConfig, data: TrainingData, layout: LayoutEvidence) -> tuple[Diagnosis, ...]:
    """Return what is wrong in branches that the steps of the proof don't take."""
    return (
        *_rates(config.train, layout.rates),
        *_skipped_steps(layout),
        *_epoch_end(config, data),
    )


def unproved(config: RunConfig, data: TrainingData, reference: ReferenceEvidence) -> tuple[str, ...]:
    """Return a note for each branch that the proof neither took nor checked."""
    notes, limit = [], config.train.max_grad_norm
    if len(reference.grad_norms) == 1 and reference.grad_norms[0] <= limit:
        notes.append(f"not proved: clipping, as the norm is below train.max_grad_norm = {limit:g}; --steps 2 proves it")
    if reference.partial_counts:
        notes.append("not proved: that steps with a value that isn't finite are skipped, in a model with experts")
    source = config.family.reference(run_facts(config), data)
    if not isinstance(source, ShowsSamples):
        notes.append("not proved: what is in the samples, as the family's reference doesn't show them (ShowsSamples)")
    elif (largest := max(part.num_windows for part in source.order.parts)) > MOST_WINDOWS:
        notes.append(f"not proved: that an epoch visits each of {largest:,} windows once")
    return tuple(notes)


def _rates(train: TrainConfig, rates: list[list[float]]) -> Iterator[Diagnosis]:
    """Compare the learning rates that ranks used, and those of the whole run, with the closed form."""
    for rank, used in enumerate(rates):
        for step, rate in enumerate(used, start=1):
            if not _is_close(rate, plain_learning_rate(step, train)):
                yield _wrong_rate(f"rank {rank} used", rate, step, train)
                return
    numbers = np.unique(np.linspace(1, train.steps, min(train.steps, MOST_RATES)).round().astype(int))
    for step in (int(number) for number in numbers):
        rate = learning_rate(step, train)
        if not _is_close(rate, plain_learning_rate(step, train)):
            yield _wrong_rate("the schedule has", rate, step, train)
            return


def _wrong_rate(who: str, rate: float, step: int, train: TrainConfig) -> Diagnosis:
    due = plain_learning_rate(step, train)
    shape = f"train.lr_schedule = {train.lr_schedule}, {train.warmup_steps} warm-up of {train.steps} steps"
    return Diagnosis(
        FaultKind.LEARNING_RATE,
        f"{who} the learning rate {rate:.6g} in step {step}, expected {due:.6g}",
        f"the learning rate differs from its closed form ({shape})",
    )


def _is_close(rate: float, due: float) -> bool:
    return abs(rate - due) <= RATE_TOLERANCE * max(abs(rate), abs(due))


def _skipped_steps(layout: LayoutEvidence) -> Iterator[Diagnosis]:
    """Check that no rank changed anything in a step with a value that isn't finite."""
    last = layout.axes.num_ranks() - 1
    for what, where in (("loss", 0), ("gradient", last)):
        if where >= len(layout.nonfinite) or what not in layout.nonfinite[where]:
            continue
        changed = {rank: found[what] for rank, found in enumerate(layout.nonfinite) if found.get(what)}
        if changed:
            names = next(iter(changed.values()))
            yield Diagnosis(
                FaultKind.NON_FINITE,
                f"a step whose {what} is not finite on rank {where} changes {rank_words(changed)}",
                "the step must be skipped by every rank: they must agree on whether loss and norm are finite",
                f"rank {min(changed)} changed {first_words(names, MAX_NAMES)}",
            )


def _epoch_end(config: RunConfig, data: TrainingData) -> Iterator[Diagnosis]:
    """Read the samples around the end of the first epoch, and check that epochs visit each window once."""
    f = run_facts(config)
    reference = config.family.reference(f, data)
    if not isinstance(reference, ShowsSamples):
        return
    order = reference.order
    for part in order.parts:
        yield from _epochs(part)
    yield from _first_epoch(order)
    task = RecordingTask(config.family.task(f, data, torch.device("cpu")), config.family.conditions)
    around = range(order.first_repeat - 1, order.first_repeat + 1)
    batch = task.batch(around)
    _ = batch.inputs, batch.targets, batch.conditions
    for sample in around:
        due, found = sample_digests(reference.sample(sample)), task.contents[sample]
        wrong = [part for part in due if part in found and found[part] != due[part]]
        if wrong:
            which = "last sample of the first epoch" if sample < order.first_repeat else "first sample of the second"
            cause = "samples at the end of an epoch are read wrongly"
            yield Diagnosis(FaultKind.SAMPLES, f"the {join_words(wrong)} of the {which} ({sample}) differ", cause)


def _first_epoch(order: SampleOrder) -> Iterator[Diagnosis]:
    """Check that no window of several sources is read twice before one of them runs out."""
    if len(order.parts) == 1:
        return  # as its epochs show
    num_samples = min(order.first_repeat, MOST_WINDOWS)
    num_repeated = num_samples - len(np.unique(order.windows(range(num_samples))))
    if num_repeated:
        symptom = f"{num_repeated} of the first {num_samples} samples repeat a window"
        yield Diagnosis(FaultKind.SAMPLES, symptom, "the mixture's order gives a position of a source to two samples")


def _epochs(order: WindowOrder) -> Iterator[Diagnosis]:
    size = order.num_windows
    if size > MOST_WINDOWS:
        return
    epochs = order.windows(np.arange(2 * size)).reshape(2, size)
    for number, windows in enumerate(epochs, start=1):
        if not np.array_equal(np.sort(windows), np.arange(size)):
            missing = size - len(np.unique(windows))
            symptom = f"epoch {number} leaves out {missing} of {size} windows"
            yield Diagnosis(FaultKind.SAMPLES, symptom, "the sampler's order is not a permutation of the windows")
            return
