"""Runs that can't train are refused by the command before processes start, with a fix that works; within a process, a
model is what `model.config` names from here and now.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright import api
from meshwright.cli.main import main
from meshwright.config.facts_for_family import model_facts
from meshwright.errors import CheckpointError, ConfigError
from meshwright.models.hf import config
from meshwright.models.hf_format.weights import import_safetensors
from meshwright.models.llama.hf_llama import LLAMA
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from tests.helpers import alternatives, quick_and_slow, shown_error
from tests.models.hf.folders import change_config, write_model
from tests.models.hf.runs import hf_config, hf_facts

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")


SIX_LAYERS = {"num_hidden_layers": 6, "layer_types": ["full_attention"] * 6}
TEXT = ("data.source=text.txt", "train.validation_samples=8", "data.cache_dir=cache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models in folders, of which all but `good` lack something."""
    here = tmp_path_factory.mktemp("models")
    (here / "text.txt").write_text("What is two and two?\n" * 3000, "utf-8")
    write_model(here / "good")
    write_model(here / "Llama-3.2-1B")  # where the error says to download a model of this name to
    write_model(here / "no_tokenizer", tokenizer=False)
    write_model(here / "few_tokens", vocab_size=256)
    write_model(here / "encoder", "bert", weights=False, is_decoder=False)
    write_model(here / "no_weights", weights=False)
    write_model(here / "cut").joinpath("model.safetensors").write_bytes(
        (here / "good/model.safetensors").read_bytes()[:-1000]
    )
    change_config(write_model(here / "narrower"), intermediate_size=96)
    change_config(write_model(here / "deeper"), **SIX_LAYERS)
    change_config(write_model(here / "narrower_experts", "mixtral"), intermediate_size=96)
    change_config(write_model(here / "no_layers"), num_hidden_layers=0, layer_types=[])
    change_config(write_model(here / "no_number"), hidden_size="x")
    change_config(write_model(here / "head"), tie_word_embeddings=True)
    tensors = load_file(write_model(here / "biases") / "model.safetensors")
    biases = {f"model.layers.{i}.self_attn.o_proj.bias": torch.ones(64) for i in range(4)}
    save_file(tensors | biases, here / "biases/model.safetensors")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    write_model(here / "yarn", "llama", rope_parameters=yarn, max_position_embeddings=256)
    for model_type in ("vit", "t5", "qwen33"):
        (here / model_type).mkdir()
        (here / model_type / "config.json").write_text(json.dumps({"model_type": model_type}))
    (here / "empty").mkdir()
    return here


@dataclass(frozen=True)
class Case:
    """A refused command: words, and what the error and its fix say."""

    words: str
    what: str
    fix: str
    """Way out that the fix names and that works, or the part of the fix that names none."""


WEIGHTS = "model.weights=folder data.tokenizer="
CASES = {
    "a folder that isn't there": Case("model.config=./nowhere", "not found: ./nowhere", "model.config=qwen3"),
    "a name of no folder": Case(
        "model.config=my-model", "there is no folder my-model, and 'my-model' is no", "model.config=qwen3"
    ),
    "no config.json": Case("model.config=empty", "empty has no config.json", "model.config=qwen3"),
    "a gated name of the hub": Case(
        "model.config=meta-llama/Llama-3.2-1B", "nothing is downloaded", "model.config=Llama-3.2-1B"
    ),
    "a misspelt type": Case("model.config=Qwen33", "'Qwen33' is no causal language model", "model.config=qwen3"),
    "a type of another kind": Case("model.config=whisperx", "is no causal", "model.config=whisper"),
    "no language model": Case("model.config=./vit", "'vit' is no causal language model", "model.config=qwen3"),
    "an encoder and a decoder": Case("model.config=./t5", "'t5' is no causal", "model.config=qwen3"),
    "an unknown type in a folder": Case("model.config=./qwen33", "'qwen33' is no causal", "--upgrade transformers"),
    "an encoder": Case("model.config=encoder", "bert is an encoder: each token sees later", "model.config=qwen3"),
    "a type whose layers pass no stream": Case(
        "model.config=blt", "take no differentiable tensor", "model.config=qwen3"
    ),
    "no layers": Case("model.config=no_layers", "has no list of layers", "model.config=qwen3"),
    "a size that is no number": Case("model.config=no_number", "hidden_size", "model.config=qwen3"),
    "a tokenizer that isn't there": Case(
        "model.config=good data.tokenizer=good/tokeniser.json", "not found: good/tokeniser.json",
        "data.tokenizer=good/tokenizer.json",
    ),
    "a folder without a tokenizer": Case(
        "model.config=no_tokenizer data.tokenizer=no_tokenizer", "without tokenizer.json", "data.tokenizer=bytes"
    ),
    "more tokens than the model has": Case(
        "model.config=few_tokens data.tokenizer=good", "ids up to 319, but the model has a vocabulary of 256",
        "resize_token_embeddings(320)",
    ),
    "weights of a type": Case("model.config=qwen3 model.weights=folder", "a model type", "model.weights=random"),
    "a forgotten tokenizer": Case(
        "model.config=good data.tokenizer=bytes", "data.tokenizer = bytes, but good", "data.tokenizer=good"
    ),
    "no weights": Case(f"model.config=no_weights {WEIGHTS}good", "has no weights", "model.weights=random"),
    "weights cut off": Case(f"model.config=cut {WEIGHTS}good", "not fully covered", "restore this one from a copy"),
    "weights of another width": Case(
        f"model.config=narrower {WEIGHTS}good", "of shape (64, 128), but the model has (64, 96)", "model.weights=random"
    ),
    "weights of fewer layers": Case(
        f"model.config=deeper {WEIGHTS}good", "no model.layers.4.input_layernorm.weight (21 more like it)",
        "model.weights=random",
    ),
    "biases that the configuration doesn't have": Case(
        f"model.config=biases {WEIGHTS}good", "no place for model.layers.0.self_attn.o_proj.bias and 3 more",
        "model.unused_weights=model.layers.*.self_attn.o_proj.bias",
    ),
    "a head of its own": Case(
        f"model.config=head {WEIGHTS}good", "lm_head.weight differs from model.embed_tokens.weight",
        "model.unused_weights=lm_head.weight",
    ),
    "weights left out of random ones": Case(
        "model.config=qwen3 model.unused_weights=x", "model.weights = random", "model.unused_weights=[]"
    ),
    "experts of another width": Case(
        f"model.config=narrower_experts {WEIGHTS}good", "experts.down_proj of shape", "model.weights=random"
    ),
}  # fmt: skip


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, as the current directory, without what runs have left in it."""
    monkeypatch.chdir(folder)
    shutil.rmtree("runs", ignore_errors=True)
    return folder


def command(words: list[str]) -> None:
    """Run the command in this process, up to where it would start the run's processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["meshwright", "run", "hf-tiny", *words])
        patch.setattr(api, "launch", started)
        main()


def started(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("it started processes")


SLOW = {"weights of another width", "weights of fewer layers", "experts of another width", "a head of its own"}


@pytest.mark.parametrize("name", quick_and_slow(zip(CASES), [(name,) for name in CASES if name not in SLOW]))
def test_refused_before_processes_start(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    case = CASES[name]
    words = [*TEXT, *case.words.split()]
    with pytest.raises(SystemExit) as caught:
        command(words)
    error = shown_error(capsys.readouterr().err)
    assert caught.value.code == 2
    assert case.what in error["error"] and case.fix in error["fix"].replace("'", ""), error
    if [case.fix] in alternatives(error["fix"]):
        with pytest.raises(AssertionError, match="started processes"):
            command([*words, case.fix])
    else:
        assert "=" not in case.fix


def test_a_refused_import_names_the_run_that_trains_the_folder(here: Path) -> None:
    """Our Llama has no YaRN; transformers' has. What contradicts itself trains nowhere."""
    with pytest.raises(CheckpointError, match="rope_type = 'yarn' is not supported") as caught:
        import_safetensors(LLAMA, Path("yarn"), here / "imported")
    words = shlex.split(caught.value.fix)
    assert words[:3] == ["meshwright", "run", "hf-tiny"] and "data.tokenizer=yarn" in words
    with pytest.raises(AssertionError, match="started processes"):
        command([*TEXT, *words[3:]])
    change_config(shutil.copytree("yarn", here / "odd", dirs_exist_ok=True), num_key_value_heads=3)
    with pytest.raises(CheckpointError, match="must divide") as caught:
        import_safetensors(LLAMA, Path("odd"), here / "imported")
    assert "config.json that belongs to these weights" in caught.value.fix


@pytest.mark.slow
def test_refused_by_the_command_itself(here: Path, forked_meshwright: Callable[..., Any]) -> None:
    words = CASES["weights of fewer layers"].words.split()
    done = forked_meshwright("run", "hf-tiny", *TEXT, *words, "--out", "run", cwd=here)
    assert done.returncode == 2 and "more like it" in shown_error(done.stderr)["error"]
    assert not (here / "run").exists(), "the run's folder is made just before its processes start"


def test_transformers_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="transformers is not installed") as caught:
        load("hf-tiny", ["model.config=a-type-that-no-other-test-names"])
    assert "pip install 'transformers>=5,<6'" in caught.value.fix


class Made(NamedTuple):
    """Description, plan, width and head of `model.config=model`."""

    num_params: int
    kinds: Any
    width: int
    head: Tensor


def made() -> Made:
    """Describe, plan and build the model, and read its weights."""
    config, facts = hf_config("model", "model.weights=folder"), hf_facts("model", "model.weights=folder")
    head = config.family.initial(facts, "lm_head.weight").read(None).clone()  # a mapping of a file that changes
    return Made(
        model_facts(config).num_params(), make_plan(config).kinds, config.family.origin(facts).config.hidden_size, head
    )


def assert_narrower(narrow: Made, wide: Made) -> None:
    assert (narrow.width, narrow.head.shape[1], wide.width, wide.head.shape[1]) == (128, 128, 256, 256)
    assert narrow.num_params < wide.num_params and narrow.kinds != wide.kinds


def test_another_folder_of_the_same_relative_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for width in (128, 256):
        folder = write_model(tmp_path / str(width) / "model", tokenizer=False, hidden_size=width)
        os.utime(folder / "config.json", (0, 0))  # as archives unpack them
        monkeypatch.chdir(tmp_path / str(width))
        found.append(made())
    assert_narrower(*found)


@pytest.mark.slow
def test_other_weights_under_the_same_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixtral's are converted: read from a file that is neither folder's."""
    found = []
    for name in ("first", "other"):
        folder = write_model(tmp_path / name / "model", "mixtral", tokenizer=False)
        os.utime(folder / "config.json", (0, 0))
        if name == "other":
            file = folder / "model.safetensors"
            tensors = load_file(file)
            save_file({name: tensor + 1 for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
        monkeypatch.chdir(folder.parent)
        found.append(made())
    assert found[0][:3] == found[1][:3] and bool((found[0].head + 1 == found[1].head).all())


def test_an_edited_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "model", tokenizer=False, hidden_size=256)
    write_model(tmp_path / "narrow", tokenizer=False, hidden_size=128)
    monkeypatch.chdir(tmp_path)
    wide = made()
    shutil.copytree("narrow", "model", dirs_exist_ok=True)
    assert_narrower(made(), wide)
