"""Bad input through the real command: one screen with what, where, rule and fix, exit code 2, before torch is imported.

One of each source of errors (a word of the command, a launcher, the data, a checkpoint) runs as a process of its own,
with a `torch` on the path that raises when it is imported. The others run in this process, where importing torch raises
too. That fixes lead to a run is tested in `test_fixes`.
"""

from __future__ import annotations

import shlex
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


def test_importing_torch_would_be_noticed(no_torch, corpus, tmp_path):
    done = meshwright("run", *corpus, "train.seq_len=64", "--out", tmp_path / "run", env=no_torch)
    assert done.returncode != 0 and "torch was imported" in done.stderr


def test_unknown_key(fails):
    error = fails("run", "train.stpes=5")
    assert error["error"] == "unknown key train.stpes" and error["where"] == "command line, train.stpes"
    assert error["fix"].startswith("train.steps")


MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
TORCHRUN = MEETING | {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SLURM = MEETING | {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}


def test_axes_that_do_not_match_the_number_of_ranks(fails, refused):
    words = ["train.global_batch=32"]
    error = fails("run", *words, **TORCHRUN)
    assert "the mesh has one rank" in error["error"] and "4 were started" in error["error"]
    assert "mesh.dp_shard=4" in error["fix"]
    assert_every_fix_works(outcome(words, num_ranks=4), words, num_ranks=4)
    assert "4 were started" in refused("run", **SLURM)["error"]


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
def test_half_a_launcher(refused, environment):
    error = refused("run", "mesh.dp_shard=2", **environment)
    assert any(name in error["error"] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_NTASKS"))


CASES = {
    "run train.steps=many": ("train.steps = 'many'", "command line, train.steps", "train.steps="),
    "run wrong.toml": ("mesh.tp = 'two'", "wrong.toml, mesh.tp", "mesh.tp="),
    "run no.toml": ("not TOML", "no.toml", ""),
    "run llama-tiny mesh.tp=3": ("does not divide 4 attention heads", "command line, mesh.tp", "mesh.tp=2"),
    "run mesh.dp_shard=3 train.global_batch=32": ("not divisible by 3", "", "train.global_batch=33 or "),
    "run dit-digits mesh.cp=2": ("blocks need the full sequence", "", "mesh.cp=1"),
    "run attention.kind=flex": ("not available yet", "", ""),
    "run data.source=no/such/*.txt": ("no/such/*.txt", "data.source, no/such/*.txt", ""),
    "run data.source=no-such.bin": ("no-such.bin", "data.source, no-such.bin", ""),
    "run data.source=.": (".", "data.source, .", ""),
    "run data.source=digits": ("digits is image data, but this model trains on text", "", "the preset dit-digits, or "),
    "run data.source=empty*": ("is empty", "data.source, empty*", "data.source=stdlib"),
    "run data.source=zeros": ("is empty", "data.source, zeros", "data.source=stdlib"),
    "run data.source=ids.npy": ("ids up to 4999", "", "model.vocab_size=5000"),
    "run data.source=stdlib data.tokenizer=tokenizer.json": ("tokenizer.json", "", "data.tokenizer=bytes"),
    "run --resume nowhere": ("manifest.json is missing", "nowhere", ""),
    "run --resume old": ("", "", "old/checkpoints/00000005"),
    "run llama-tinny": ("llama-tinny is neither a preset nor a TOML file", "", "llama-tiny"),
    "run llama-tiny train.steps": ("'train.steps' is not an override", "", ""),
    "run --out old": ("old already holds", "", "meshwright run old,"),
    "run --out old --resume auto model.dim=64": ("model.dim is 64 here and 128 in the", "00000005", "model.dim=128"),
    "run --out old --resume auto train.seed=1": ("train.seed = 1", "", "train.seed=7"),
    "run --out old --resume auto train.seq_len=128": ("train.seq_len = 128", "", "train.seq_len=64"),
    "run --out old --resume auto train.global_batch=16": ("train.global_batch = 16", "", "train.global_batch=8"),
    "run --out old --resume auto train.seed=7": ("another corpus", "data.source = ", ""),
    "run --out a-file": ("a-file", "--out", ""),
    "run --out a-file/below": ("a-file/below", "--out", ""),
    "run --out /proc/nothing": ("/proc/nothing", "--out", ""),
    "run --out ''": ("--out is empty", "", "leave --out out"),
    "run --resume ''": ("--resume is empty", "", "leave --resume out"),
    "prove llama-tinny": ("llama-tinny", "", "llama-tiny"),
    "presets llama-tinny": ("llama-tinny", "", "llama-tiny"),
    "checkpoint ls nowhere": ("no checkpoint in nowhere", "nowhere", ""),
}
"""Parts of what, where and fix, of commands in a folder with files, a run and the record of another."""
OLD = ["train.seed=7", "train.seq_len=64", "train.global_batch=8"]


@pytest.mark.parametrize("command", CASES)
def test_bad_input(refused, corpus, tmp_path, command):
    for name, content in {"wrong.toml": "[mesh]\ntp = 'two'\n", "no.toml": "[train\n", "zeros": "\0\0\0"}.items():
        (tmp_path / name).write_text(content)
    for name in ("a-file", "empty.txt"):
        (tmp_path / name).touch()
    numpy.save(tmp_path / "ids.npy", numpy.arange(5000, dtype=numpy.uint32))
    save_checkpoint(tmp_path / "old/checkpoints", *OLD)
    words, (what, where, fix) = shlex.split(command), CASES[command]
    if "--out" in words or "--resume" in words:
        words += [*corpus, *(word for word in OLD if word.partition("=")[0] not in command)]
    error = refused(*words, *["data.cache_dir=cache"] * (words[0] == "run"))
    assert what in error["error"] and where in error["where"] and fix in error["fix"], error
    assert not (tmp_path / "config.toml").exists()


def test_another_runs_checkpoint_does_not_overwrite_a_folder(refused, corpus, tmp_path):
    path = save_checkpoint(tmp_path / "old/checkpoints", corpus=open_data(load(None, corpus)).fingerprint)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/metrics.jsonl").write_text('{"step": 1}\n')
    error = refused("run", *corpus, "--out", "mine", "--resume", path)
    assert error["error"] == "mine already holds a run"
    assert (tmp_path / "mine/metrics.jsonl").read_text() == '{"step": 1}\n'


def test_missing_data_file(fails, refused, tmp_path):
    error = fails("run", "data.source=no-such.txt")
    assert error["error"].startswith("file not found: no-such.txt") and error["where"] == "data.source, no-such.txt"
    assert alternatives(error["fix"]) == [["data.source=stdlib"]]
    small_corpus(tmp_path)
    words = alternatives(refused("run", "data.source=corpsu.txt", "data.cache_dir=cache")["fix"])[0]
    assert words == [f"data.source={tmp_path / 'corpus.txt'}"]
    open_data(load(None, [*words, f"data.cache_dir={tmp_path}/cache"]))


def test_a_file_named_like_pictures_is_text_like_any_other(refused, tmp_path):
    (tmp_path / "digits").write_text("a few words")
    assert "longer than" in refused("run", "data.source=digits", "data.cache_dir=cache")["error"]


@pytest.mark.parametrize("more", [[], ["mesh.tp=2"], ["mesh.tp=2", "mesh.sequence_parallel=false"]])
def test_sequence_longer_than_the_corpus(refused, tmp_path, more):
    """Where tokens are divided over tp, so is the length that is suggested."""
    words = [*small_corpus(tmp_path, num_bytes=1230), *more]
    error = refused("run", *words, "train.seq_len=256")
    assert "train.seq_len = 256 is longer" in error["error"]
    [fix] = alternatives(error["fix"])[0]
    open_data(load(None, [*words, fix]))
    assert not more or ("false" in more[-1]) == (int(fix.partition("=")[2]) % 2 == 1)


def save_checkpoint(root: Path, *words: str, corpus: str = "c") -> Path:
    """A checkpoint with a manifest and no tensors, which is all that torch-free checks look at."""
    config = load(None, words)
    folder = atomic_directory.begin(root, 5)
    files = {"data": write_file(folder / "data", b"x" * 1000)}
    run = {"config": config.model_dump(), "corpus": corpus, "skipped_in_a_row": 0}
    return atomic_directory.commit(folder, step=5, model=dict(model_facts(config).identity), run=run, files=files)


def test_damaged_checkpoint_by_its_path(fails, corpus, tmp_path):
    path = save_checkpoint(tmp_path / "old/checkpoints")
    (path / "data").write_bytes(b"x" * 999 + b"y")
    error = fails("run", *corpus, "--out", "old", "--resume", path)
    assert error["error"].startswith("data has changed content") and error["where"] == str(path / "data")
    assert f"(meshwright run {tmp_path}/old takes the newest valid one)" in error["fix"]
