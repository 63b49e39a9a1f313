"""Packed text, documents or conversations, and its reference, which finds out again what counts: loss and gradients of
each alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from meshwright.config.facts_for_family import run_facts
from meshwright.data.loader import IGNORED_TARGET
from meshwright.data.packed_windows import PackedSplits
from meshwright.errors import ConfigError, DataError
from meshwright.models.contract.model_facts import Part
from meshwright.models.tasks.text_reference import (
    PackedTextReference,
    document_pairs,
    document_spans,
    documents_loss_sum,
)
from meshwright.models.tasks.text_sources import end_ids
from meshwright.plan.rules import load
from tests.data.chats.formats import CHATML, SPECIAL, build, many_chats, write_lines
from tests.helpers import open_data

pytest.importorskip("tokenizers")

CPU = torch.device("cpu")
PACKED = "data.packing=documents"
LENGTHS = (2, 3, 70, 5, 1, 33, 9, 9, 12, 2, 2, 20, 31, 6, 40, 11, 7)
SMALL = [PACKED, "train.global_batch=4", "model.num_layers=2", "model.dim=32", "model.num_heads=4",
         "model.num_kv_heads=2", "model.ffn_dim=48", "train.precision=float64"]  # fmt: skip
KINDS = ["documents", "conversations"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Documents of very different lengths, conversations, others to validate with, and a tokenizer for chats."""
    folder = tmp_path_factory.mktemp("chats")
    build(folder / "tokenizer", CHATML)
    write_lines(folder / "a.jsonl", many_chats(60))
    write_lines(folder / "b.jsonl", many_chats(9, seed=1))
    write_lines(folder / "texts.jsonl", [f"fox {n} fox" for n in range(60)], "text")
    generator = np.random.default_rng(0)
    ids = [np.append(generator.integers(1, 50, length - 1), 0) for length in LENGTHS]
    np.save(folder / "t.npy", np.concatenate(ids).astype(np.uint16))
    (folder / "plain.txt").write_text("The quick brown fox.\n" * 100)
    return folder


def config_of(folder, *words, source="a.jsonl"):
    given = [] if source is None else [f"data.source={folder}/{source}"]
    return load("llama-tiny", [
        *given, f"data.cache_dir={folder}/cache", f"data.tokenizer={folder}/tokenizer", "data.chat_field=messages",
        "model.vocab_size=360", "train.seq_len=32", *SMALL, *words])  # fmt: skip


@pytest.fixture(scope="module")
def runs(folder):
    """Configuration, facts, data, task and a float64 model of both kinds."""
    found = {}
    tokens = ["data.separator=0", "train.seq_len=16", f"data.source={folder}/t.npy", f"data.cache_dir={folder}/cache"]
    for kind, config in zip(KINDS, (load("llama-tiny", [*tokens, *SMALL]), config_of(folder)), strict=True):
        facts, data = run_facts(config), open_data(config)
        torch.manual_seed(0)
        model = config.family.build(facts, Part(range(2))).to_empty(device="cpu").double()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        found[kind] = config, facts, data, config.family.task(facts, data, CPU), model
    return found


@pytest.fixture
def run(runs):
    return runs["conversations"]


@pytest.fixture
def documents(runs):
    return runs["documents"]


def loss_of(task, model, samples, *conditions):
    batch = task.batch(samples)
    return task.loss_sum(model(batch.inputs, *(conditions or batch.conditions)), batch.targets) / task.count(samples)


def differences(model, first, second):
    both = [torch.autograd.grad(loss, list(model.parameters())) for loss in (first, second)]
    return max(float((a - b).norm() / b.norm()) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [0, 1, 5])
def test_packed_equals_document_by_document(runs, kind, step):
    config, facts, data, task, model = runs[kind]
    reference = config.family.reference(facts, data)
    assert isinstance(reference, PackedTextReference)
    samples = range(step * 4, step * 4 + 4)
    loss = loss_of(task, model, samples)
    expected = sum(reference.loss(model, [index]) for index in samples)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert differences(model, loss, expected) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_samples_and_their_count_are_those_of_the_reference(runs, kind):
    config, facts, data, task, _ = runs[kind]
    assert task.units_per_sample is None
    reference = config.family.reference(facts, data)
    for index in range(2 * data.packed.train.num_windows):
        batch, sample = task.batch(range(index, index + 1)), reference.sample(index)
        assert torch.equal(batch.inputs[0], sample["inputs"]) and torch.equal(batch.targets[0], sample["targets"])
        num_targets = int((sample["targets"] != IGNORED_TARGET).sum())
        assert 0 < num_targets == task.count(range(index, index + 1))
        assert batch.conditions[0].samples == (index,) and batch.conditions[0].documents == (sample["documents"],)
        prepared = task.prepare(range(index, index + 1), None).to(CPU)
        assert torch.equal(prepared.targets, batch.targets)


@pytest.mark.parametrize("kind", KINDS)
def test_a_validation_counts_its_targets(runs, kind):
    _, _, data, task, model = runs[kind]
    total, count = 0.0, 0
    for index in range(2):
        for batch in task.validation(batch_size=2, data_parallel=2, data_index=index):
            one, number = task.validation_sums(model(batch.inputs, *batch.conditions), batch.targets)
            total, count = total + one.item(), count + int(number)
    windows = data.packed.validation
    spans = [span for window in range(windows.num_windows) for span in document_spans(windows, window)]
    pairs = document_pairs(data.validation, spans)
    if windows.mask is not None:
        counts = (windows.mask.at(np.arange(start + 1, start + 1 + length)) for start, length in spans)
        pairs = [(inputs, targets.where(torch.from_numpy(one), IGNORED_TARGET))
                 for (inputs, targets), one in zip(pairs, counts, strict=True)]  # fmt: skip
    assert count == windows.num_targets
    assert total == pytest.approx(documents_loss_sum(model, pairs).item(), rel=1e-12)


def test_the_reference_sees_documents_that_attend_to_each_other(documents):
    config, facts, data, task, model = documents
    (layout,) = task.batch(range(4)).conditions
    for fault in (replace(layout, documents=None), replace(layout, documents=((16,),) * 4)):
        expected = config.family.reference(facts, data).loss(model, list(range(4)))
        assert differences(model, loss_of(task, model, range(4), fault), expected) > 1e-6


def test_samples_of_several_steps_are_refused(documents):
    config, facts, data, _, model = documents
    with pytest.raises(AssertionError):
        config.family.reference(facts, data).loss(model, [3, 4])


def test_the_references_spans_are_the_documents(documents):
    """All spans together are the documents' pairs, split where a document is longer than a window."""
    _, _, data, _, model = documents
    windows = data.packed.train
    spans = sorted(span for window in range(windows.num_windows) for span in document_spans(windows, window))
    tokens = data.train.tolist()
    for start, length in spans:
        assert 0 not in tokens[start : start + length], "a separator is no input: nothing follows it"
        assert length == 16 or tokens[start + length] == 0
    assert sum(length for _, length in spans) == len(tokens) - tokens.count(0) == windows.num_targets
    assert documents_loss_sum(model, document_pairs(data.train, spans[:1])).dtype == torch.float64


def test_generation_ends_as_the_data_teaches(run, folder):
    """With turns of the assistant and with documents, whichever are trained on; ids are those of `formats.SPECIAL`."""
    turn, text = SPECIAL.index("<|im_end|>"), SPECIAL.index("<|endoftext|>")
    assert run[3].end_ids() == (turn,) and "\n  turns of the assistant end with <|im_end|>" in run[2].description
    np.save(folder / "tokens.npy", np.arange(2000, dtype=np.uint16) % 360)

    def ends(*words, source=None):
        return end_ids(run_facts(config_of(folder, *words, source=source)).data)

    no_chat = "data.chat_field=none"
    mixed = f"data.mixture=['0.5:{folder}/plain.txt','0.5:{folder}/a.jsonl']"
    assert ends(mixed) == (turn,) and ends(no_chat, source="plain.txt") == (turn,), "as eos_token is declared"
    other = f"data.separator={text}"
    assert ends(mixed, other) == (turn, text) and ends(no_chat, other, source="plain.txt") == (text,)
    assert ends(f"data.validation_source={folder}/plain.txt", source="a.jsonl") == (turn,)
    assert ends(no_chat, "data.separator=9", source="tokens.npy") == (9,)
    assert ends(no_chat, PACKED.replace("documents", "none"), source="tokens.npy") == ()
    assert ends(no_chat, "data.tokenizer=bytes", source="plain.txt") == (0,)


def test_turns_that_end_without_a_token_are_warned_about_before_training(folder, tmp_path):
    build(tmp_path, CHATML.replace("<|im_end|>' + '", ""))
    config = config_of(folder, f"data.tokenizer={tmp_path}")
    last = open_data(config).description.splitlines()[-1].strip()
    assert last.startswith("warning: no token that counts in the loss ends the turns of the assistant")
    assert last.endswith(f"inside the turn in {tmp_path}/chat_template.jinja")
    assert config.family.task(run_facts(config), open_data(config), CPU).end_ids() == ()


@pytest.mark.parametrize("change", ["shifted by one", "everything counts"])
def test_a_wrong_mask_in_the_cache_is_another_loss_than_the_references(run, change):
    config, facts, data, _, model = run
    right = data.packed.train
    mask = (
        replace(right.mask, start=1) if change == "shifted by one" else replace(right.mask, bits=right.mask.bits | 255)
    )
    wrong = replace(data, packed=PackedSplits(replace(right, mask=mask), data.packed.validation))
    task, samples = config.family.task(facts, wrong, CPU), range(4)
    loss = loss_of(task, model, samples)
    assert differences(model, loss, config.family.reference(facts, wrong).loss(model, list(samples))) > 1e-3


def test_losses_are_in_nats_and_text_is_generated(run):
    _, _, data, task, _ = run
    assert data.validation_bytes_per_token is None and data.is_text
    assert task.unit.name == "nats/token"


def test_a_source_of_its_own_to_validate_with(folder):
    data = open_data(config_of(folder, f"data.validation_source={folder}/b.jsonl"))
    assert len(data.train_documents.ends) == 60 and len(data.validation_documents.ends) == 9
    assert data.packed.validation.mask is not None and data.is_text
    text = open_data(config_of(folder, f"data.validation_source={folder}/plain.txt"))
    assert text.packed.validation.mask is None and text.packed.train.mask is not None
    chats = open_data(config_of(folder, f"data.validation_source={folder}/b.jsonl", source="plain.txt"))
    assert chats.packed.train.mask is None and chats.packed.validation.mask is not None


def test_conversations_and_texts_are_mixed(folder):
    mixture = f"data.mixture=['0.5:{folder}/a.jsonl','0.25:{folder}/texts.jsonl#text','0.25:{folder}/plain.txt']"
    config = config_of(folder, mixture, source=None)
    facts, data = run_facts(config), open_data(config)
    assert [corpus.train_mask is not None for corpus in data.sources] == [True, False, False]
    assert "of tokens count in the loss" in data.description and data.is_text
    task, reference = config.family.task(facts, data, CPU), config.family.reference(facts, data)
    for index in range(24):
        batch, sample = task.batch(range(index, index + 1)), reference.sample(index)
        assert torch.equal(batch.targets[0], sample["targets"])


REFUSED = {
    "windows of a stream": (["data.packing=none"], ConfigError, "data.chat_field = messages, but data.packing = none",
                            "data.packing=documents"),
    "two fields": (["data.text_field=text"], ConfigError, "data.text_field = text and data.chat_field = messages are "
                   "both set", "data.text_field=none"),
    "bytes": (["data.tokenizer=bytes"], DataError, "data.tokenizer = bytes has no chat template", "data.tokenizer="),
    "no records": (["data.source=stdlib"], DataError, "data.chat_field = messages has no effect",
                   "remove data.chat_field"),
    "no records in several": (["data.validation_source={folder}/plain.txt", "data.source=stdlib"], DataError,
                              "data.chat_field = messages has no effect", "remove data.chat_field"),
    "fields of their own": (["data.source=stdlib", "data.mixture=['1:{folder}/texts.jsonl#text']"], DataError,
                            "data.chat_field = messages has no effect: no source", "remove data.chat_field"),
    "another field": (["data.chat_field=said"], DataError, "has no field said", "data.chat_field=messages"),
    "a few ids": (["model.vocab_size=100"], DataError, "model.vocab_size = 100 is too small", "model.vocab_size=320"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_before_a_run(folder, name):
    words, kind, says, fix = REFUSED[name]
    with pytest.raises(kind) as caught:
        open_data(config_of(folder, *(word.format(folder=folder) for word in words)))
    assert says in caught.value.what and fix in caught.value.fix and caught.value.where and caught.value.rule
