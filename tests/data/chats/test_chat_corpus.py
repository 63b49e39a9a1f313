"""Corpora of conversations: their tokens, masks and packed windows, from every kind of record, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from datetime import date

import numpy as np
import pytest

from meshwright.data import tokenise
from meshwright.data.chats.chat_format import ChatFormat
from meshwright.data.packed_corpus import pack_corpus
from meshwright.data.sources.source_text import Use
from meshwright.data.text_corpus import open_corpus
from meshwright.errors import DataError
from tests.data.chats.formats import CHATML, TEMPLATES, build, chat, many_chats, write_lines
from tests.data.chats.formats import parts as written

pytest.importorskip("tokenizers")

CHATS = many_chats(80)
IGNORED = -100


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    return {name: build(folder / name, template) for name, template in TEMPLATES.items()}


def opened(source, tokenizer, folder, *, chat_field="messages", **more):
    return open_corpus(str(source), tokenizer=str(tokenizer.folder), token_dtype="uint16", chat_field=chat_field,
                       cache_dir=str(folder / "cache"), with_documents=True, **more)  # fmt: skip


def documents(tokens, ends, mask, start=0):
    """Ids and mask of each document."""
    bounds = [0, *(int(end) - start for end in ends)]
    counts = mask.at(np.arange(len(tokens)))
    return [(tokens[a:b].tolist(), counts[a:b].tolist()) for a, b in zip(bounds, bounds[1:], strict=False)]


def splits(corpus):
    train = documents(corpus.train, corpus.train_documents.ends, corpus.train_mask)
    held_out = corpus.validation_documents
    return train, documents(corpus.validation, held_out.ends, corpus.validation_mask, held_out.split_start)


def pieces_of(documents, seq_len):
    """Inputs and targets of each document, and of its parts that fit into a window; what has no target is left out."""
    found = Counter()
    for ids, counts in documents:
        pairs = [(a, b if c else IGNORED) for a, b, c in zip(ids, ids[1:], counts[1:], strict=False)]
        for first in range(0, len(pairs), seq_len):
            piece = tuple(pairs[first : first + seq_len])
            if any(target != IGNORED for _, target in piece):
                found[piece] += 1
    return found


def pieces_in(windows):
    """The same of packed windows, and whether padding is padding."""
    every = np.arange(windows.num_windows)
    inputs, targets = windows.read(every, ignored_target=IGNORED)
    found = Counter()
    for row, lengths in enumerate(windows.documents(every)):
        first = 0
        for length in lengths:
            here = slice(first, first + length)
            piece = tuple(zip(inputs[row, here].tolist(), targets[row, here].tolist(), strict=True))
            first += length
            if any(target != IGNORED for _, target in piece):
                found[piece] += 1
            else:
                assert first == windows.seq_len and set(piece) == {(0, IGNORED)}
        assert windows.count(every[row : row + 1]) == (targets[row] != IGNORED).sum() > 0
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_documents_and_windows_are_the_conversations(tmp_path, tokenizers, name):
    tokenizer = tokenizers[name]
    corpus = opened(write_lines(tmp_path / "a.jsonl", CHATS), tokenizer, tmp_path)
    train, held_out = splits(corpus)
    assert len(train) == 72 and len(held_out) == 8
    for (ids, counts), messages in zip(train + held_out, CHATS, strict=True):
        assert counts == tokenizer.mask(ids, written(name, messages))
    for seq_len in (8, 50, 1000):
        packed = pack_corpus(corpus, seq_len=seq_len, cache_dir=str(tmp_path)).packed
        for windows, split in ((packed.train, train), (packed.validation, held_out)):
            found = pieces_in(windows)
            assert found == pieces_of(split, seq_len)
            assert windows.num_targets == sum(counts.count(True) for _, counts in split)
            assert windows.num_split == sum(len(ids) - 1 > seq_len for ids, _ in split)
            num_pieces = sum(-(-(len(ids) - 1) // seq_len) for ids, _ in split)
            assert windows.num_left_out == num_pieces - found.total()


def test_the_description_says_what_counts_and_what_is_split(tmp_path, tokenizers):
    corpus = opened(write_lines(tmp_path / "a.jsonl", CHATS), tokenizers["chatml"], tmp_path)
    train = splits(corpus)[0]
    share = sum(counts.count(True) for _, counts in train) / sum(len(ids) - 1 for ids, _ in train)
    assert f": {share:.0%} of tokens count in the loss" in pack_corpus(
        corpus, seq_len=1000, cache_dir=str(tmp_path)).description  # fmt: skip
    split = sum(len(ids) > 51 for ids, _ in train)
    text = pack_corpus(corpus, seq_len=50, cache_dir=str(tmp_path)).description
    assert text.endswith("\n  turns of the assistant end with <|im_end|>")
    assert f"longer than train.seq_len = 50, and split: {split} of 72 conversations; left out: " in text


def test_parquet_and_saved_datasets_have_the_same_conversations(tmp_path, tokenizers):
    datasets = pytest.importorskip("datasets")
    tokenizer = tokenizers["chatml"]
    rows = [{"messages": messages, "n": n} for n, messages in enumerate(CHATS)]
    dataset = datasets.Dataset.from_list(rows)
    dataset.to_parquet(str(tmp_path / "a.parquet"))
    dataset.save_to_disk(str(tmp_path / "saved"))
    expected = splits(opened(write_lines(tmp_path / "a.jsonl", CHATS), tokenizer, tmp_path))
    assert splits(opened(tmp_path / "a.parquet", tokenizer, tmp_path)) == expected
    saved = splits(opened(tmp_path / "saved", tokenizer, tmp_path))
    assert sorted(saved[0] + saved[1]) == sorted(expected[0] + expected[1])
    for source in ("a.parquet", "saved"):
        with pytest.raises(DataError, match="n is a number, not a list of messages, in .* row 0"):
            opened(tmp_path / source, tokenizer, tmp_path, chat_field="n")
        with pytest.raises(DataError, match="has no column said; it has") as caught:
            opened(tmp_path / source, tokenizer, tmp_path, chat_field="said")
        assert caught.value.fix.startswith("data.chat_field=")
        with pytest.raises(DataError, match="data.chat_field are not set") as caught:
            opened(tmp_path / source, tokenizer, tmp_path, chat_field=None)
        assert caught.value.fix.startswith("data.chat_field=messages data.packing=documents")


def test_texts_beside_conversations_count_as_a_whole(tmp_path, tokenizers):
    write_lines(tmp_path / "a.jsonl", CHATS)
    (tmp_path / "b.txt").write_text("fox " * 100)
    train, held_out = splits(opened(f"{tmp_path}/*.*", tokenizers["chatml"], tmp_path))
    for ids, counts in (train[-1], held_out[-1]):
        assert ids[0] == 3 and ids[-1] == 2 and all(counts), "framed as the tokenizer frames a text"
    assert len(train) == 73 and not all(train[0][1])


@pytest.mark.parametrize("use", [Use.TRAIN, Use.VALIDATION])
def test_a_source_is_used_whole(tmp_path, tokenizers, use):
    corpus = opened(write_lines(tmp_path / "a.jsonl", CHATS), tokenizers["chatml"], tmp_path, use=use)
    is_train = use is Use.TRAIN
    tokens, documents_of = (
        (corpus.train, corpus.train_documents) if is_train else (corpus.validation, corpus.validation_documents)
    )
    mask = corpus.train_mask if is_train else corpus.validation_mask
    found = documents(tokens, documents_of.ends, mask, documents_of.split_start)
    assert len(found) == 80 and len(corpus.validation if is_train else corpus.train) == 0
    for (ids, counts), messages in zip(found, CHATS, strict=True):
        assert counts == tokenizers["chatml"].mask(ids, written("chatml", messages))


def test_a_killed_process_leaves_parts_with_masks(tmp_path, tokenizers, monkeypatch):
    monkeypatch.setattr(tokenise, "_BATCH_CHARS", 200)
    monkeypatch.setattr(tokenise, "_NUM_BATCHES", 2)
    path = write_lines(tmp_path / "a.jsonl", CHATS)
    save, encode_batch = tokenise.Parts._save, ChatFormat.encode_batch

    def save_and_fail(self, number, encoded):
        save(self, number, encoded)
        if number == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tokenise.Parts, "_save", save_and_fail)
        with pytest.raises(KeyboardInterrupt):
            opened(path, tokenizers["chatml"], tmp_path)
    num_encoded = []
    monkeypatch.setattr(ChatFormat, "encode_batch",
                        lambda self, chats: num_encoded.append(len(chats)) or encode_batch(self, chats))  # fmt: skip
    again = opened(path, tokenizers["chatml"], tmp_path)
    assert 0 < sum(num_encoded) < len(CHATS)
    fresh = opened(path, tokenizers["chatml"], tmp_path / "other")
    assert splits(again) == splits(fresh) and again.fingerprint == fresh.fingerprint


def test_fingerprints_and_caches_are_those_of_the_template(tmp_path, tokenizers):
    path = write_lines(tmp_path / "a.jsonl", CHATS)
    first = {name: opened(path, tokenizer, tmp_path).fingerprint for name, tokenizer in tokenizers.items()}
    assert first["chatml"] == first["tagged"] != first["llama"], "the same tokens and masks"
    assert {name: opened(path, one, tmp_path).fingerprint for name, one in tokenizers.items()} == first
    assert len(list((tmp_path / "cache").glob("text-*"))) == 3
    everything = CHATML.replace("{{ '<|im_start|>'", "{% generation %}{{ '<|im_start|>'").replace(
        "'\\n' }}\n{%- endfor", "'\\n' }}{% endgeneration %}\n{%- endfor"
    )
    other = opened(path, build(tmp_path / "other", everything), tmp_path)
    assert all(all(counts) for _, counts in splits(other)[0]) and other.fingerprint != first["chatml"]


def test_the_date_is_that_of_the_day_of_the_cache(tmp_path, monkeypatch):
    tokenizer = build(tmp_path / "t", "{{ strftime_now('%d %b %Y') }}" + CHATML)
    path = write_lines(tmp_path / "a.jsonl", CHATS)
    day = date(2031, 5, 7)

    class Day(date):
        @classmethod
        def today(cls):
            return day

    monkeypatch.setattr("meshwright.data.chats.chat_format.date", Day)
    first = opened(path, tokenizer, tmp_path)
    assert "theirs is 2031-05-07" in first.description
    day = date(2031, 5, 8)
    again = opened(path, tokenizer, tmp_path)
    assert again.fingerprint == first.fingerprint and again.conversations.day == date(2031, 5, 7)
    ids = splits(again)[0][0][0]
    assert b"".join(tokenizer.token_bytes[i] for i in ids).startswith(b"07 May 2031")


REFUSED = {
    "a line": ('{"messages": [{"role": "user", "content": "a"}]}', {}, "the assistant says nothing in {path}:3"),
    "no field": ('{"chat": []}', {}, "{path}:3 has no field messages; it has chat"),
    "a text": ('{"messages": "a"}', {}, "messages is a string, not a list of messages, in {path}:3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_line_that_is_no_conversation_is_named(tmp_path, tokenizers, name):
    line, more, says = REFUSED[name]
    path = write_lines(tmp_path / "a.jsonl", CHATS[:2])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError) as caught:
        opened(path, tokenizers["chatml"], tmp_path, **more)
    assert says.format(path=path) in caught.value.what and f"{path}:3" in caught.value.where


def test_fields_and_sources_that_do_not_fit_are_refused(tmp_path, tokenizers):
    path = write_lines(tmp_path / "a.jsonl", CHATS)
    with pytest.raises(DataError, match="data.chat_field are not set, and .* messages \\(an array\\)") as caught:
        opened(path, tokenizers["chatml"], tmp_path, chat_field=None)
    assert caught.value.fix.startswith("data.chat_field=messages data.packing=documents")
    with pytest.raises(DataError, match="has no field said") as caught:
        opened(path, tokenizers["chatml"], tmp_path, chat_field="said")
    assert caught.value.fix.startswith("data.chat_field=messages")
    (tmp_path / "b.txt").write_text("a" * 100)
    with pytest.raises(DataError, match="data.chat_field = messages has no effect"):
        opened(tmp_path / "b.txt", tokenizers["chatml"], tmp_path)
    with pytest.raises(DataError, match="has no chat template"):
        opened(path, build(tmp_path / "plain", None), tmp_path)


def test_a_split_without_a_target_is_refused(tmp_path, tokenizers):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"messages": chat("a", "b")}) + "\n" for _ in range(9)))
    with pytest.raises(DataError, match="validation split of .* is empty"):
        opened(path, tokenizers["chatml"], tmp_path)
