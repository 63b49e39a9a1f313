"""Text of a run: when a separator is needed, when it or a prompt has no effect, and which prompts fit."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.errors import ConfigError, DataError
from meshwright.plan.load_config import load
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
