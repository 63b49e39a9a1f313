"""Packed task and its reference: the loss and gradients are those of each document alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from meshwright.config.facts_for_family import run_facts
from meshwright.data.loader import IGNORED_TARGET
from meshwright.models.contract.model_facts import Part
from meshwright.models.tasks.text_reference import (
    PackedTextReference,
    document_pairs,
    document_spans,
    documents_loss_sum,
)
from meshwright.plan.rules import load
from tests.helpers import open_data

CPU = torch.device("cpu")
LENGTHS = (2, 3, 70, 5, 1, 33, 9, 9, 12, 2, 2, 20, 31, 6, 40, 11, 7)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Facts, data, task and a float64 model of a packed run with documents of very different lengths."""
    folder = tmp_path_factory.mktemp("packed")
    generator = np.random.default_rng(0)
    ids = [np.append(generator.integers(1, 50, length - 1), 0) for length in LENGTHS]
    np.save(folder / "t.npy", np.concatenate(ids).astype(np.uint16))
    config = load("llama-tiny", [
        f"data.source={folder}/t.npy", f"data.cache_dir={folder}", "data.packing=documents", "data.separator=0",
        "train.seq_len=16", "train.global_batch=4", "model.num_layers=2", "model.dim=32", "model.num_heads=4",
        "model.num_kv_heads=2", "model.ffn_dim=48", "train.precision=float64"])  # fmt: skip
    facts, data = run_facts(config), open_data(config)
    torch.manual_seed(0)
    model = config.family.build(facts, Part(range(2))).to_empty(device="cpu").double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return config, facts, data, config.family.task(facts, data, CPU), model


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def differences(model, first, second):
    pairs = zip(gradients(model, first), gradients(model, second), strict=True)
    return [float((a - b).norm() / b.norm()) for a, b in pairs]


@pytest.mark.parametrize("step", [0, 1, 5])
def test_packed_equals_document_by_document(run, step):
    config, facts, data, task, model = run
    reference = config.family.reference(facts, data)
    assert isinstance(reference, PackedTextReference)
    samples = range(step * 4, step * 4 + 4)
    batch = task.batch(samples)
    loss = task.loss_sum(model(batch.inputs, *batch.conditions), batch.targets) / task.count(samples)
    expected = sum(reference.loss(model, [index]) for index in samples)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert max(differences(model, loss, expected)) < 1e-12


def test_the_reference_sees_documents_that_attend_to_each_other(run):
    config, facts, data, task, model = run
    batch, samples = task.batch(range(4)), range(4)
    (layout,) = batch.conditions
    for fault in (replace(layout, documents=None), replace(layout, documents=((16,),) * 4)):
        loss = task.loss_sum(model(batch.inputs, fault), batch.targets) / task.count(samples)
        expected = config.family.reference(facts, data).loss(model, list(samples))
        assert max(differences(model, loss, expected)) > 1e-6


def test_the_task_counts_targets(run):
    _, _, data, task, _ = run
    assert task.units_a_sample is None
    for sample in range(2 * data.packed.train.num_windows):
        batch = task.batch(range(sample, sample + 1))
        assert task.count(range(sample, sample + 1)) == (batch.targets != IGNORED_TARGET).sum()
        assert batch.conditions[0].samples == (sample,)


def test_samples_of_several_steps_are_refused(run):
    config, facts, data, _, model = run
    with pytest.raises(AssertionError):
        config.family.reference(facts, data).loss(model, [3, 4])


def test_the_references_spans_are_the_documents(run):
    """All spans together are the documents' pairs, split where a document is longer than a window."""
    _, _, data, _, model = run
    windows = data.packed.train
    spans = sorted(span for window in range(windows.num_windows) for span in document_spans(windows, window))
    tokens = data.train.tolist()
    for start, length in spans:
        assert 0 not in tokens[start : start + length], "a separator is no input: nothing follows it"
        assert length == 16 or tokens[start + length] == 0
    assert sum(length for _, length in spans) == len(tokens) - tokens.count(0) == windows.num_targets
    assert documents_loss_sum(model, document_pairs(data.train, spans[:1])).dtype == torch.float64


def test_a_validation_counts_its_targets(run):
    _, _, data, task, model = run
    total, count = 0.0, 0
    for index in range(2):
        for batch in task.validation(batch_size=2, data_parallel=2, data_index=index):
            one, number = task.validation_sums(model(batch.inputs, *batch.conditions), batch.targets)
            total, count = total + one.item(), count + int(number)
    windows = data.packed.validation
    every = range(windows.num_windows)
    spans = (span for window in every for span in document_spans(windows, window))
    expected = documents_loss_sum(model, document_pairs(data.validation, spans))
    assert count == windows.num_targets and total == pytest.approx(expected.item(), rel=1e-12)
