"""Files beside the weights: tokenizers that fit, and exports of models trained from scratch. No transformers."""

from __future__ import annotations

import json

import pytest

from meshwright.errors import CheckpointError
from meshwright.models.hf_format.kept_files import files_to_write, read_kept, with_ends
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


SETTINGS = {"temperature": 0.6, "eos_token_id": [0, 7]}
NAMED = {"eos_token": {"content": "a"}, "pad_token": "b"}


@pytest.mark.parametrize(
    ("template", "end"), [("{{ m.content }}</s>", "</s>"), ("{{ m.content }}{{ eos_token }}", {"content": "a"})]
)
@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "additional_chat_templates/a.jinja"])
def test_generation_ends_where_training_taught_it_and_before(template, end, place):
    """The tokenizer's end of text stays where a chat template writes it."""
    kept = {"tokenizer.json": BPE, "tokenizer_config.json": NAMED, "special_tokens_map.json": {"eos_token": "a"},
            "generation_config.json": SETTINGS, "config.json": {"eos_token_id": 1}}  # fmt: skip
    files = {name: json.dumps(content).encode() for name, content in kept.items()}
    if place in files:
        files[place] = json.dumps({**NAMED, "chat_template": [{"name": "default", "template": template}]}).encode()
    else:
        files[place] = template.encode()
    found = with_ends(files, (9, 0))
    read = {name: json.loads(found[name]) for name in kept}
    assert read["config.json"]["eos_token_id"] == read["generation_config.json"]["eos_token_id"] == [9, 0, 7, 1]
    assert read["generation_config.json"]["temperature"] == 0.6 and found["tokenizer.json"] == files["tokenizer.json"]
    assert read["tokenizer_config.json"] | {"eos_token": end} == read["tokenizer_config.json"]
    assert read["special_tokens_map.json"]["eos_token"] == (end if isinstance(end, str) else "a")
    assert with_ends(found, (9, 0)) == found and with_ends(files, ()) == files


def test_a_model_from_scratch_ends_where_its_documents_did():
    kept = {"tokenizer.json": json.dumps(BPE).encode()}
    files = files_to_write(
        LLAMA, PLAIN.identity(), kept, dtype="float32", max_seq_len=9, end_ids=[1], where="here"
    )  # fmt: skip
    assert json.loads(files["config.json"])["eos_token_id"] == [1, 9]
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "b"
    files = files_to_write(LLAMA, PLAIN.identity(), {}, dtype="float32", max_seq_len=9, end_ids=[0], where="here")
    assert json.loads(files["config.json"])["eos_token_id"] == 0, "bytes, too"


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
