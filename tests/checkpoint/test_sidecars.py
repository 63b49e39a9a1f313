"""Small files in a checkpoint: hashed like the others, and read again byte for byte."""

from __future__ import annotations

import pytest
import torch

from meshwright.checkpoint import manifest, save_load
from meshwright.checkpoint.manifest import read_sidecars
from meshwright.errors import CheckpointError

FILES = {"tokenizer.json": b"{}\n", "empty": b"", "templates/tool.jinja": b"{{ \xff }}"}


@pytest.fixture
def saved(tmp_path):
    return save_load.save(tmp_path, 1, {"w": torch.ones(2)}, model={}, run={}, keep=1, sidecars=FILES)


def test_they_are_read_as_they_were_given(saved, tmp_path):
    assert read_sidecars(manifest.verify(saved)) == FILES
    assert torch.equal(save_load.read_tensors(saved, ["w"])["w"], torch.ones(2))
    without = save_load.save(tmp_path, 2, {"w": torch.ones(2)}, model={}, run={}, keep=1)
    assert read_sidecars(manifest.verify(without)) == {} and not saved.exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "templates/tool.jinja"])
def test_a_changed_or_missing_one_is_named(saved, name):
    path = saved / "sidecars" / name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=f"sidecars/{name} has changed"):
        manifest.verify(saved)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"sidecars/{name} is missing"):
        manifest.verify(saved)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_sidecars(manifest.read_manifest(saved))
