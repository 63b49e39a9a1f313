"""Wrong commands, options and arguments end in an error whose fix is valid; those of other frameworks name ours."""

from __future__ import annotations

import shlex

import pytest
import typer.main

from meshwright.cli.main import app
from meshwright.cli.usage_errors import COMMANDS, OwnErrors
from meshwright.config.schema import RunConfig
from tests.helpers import alternatives, outcome

CASES = {
    "--versoin": ("unknown option --versoin", "--version"),
    "presets --device": ("unknown option --device", "--devices"),
    "doctor --verbose": ("unknown option --verbose", "meshwright doctor --help"),
    "draw pipeline 1f1b --stagse 4": ("unknown option --stagse", "--stages"),
    "checkpoint ls x --json y": ("unknown option --json", "meshwright checkpoint ls --help"),
    "draw pipelnie 1f1b": ("unknown command pipelnie", "meshwright draw pipeline 1f1b"),
    "launch no-such": ("unknown command no-such", "meshwright launch --help"),
    "draw pipeline": ("missing argument SCHEDULE", "meshwright draw pipeline SCHEDULE"),
    "checkpoint ls": ("missing argument FOLDER", "meshwright checkpoint ls FOLDER"),
    "draw reshard S0 R": ("missing option --mesh", "meshwright draw reshard FROM TO --mesh 4,8 --shape 8192,8192"),
    "launch slurm llama3-8b": ("missing option --nodes", "meshwright launch slurm --nodes 2 --gpus-per-node 8"),
    "presets llama-tiny extra": ("unexpected argument extra", "meshwright presets --help"),
    "draw pipeline 1f1b --stages four": ("--stages four is not allowed", "--stages 4"),
    "draw capture 1f1b --rank=-1": ("--rank -1 is not allowed", "--rank 0"),
    "bench train --device gpu": ("--device gpu is not allowed", "--device auto"),
    "launch slurm --nodes two --gpus-per-node 8": ("--nodes two is not allowed", "--nodes 2"),
    "prove --steps 0": ("--steps 0 is not allowed", "--steps 3"),
    "prove --steps": ("--steps has no value", "--steps 3"),
    "run --plan": ("--plan has no value", "--plan PLAN"),
    "draw reshard S0 R --mesh": ("--mesh has no value", "--mesh 4,8"),
}


@pytest.mark.parametrize("command", CASES)
def test_usage_errors(refused, command):
    error = refused(*shlex.split(command))
    assert (error["error"], error["fix"]) == CASES[command]
    assert error["where"].startswith("command line") and "\n" not in error["rule"]
    assert "unable to parse" not in error["rule"] and "Value error" not in error["rule"]


def commands(group, path=()):
    for name, command in group.commands.items():
        yield (*path, name), command
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))


def test_every_command_has_such_errors():
    root = typer.main.get_command(app)
    assert isinstance(root, OwnErrors)
    without = [path for path, command in commands(root) if not isinstance(command, OwnErrors)]
    assert not without


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("train llama-tiny mesh.tp=2", "meshwright run llama-tiny mesh.tp=2"),
        ("simulate llama3-8b", "meshwright plan llama3-8b"),
        ("verify mesh.tp=2", "meshwright prove mesh.tp=2"),
        ("init", "meshwright presets llama-tiny > run.toml"),
        ("help", "meshwright --help"),
        ("convert x y", "meshwright checkpoint import"),
        ("visualize", "meshwright draw pipeline"),
        ("rnu mesh.tp=2", "meshwright run mesh.tp=2"),
        ("llama3-8b 'data.source=my texts/*'", "meshwright run llama3-8b 'data.source=my texts/*'"),
        ("mesh.tp=2", "meshwright run mesh.tp=2"),
        ("run.toml", "meshwright run run.toml"),
        ("no-such", "meshwright --help"),
    ],
)
def test_an_unknown_command_names_ours(refused, words, fix):
    error = refused(*shlex.split(words))
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
def test_an_option_that_is_a_key_names_it_with_its_value(refused, command, words, own):
    error = refused(command, *words.split())
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


def test_a_wrong_value_of_such_an_option_names_the_key(refused):
    error = refused("run", "--steps", "ten")
    assert error["error"].startswith("train.steps = 'ten'") and error["where"] == "command line, train.steps"


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("run --resme auto", "--resume"),
        ("run --output-dir x", "--out x"),
        ("run --resume_from_checkpoint x", "--resume x"),
        ("run --config run.toml", "run.toml as the first word"),
        ("run --model meta-llama/Llama-3.1-8B", "llama3-8b as the first word"),
        ("run --no-such 5", "meshwright presets llama-tiny prints all keys"),
    ],
)
def test_other_options(refused, words, fix):
    error = refused(*words.split())
    assert error["fix"] == fix and error["error"] == f"unknown option {words.split()[1]}"


def test_weights_to_resume_from_are_imported(refused, tmp_path):
    """A run folder has a configuration too, but no weights in this format."""
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (tmp_path / "a.txt").write_text("a few words " * 1000)
    words = ("run", "data.source=a.txt", "data.cache_dir=cache", "--out", "new", "--resume", "weights")
    assert "manifest.json is missing" in refused(*words)["error"]
    (folder / "model.safetensors").touch()
    fix = refused(*words)["fix"]
    assert fix == "meshwright checkpoint import weights runs/imported, then meshwright run runs/imported"
