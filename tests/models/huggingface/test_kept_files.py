"""Files beside the weights: tokenizers that fit, and exports of models trained from scratch. No transformers."""

from __future__ import annotations

import json

import pytest

from meshwright.errors import CheckpointError
from meshwright.models.huggingface.kept_files import files_to_write, read_kept
from meshwright.models.llama.hf_llama import LLAMA
from tests.models.llama.test_hf_llama import PLAIN

BPE = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "</s>", "id": 9}]}
UNIGRAM = {"model": {"vocab": [["a", -1.0], ["</s>", -2.0]]}}


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))


def written(kept, model=None, max_seq_len=None):
    kept = {name: json.dumps(content).encode() for name, content in kept.items()}
    model = model or PLAIN.identity()
    files = files_to_write(LLAMA, model, kept, dtype="float32", max_seq_len=max_seq_len, where="here")
    return {name: json.loads(content) for name, content in files.items()}


@pytest.mark.parametrize(("tokenizer", "last"), [(BPE, 9), (UNIGRAM, 1)], ids=["bpe", "unigram"])
def test_a_tokenizer_fits_a_vocabulary_as_large_or_padded(tmp_path, tokenizer, last):
    write(tmp_path, tokenizer=tokenizer, config={})
    for vocab_size in (last + 1, last + 50):
        assert set(read_kept(tmp_path, vocab_size=vocab_size)) == {"tokenizer.json", "config.json"}
    with pytest.raises(CheckpointError, match=f"the token '</s>' with id {last}, but the model has {last}") as caught:
        read_kept(tmp_path, vocab_size=last)
    assert f"resize_token_embeddings({last + 1})" in caught.value.fix


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model": {"vocab": 3}}', '{"model": {"vocab": ["a"]}}'])
def test_a_damaged_tokenizer_is_named(tmp_path, content):
    write(tmp_path, tokenizer=content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer"):
        read_kept(tmp_path, vocab_size=9)


def test_other_files_are_not_kept(tmp_path):
    write(tmp_path, config={}, generation_config={}, vocab={}, optimizer={}, other={})
    (tmp_path / "additional_chat_templates").mkdir()
    for name in ("README.md", "model.safetensors", "modeling.py", "tokenizer.model", "chat_template.jinja",
                 "additional_chat_templates/tool.jinja"):  # fmt: skip
        (tmp_path / name).write_text("x")
    kept = {"config.json", "generation_config.json", "vocab.json", "tokenizer.model", "chat_template.jinja"}
    assert set(read_kept(tmp_path, vocab_size=9)) == kept | {"additional_chat_templates/tool.jinja"}


def test_without_an_import_the_ids_are_those_of_the_tokenizer():
    files = written({"tokenizer.json": BPE})
    assert (files["config.json"]["bos_token_id"], files["config.json"]["eos_token_id"]) == (None, 9)
    assert files["tokenizer_config.json"] == {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    named = {"bos_token": {"content": "a"}, "eos_token": "b"}
    files = written({"tokenizer.json": BPE, "tokenizer_config.json": named})
    assert (files["config.json"]["bos_token_id"], files["config.json"]["eos_token_id"]) == (0, 1)
    assert files["tokenizer_config.json"] == named


def test_bytes_have_no_tokenizer():
    files = written({}, max_seq_len=99)
    config = files["config.json"]
    assert set(files) == {"config.json"} and config["max_position_embeddings"] == 99
    assert config["bos_token_id"] is None and config["eos_token_id"] is None


def test_the_configuration_of_another_model_is_refused():
    kept = {"config.json": written({})["config.json"]}
    assert written(kept)["config.json"] == kept["config.json"]
    kept["config.json"]["rope_theta"] = kept["config.json"]["rope_parameters"]["rope_theta"] = 7.0
    with pytest.raises(CheckpointError, match=r"config\.json has rope_theta = 7.0, but its weights have 500000"):
        written(kept)
