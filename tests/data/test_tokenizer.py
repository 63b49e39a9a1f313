"""Tokenizers: round trips, ids within the vocabulary, and errors with fixes."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.data import tokenizer as tokenizer_module
from meshwright.data.tokenizer import ByteTokenizer, open_tokenizer, pieces, token_dtype, tokenizer_identity
from meshwright.data.tokenizer_files import tokenizer_files
from meshwright.errors import DataError

# The first text that hypothesis makes on a machine costs a second or two.
ANY_TEXT = settings(suppress_health_check=[HealthCheck.too_slow])

CORPUS = ["def f(x):\n    return x + 1\n", "The quick brown fox; jumps over\n\nthe lazy dog's 12 bones. äöü 漢字"]
CORPUS += ["a\n\n\n  b\n \n\n\n  a\n\n\n\n\n  b\n"]  # Merges of blanks, which a careless cut would part.


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    """A byte-level BPE of 300 ids, as GPT-2's and Llama 3's are, with truncation left on as many files have it."""
    return build(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json", separator="<|endoftext|>")


def build(path, *, separator):
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[separator, "<s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 20, trainer)
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.enable_truncation(max_length=8)
    backend.enable_padding(length=8, pad_id=1, pad_token="<s>")
    backend.save(str(path))
    return path


@ANY_TEXT
@given(text=st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint8 and ids.tobytes() == text.encode("utf-8")
    assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == text


@given(ids=st.lists(st.integers(0, 1000)))
def test_bytes_decode_whatever_a_model_draws(ids):
    assert len(ByteTokenizer().decode(ids)) <= len(ids)
    assert ByteTokenizer().decode([97, 300, 0xFF, 98]) == "a\ufffd\ufffdb"


@ANY_TEXT
@given(text=st.text())
def test_tokenizer_json_round_trips_without_extra_ids(tokenizer_path, text):
    tokenizer = open_tokenizer(str(tokenizer_path))
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert ids.size == 0 or ids.max() < tokenizer.vocab_size == 300
    assert tokenizer.decode(ids) == text
    np.testing.assert_array_equal(tokenizer.encode_batch(["x", text])[1], ids)


def test_a_separator_in_the_text_is_text(tokenizer_path):
    tokenizer = open_tokenizer(str(tokenizer_path))
    (end,) = tokenizer.framing.end
    text = "a<|endoftext|>b"
    assert end == 0 and end not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([end]) == "<|endoftext|>"


@given(
    lines=st.lists(st.text(alphabet="ab .\n\u3000\r'7", max_size=12), min_size=1, max_size=60),
    size=st.integers(1, 40),
    step=st.integers(1, 40),
)
def test_pieces_do_not_change_the_ids(tokenizer_path, lines, size, step):
    tokenizer, text = open_tokenizer(str(tokenizer_path)), "\n".join(lines)
    whole = tokenizer.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "_PIECE_CHARS", size)
        found = list(pieces([text]))
        assert "".join(found) == text
        assert len(found) > 1 or len(text) <= size or not re.search(r"\S\n\S", text[size - 1 :])
        given = [text[first : first + step] for first in range(0, len(text), step)]
        assert list(pieces(given)) == found, "wherever what is read begins and ends"
        np.testing.assert_array_equal(tokenizer.encode(text), whole)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(256, "u1"), (257, "u2"), (2**16, "u2"), (2**16 + 1, "u4")])
def test_dtype_is_the_narrowest_that_holds_every_id(vocab_size, dtype):
    assert token_dtype(vocab_size) == np.dtype(dtype)
    assert np.iinfo(token_dtype(vocab_size)).max >= vocab_size - 1


def test_identity_follows_the_contents(tmp_path, tokenizer_path):
    copy = tmp_path / "other.json"
    copy.write_bytes(tokenizer_path.read_bytes())
    assert tokenizer_identity(str(copy)) == tokenizer_identity(str(tokenizer_path)) != tokenizer_identity("bytes")
    copy.write_bytes(tokenizer_path.read_bytes() + b" ")
    assert tokenizer_identity(str(copy)) != tokenizer_identity(str(tokenizer_path))


@pytest.mark.parametrize("ask", [open_tokenizer, tokenizer_identity])
def test_a_missing_file_names_one_that_is_there(tokenizer_path, ask):
    with pytest.raises(DataError) as caught:
        ask(str(tokenizer_path.with_name("tokeniser.json")))
    assert caught.value.where.startswith("data.tokenizer")
    assert caught.value.fix == f"data.tokenizer={tokenizer_path}"


def test_a_folder_is_that_of_its_file(tokenizer_path, tmp_path):
    assert tokenizer_identity(str(tokenizer_path.parent)) == tokenizer_identity(str(tokenizer_path))
    assert open_tokenizer(str(tokenizer_path.parent)).vocab_size == 300
    assert tokenizer_files(str(tokenizer_path.parent)) == tokenizer_files(str(tokenizer_path))
    with pytest.raises(DataError, match="is a directory without tokenizer.json"):
        open_tokenizer(str(tmp_path))


def test_a_missing_file_with_nothing_near_offers_bytes(tmp_path):
    with pytest.raises(DataError) as caught:
        open_tokenizer(str(tmp_path / "no" / "such.json"))
    assert caught.value.fix == "data.tokenizer=bytes"


@pytest.mark.parametrize("contents", [b"", b"{}", b"\xff\xfe", b'{"model": 3}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, contents):
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_bytes(contents)
    with pytest.raises(DataError, match="cannot be used") as caught:
        open_tokenizer(str(path))
    assert str(path) in caught.value.where


def test_a_text_that_a_tokenizer_cannot_encode_is_an_error(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"known": 0}, unk_token="?")).save(str(path))
    tokenizer = open_tokenizer(str(path))
    assert tokenizer.encode("known").tolist() == [0]
    with pytest.raises(DataError, match="it fails on a text") as caught:
        tokenizer.encode("unknown")
    assert str(path) in caught.value.where


@pytest.mark.parametrize("ask", [open_tokenizer, tokenizer_identity])
def test_a_missing_package_is_said_with_the_pip_command(tmp_path, monkeypatch, ask):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError) as caught:
        ask(str(path))
    assert "pip install tokenizers" in caught.value.fix
    ask("bytes")


def test_imports_neither_torch_nor_tokenizers():
    modules = "meshwright.data.text_corpus, meshwright.data.sampler, meshwright.data.tokenizer"
    code = f"import sys, {modules}; sys.exit(bool({{'torch', 'tokenizers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
