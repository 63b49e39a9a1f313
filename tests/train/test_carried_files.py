"""A run's checkpoints carry its tokenizer and what was imported, and no run trains on the ids of another tokenizer."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from meshwright.checkpoint import manifest, save_load
from meshwright.errors import CheckpointError
from meshwright.plan.rules import load
from meshwright.train.choose_folder import check_continues
from meshwright.train.run_folder import files_to_carry
from tests.helpers import SMALL

TOKENIZER = json.dumps({"model": {"vocab": {"a": 0}}})


@pytest.fixture
def folder(tmp_path):
    """A tokenizer with its settings, and other files beside it."""
    for name in ("tokenizer.json", "other.json"):
        (tmp_path / name).write_text(TOKENIZER if name == "tokenizer.json" else "{}")
    (tmp_path / "tokenizer_config.json").write_text("settings")
    (tmp_path / "config.json").write_text("of a model that isn't this one")
    np.save(tmp_path / "tokens.npy", np.zeros(9, np.uint8))
    return tmp_path


def config(**data):
    return load(None, [*SMALL, *(f"data.{key}={value}" for key, value in data.items())])


def checkpoint(folder, sidecars):
    identity = config().model.spec().identity()
    return save_load.save(folder / "run/checkpoints", 0, {"model.w": torch.ones(1)}, model=identity, run={}, keep=1,
                          sidecars=sidecars)  # fmt: skip


def test_a_run_from_scratch_carries_its_tokenizer(folder):
    assert files_to_carry(config(), None) == {}
    assert files_to_carry(config(tokenizer=folder / "missing.json"), None) == {}
    assert files_to_carry(config(tokenizer=folder / "other.json"), None) == {"tokenizer.json": b"{}"}
    kept = files_to_carry(config(tokenizer=folder / "tokenizer.json"), None)
    assert kept == {"tokenizer.json": TOKENIZER.encode(), "tokenizer_config.json": b"settings"}


def test_what_was_imported_is_carried_on_but_for_a_tokenizer_that_the_run_reads(folder):
    imported = {"config.json": b"1", "tokenizer_config.json": b"2", "chat_template.jinja": b"3"}
    path = checkpoint(folder, imported)
    assert files_to_carry(config(), path) == imported
    assert files_to_carry(config(tokenizer=folder / "other.json"), path) == {**imported, "tokenizer.json": b"{}"}
    kept = files_to_carry(config(tokenizer=folder / "tokenizer.json"), path)
    own = {"tokenizer.json": TOKENIZER.encode(), "tokenizer_config.json": b"settings"}
    assert kept == {"config.json": b"1", **own}, "its template wrote the training data, not the imported one"


def check(path, **data):
    check_continues(manifest.read_manifest(path), config(**data), path, "corpus")


def test_another_tokenizer_is_refused(folder):
    path = checkpoint(folder, {"tokenizer.json": TOKENIZER.encode()})
    for data in ({}, {"tokenizer": folder / "other.json"},
                 {"tokenizer": folder / "other.json", "source": folder / "tokens.npy"}):  # fmt: skip
        with pytest.raises(CheckpointError, match="trained with another tokenizer") as caught:
            check(path, **data)
        assert caught.value.fix.startswith(f"cp {path}/sidecars/tokenizer.json tokenizer.json, then ")
    check(path, tokenizer=folder / "tokenizer.json")
    check(path, source=folder / "tokens.npy")  # bytes stand for none there
    kept = folder / "run/huggingface/tokenizer.json"
    kept.parent.mkdir()
    kept.write_text(TOKENIZER)
    with pytest.raises(CheckpointError) as caught:
        check(path)
    assert caught.value.fix == f"data.tokenizer={kept}"
    check(path, tokenizer=kept)
