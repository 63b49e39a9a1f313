"""Documents are framed as the tokenizer itself frames a text, and end as its files declare."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest

from meshwright.data.packed_corpus import pack_corpus
from meshwright.data.text_corpus import open_corpus
from meshwright.data.tokenizer import ByteTokenizer, open_tokenizer
from meshwright.errors import DataError

tokenizers = pytest.importorskip("tokenizers")
pre_tokenizers, processors = tokenizers.pre_tokenizers, tokenizers.processors

WORDS = ["[UNK]", "<s>", "</s>", "<|endoftext|>", "[EOS]", "river", "stone", "lamp", "doc"]
START, END, TEXT_END, EOS = 1, 2, 3, 4
TEMPLATE = [("<s>", START), ("</s>", END)]
PROCESSORS = {
    "nothing": None,
    "a begin": processors.TemplateProcessing(single="<s> $A", special_tokens=TEMPLATE),
    "two begins": processors.TemplateProcessing(single="[UNK] <s> $A", special_tokens=[("[UNK]", 0), TEMPLATE[0]]),
    "both": processors.TemplateProcessing(single="<s> $A </s>", special_tokens=TEMPLATE),
    "an end": processors.TemplateProcessing(single="$A </s>", special_tokens=TEMPLATE),
    "Roberta's": processors.RobertaProcessing(("</s>", END), ("<s>", START)),
    "Bert's": processors.BertProcessing(("</s>", END), ("<s>", START)),
    "in a sequence": processors.Sequence(
        [processors.ByteLevel(), processors.TemplateProcessing(single="<s> $A", special_tokens=TEMPLATE)]
    ),
}
CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"
TEXTS = [f"doc {' '.join(WORDS[5 + (number + at) % 3] for at in range(number % 7 + 1))}" for number in range(300)]


def write(folder, *, words=WORDS, processor=None, **files):
    """Write a tokenizer of whole words, and the files beside it."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0])
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if processor is not None:
        backend.post_processor = processor
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return backend


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def opened(lines, folder, **more):
    return open_corpus(
        str(lines), tokenizer=str(folder / "tokenizer.json"), token_dtype="uint16", text_field="text",
        cache_dir=str(folder / "cache"), with_documents=True, **more,
    )  # fmt: skip


def documents_of(part, documents):
    bounds = [0, *(documents.ends.astype(int) - documents.split_start)]
    return [part[first:last].tolist() for first, last in itertools.pairwise(bounds)]


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("bos", ["auto", "none"])
def test_documents_are_those_of_the_tokenizer_itself(tmp_path, lines, name, bos):
    backend = write(tmp_path, processor=PROCESSORS[name], tokenizer_config={"eos_token": "</s>"})
    corpus = opened(lines, tmp_path, bos=bos)
    expected = []
    for text in TEXTS:
        ids = backend.encode(text).ids
        ids = ids if ids[-1] == END else [*ids, END]
        begin = ids.index(WORDS.index("doc"))
        expected.append(ids[begin:] if bos == "none" else ids)
    found = documents_of(corpus.train, corpus.train_documents)
    held_out = documents_of(corpus.validation, corpus.validation_documents)
    assert found + held_out == expected and len(held_out) == 30
    frame = " ".join(WORDS[token] for token in expected[0][:begin] if bos == "auto")
    assert corpus.description.splitlines()[1] == f"  documents framed {frame}{' ' * bool(frame)}… </s>"


@pytest.mark.parametrize("name", ["a begin", "both", "nothing"])
def test_bytes_are_those_of_the_text_and_one_for_each_end(tmp_path, lines, name):
    """Packed documents don't predict a begin, which has no bytes; a stream of windows predicts it after the end."""
    write(tmp_path, processor=PROCESSORS[name])
    packed = opened(lines, tmp_path, separator=END)
    num_tokens, num_bytes = len(packed.validation), sum(len(text) + 1 for text in TEXTS[-30:])
    targets = num_tokens - 30 * (name != "nothing")
    assert packed.validation_bytes_per_token == pytest.approx(num_bytes / targets, rel=1e-12)
    windows = open_corpus(
        str(lines), tokenizer=str(tmp_path), token_dtype="uint16", text_field="text", separator=END,
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    assert windows.validation_bytes_per_token == pytest.approx(num_bytes / num_tokens, rel=1e-12)
    assert np.array_equal(windows.train, packed.train)


def test_a_packed_begin_is_the_first_input_of_each_document_and_never_a_target(tmp_path, lines):
    write(tmp_path, processor=PROCESSORS["a begin"])
    windows = pack_corpus(opened(lines, tmp_path, separator=END), seq_len=20, cache_dir=str(tmp_path / "cache"))
    train = windows.packed.train
    inputs, targets = train.read(np.arange(train.num_windows), ignored_target=-100)
    assert not (targets == START).any() and not (inputs == END).any() and (targets == END).sum() == 270
    for row, lengths in zip(inputs, train.documents(np.arange(train.num_windows)), strict=True):
        starts = np.cumsum([0, *lengths])[:-1]
        assert all(row[start] in (START, 0) for start in starts)  # 0 is padding


DECLARED = {
    "as text": {"tokenizer_config": {"eos_token": "[EOS]"}},
    "as an object": {"tokenizer_config": {"eos_token": {"content": "[EOS]", "lstrip": False}}},
    "in the map": {"special_tokens_map": {"eos_token": "[EOS]"}},
    "in the map, since it is null": {
        "tokenizer_config": {"eos_token": None}, "special_tokens_map": {"eos_token": {"content": "[EOS]"}}},
    "twice": {"tokenizer_config": {"eos_token": "[EOS]"}, "special_tokens_map": {"eos_token": "[EOS]"}},
}  # fmt: skip


@pytest.mark.parametrize("name", DECLARED)
def test_a_declared_end_wins_over_known_names(tmp_path, name):
    write(tmp_path, **DECLARED[name])
    for named in (tmp_path, tmp_path / "tokenizer.json"):
        assert open_tokenizer(str(named)).framing.end == (EOS,)


@pytest.mark.parametrize("files", [{}, {"tokenizer_config": {"eos_token": None}}, {"tokenizer_config": {}}])
def test_of_known_names_the_only_one_ends_a_document(tmp_path, files):
    for word, ends in (("</s>", (1,)), ("<eos>", (1,)), ("<?>", ())):
        write(tmp_path, words=["[UNK]", word, "doc"], **files)
        framing = open_tokenizer(str(tmp_path)).framing
        assert framing.begin == () and framing.end == ends
    assert framing.text == "by nothing: the tokenizer has no end of text"
    assert ByteTokenizer().framing.end == (0,)


DISAGREE = {
    "two known names": ({}, None, {TEXT_END, END}),
    "two files": ({"tokenizer_config": {"eos_token": "[EOS]"}, "special_tokens_map": {"eos_token": "</s>"}}, None,
                  {EOS, END}),
    "a file and what is added": ({"tokenizer_config": {"eos_token": "[EOS]"}}, "both", {EOS, END}),
}  # fmt: skip


@pytest.mark.parametrize("name", DISAGREE)
def test_ends_that_disagree_are_named_and_each_fix_decides(tmp_path, lines, name):
    files, processor, ends = DISAGREE[name]
    write(tmp_path, processor=PROCESSORS.get(processor), **files)
    with pytest.raises(DataError, match="documents may end with") as caught:
        opened(lines, tmp_path)
    error = caught.value
    assert all(WORDS[end] in error.what for end in ends) and str(tmp_path) in error.where
    found = {int(number) for number in re.findall(r"data\.separator=(\d+)", error.fix)}
    assert found == ends
    for end in ends:
        corpus = opened(lines, tmp_path, separator=end)
        assert {ids[-1] for ids in documents_of(corpus.train, corpus.train_documents)} == {end}
        assert f"… {WORDS[end]}" in corpus.description


@pytest.mark.parametrize(("files", "separator", "what", "fix"), [
    ({"tokenizer_config": {"eos_token": "<gone>"}}, None, f"{CONFIG} declares the eos_token <gone>", "save_pretrained"),
    ({"special_tokens_map": {"eos_token": "<gone>"}}, None, f"{MAP} declares", f"correct {MAP}"),
    ({"tokenizer_config": []}, None, "can't be read: it is no object", "save the tokenizer again"),
    ({}, 99, "data.separator = 99 is no id of", "remove data.separator"),
])  # fmt: skip
def test_an_end_that_the_vocabulary_lacks_is_an_error(tmp_path, lines, files, separator, what, fix):
    write(tmp_path, **files)
    with pytest.raises(DataError, match=re.escape(what)) as caught:
        opened(lines, tmp_path, separator=separator)
    assert fix in caught.value.fix and caught.value.rule


def test_another_frame_is_another_corpus_in_the_cache(tmp_path, lines):
    write(tmp_path, processor=PROCESSORS["a begin"], tokenizer_config={"eos_token": "[EOS]"})
    fingerprints = [opened(lines, tmp_path, bos=bos).fingerprint for bos in ("auto", "none", "auto")]
    assert fingerprints[0] == fingerprints[2] != fingerprints[1]
    (tmp_path / CONFIG).write_text(json.dumps({"eos_token": "</s>"}))
    assert opened(lines, tmp_path).fingerprint not in fingerprints


def test_a_text_that_its_vocabulary_lacks_doesn_t_hide_what_is_added(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "known": 2}, unk_token="?"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    framing = open_tokenizer(str(tmp_path)).framing
    assert (framing.begin, framing.end, framing.text) == ((0,), (1,), "<s> … </s>")
