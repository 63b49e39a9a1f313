"""A run of a transformers model goes on from its checkpoint on another layout, and its export opens as that model."""

from __future__ import annotations

import pytest
import torch

from meshwright.checkpoint import layout_file
from meshwright.checkpoint.manifest import newest_valid
from meshwright.checkpoint.reader import read_tensor
from meshwright.models.huggingface.export_weights import PREFIX
from tests.helpers import meshwright

SIZES = ("train.global_batch=8", "train.seq_len=32", "train.num_microbatches=2", "train.validation_samples=8",
         "train.sample_tokens=0", "checkpoint.every=0")  # fmt: skip
LAYOUTS = (("mesh.pp=2", "mesh.dp_shard=2", "train.steps=2"), ("mesh.tp=2", "mesh.dp_shard=2", "train.steps=4"))


def run(folder, *words, out="run"):
    done = meshwright("run", "hf-tiny", *SIZES, *words, "--out", out, cwd=folder, timeout_s=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mixtral", "gpt2"])
def test_a_run_resumes_on_another_layout_and_its_export_is_the_model(model, tmp_path):
    first, then = LAYOUTS
    run(tmp_path, f"model.config={model}", *first)
    assert "step 4/4" in run(tmp_path, f"model.config={model}", *then, "--resume", "auto")
    done = meshwright("checkpoint", "export", "run", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    from transformers import AutoModelForCausalLM

    stored = layout_file.read(newest_valid(tmp_path / "run" / "checkpoints")[0])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    names = [name for name in stored.tensors if name.startswith(PREFIX)]
    assert len(names) == len(exported.state_dict()) - (model == "gpt2")  # its head is its table of tokens
    for name in names:
        assert torch.equal(exported.state_dict()[name.removeprefix(PREFIX)], read_tensor(stored, name)), name

    # The weights of the folder start a run: after a step that moves none of them, they are its weights.
    still = ("train.steps=1", "train.lr=1e-30", "train.warmup_steps=0")
    run(tmp_path, f"model.config={tmp_path / 'out'}", "model.weights=folder", *still, out="again")
    again = layout_file.read(newest_valid(tmp_path / "again" / "checkpoints")[0])
    for name in names:
        assert torch.equal(read_tensor(again, name), read_tensor(stored, name)), name
