"""Exports stop where training taught it, keep what the model's folder had, and are the same from everywhere: plain
transformers opens them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.data.loader import IGNORED_TARGET
from meshwright.data.windows import JoinedWindows
from meshwright.models.contract.task import Batch
from meshwright.models.hf import pretrained, private
from meshwright.models.hf.attention import Attending
from meshwright.models.hf.build_model import original_config
from meshwright.models.hf.config import Source
from meshwright.models.hf.pretrained import TransformersWeights
from meshwright.plan.rules import load
from meshwright.prove.record.reference_run import build_reference
from meshwright.prove.spec import as_proof
from tests.data.chats.formats import CHATML, Tokenizer, build, chat, parts, write_lines
from tests.gangs.gang import GangPool
from tests.helpers import open_data
from tests.models.hf.faults import mask_without_documents
from tests.models.hf.folders import change_config, open_folder, write_model
from tests.models.hf.runs import hf_config, run, saved

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")


END_OF_TEXT, TURN_END = 0, 2
SAYS = [40, 41, 42, TURN_END, 50, 51, 52]
"""Tokens that follow each other, and the last one itself, after the generation prompt."""
QUESTION = chat("What is two and two?")
FIELDS = {"max_position_embeddings": 64, "bos_token_id": 3, "eos_token_id": END_OF_TEXT, "of_the_author": "kept"}


def write_chain(folder: Path) -> Path:
    """Write a bfloat16 model that says `SAYS` after the generation prompt, whose folder knows no end of a turn."""
    build(folder, CHATML)
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokenizer_config, "eos_token": "<|endoftext|>"}))
    write_model(folder, tokenizer=False, tie_word_embeddings=False, **FIELDS)
    model = open_model(folder, torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()  # so that the stream is the token's embedding
        torch.nn.init.normal_(model.get_input_embeddings().weight)
        prompt = prompt_of(folder)[0]
        model.lm_head.weight.zero_()
        for token, following in zip([int(prompt[-1]), *SAYS], [*SAYS, SAYS[-1]], strict=True):
            model.lm_head.weight[following] += model.get_input_embeddings().weight[token]
    model.generation_config.update(temperature=0.6, do_sample=True, eos_token_id=[END_OF_TEXT, 7])
    model.save_pretrained(folder)
    change_config(folder, eos_token_id=END_OF_TEXT)
    return folder


def prompt_of(folder: Path) -> Tensor:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    found: Any = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt")
    return found["input_ids"]  # type: ignore[no-any-return]


def open_model(folder: Path, dtype: Any = "auto") -> Any:
    from transformers import AutoModelForCausalLM

    with private.quiet():
        return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=dtype)


def said(folder: Path) -> list[int]:
    """What plain transformers generates after the question."""
    prompt = prompt_of(folder)
    out: Any = open_model(folder).generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=5)
    return out[0, prompt.shape[1] :].tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def trained(gang: GangPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step that was started beside the model's folder, which is gone since; `before` is a copy of it."""
    here = tmp_path_factory.mktemp("exports")
    write_chain(here / "before")
    shutil.copytree(here / "before", here / "model")
    write_lines(here / "chats.jsonl", [chat(f"What is {n}?", f"It is {n}.", "and two", "four") for n in range(40)])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        config = hf_config(
            "model", "model.weights=folder", "data.tokenizer=model", f"data.source={here}/chats.jsonl",
            "data.chat_field=messages", "data.packing=documents", "train.seq_len=128", "train.steps=1",
            "train.warmup_steps=0", "train.lr=1e-12", "train.weight_decay=0", "train.validation_samples=4",
            "train.sample_tokens=0", "train.num_microbatches=1",
        )  # fmt: skip
        run(gang, config, here / "run")
    shutil.rmtree(here / "model")
    return here


@pytest.fixture(scope="module")
def exported(trained: Path) -> tuple[Path, list[str]]:
    """What a later export elsewhere writes, and its notes."""
    out = trained / "elsewhere" / "out"
    return out, TransformersWeights().export(trained / "run/checkpoints/00000001", out)


def read(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text())
    return found


def test_generation_ends_with_the_turn(trained: Path, exported: tuple[Path, list[str]]) -> None:
    folder = exported[0]
    assert said(trained / "before") == SAYS[:6], "the folder's own settings go on"
    assert said(folder) == SAYS[:4]
    ids = [TURN_END, END_OF_TEXT, 7]
    assert read(folder, "config.json")["eos_token_id"] == read(folder, "generation_config.json")["eos_token_id"] == ids
    assert read(folder, "tokenizer_config.json")["eos_token"] == "<|im_end|>"
    assert read(folder, "generation_config.json")["temperature"] == 0.6, "the folder's other settings are kept"


def test_weights_and_configuration_are_of_the_folders_dtype_unless_another_is_asked_for(
    trained: Path, exported: tuple[Path, list[str]], tmp_path: Path
) -> None:
    after = saved(trained / "run")
    for dtype in (None, "float32", "float16"):
        folder, wanted = exported[0], torch.bfloat16
        if dtype is not None:
            folder, wanted = tmp_path / dtype, getattr(torch, dtype)
            TransformersWeights().export(trained / "run/checkpoints/00000001", folder, dtype=dtype)
        tensors = load_file(folder / "model.safetensors")
        assert tensors.keys() == after.keys() and open_model(folder).dtype == wanted
        assert all(torch.equal(tensors[name], tensor.to(wanted)) for name, tensor in after.items())
        assert read(folder, "config.json")["dtype"] == str(wanted).removeprefix("torch.")
    assert read(exported[0], "config.json")["of_the_author"] == "kept"


def test_the_context_grows_to_the_samples_with_a_note(exported: tuple[Path, list[str]]) -> None:
    folder, notes = exported
    assert read(folder, "config.json")["max_position_embeddings"] == 128
    assert notes == ["max_position_embeddings: 64 → 128, the tokens of the samples in training"]


ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": None, "original_max_position_embeddings": 16},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 16},
}


@pytest.mark.parametrize("kind", ROPES)
def test_a_context_with_which_something_is_computed_stays(kind: str) -> None:
    """The frequencies of the model that transformers builds are the same before and after."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    fields = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64,
              "rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **ROPES[kind]}}  # fmt: skip

    def rotated(config: Any) -> list[Tensor]:
        rotary, x = LlamaRotaryEmbedding(config), torch.zeros(1, 100, 64)
        return [one for n in (10, 100) for one in rotary(x[:, :n], torch.arange(n)[None])]

    with private.quiet():
        config, raised = (original_config(Source("llama", None, json.dumps(fields))) for _ in range(2))
        before = rotated(config)
        (note,) = pretrained._raise_context(config, 100)
        assert all(torch.equal(a, b) for a, b in zip(before, rotated(config), strict=True))
        is_raised = kind in ("default", "llama3")
        assert config.max_position_embeddings == (100 if is_raised else 64)
        assert ("64 → 100" in note) == is_raised and (is_raised or kind in note)
        raised.max_position_embeddings = 100
        changes = any(not torch.equal(a, b) for a, b in zip(before, rotated(raised), strict=True))
    assert changes == (kind in ("dynamic", "yarn", "longrope")), "what raising it anyway would have changed"
    assert not pretrained._raise_context(config, 64)


@pytest.mark.parametrize(
    ("named", "directory", "base"),
    [("models/a", "/home/b", "/home/b/models/a"), ("../a/config.json", "/home/b", "/home/a"), ("/a", "/b", "/a")],
)
def test_the_base_of_adapters_is_named_absolutely(named: str, directory: str, base: str) -> None:
    model = {"config": named, "weights": "folder"}
    assert pretrained._base({"config": {"model": model}, "directory": directory}) == base
    assert pretrained._base({"config": {"model": {**model, "weights": "random"}}, "directory": directory}) is None


def test_a_checkpoint_of_an_earlier_version_takes_them_from_the_folder(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified = pretrained.manifest.verify(trained / "run/checkpoints/00000001")
    assert "generation_config.json" in pretrained._kept(verified)
    del verified.run["directory"], verified.files["sidecars/generation_config.json"]
    monkeypatch.chdir(tmp_path)
    assert "generation_config.json" not in pretrained._kept(verified)
    shutil.copytree(trained / "before", tmp_path / "model")
    assert "generation_config.json" in pretrained._kept(verified)


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
    monkeypatch.setattr(Attending, "mask", mask_without_documents(Attending.mask))
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
