"""Within a process, a model is what `model.config` names from here and now."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.config.facts_for_family import model_facts
from meshwright.plan.make_plan import make_plan
from tests.models.hf.folders import write_model
from tests.models.hf.runs import hf_config, hf_facts

pytest.importorskip("transformers")


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
