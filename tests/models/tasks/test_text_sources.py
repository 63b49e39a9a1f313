"""Text of several sources: mixtures, a validation source, sources that run out, changes, and what is wrong."""

from __future__ import annotations

import json
import logging
import shutil
import sysconfig

import numpy as np
import pytest
import torch

from meshwright.config.facts_for_family import run_facts
from meshwright.data.mixtures.entries import ONE
from meshwright.data.mixtures.mixture import Mixture
from meshwright.data.mixtures.mixture_order import MixtureOrder
from meshwright.data.sources import source_text
from meshwright.data.sources.source_text import Use
from meshwright.errors import ConfigError, DataError
from meshwright.mesh.axes import Axes
from meshwright.models.tasks.text_data import check_overlaps
from meshwright.models.tasks.text_sources import RunSource, changes
from meshwright.plan.rules import load
from meshwright.prove.conclude import diagnose_branches
from meshwright.prove.record.evidence import Evidence, RankRecord
from tests.helpers import open_data

CPU = torch.device("cpu")
PACKED = "data.packing=documents"
HERE = "tests.models.tasks.test_text_sources"


class Letters:
    """Documents of the user's own code."""

    identity = "letters"

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return "z" * (index + 20)


class MoreLetters(Letters):
    """Others of the user's own code."""


@pytest.fixture
def folder(tmp_path):
    """Sources of one letter each, so that a sample shows where it is from."""
    for letter, number in (("a", 40), ("b", 60)):
        lines = [json.dumps({"text": letter * 30, "title": letter.upper() * 30}) for _ in range(number)]
        (tmp_path / f"{letter}.jsonl").write_text("\n".join(lines))
    (tmp_path / "c.txt").write_text("c" * 3000)
    (tmp_path / "d.txt").write_text("d" * 50_000)
    (tmp_path / "v.txt").write_text("v" * 900)
    np.save(tmp_path / "t.npy", np.tile(np.array([*[116] * 39, 0], dtype=np.uint16), 50))
    shutil.copy(tmp_path / "t.npy", tmp_path / "u.npy")
    (tmp_path / "empty.txt").write_text("")
    return tmp_path


def config_of(folder, *words):
    data = [f"data.cache_dir={folder}/cache", "train.seq_len=8", "train.global_batch=8", "train.steps=20"]
    return load("llama-tiny", [*data, *words])


def mixture(folder, *entries):
    pairs = [entry.split(":", 1) for entry in entries]
    texts = [f"{weight}:{name}" if ":" in name else f"{weight}:{folder}/{name}" for weight, name in pairs]
    return "data.mixture=" + json.dumps(texts)


def letters(tokens):
    return set(bytes(np.asarray(tokens, dtype=np.uint8)).decode()) - {"\0"}


MIXED = ("3:a.jsonl", "1:b.jsonl#title", "4:c.txt")


@pytest.mark.parametrize("packing", ["data.packing=none", PACKED])
def test_a_mixture_reads_its_sources_by_weight_and_the_reference_reads_the_same(folder, packing):
    config = config_of(folder, mixture(folder, *MIXED), "data.text_field=text", packing)
    f, text = run_facts(config), open_data(config)
    assert isinstance(text, Mixture) and text.shares == (3 * ONE // 8, ONE // 8, ONE // 2)
    task, reference = config.family.task(f, text, CPU), config.family.reference(f, text)
    batch = task.batch(range(400))
    for index in range(0, 400, 37):
        expected = reference.sample(index)
        assert batch.inputs[index].tolist() == expected["inputs"].tolist()
        assert batch.targets[index].tolist() == expected["targets"].tolist()
    assert task.batch(range(120, 160)).inputs.tolist() == batch.inputs[120:160].tolist()
    counts = {letter: sum(letter in letters(row) for row in batch.inputs) for letter in "aBcb"}
    assert counts["b"] == 0 and [counts[letter] / 400 for letter in "aBc"] == pytest.approx(
        [3 / 8, 1 / 8, 1 / 2], abs=0.1
    )


def test_a_validation_of_a_mixture_keeps_its_proportions(folder):
    words = [mixture(folder, *MIXED), "data.text_field=text", "train.validation_samples=16"]
    config = config_of(folder, *words)
    task = config.family.task(run_facts(config), open_data(config), CPU)
    [batch] = task.validation(batch_size=16, data_parallel=1, data_index=0)
    found = ["".join(sorted(letters(row))) for row in batch.inputs]
    assert (found.count("a"), found.count("B"), found.count("c")) == (6, 2, 8)


def test_the_run_says_what_it_reads(folder):
    text = open_data(config_of(folder, mixture(folder, "0.9:a.jsonl", "0.1:d.txt"), "data.text_field=text"))
    first, second, third = text.description.splitlines()
    assert first == "mixture of 2 sources"
    assert second.startswith(f"  90.00%  1 file of {folder}/a.jsonl, 1.1 kB train / 124 B validation; 1")
    assert second.endswith(" epoch in this run")
    assert third.startswith(f"  10.00%  1 file of {folder}/d.txt, 45.0 kB train") and "; 0.0027 epochs in" in third


@pytest.mark.parametrize("packing", ["data.packing=none", PACKED])
def test_a_validation_source_leaves_the_other_whole(folder, packing):
    split = open_data(config_of(folder, f"data.source={folder}/c.txt", packing))
    words = [f"data.source={folder}/c.txt", f"data.validation_source={folder}/v.txt", packing]
    config = config_of(folder, *words)
    text = open_data(config)
    assert len(text.train) == 3001 and len(text.validation) == 901
    assert letters(text.train) == {"c"} and letters(text.validation) == {"v"}
    assert text.validation_bytes_per_token == 1.0 and text.fingerprint != split.fingerprint
    assert "c.txt, 3.0 kB train\n" in text.description and "v.txt, 901 B validation" in text.description
    task = config.family.task(run_facts(config), text, CPU)
    assert letters(task.batch(range(500)).inputs) == {"c"}
    for batch in task.validation(batch_size=16, data_parallel=1, data_index=0):
        assert letters(batch.inputs) == {"v"}
    if packing == PACKED:
        assert text.packed.train.num_targets == 3000 and text.packed.validation.num_targets == 900


def test_another_validation_source_tokenises_nothing_but_itself(folder, caplog):
    words = [f"data.source={folder}/c.txt", f"data.validation_source={folder}/v.txt"]
    open_data(config_of(folder, *words))
    (folder / "w.txt").write_text("w" * 500)
    with caplog.at_level(logging.INFO, logger="meshwright"):
        open_data(config_of(folder, words[0], f"data.validation_source={folder}/w.txt"))
    assert [record.message.split()[-3] for record in caplog.records] == [f"{folder}/w.txt"]


def test_files_that_are_read_in_pieces_are_used_whole(folder, monkeypatch):
    (folder / "long.txt").write_text("some words\n\n" * 500)
    words = [f"data.source={folder}/long.txt", f"data.validation_source={folder}/v.txt", PACKED]
    whole = open_data(config_of(folder, *words))
    monkeypatch.setattr(source_text, "_LONG_CHARS", 100)
    monkeypatch.setattr(source_text, "_READ_BYTES", 300)
    pieces = open_data(config_of(folder, *words, f"data.cache_dir={folder}/other"))
    assert len(pieces.train) == 6001 and pieces.fingerprint == whole.fingerprint


@pytest.mark.parametrize("packing", [["data.packing=none"], [PACKED, "data.separator=0"]])
def test_token_files_are_used_whole_too(folder, packing):
    words = [f"data.source={folder}/t.npy", f"data.validation_source={folder}/u.npy", *packing]
    text = open_data(config_of(folder, *words))
    assert len(text.train) == len(text.validation) == 2000 and text.validation_bytes_per_token is None
    if packing[0] == PACKED:
        assert text.packed.train.num_targets == text.packed.validation.num_targets == 50 * 39


def test_the_vocabulary_covers_the_validation_source(folder):
    np.save(folder / "large.npy", np.arange(230, dtype=np.uint16))
    words = [f"data.source={folder}/t.npy", f"data.validation_source={folder}/large.npy"]
    assert open_data(config_of(folder, *words)).vocab_size == 230
    with pytest.raises(DataError, match="ids up to 229"):
        open_data(config_of(folder, *words, "model.vocab_size=229"))


def test_mixtures_of_everything_with_a_validation_source(folder):
    words = [mixture(folder, "1:t.npy", "1:c.txt", f"1:{HERE}:Letters"), f"data.validation_source={HERE}:MoreLetters"]
    text = open_data(config_of(folder, *words, PACKED, "data.separator=0"))
    assert [letters(corpus.train) for corpus in text.sources] == [{"t"}, {"c"}, {"z"}]
    assert {corpus.validation_source for corpus in text.sources} == {f"{HERE}:MoreLetters"}
    assert text.validation_bytes_per_token == 1.0
    assert text.description.count("validation") == 1


def test_the_fingerprint_is_that_of_the_corpora_and_their_proportions(folder):
    def fingerprint(*entries, more=()):
        return open_data(config_of(folder, mixture(folder, *entries), *more)).fingerprint

    first = fingerprint("1:c.txt", "3:v.txt")
    assert fingerprint("0.25:c.txt", "0.75:v.txt") == first
    others = [("1:c.txt", "2:v.txt"), ("3:v.txt", "1:c.txt"), ("1:c.txt",), ("1:c.txt", "3:t.npy")]
    found = [fingerprint(*entries) for entries in others]
    found.append(fingerprint("1:c.txt", "3:v.txt", more=[f"data.validation_source={folder}/d.txt"]))
    assert len({first, *found}) == 6


@pytest.mark.parametrize("source", ["mixture", "data.source"])
def test_a_run_ends_before_a_source_runs_out(folder, source):
    words = [f"data.source={folder}/c.txt"]
    if source == "mixture":
        words = [mixture(folder, "1:c.txt", "1:d.txt")]
    open_data(config_of(folder, *words, "train.steps=1000"))
    with pytest.raises(DataError, match=r"c.txt runs out in step \d+ of 1000: it has 337 samples") as caught:
        open_data(config_of(folder, *words, "train.steps=1000", "data.when_exhausted=end"))
    fix = caught.value.fix.partition(",")[0]
    one_more = f"train.steps={int(fix.partition('=')[2]) + 1}"
    with pytest.raises(DataError, match="runs out in step"):
        open_data(config_of(folder, *words, one_more, "data.when_exhausted=end"))
    text = open_data(config_of(folder, *words, fix, "data.when_exhausted=end"))
    config = config_of(folder, *words, fix)
    steps = config.train.steps
    order = config.family.reference(run_facts(config), text).order
    windows = order.windows(range((steps + 1) * 8))
    windows = windows[windows < 337]
    assert len(windows) > 337 >= (order.windows(range(steps * 8)) < 337).sum() > 337 - 9
    assert len(set(windows[:337].tolist())) == 337, "the windows of an epoch are all different"


def test_files_in_common_are_found_through_links_and_in_the_standard_library(folder):
    (folder / "link").symlink_to(".")
    (folder / "one.txt").symlink_to("c.txt")
    library = sysconfig.get_paths()["stdlib"]
    for one, other in (
        (f"{folder}/c.txt", f"{folder}/link/c.txt"),
        (f"{folder}/[cd].txt", f"{folder}/one.txt"),
        ("stdlib", f"{library}/json/*.py"),
    ):
        sources = (
            RunSource("data.source", one, Use.TRAIN),
            RunSource("data.validation_source", other, Use.VALIDATION),
        )
        with pytest.raises(DataError, match="would be trained on"):
            check_overlaps(sources)


@pytest.mark.parametrize(
    ("words", "says", "where"),
    [(["data.source={}/*.txt", "data.validation_source={}/c.txt"],
      "would be trained on, as ", "data.validation_source"),
     (["data.mixture=['1:{}/c.txt','1:{}/../{name}/c.txt']"], "would be read by ", "data.mixture"),
     (["data.mixture=['1:{}/c.txt','1:{}/d.txt']", "data.validation_source={}/d.txt"],
      "and validated with", "data.validation_source")],
)  # fmt: skip
def test_no_text_is_of_two_sources(folder, words, says, where):
    filled = [word.replace("{}", str(folder)).replace("{name}", folder.name) for word in words]
    with pytest.raises(DataError) as caught:
        open_data(config_of(folder, *filled))
    assert says in caught.value.what and caught.value.where.startswith(where)


def test_a_source_smaller_than_a_batch_runs_out_at_once(folder):
    words = [f"data.source={folder}/c.txt", "data.when_exhausted=end", "train.global_batch=1024"]
    with pytest.raises(DataError, match="runs out in step 1 of 20") as caught:
        open_data(config_of(folder, *words))
    assert caught.value.fix.startswith("data.when_exhausted=wrap")


WRONG = {
    "a source that isn't there": (
        "1:nope.txt", [], DataError, "file not found", "data.mixture, ", "in data.mixture, 1:"),
    "no field": ("1:a.jsonl", [], DataError, "data.text_field is not set", "data.text_field; data.mixture", "=text"),
    "another field": (
        "2:a.jsonl#body", [], DataError, "has no field body", "a.jsonl:1", "a.jsonl#text"),
    "a field of what has none": (
        "1:c.txt#text", [], DataError, "has no effect", "data.mixture, ", "in data.mixture, 1:"),
    "a field of no source": (
        "1:c.txt", ["data.text_field=text"], DataError, "has no effect", "data.text_field", "remove data.text_field"),
    "images": ("1:digits", [], DataError, "is image data", "data.mixture, digits", "preset dit-digits"),
    "too short": ("1:v.txt", ["train.seq_len=200"], DataError, "is longer than the validation", "data.mixture", "=90"),
    "an empty source": ("1:empty.txt", [], DataError, "is empty", "data.mixture", "a source with more text"),
    "other tokens": (
        "1:ids.npy", [], DataError, "has ids up to 9999, but data.tokenizer = bytes has 256", "data.mixture", "token"),
    "no separator": ("1:t.npy", [PACKED], ConfigError, "doesn't say where its documents end", "data.separator", "="),
    "a separator for nothing": ("1:c.txt", [PACKED, "data.separator=0"], ConfigError, "no effect", "data.sep", "rem"),
    "a prompt": ("1:t.npy", ["train.sample_prompt=a"], ConfigError, "no effect", "train.sample_prompt", "remove"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_names_the_mixture_and_a_fix(folder, name):
    entry, words, kind, what, where, fix = WRONG[name]
    np.save(folder / "ids.npy", np.arange(10_000, dtype=np.uint16))
    entry = entry if entry == "1:digits" else entry.replace(":", f":{folder}/")
    with pytest.raises(kind, match=what) as caught:
        open_data(config_of(folder, "data.mixture=" + json.dumps([entry, f"1:{folder}/d.txt"]), *words))
    assert where in caught.value.where and fix in caught.value.fix and caught.value.rule


@pytest.mark.parametrize(("source", "what", "fix"), [
    ("nope.txt", "file not found", "data.validation_source="),
    ("empty.txt", "no text in 1 file of .*empty.txt", "a source with text, or data.validation_source=stdlib"),
    ("digits", "is image data", "data.validation_source=stdlib"),
    ("a.jsonl", "data.text_field is not set", "data.text_field=text"),
    ("short.txt", "longer than the validation split, which has 4 tokens", "train.seq_len=3"),
])  # fmt: skip
def test_a_wrong_validation_source_is_named(folder, source, what, fix):
    (folder / "short.txt").write_text("abc")
    path = source if source == "digits" else f"{folder}/{source}"
    with pytest.raises(DataError, match=what) as caught:
        open_data(config_of(folder, f"data.source={folder}/c.txt", f"data.validation_source={path}"))
    assert "data.validation_source" in caught.value.where and fix in caught.value.fix


def test_a_field_may_be_that_of_the_validation_source_alone(folder):
    words = [f"data.source={folder}/c.txt", f"data.validation_source={folder}/a.jsonl", "data.text_field=title"]
    assert letters(open_data(config_of(folder, *words)).validation) == {"A"}


NOTHING = Evidence(Axes(), 1, (RankRecord(),))


@pytest.mark.parametrize("packing", ["data.packing=none", PACKED])
def test_a_proof_reads_the_samples_at_the_end_of_an_epoch_of_a_mixture(folder, packing):
    config = config_of(folder, mixture(folder, *MIXED), "data.text_field=text", packing)
    found = [one.symptom for one in diagnose_branches(config, open_data(config), NOTHING) if "rate" not in one.symptom]
    assert found == []


def test_a_proof_finds_a_mixture_that_repeats_a_position(folder, monkeypatch):
    config = config_of(folder, mixture(folder, "1:c.txt", "1:d.txt"))
    real = MixtureOrder.places

    def places(self, samples):
        sources, positions = real(self, samples)
        return sources, np.where(positions == 5, 4, positions)

    monkeypatch.setattr(MixtureOrder, "places", places)
    found = [one.symptom for one in diagnose_branches(config, open_data(config), NOTHING)]
    assert any("2 of the first" in one and "samples repeat a window" in one for one in found)


def test_a_tokenizer_that_knows_few_characters_reads_a_source_whole(folder):
    """No character of the other split's placeholder is unknown, as it is of the source itself."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.BPE({"c": 0, "v": 1}, [])).save(str(folder / "few.json"))
    words = [f"data.source={folder}/c.txt", f"data.validation_source={folder}/v.txt"]
    text = open_data(config_of(folder, *words, f"data.tokenizer={folder}/few.json"))
    assert (len(text.train), len(text.validation)) == (3000, 900)


def test_text_is_generated_if_the_validation_source_is_text(folder):
    words = ["train.sample_prompt=vv", f"data.validation_source={folder}/v.txt"]
    assert open_data(config_of(folder, f"data.source={folder}/t.npy", *words)).validation_bytes_per_token == 1.0
    with pytest.raises(ConfigError, match="no effect"):
        open_data(config_of(folder, f"data.source={folder}/v.txt", words[0], f"data.validation_source={folder}/t.npy"))


OURS = {"mixture": ("0.7:web", "0.2:code", "0.1:books"), "source": "stdlib", "validation_source": None}


@pytest.mark.parametrize(("now", "says"), [
    (("0.7:web", "0.2:code", "0.1:books"), []),
    (("7:web", "2:code", "1:books"), []),
    (("0.6:web", "0.3:code", "0.1:books"),
     ["the weight of web was 70% and is 60%", "the weight of code was 20% and is 30%"]),
    (("0.7:web", "0.2:code", "0.05:books", "0.05:new#text"),
     ["new#text was added", "the weight of books was 10% and is 5%"]),
    (("0.7:web", "0.3:code"), ["books was removed", "the weight of code was 20% and is 30%"]),
    (("0.2:code", "0.7:web", "0.1:books"), ["the sources are in another order"]),
    ((), ["data.mixture was set and is not set"]),
])  # fmt: skip
def test_sources_added_and_removed_and_weights(now, says):
    assert changes(OURS, {**OURS, "mixture": now}) == says


def test_other_sources_are_named():
    one = {"mixture": (), "source": "a", "validation_source": None}
    assert changes(one, {**one, "source": "b"}) == ["data.source was a and is b"]
    assert changes(one, {**one, "validation_source": "v"}) == ["data.validation_source was not set and is v"]
    assert changes({"source": "a"}, one) == [], "of a version without these keys"
    assert changes({**OURS, "source": "x"}, OURS) == [], "which has no effect beside a mixture"
    assert changes({**OURS, "mixture": ["no weight"]}, OURS) == ["data.mixture was ['no weight']"]
