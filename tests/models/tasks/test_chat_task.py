"""Task on conversations, and its reference, which finds out again what counts: loss and gradients of each alone."""

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
from meshwright.models.tasks.text_reference import document_pairs, document_spans, documents_loss_sum
from meshwright.models.tasks.text_sources import end_ids
from meshwright.plan.rules import load
from tests.data.chats.formats import CHATML, SPECIAL, build, many_chats, write_lines
from tests.helpers import open_data

pytest.importorskip("tokenizers")

CPU = torch.device("cpu")
PACKED = "data.packing=documents"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Conversations, others to validate with, and a tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("chats")
    build(folder / "tokenizer", CHATML)
    write_lines(folder / "a.jsonl", many_chats(60))
    write_lines(folder / "b.jsonl", many_chats(9, seed=1))
    write_lines(folder / "texts.jsonl", [f"fox {n} fox" for n in range(60)], "text")
    (folder / "plain.txt").write_text("The quick brown fox.\n" * 100)
    return folder


def config_of(folder, *words, source="a.jsonl"):
    given = [] if source is None else [f"data.source={folder}/{source}"]
    return load("llama-tiny", [
        *given, f"data.cache_dir={folder}/cache", f"data.tokenizer={folder}/tokenizer", "data.chat_field=messages",
        PACKED, "model.vocab_size=360", "train.seq_len=32", "train.global_batch=4", "model.num_layers=2",
        "model.dim=32", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_dim=48", "train.precision=float64",
        *words])  # fmt: skip


@pytest.fixture(scope="module")
def run(folder):
    """Facts, data, task and a float64 model."""
    config = config_of(folder)
    facts, data = run_facts(config), open_data(config)
    torch.manual_seed(0)
    model = config.family.build(facts, Part(range(2))).to_empty(device="cpu").double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return config, facts, data, config.family.task(facts, data, CPU), model


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


def differences(model, first, second):
    both = [torch.autograd.grad(loss, list(model.parameters())) for loss in (first, second)]
    return max(float((a - b).norm() / b.norm()) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("step", [0, 3])
def test_packed_equals_conversation_by_conversation(run, step):
    config, facts, data, task, model = run
    samples = range(step * 4, step * 4 + 4)
    batch = task.batch(samples)
    loss = task.loss_sum(model(batch.inputs, *batch.conditions), batch.targets) / task.count(samples)
    reference = config.family.reference(facts, data)
    expected = sum(reference.loss(model, [index]) for index in samples)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert differences(model, loss, expected) < 1e-12


def test_samples_and_their_count_are_those_of_the_reference(run):
    config, facts, data, task, _ = run
    reference = config.family.reference(facts, data)
    for index in range(data.packed.train.num_windows):
        batch, sample = task.batch(range(index, index + 1)), reference.sample(index)
        assert torch.equal(batch.inputs[0], sample["inputs"]) and torch.equal(batch.targets[0], sample["targets"])
        num_targets = int((sample["targets"] != IGNORED_TARGET).sum())
        assert 0 < num_targets == task.count(range(index, index + 1))
        prepared = task.prepare(range(index, index + 1), None).to(CPU)
        assert torch.equal(prepared.targets, batch.targets)


@pytest.mark.parametrize("change", ["shifted by one", "everything counts"])
def test_a_wrong_mask_in_the_cache_is_another_loss_than_the_references(run, change):
    config, facts, data, _, model = run
    right = data.packed.train
    mask = (
        replace(right.mask, start=1) if change == "shifted by one" else replace(right.mask, bits=right.mask.bits | 255)
    )
    wrong = replace(data, packed=PackedSplits(replace(right, mask=mask), data.packed.validation))
    task, samples = config.family.task(facts, wrong, CPU), range(4)
    batch = task.batch(samples)
    loss = task.loss_sum(model(batch.inputs, *batch.conditions), batch.targets) / task.count(samples)
    assert differences(model, loss, config.family.reference(facts, wrong).loss(model, list(samples))) > 1e-3


def test_a_validation_counts_its_targets(run):
    _, _, data, task, model = run
    total, count = 0.0, 0
    for index in range(2):
        for batch in task.validation(batch_size=2, data_parallel=2, data_index=index):
            one, number = task.validation_sums(model(batch.inputs, *batch.conditions), batch.targets)
            total, count = total + one.item(), count + int(number)
    windows = data.packed.validation
    pairs = document_pairs(data.validation, (s for w in range(windows.num_windows) for s in document_spans(windows, w)))
    starts = (s for w in range(windows.num_windows) for s, _ in document_spans(windows, w))
    counts = (windows.mask.at(np.arange(start + 1, start + 1 + len(inputs)))
              for start, (inputs, _) in zip(starts, pairs, strict=True))  # fmt: skip
    masked = [(inputs, targets.where(torch.from_numpy(one), IGNORED_TARGET))
              for (inputs, targets), one in zip(pairs, counts, strict=True)]  # fmt: skip
    assert count == windows.num_targets
    assert total == pytest.approx(documents_loss_sum(model, masked).item(), rel=1e-12)


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
