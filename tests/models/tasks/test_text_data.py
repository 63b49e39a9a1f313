"""Text of a run: when a separator is needed, when it or a prompt has no effect, and which prompts fit."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.config.facts_for_family import run_facts
from meshwright.errors import ConfigError, DataError
from meshwright.models.tasks.text_data import encode_prompt
from meshwright.plan.rules import load
from tests.helpers import open_data

PACKED = "data.packing=documents"


@pytest.fixture
def opened(tmp_path):
    """Opens the data of a run on tokens or text of tmp_path."""
    np.save(tmp_path / "t.npy", np.tile(np.array([5, 6, 7, 0], dtype=np.uint16), 100))
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("some text\n" * 100, "utf-8")

    def open_it(name, *words):
        data = [f"data.source={tmp_path}/{name}", f"data.cache_dir={tmp_path}/cache", "train.seq_len=8"]
        return open_data(load("llama-tiny", [*data, *words]))

    return open_it


def test_what_each_source_needs(opened):
    assert opened("t.npy").packed is None and opened("*.txt").packed is None
    assert opened("t.npy", PACKED, "data.separator=0").packed.train.num_targets == 90 * 3
    assert opened("*.txt", PACKED).packed.train.num_targets == 3 * 900


@pytest.mark.parametrize(
    ("name", "words", "what", "fix"),
    [
        ("t.npy", [PACKED], "doesn't say where its documents end", "data.separator="),
        ("t.npy", ["data.separator=0"], "has no effect", "data.packing=documents"),
        ("*.txt", ["data.separator=0"], "has no effect", "remove data.separator"),
        ("*.txt", [PACKED, "data.separator=0"], "has no effect", "remove data.separator"),
    ],
)
def test_a_wrong_separator(opened, name, words, what, fix):
    with pytest.raises(ConfigError, match=what) as caught:
        opened(name, *words)
    assert caught.value.where == "data.separator" and caught.value.rule and fix in caught.value.fix


@pytest.fixture
def framing(tmp_path):
    """A tokenizer of words that adds <s>, and declares no end where two are known."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["<s>", "</s>", "<eos>", "some", "text"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="some"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    return f"data.tokenizer={tmp_path}"


def test_a_separator_decides_how_texts_end_and_prompts_begin_as_they_do(opened, framing, tmp_path):
    with pytest.raises(DataError, match="documents may end with </s> or <eos>"):
        opened("*.txt", framing)
    for bos, begin in (("auto", [0]), ("none", [])):
        words = [framing, "data.separator=2", f"data.bos={bos}", "train.sample_prompt=text some"]
        text = opened("*.txt", *words)
        assert text.train.tolist() == 3 * [*begin, *90 * [3, 4], 2]
        f = run_facts(load("llama-tiny", words))
        assert encode_prompt("text some", f.data)[1] == [*begin, 4, 3]
        assert encode_prompt(" ", f.data)[1] == []
    with pytest.raises(ConfigError, match="has 9 tokens, but train.seq_len = 8"):
        opened("*.txt", framing, "data.separator=2", f"train.sample_prompt={'some ' * 8}")


def test_a_batch_larger_than_the_corpus_is_said(opened):
    """Of 2,703 tokens, 337 samples of 8."""
    assert "repeats samples" not in opened("*.txt", "train.global_batch=337").description
    for words in ([], [PACKED]):
        text = opened("*.txt", "train.global_batch=340", *words)
        assert text.description.count("each batch repeats samples: train.global_batch = 340, and ") == 1


def test_a_separator_that_does_not_occur(opened):
    with pytest.raises(DataError, match="separator 9 does not occur"):
        opened("t.npy", PACKED, "data.separator=9")


def test_ids_beyond_the_vocabulary(opened):
    with pytest.raises(DataError, match="vocab_size"):
        opened("t.npy", PACKED, "data.separator=0", "model.vocab_size=7")


@pytest.mark.parametrize(
    ("name", "words", "what", "fix"),
    [
        ("t.npy", ["train.sample_prompt=a"], "has no effect", "remove train.sample_prompt"),
        ("*.txt", ["train.sample_prompt=a", "train.sample_tokens=0"], "has no effect", "train.sample_tokens=120"),
        ("*.txt", ["train.sample_prompt=nine or so"], "has 10 tokens, but train.seq_len = 8", "train.seq_len=10"),
    ],
)
def test_a_prompt_without_effect_or_that_does_not_fit(opened, name, words, what, fix):
    with pytest.raises(ConfigError, match=what) as caught:
        opened(name, *words)
    assert caught.value.where == "train.sample_prompt" and caught.value.rule and fix in caught.value.fix


def test_a_prompt_fits_with_as_many_tokens_as_a_sample(opened):
    assert opened("*.txt", "train.sample_prompt=just fit")


def test_a_prompt_without_a_known_character_is_refused(opened, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"some": 0, "text": 1}, unk_token="some"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "words.json"))
    with pytest.raises(ConfigError, match="can't be tokenized"):
        opened("*.txt", f"data.tokenizer={tmp_path}/words.json", "train.sample_prompt=' '")
