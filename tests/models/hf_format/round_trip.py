"""Models in Hugging Face's format to import, and what an export of one must give back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshwright.checkpoint import save_load

KEPT = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TEXT = "def step(x):\n    return x * 3  # <|endoftext|> 😀"


def write_tokenizer(folder, *, vocab_size=300, text="def step(x): return x * 3\n"):
    """A tiny byte-level BPE, with an end of text as id 0."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|endoftext|>", "<|start|>"], initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([text] * 9, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def write_model(folder, kind="Llama", **changes):
    """Folder that transformers writes of a random model with a tokenizer, a chat template and generation settings."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    write_tokenizer(folder)
    special = {"bos_token": "<|start|>", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **special})
    )
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    options = {
        "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.25,
        "bos_token_id": 1, "eos_token_id": [0, 3], "pad_token_id": 2,
    }  # fmt: skip
    if kind == "Mixtral":
        options |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(options | changes))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.generation_config.update(do_sample=True, temperature=0.6, top_p=0.9)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"note_of_the_author": ["kept", 1]}))
    return model


def lost(source: Path, back: Path, *, context: int) -> list[str]:
    """Losses and changes by an export of the imported folder, weights aside; `context` is the longest due."""
    wrong = []
    for name in KEPT:
        if not (back / name).is_file():
            wrong.append(f"{name} is missing")
        elif (back / name).read_bytes() != (source / name).read_bytes():
            wrong.append(f"{name} has changed")
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, back))
    before |= {"max_position_embeddings": context}
    wrong += [f"config.json: {key}" for key in before if after.get(key, "missing") != before[key]]
    return wrong + [f"config.json: {key} is new" for key in after.keys() - before.keys()]


def save(root, model, tensors):
    """A checkpoint of a described model, with optimizer state beside the weights."""
    state = {f"optimizer.exp_avg.{name}": torch.ones_like(tensor) for name, tensor in tensors.items()}
    return save_load.save(root, 5, {**tensors, **state}, model=model, run={}, keep=9)


def read(path):
    """Every tensor of a checkpoint."""
    return save_load.read_tensors(path, save_load.tensor_names(path))


def their_files(out):
    """Every tensor of a Hugging Face directory."""
    return {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(left, right):
    return set(left) == set(right) and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def edit_config(out, **changes):
    """Change keys of a config.json, or leave them out."""
    config = json.loads((out / "config.json").read_text()) | changes
    (out / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "remove"}))
