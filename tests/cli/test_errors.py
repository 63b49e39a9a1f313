"""Bad input through the real command: one screen with what, where, rule and fix, exit code 2, before torch is imported.

One of each source of errors (a word of the command, a launcher, the data, a checkpoint) runs as a process of its own,
with a `torch` on the path that raises when it is imported. The others run in this process, where importing torch raises
too.
"""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest

from meshwright.checkpoint import atomic_directory
from meshwright.checkpoint.manifest import write_file
from meshwright.config.facts_for_family import model_facts
from meshwright.plan.rules import load
from tests.helpers import (
    alternatives,
    assert_every_fix_works,
    meshwright,
    open_data,
    outcome,
    shown_error,
    small_corpus,
)


@pytest.fixture
def fails(no_torch, tmp_path):
    """Runs a command that must fail with bad input, and gives the parts of the error."""

    def run(*words, **environment):
        done = meshwright(*words, env=no_torch | environment, cwd=tmp_path)
        assert done.returncode == 2, f"exit code {done.returncode}\n{done.stderr}"
        assert done.stdout == "" and "\x1b" not in done.stderr
        return shown_error(done.stderr)

    return run


@pytest.fixture
def fails_here(here):
    """The same within this process."""

    def run(*words, **environment):
        done = here(*words, **environment)
        assert done.returncode == 2, f"exit code {done.returncode}\n{done.stderr}"
        assert done.stdout == ""
        return shown_error(done.stderr)

    return run


def test_importing_torch_would_be_noticed(no_torch, corpus, tmp_path):
    done = meshwright("run", *corpus, "train.seq_len=64", "--out", tmp_path / "run", env=no_torch)
    assert done.returncode != 0 and "torch was imported" in done.stderr


def test_unknown_key(fails):
    error = fails("run", "train.stpes=5")
    assert error["error"] == "unknown key train.stpes" and error["where"] == "command line, train.stpes"
    assert error["fix"].startswith("train.steps")


def test_wrong_type(fails_here):
    error = fails_here("run", "train.steps=many")
    assert "train.steps = 'many'" in error["error"] and "integer" in error["rule"]
    assert alternatives(error["fix"]) == [[f"train.steps={load(None).train.steps}"]]


def test_wrong_type_in_a_file(fails_here, tmp_path):
    (tmp_path / "mine.toml").write_text("[mesh]\ntp = 'two'\n")
    assert fails_here("run", "mine.toml")["where"] == "mine.toml, mesh.tp"


MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
TORCHRUN = MEETING | {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SLURM = MEETING | {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}


def test_axes_that_do_not_match_the_number_of_ranks(fails):
    words = ["train.global_batch=32"]
    error = fails("run", *words, **TORCHRUN)
    assert "the mesh has one rank" in error["error"] and "4 were started" in error["error"]
    assert "mesh.dp_shard=4" in error["fix"]
    assert_every_fix_works(outcome(words, num_ranks=4), words, num_ranks=4)


def test_axes_that_do_not_match_what_slurm_started(fails_here):
    assert "4 were started" in fails_here("run", **SLURM)["error"]


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "0", "WORLD_SIZE": "2"},
        MEETING | {"RANK": "x", "WORLD_SIZE": "2"},
        MEETING | {"RANK": "2", "WORLD_SIZE": "2"},
        MEETING | {"RANK": "-1", "WORLD_SIZE": "2"},
        MEETING | {"RANK": "0"},
        {"WORLD_SIZE": "2"},
        {"SLURM_NTASKS": "two", "SLURM_PROCID": "0"},
    ],
)
def test_half_a_launcher(fails_here, environment):
    error = fails_here("run", "mesh.dp_shard=2", **environment)
    assert any(name in error["error"] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_NTASKS"))


def test_heads_that_tp_does_not_divide(fails_here):
    error = fails_here("run", "llama-tiny", "mesh.tp=3")
    assert error["error"] == "mesh.tp = 3 does not divide 4 attention heads"
    assert error["where"] == "command line, mesh.tp" and "mesh.tp=2" in error["fix"]


def test_batch_that_does_not_divide(fails_here):
    error = fails_here("run", "mesh.dp_shard=3", "train.global_batch=32")
    assert "train.global_batch = 32 is not divisible by 3" in error["error"]
    assert alternatives(error["fix"]) == [["train.global_batch=33"], ["train.global_batch=30"]]


def test_axis_that_a_model_has_no_use_for(fails_here):
    error = fails_here("run", "dit-digits", "mesh.cp=2")
    assert "blocks need the full sequence" in error["error"] and len(alternatives(error["fix"])) == 2


def test_section_that_is_not_there_yet(fails_here):
    assert "not available yet" in fails_here("run", "attention.kind=flex")["error"]


def test_missing_data_file(fails):
    error = fails("run", "data.source=no-such.txt")
    assert error["error"].startswith("file not found: no-such.txt") and error["where"] == "data.source, no-such.txt"
    assert alternatives(error["fix"]) == [["data.source=stdlib"]]


@pytest.mark.parametrize("name", ["no/such/*.txt", "no-such.bin", "no-such.npy", "."])
def test_other_missing_data(fails_here, name):
    error = fails_here("run", f"data.source={name}")
    assert name in error["error"] and "data.source" in error["where"]


@pytest.mark.parametrize("source", ["digits", "digits-video"])
def test_pictures_for_a_model_of_text(fails_here, source, tmp_path):
    """A file of that name is text like any other."""
    error = fails_here("run", f"data.source={source}")
    assert error["error"] == f"{source} is image data, but this model trains on text"
    assert error["fix"] == f"the preset dit-{source}, or data.source=stdlib"
    assert outcome([], f"dit-{source}").data.source == source
    (tmp_path / source).write_text("a few words")
    assert "longer than" in fails_here("run", f"data.source={source}", "data.cache_dir=cache")["error"]


def test_missing_data_file_beside_a_similar_one(fails_here, tmp_path):
    small_corpus(tmp_path)
    error = fails_here("run", "data.source=corpsu.txt", "data.cache_dir=cache")
    words = alternatives(error["fix"])[0]
    assert words == [f"data.source={tmp_path / 'corpus.txt'}"]
    open_data(load(None, [*words, f"data.cache_dir={tmp_path}/cache"]))


def test_missing_tokenizer(fails_here, corpus):
    error = fails_here("run", *corpus, "data.tokenizer=tokenizer.json")
    assert "tokenizer.json" in error["error"] and "data.tokenizer=bytes" in error["fix"]


def test_empty_corpus(fails_here, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"")
    error = fails_here("run", "data.source=*.txt", "data.cache_dir=cache")
    assert "is empty" in error["error"] and error["where"] == "data.source, *.txt"
    assert alternatives(error["fix"]) == [["data.source=stdlib"]]


@pytest.mark.parametrize("content", [b"\0\0\0", b"\xff\xfd\xff", b"x"])
def test_corpus_without_text(fails_here, tmp_path, content):
    (tmp_path / "a.txt").write_bytes(content)
    assert "is empty" in fails_here("run", "data.source=*.txt", "data.cache_dir=cache")["error"]


def test_sequence_longer_than_the_corpus(fails_here, tmp_path):
    words = small_corpus(tmp_path, num_bytes=3000)
    error = fails_here("run", *words, "train.seq_len=4096")
    assert "train.seq_len = 4096 is longer" in error["error"]
    [fix] = alternatives(error["fix"])[0]
    open_data(load(None, [*words, fix]))
    assert int(fix.partition("=")[2]) > 64


@pytest.mark.parametrize("more", [["mesh.tp=2"], ["mesh.tp=2", "mesh.sequence_parallel=false"], ["mesh.tp=4"]])
def test_sequence_longer_than_the_corpus_that_tp_divides(fails_here, tmp_path, more):
    words = [*small_corpus(tmp_path, num_bytes=1230), *more]
    [fix] = alternatives(fails_here("run", *words, "train.seq_len=256")["fix"])[0]
    open_data(load(None, [*words, fix]))
    assert ("false" in more[-1]) == (int(fix.partition("=")[2]) % 2 == 1)


def test_ids_that_the_vocabulary_lacks(fails_here, tmp_path):
    numpy.save(tmp_path / "ids.npy", numpy.arange(5000, dtype=numpy.uint32))
    error = fails_here("run", "data.source=ids.npy", "data.cache_dir=cache")
    assert "ids up to 4999" in error["error"] and "model.vocab_size=5000" in error["fix"]


def save_checkpoint(root: Path, *words: str, step: int = 5, corpus: str = "c") -> Path:
    """A checkpoint with a manifest and no tensors, which is all that torch-free checks look at."""
    config = load(None, words)
    folder = atomic_directory.begin(root, step)
    files = {"data": write_file(folder / "data", b"x" * 1000)}
    run = {"config": config.model_dump(), "corpus": corpus, "skipped_in_a_row": 0}
    return atomic_directory.commit(folder, step=step, model=dict(model_facts(config).identity), run=run, files=files)


def test_checkpoint_of_another_model(fails_here, corpus, tmp_path):
    save_checkpoint(tmp_path / "old/checkpoints", "model.dim=64")
    error = fails_here("run", *corpus, "--out", "old", "--resume", "auto")
    assert error["error"] == "model.dim is 128 here and 64 in the checkpoint"
    assert "00000005" in error["where"] and "model.dim=64" in error["fix"]


@pytest.mark.parametrize("word", ["train.seed=1", "train.seq_len=128", "train.global_batch=16"])
def test_checkpoint_of_other_samples(fails_here, corpus, tmp_path, word):
    words = ["train.seed=7", "train.seq_len=64", "train.global_batch=8"]
    save_checkpoint(tmp_path / "old/checkpoints", *words)
    error = fails_here("run", *corpus, *words, word, "--out", "old", "--resume", "auto")
    key = word.partition("=")[0]
    assert error["error"].startswith(f"{key} = ") and alternatives(error["fix"])[0][0].startswith(f"{key}=")


def test_checkpoint_of_another_corpus(fails_here, corpus, tmp_path):
    save_checkpoint(tmp_path / "old/checkpoints")
    error = fails_here("run", *corpus, "--out", "old", "--resume", "auto")
    assert "another corpus" in error["error"] and corpus[0].replace("=", " = ") in error["where"]


def test_damaged_checkpoint_by_its_path(fails, corpus, tmp_path):
    path = save_checkpoint(tmp_path / "old/checkpoints")
    (path / "data").write_bytes(b"x" * 999 + b"y")
    error = fails("run", *corpus, "--out", "old", "--resume", path)
    assert error["error"].startswith("data has changed content") and error["where"] == str(path / "data")
    assert f"(meshwright run {tmp_path}/old takes the newest valid one)" in error["fix"]


def test_no_checkpoint_at_the_path(fails_here, corpus):
    error = fails_here("run", *corpus, "--resume", "nowhere")
    assert "manifest.json is missing" in error["error"] and error["where"] == "nowhere"


def test_a_run_folder_given_as_a_checkpoint_names_its_checkpoint(fails_here, corpus, tmp_path):
    path = save_checkpoint(tmp_path / "old/checkpoints")
    error = fails_here("run", *corpus, "--resume", "old")
    assert str(path.relative_to(tmp_path)) in error["fix"]


def test_unknown_preset(fails_here):
    error = fails_here("run", "llama-tinny")
    assert error["error"].startswith("llama-tinny is neither a preset nor a TOML file")
    assert error["fix"] == "llama-tiny"


def test_folder_that_already_holds_a_run(fails_here, corpus, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old/metrics.jsonl").write_text('{"step": 1}\n')
    error = fails_here("run", *corpus, "--out", "old")
    assert error["error"] == "old already holds a run" and "meshwright run old," in error["fix"]
    assert (tmp_path / "old/metrics.jsonl").read_text() == '{"step": 1}\n'


def test_another_runs_checkpoint_does_not_overwrite_this_folder(fails_here, corpus, tmp_path):
    config = load(None, corpus)
    path = save_checkpoint(tmp_path / "old/checkpoints", corpus=open_data(config).fingerprint)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/metrics.jsonl").write_text('{"step": 1}\n')
    error = fails_here("run", *corpus, "--out", "mine", "--resume", path)
    assert error["error"] == "mine already holds a run"


@pytest.mark.parametrize("out", ["a-file", "a-file/below", "/proc/nothing"])
def test_folder_that_cannot_be_made(fails_here, corpus, tmp_path, out):
    (tmp_path / "a-file").write_text("")
    error = fails_here("run", *corpus, "--out", out)
    assert out in error["error"] and error["where"] == "--out"


def test_not_an_override(fails_here):
    assert fails_here("run", "llama-tiny", "train.steps")["error"] == "'train.steps' is not an override"


def test_file_that_is_not_toml(fails_here, tmp_path):
    (tmp_path / "mine.toml").write_text("[train\n")
    error = fails_here("run", "mine.toml")
    assert "not TOML" in error["error"] and "line 1" in error["error"] and error["where"] == "mine.toml"


@pytest.mark.parametrize("verb", ["prove", "presets"])
def test_other_verbs_explain_too(fails_here, verb):
    assert "llama-tiny" in fails_here(verb, "llama-tinny")["fix"]


def test_a_folder_without_checkpoints(fails_here):
    assert "no checkpoint in nowhere" in fails_here("checkpoint", "ls", "nowhere")["error"]


@pytest.mark.parametrize("option", ["--out", "--resume"])
def test_an_empty_path_is_not_the_current_folder(fails_here, tmp_path, option):
    error = fails_here("run", option, "")
    assert error["error"] == f"{option} is empty" and error["fix"].startswith(f"leave {option} out")
    assert not (tmp_path / "config.toml").exists()
