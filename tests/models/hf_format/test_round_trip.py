"""A model's folder in Hugging Face's format, imported and exported: transformers finds all of it again."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from meshwright.checkpoint import manifest, save_load
from meshwright.checkpoint.manifest import read_sidecars, sidecar_path
from meshwright.models.decoder.module import Decoder
from meshwright.models.hf_format import kept_files, weights
from meshwright.models.hf_format.weights import HuggingFaceWeights
from meshwright.models.llama.family import LlamaConfig
from meshwright.models.llama.hf_llama import LLAMA
from meshwright.models.moe.hf_mixtral import MIXTRAL
from tests.helpers import small_corpus
from tests.models.hf_format.round_trip import TEXT, lost, write_model, write_tokenizer

LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A model's folder, for reading only."""
    folder = tmp_path_factory.mktemp("model") / "source"
    write_model(folder, rope_parameters=LLAMA_3)
    return folder


def there_and_back(source, tmp_path, *, architecture=LLAMA, trained=None):
    """The folder as exported from the imported checkpoint."""
    path = weights.import_safetensors(architecture, source, tmp_path / "run")
    return weights.export_safetensors(architecture, path, tmp_path / "back", max_seq_len=trained)


def ours(checkpoint):
    """Our model with a checkpoint's weights."""
    model = manifest.read_manifest(checkpoint).model
    module = Decoder(LlamaConfig(**{k: v for k, v in model.items() if k in LlamaConfig.model_fields}).spec())
    names = {f"model.{name}" for name in module.state_dict()}
    module.load_state_dict(
        {name.removeprefix("model."): value for name, value in save_load.read_tensors(checkpoint, names).items()}
    )
    return module


def assert_opens_as(back, source, checkpoint):
    """transformers opens the folder: our logits, and the tokenizer and generation settings of the original."""
    import transformers

    before, after = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (source, back))
    assert after(TEXT)["input_ids"] == before(TEXT)["input_ids"] and after.decode(after(TEXT)["input_ids"]) == TEXT
    assert (after.bos_token_id, after.eos_token_id, after.chat_template) == (1, 0, before.chat_template)
    model = transformers.AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32)
    settings = transformers.GenerationConfig.from_pretrained(source)
    assert model.generation_config.to_dict() == settings.to_dict() and settings.temperature == 0.6
    tokens_bt = torch.tensor([before(TEXT)["input_ids"]])
    with torch.no_grad():
        wanted, found = ours(checkpoint)(tokens_bt), model(tokens_bt).logits
    assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max().clamp(min=1)


@pytest.mark.parametrize(("trained", "context"), [(None, 64), (16, 64), (64, 64), (100, 100)])
def test_nothing_is_lost_and_the_longer_context_wins(written, tmp_path, trained, context):
    assert lost(written, there_and_back(written, tmp_path, trained=trained), context=context) == []


def test_transformers_opens_it(written, tmp_path):
    back = there_and_back(written, tmp_path)
    assert_opens_as(back, written, tmp_path / "run/00000000")
    before, after = (load_file(folder / "model.safetensors") for folder in (written, back))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("trained", "window"), [(None, 64), (100, None)])
def test_a_mixture_of_experts_keeps_its_window_unless_trained_on_more(tmp_path, trained, window):
    write_model(tmp_path / "source", "Mixtral", sliding_window=64)
    back = there_and_back(tmp_path / "source", tmp_path, architecture=MIXTRAL, trained=trained)
    config = json.loads((back / "config.json").read_text())
    assert config["sliding_window"] == window
    changed = [] if window else ["config.json: sliding_window"]
    assert lost(tmp_path / "source", back, context=trained or 64) == changed


def test_a_scaling_without_its_original_context_keeps_it_when_the_context_grows(written, tmp_path):
    source = shutil.copytree(written, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    del config["rope_parameters"]["original_max_position_embeddings"]
    (source / "config.json").write_text(json.dumps(config))
    back = there_and_back(source, tmp_path, trained=100)
    exported = json.loads((back / "config.json").read_text())
    assert exported["rope_parameters"] == {**LLAMA_3, "original_max_position_embeddings": 64}


def test_trained_weights_keep_the_dtype_of_the_folder_and_say_what_grew(tmp_path):
    """As a checkpoint of a run that was trained, in float32, from an imported folder in bfloat16."""
    import transformers

    model = write_model(tmp_path / "source").bfloat16()
    model.save_pretrained(tmp_path / "source")
    weights = HuggingFaceWeights(LLAMA)
    imported = weights.load(tmp_path / "source", tmp_path / "run")
    found = manifest.read_manifest(imported)
    names = save_load.tensor_names(imported)
    tensors = {name: tensor.float() + 2**-20 for name, tensor in save_load.read_tensors(imported, names).items()}
    run = {"config": {"train": {"seq_len": 100}}, "end_ids": [3]}
    path = save_load.save(
        tmp_path / "run", 5, tensors, model=found.model, run=run, keep=9, sidecars=read_sidecars(found)
    )  # fmt: skip
    assert weights.export(path, tmp_path / "out") == [
        "max_position_embeddings: 64 → 100, the tokens of the samples in training"
    ]
    assert (
        weights.export(path, tmp_path / "full", dtype="float32") and weights.export(imported, tmp_path / "back") == []
    )
    out, full, back = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "full", "back"))
    before = load_file(tmp_path / "source/model.safetensors")
    for name, tensor in out.items():
        assert torch.equal(tensor, (before[name].float() + 2**-20).bfloat16()) and torch.equal(back[name], before[name])
        assert full[name].dtype == torch.float32 and torch.equal(full[name].bfloat16(), tensor)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert opened.dtype == torch.bfloat16 and opened.generation_config.eos_token_id == [3, 0]


def swapped(checkpoint_manifest):
    files = READ(checkpoint_manifest)
    return files | {"tokenizer.json": files["tokenizer.json"].replace(b"return", b"rteurn")}


READ, UPDATE = weights.read_sidecars, kept_files._updated
FAULTS = {
    "generation settings dropped": (kept_files, "KEPT", tuple(k for k in kept_files.KEPT if "generation" not in k)),
    "tokenizer dropped": (kept_files, "KEPT", kept_files.KEPT[:2]),
    "tokenizer swapped": (weights, "read_sidecars", swapped),
    "config.json rewritten": (kept_files, "_updated", lambda kept, ours, **_: {**kept, **ours}),
    "context of the samples": (kept_files, "_updated", lambda kept, ours, max_seq_len: kept | {
        "max_position_embeddings": max_seq_len}),
    "end of text lost": (kept_files, "_updated", lambda kept, ours, max_seq_len: UPDATE(
        kept | {"eos_token_id": None}, ours, max_seq_len=max_seq_len)),
}  # fmt: skip


@pytest.mark.parametrize(("where", "name", "fault"), FAULTS.values(), ids=FAULTS)
def test_faults_are_found(written, tmp_path, monkeypatch, where, name, fault):
    monkeypatch.setattr(where, name, fault)
    assert lost(written, there_and_back(written, tmp_path, trained=16), context=64)


@pytest.mark.slow
def test_the_commands_import_train_and_export(forked_meshwright, tmp_path):
    write_model(tmp_path / "source")
    done = forked_meshwright("checkpoint", "import", "source", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    config = tmp_path / "run/config.toml"
    assert f'tokenizer = "{tmp_path}/run/huggingface/tokenizer.json"' in config.read_text()
    words = ["--resume", "run/checkpoints/00000000", *small_corpus(tmp_path / "corpus"), "train.seq_len=96",
             "train.steps=2", "train.global_batch=2", "train.validation_samples=2", "train.sample_tokens=2",
             "train.lr=0.01", "train.warmup_steps=0", "checkpoint.every=1", "checkpoint.keep=1"]  # fmt: skip
    done = forked_meshwright("run", config, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["00000002"]
    shutil.rmtree(tmp_path / "run/huggingface")  # a checkpoint has all that an export needs
    done = forked_meshwright("checkpoint", "export", "run", "back", cwd=tmp_path)
    assert done.returncode == 0 and "no tokenizer" not in done.stdout, done.stderr
    assert lost(tmp_path / "source", tmp_path / "back", context=96) == []
    assert_opens_as(tmp_path / "back", tmp_path / "source", tmp_path / "run/checkpoints/00000002")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "back"))
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])


@pytest.mark.slow
def test_a_run_from_scratch_exports_its_tokenizer(forked_meshwright, tmp_path):
    import transformers

    path = write_tokenizer(tmp_path / "own").rename(tmp_path / "own/bpe.json")
    words = ["llama-tiny", f"data.tokenizer={path}", *small_corpus(tmp_path / "corpus"), "model.vocab_size=320",
             "model.num_layers=2", "train.steps=1", "train.seq_len=32", "train.global_batch=2",
             "train.validation_samples=2", "train.sample_tokens=2"]  # fmt: skip
    done = forked_meshwright("run", *words, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tmp_path / "own")
    done = forked_meshwright("checkpoint", "export", "run", "back", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert tokenizer.eos_token == "<|endoftext|>" and tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 0 and model.config.bos_token_id is None
    assert sidecar_path("tokenizer.json") in manifest.read_manifest(tmp_path / "run/checkpoints/00000001").files
