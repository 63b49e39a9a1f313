"""A model in a folder is tuned on conversations: what counts is what the assistant says, and each is read alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.data.loader import IGNORED_TARGET
from meshwright.data.windows import JoinedWindows
from meshwright.models.contract.task import Batch
from meshwright.models.hf import origin
from meshwright.models.hf.pretrained import TransformersWeights
from meshwright.plan.rules import load
from meshwright.prove.record.reference_run import build_reference
from meshwright.prove.spec import as_proof
from tests.data.chats.formats import CHATML, Tokenizer, build, chat, parts, write_lines
from tests.gangs.gang import GangPool
from tests.helpers import open_data
from tests.models.hf.folders import open_folder, write_model
from tests.models.hf.runs import run, saved

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

Messages = list[dict[str, str]]


def conversations(first: int, last: int) -> list[Messages]:
    """Conversations of one or two turns, several of which fit into a sample."""
    words = ("What", "is", "two", "and", "fox", "äö")
    questions = [f"{words[n % 6]} {words[n % 5]} {words[n % 4]} {n}" for n in range(first, last)]
    turns = [(one, f"It is {one[::-1]}.") for one in questions]
    return [chat(*turn, *(turns[n - 1] if n % 3 == 0 else ()), system="quick" if n % 4 == 0 else None)
            for n, turn in enumerate(turns)]  # fmt: skip


CHATS = conversations(0, 90)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A model with its tokenizer and template in a folder `model`, beside its conversations."""
    here = tmp_path_factory.mktemp("tuning")
    write_model(here / "model", tokenizer=False)
    write_lines(here / "train.jsonl", CHATS)
    write_lines(here / "valid.jsonl", conversations(90, 110))
    return build(here / "model", CHATML, in_config=True)


def tuning(tokenizer: Tokenizer, *words: str) -> RunConfig:
    here = tokenizer.folder.parent
    return load("hf-tiny", [
        f"model.config={here}/model", "model.weights=folder", f"data.tokenizer={here}/model",
        f"data.source={here}/train.jsonl", f"data.validation_source={here}/valid.jsonl", "data.chat_field=messages",
        "data.packing=documents", f"data.cache_dir={here}/cache", "train.seq_len=128", "train.global_batch=8",
        "train.num_microbatches=2", "train.steps=5", "train.warmup_steps=0", "train.lr=0.01",
        "train.validation_samples=8", "train.sample_tokens=0", *words])  # fmt: skip


def batch_of(config: RunConfig, *, mask_later: int = 0) -> Batch:
    """The batch that a run's task reads for its first step; a fault counts tokens `mask_later` later."""
    task: Any = config.family.task(run_facts(config), open_data(config), torch.device("cpu"))
    (windows,) = task._loader._windows.sources
    mask = replace(windows.mask, start=windows.mask.start - mask_later)
    task._loader._windows = JoinedWindows((replace(windows, mask=mask),))
    batch: Batch = task.batch(range(8))
    return batch


def documents(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Inputs and targets of each conversation of a batch."""
    found = []
    for row, lengths in enumerate(batch.conditions[0].documents):
        first = 0
        for length in lengths:
            part = slice(first, first + length)
            found.append((batch.inputs[row, part].tolist(), batch.targets[row, part].tolist()))
            first += length
    return [(inputs, targets) for inputs, targets in found if any(one != IGNORED_TARGET for one in targets)]


def expected(tokenizer: Tokenizer) -> dict[tuple[int, ...], list[int]]:
    """Targets of each conversation by its inputs, as transformers' own tokenizer and the messages say."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tokenizer.folder, local_files_only=True)
    found = {}
    for messages in CHATS:
        ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
        is_said = tokenizer.mask(ids, parts("chatml", messages))
        targets = [i if said else IGNORED_TARGET for i, said in zip(ids[1:], is_said[1:], strict=True)]
        found[tuple(ids[:-1])] = targets
    return found


@pytest.mark.slow
def test_only_tokens_of_the_assistant_count(tokenizer: Tokenizer) -> None:
    batch, right = batch_of(tuning(tokenizer)), expected(tokenizer)
    read = documents(batch)
    assert len(read) > 2 * len(batch.inputs), "several conversations in a sample"
    assert all(targets == right[tuple(inputs)] for inputs, targets in read)
    counted = sum(one != IGNORED_TARGET for _, targets in read for one in targets)
    assert counted == (batch.targets != IGNORED_TARGET).sum()  # nothing counts elsewhere
    assert 0.2 * batch.targets.numel() < counted < 0.8 * batch.targets.numel()
    wrong = documents(batch_of(tuning(tokenizer), mask_later=1))
    assert any(targets != right[tuple(inputs)] for inputs, targets in wrong)


def alone(config: RunConfig, tokenizer: Tokenizer) -> float:
    """Largest difference between logits in a batch and those that transformers' model gives to each conversation."""
    batch, model, theirs = batch_of(config), build_reference(config), open_folder(tokenizer.folder)
    worst, first = 0.0, 0
    with torch.no_grad():
        out = config.family.run(model, batch.inputs, batch)
        for row, lengths in enumerate(batch.conditions[0].documents):
            first = 0
            for length in lengths:
                part = slice(first, first + length)
                difference = out[row, part] - theirs(input_ids=batch.inputs[row : row + 1, part]).logits[0]
                worst, first = max(worst, float(difference.abs().max())), first + length
    return worst


def test_conversations_do_not_see_each_other(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    config = as_proof(tuning(tokenizer))
    assert alone(config, tokenizer) < 1e-6
    monkeypatch.setattr(origin, "restarting_positions", lambda layout, ids: {})
    assert alone(config, tokenizer) > 1e-3


@pytest.mark.slow
def test_a_model_is_tuned_and_exported_with_its_tokenizer(gang: GangPool, tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    config, exported = tuning(tokenizer, "mesh.pp=2"), tmp_path / "tuned"
    metrics = run(gang, config, tmp_path / "run")
    losses = [line["loss_nats_per_token"] for line in metrics]
    assert losses[-1] < losses[0] - 1 and metrics[-1]["validation_loss_nats_per_token"] < losses[0] - 1

    kept = tokenizer.folder.rename(tmp_path / "moved")  # the checkpoint has what the export needs
    try:
        TransformersWeights().export(tmp_path / "run/checkpoints/00000005", exported)
    finally:
        kept.rename(tokenizer.folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (exported / name).read_bytes() == (tokenizer.folder / name).read_bytes()
    written = [
        AutoTokenizer.from_pretrained(one, local_files_only=True).apply_chat_template(
            CHATS[0][:1], add_generation_prompt=True, tokenize=False
        )
        for one in (tokenizer.folder, exported)
    ]
    assert written[0] == written[1] and written[0].endswith("<|im_start|>assistant\n")
    assert json.loads((exported / "config.json").read_text())["vocab_size"] == 384
    trained = saved(tmp_path / "run")
    for name, tensor in open_folder(exported).state_dict().items():
        assert torch.equal(tensor, trained[name].double()), name
