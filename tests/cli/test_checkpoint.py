"""`meshwright checkpoint`: what it lists, verifies, exports and imports of a run's checkpoints."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

from meshwright.checkpoint import save_load
from meshwright.config.facts_for_family import model_facts
from meshwright.plan.rules import load
from tests.helpers import SMALL, meshwright, shown_error
from tests.models.specs import build as build_model

CONFIG = load(None, SMALL)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run folder with two checkpoints of a small model."""
    folder = tmp_path_factory.mktemp("run")
    model = build_model(CONFIG.model.spec(), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    tensors = {f"model.{n}": torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}
    run = {"config": CONFIG.model_dump(), "corpus": "c", "skipped_in_a_row": 0}
    for step in (5, 10):
        save_load.save(folder / "checkpoints", step, tensors, model=CONFIG.model.spec().identity(), run=run, keep=9)
    return folder


@pytest.fixture
def copied(run_folder, tmp_path):
    return shutil.copytree(run_folder, tmp_path / "run")


def test_ls_and_verify_need_no_torch(no_torch, run_folder):
    done = meshwright("checkpoint", "ls", run_folder, env=no_torch)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and "step 5 · " in lines[0] and "step 10 · " in lines[1]
    assert all(" MiB · 2 files · kind llama · num_layers 2 · dim 128" in line for line in lines)


@pytest.mark.parametrize("part", ["", "checkpoints", "checkpoints/00000010"])
def test_a_run_a_folder_or_a_checkpoint(here, run_folder, part):
    for verb in ("ls", "verify"):
        done = here("checkpoint", verb, run_folder / part)
        assert done.returncode == 0 and len(done.stdout.splitlines()) == (1 if "0" in part else 2)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
@pytest.mark.parametrize("name", ["rank-00000.safetensors", "layout.json", "manifest.json"])
def test_damage_is_found_and_the_file_named(here, copied, name, damage):
    path = copied / "checkpoints/00000005" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink() if damage == "remove" else path.write_bytes(data if damage == "flip" else data[:-1])
    done = here("checkpoint", "verify", copied)
    assert done.returncode == 2
    assert f"✗ {copied}/checkpoints/00000005  {name}" in done.stdout and "✓" in done.stdout
    assert name in shown_error(done.stderr)["error"]


def test_ls_names_what_has_no_manifest(here, copied):
    (copied / "checkpoints/00000005/manifest.json").unlink()
    lines = here("checkpoint", "ls", copied).stdout.splitlines()
    assert "step 10" in lines[1] and lines[0].endswith("00000005  damaged: manifest.json is missing")


def test_export_and_import_are_inverse(here, run_folder, tmp_path):
    done = here("checkpoint", "export", run_folder, tmp_path / "hf", torch=True)
    assert done.returncode == 0 and "00000010" in done.stdout, done.stderr
    assert {"model.safetensors", "config.json"} <= set(os.listdir(tmp_path / "hf"))
    done = here("checkpoint", "import", tmp_path / "hf", tmp_path / "new", torch=True)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "new/checkpoints/00000000"
    names = save_load.tensor_names(path)
    ours, theirs = (save_load.read_tensors(p, names) for p in (path, run_folder / "checkpoints/00000010"))
    assert all(torch.equal(ours[name], theirs[name]) for name in names) and len(names) > 10
    assert told_model(done) == CONFIG.model.spec()


def test_weights_are_exported_in_the_dtype_that_is_asked_for(here, run_folder, tmp_path):
    from safetensors.torch import load_file

    done = here("checkpoint", "export", run_folder, tmp_path / "hf", "--dtype", "bfloat16", torch=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "hf/config.json").read_text())["torch_dtype"] == "bfloat16"
    path, ours, theirs = run_folder / "checkpoints/00000010", "model.head.weight", "lm_head.weight"
    stored = save_load.read_tensors(path, [ours])[ours]
    assert torch.equal(load_file(tmp_path / "hf/model.safetensors")[theirs], stored.bfloat16())
    done = here("checkpoint", "export", run_folder, tmp_path / "other", "--dtype", "int8", torch=True)
    assert done.returncode == 2 and "float32" in done.stderr and not (tmp_path / "other").exists()


def told_model(done):
    """By the words that an import prints, with which a run takes the weights up."""
    words = next(line for line in done.stdout.splitlines() if line.startswith("model  ")).split()[1:]
    return load(None, words).model.spec()


def test_the_words_of_an_imported_model_have_its_rotary_scaling(here, tmp_path):
    config = load(None, [*SMALL, "model.num_layers=1", "model.rope_scaling.factor=4.0", "model.norm_eps=1e-30"])
    model = build_model(config.model.spec(), dtype=torch.float32)
    tensors = {f"model.{name}": torch.ones(parameter.shape) for name, parameter in model.named_parameters()}
    save_load.save(tmp_path / "run/checkpoints", 1, tensors, model=dict(model_facts(config).identity), run={}, keep=1)
    here("checkpoint", "export", "run", "hf", torch=True)
    done = here("checkpoint", "import", "hf", "new", torch=True)
    assert done.returncode == 0 and told_model(done) == config.model.spec()


@pytest.mark.parametrize("part", ["", "checkpoints"])
def test_export_takes_the_newest_valid_one(here, copied, tmp_path, part):
    (copied / "checkpoints/00000010/layout.json").write_text("{}")
    done = here("checkpoint", "export", copied / part, tmp_path / "hf", torch=True)
    assert done.returncode == 0 and "00000005 →" in done.stdout
    assert "skipped" in done.stderr and "00000010: layout.json is truncated" in done.stderr
    # One that is asked for by its own path is that one or none.
    done = here("checkpoint", "export", copied / "checkpoints/00000010", tmp_path / "other", torch=True)
    assert done.returncode == 2 and "layout.json is truncated" in shown_error(done.stderr)["error"]
    (copied / "checkpoints/00000005/manifest.json").unlink()
    done = here("checkpoint", "export", copied / part, tmp_path / "other", torch=True)
    assert done.returncode == 2 and "no valid checkpoint" in shown_error(done.stderr)["error"]
    assert not (tmp_path / "other").exists()


def test_import_needs_a_new_folder(here, run_folder, tmp_path):
    here("checkpoint", "export", run_folder, tmp_path / "hf", torch=True)
    done = here("checkpoint", "import", tmp_path / "hf", run_folder, torch=True)
    assert done.returncode == 2 and "already holds checkpoints" in shown_error(done.stderr)["error"]
    done = here("checkpoint", "export", run_folder, tmp_path / "hf", torch=True)
    assert done.returncode == 2 and "not an empty directory" in shown_error(done.stderr)["error"]
    done = here("checkpoint", "import", tmp_path, tmp_path / "new", torch=True)
    assert done.returncode == 2 and "config.json is missing" in shown_error(done.stderr)["error"]


def test_a_model_without_a_family_of_its_own_needs_no_import(here, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    done = here("checkpoint", "import", tmp_path, tmp_path / "new", torch=True)
    shown = shown_error(done.stderr)
    assert done.returncode == 2 and shown["error"] == f"{tmp_path} is read by transformers, and needs no import"
    assert "model.weights=folder" in shown["fix"] and not (tmp_path / "new").exists()


def test_an_import_writes_a_configuration_that_loads_as_it_stands(here, run_folder, tmp_path):
    here("checkpoint", "export", run_folder, tmp_path / "hf", torch=True)
    context = json.loads((tmp_path / "hf/config.json").read_text())["max_position_embeddings"]
    done = here("checkpoint", "import", "hf", "new", torch=True)
    assert done.returncode == 0, done.stderr
    config = load(str(tmp_path / "new/config.toml"), ["train.threads=1"])
    assert config.model.spec() == CONFIG.model.spec() and config.name == "hf"
    assert config.data.tokenizer == "bytes" and "no tokenizer.json in hf: data.tokenizer is bytes" in done.stdout
    assert (
        context == 64 == config.train.seq_len and "for at most 64 tokens" in (tmp_path / "new/config.toml").read_text()
    )
    assert "meshwright run new data.source=…" in done.stdout
    done = here("checkpoint", "export", "new", "back", torch=True)
    assert done.returncode == 0 and "no tokenizer to export" in done.stdout


def test_an_import_keeps_the_tokenizer_for_training(here, run_folder, tmp_path):
    here("checkpoint", "export", run_folder, tmp_path / "hf", torch=True)
    tokenizer = {"model": {"vocab": {"a": 0, "b": 255}}}
    (tmp_path / "hf/tokenizer.json").write_text(json.dumps(tokenizer))
    done = here("checkpoint", "import", "hf", "new", torch=True)
    assert done.returncode == 0 and "no tokenizer" not in done.stdout
    kept = tmp_path / "new/huggingface/tokenizer.json"
    assert load(str(tmp_path / "new/config.toml"), ["train.threads=1"]).data.tokenizer == str(kept)
    assert kept.read_bytes() == (tmp_path / "hf/tokenizer.json").read_bytes()
    done = here("checkpoint", "export", "new", "back", torch=True)
    assert done.returncode == 0 and "no tokenizer" not in done.stdout
    assert (tmp_path / "back/tokenizer.json").read_bytes() == kept.read_bytes()


def test_an_import_that_is_refused_writes_nothing(here, run_folder, tmp_path):
    here("checkpoint", "export", run_folder, tmp_path / "hf", torch=True)
    done = here("checkpoint", "import", "meta-llama/Llama-3.1-8B", "new")
    assert done.returncode == 2 and "hf download meta-llama/Llama-3.1-8B --local-dir" in shown_error(done.stderr)["fix"]
    (tmp_path / "hf/tokenizer.json").write_text('{"model": {"vocab": {"a": 256}}}')
    done = here("checkpoint", "import", "hf", "new", torch=True)
    assert done.returncode == 2 and "id 256, but the model has 256 embeddings" in shown_error(done.stderr)["error"]
    assert not (tmp_path / "new").exists()
    (tmp_path / "config.toml").write_text("# of another run")
    done = here("checkpoint", "import", "hf", ".", torch=True)
    assert done.returncode == 2 and "already has a config.toml" in shown_error(done.stderr)["error"]
    assert (tmp_path / "config.toml").read_text() == "# of another run" and not (tmp_path / "checkpoints").exists()
