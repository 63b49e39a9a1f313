"""Commands and options of other frameworks: the error names ours, and what it suggests is a command that exists."""

from __future__ import annotations

import shlex

import pytest
import typer.main

from meshwright.cli.main import app
from meshwright.cli.usage_errors import COMMANDS
from meshwright.config.schema import RunConfig
from tests.helpers import alternatives, outcome, shown_error


@pytest.fixture
def fails(here):
    """Runs a command that must fail with bad input, and gives the parts of the error."""

    def run(*words):
        done = here(*words)
        assert done.returncode == 2 and done.stdout == "", done
        return shown_error(done.stderr)

    return run


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("train llama-tiny mesh.tp=2", "meshwright run llama-tiny mesh.tp=2"),
        ("pretrain", "meshwright run"),
        ("finetune", "meshwright run"),
        ("simulate llama3-8b", "meshwright plan llama3-8b"),
        ("estimate-memory", "meshwright plan"),
        ("verify mesh.tp=2", "meshwright prove mesh.tp=2"),
        ("test", "meshwright prove"),
        ("list", "meshwright presets"),
        ("init", "meshwright presets llama-tiny > run.toml"),
        ("help", "meshwright --help"),
        ("version", "meshwright --version"),
        ("convert x y", "meshwright checkpoint import"),
        ("visualize", "meshwright draw pipeline"),
        ("rnu mesh.tp=2", "meshwright run mesh.tp=2"),
        ("llama3-8b 'data.source=my texts/*'", "meshwright run llama3-8b 'data.source=my texts/*'"),
        ("mesh.tp=2", "meshwright run mesh.tp=2"),
        ("run.toml", "meshwright run run.toml"),
        ("no-such", "meshwright --help"),
    ],
)
def test_an_unknown_command_names_ours(fails, words, fix):
    error = fails(*shlex.split(words))
    assert error["fix"] == fix and error["error"] == f"unknown command {shlex.split(words)[0]}"


def test_every_command_in_the_table_exists(here):
    own = typer.main.get_command(app).commands
    for command, names in COMMANDS.items():
        first, *rest = command.partition(" >")[0].split()
        assert first.startswith("--") or first in own, command
        assert first in ("presets", "--help", "--version") or all(word in own[first].commands for word in rest), command
        assert not set(names.split()) & own.keys()
    assert here("presets", "llama-tiny").returncode == 0


@pytest.mark.parametrize("command", ["run", "plan", "prove"])
@pytest.mark.parametrize(
    ("words", "own"),
    [
        ("--tensor-parallel-size 2", ["mesh.tp=2"]),
        ("--tensor_parallel_size=2 llama-tiny", ["mesh.tp=2"]),
        ("llama-tiny --bf16", ["train.precision=bfloat16"]),
        ("--bf16 llama-tiny mesh.dp_shard=2", ["train.precision=bfloat16"]),
        ("--bf16 true --learning-rate=1e-4", ["train.precision=bfloat16", "train.lr=0.0001"]),
        ("-lr 1e-4", ["train.lr=0.0001"]),
        ("--fp16 --seq-length 4k --FSDP", ["train.precision=bfloat16", "train.seq_len=4096", "mesh.dp_shard=2"]),
        ("--max-steps 10 --tp_size 2 --pp_size 2", ["train.steps=10", "mesh.tp=2", "mesh.pp=2"]),
    ],
)
def test_an_option_that_is_a_key_names_it_with_its_value(fails, command, words, own):
    error = fails(command, *words.split())
    first = next(word for word in words.split() if word.startswith("-")).partition("=")[0]
    assert error["error"].startswith("unknown option") and first in error["error"]
    assert error["where"] == f"command line, {first}"
    assert alternatives(error["fix"]) == [own]
    assert isinstance(outcome(own), RunConfig)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("llama-tiny --steps 10 --tp 2", ["llama-tiny", "train.steps=10", "mesh.tp=2"]),
        ("--train.steps=10 llama-tiny mesh.pp=2", ["llama-tiny", "mesh.pp=2", "train.steps=10"]),
        ("--compile llama-tiny --dp-shard 2", ["llama-tiny", "train.compile=true", "mesh.dp_shard=2"]),
        ("dit-digits --comm.gradients loco4 --SEED 3", ["dit-digits", "comm.gradients=loco4", "train.seed=3"]),
    ],
)  # fmt: skip
def test_our_keys_are_options_too(here, options, words):
    shown = here("plan", *options.split())
    assert shown.returncode == 0 and shown == here("plan", *words)


def test_a_wrong_value_of_such_an_option_names_the_key(fails):
    error = fails("run", "--steps", "ten")
    assert error["error"].startswith("train.steps = 'ten'") and error["where"] == "command line, train.steps"


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("run --resme auto", "--resume"),
        ("run --output-dir x", "--out x"),
        ("run --save x", "--out x"),
        ("run --resume_from_checkpoint x", "--resume x"),
        ("run --config run.toml", "run.toml as the first word"),
        ("run --model meta-llama/Llama-3.1-8B", "llama3-8b as the first word"),
        ("run --model llama3-8b", "llama3-8b as the first word"),
        ("run --no-such 5", "meshwright presets llama-tiny prints all keys"),
    ],
)
def test_other_options(fails, words, fix):
    error = fails(*words.split())
    assert error["fix"] == fix and error["error"] == f"unknown option {words.split()[1]}"


def test_weights_to_resume_from_are_imported(fails, tmp_path):
    """A run folder has a configuration too, but no weights in this format."""
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (tmp_path / "a.txt").write_text("a few words " * 1000)
    words = ("run", "data.source=a.txt", "data.cache_dir=cache", "--out", "new", "--resume", "weights")
    assert "manifest.json is missing" in fails(*words)["error"]
    (folder / "model.safetensors").touch()
    fix = fails(*words)["fix"]
    assert fix == "meshwright checkpoint import weights runs/imported, then meshwright run runs/imported"
