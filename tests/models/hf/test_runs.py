"""Runs of transformers models: the same losses on all layouts, resumed on another one, exported as that model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.models.contract.task import SimpleBatch
from meshwright.models.hf.pretrained import TransformersWeights
from meshwright.prove.record.reference_run import build_reference
from meshwright.prove.spec import as_proof
from tests.gangs.gang import GangPool
from tests.models.hf.faults import seed_of
from tests.models.hf.folders import open_folder
from tests.models.hf.runs import hf_config, run, saved
from tests.prove.proofs import records_of

pytest.importorskip("transformers")

LAYOUTS = {
    "qwen3": "mesh.pp=2 mesh.tp=2",
    "deepseek_v3": "mesh.tp=2 mesh.dp_shard=2 mesh.ep=2",
    "olmo2": "mesh.pp=4 pipeline.schedule=v-half pipeline.allow_empty_stages=true",
}
"""A layout for each model: all of them give the same losses for each."""
RESUMED = {"mixtral": ("mesh.ep=2",), "gpt2": ()}
"""Models with what all their layouts have besides."""
FIRST = ("mesh.pp=2", "mesh.dp_shard=2", "train.steps=2")
THEN = ("mesh.tp=2", "mesh.dp_shard=2", "train.steps=3")
SHORT = ("train.validation_samples=0", "train.sample_tokens=0", "train.warmup_steps=1", "checkpoint.every=0")


def losses(gang: GangPool, model: str, layout: str, *, fault: str = "") -> list[float]:
    words = ("train.precision=float64", "train.warmup_steps=0", "train.lr=0.01", *layout.split())
    records = records_of(gang, hf_config(model, *words), seed_of(fault), steps=4)
    return [step["loss"] for step in records[0].steps]


@pytest.mark.slow
@pytest.mark.parametrize("model", LAYOUTS)
def test_losses_are_those_of_one_process(gang: GangPool, model: str) -> None:
    """And not with wrong gradients."""
    alone = losses(gang, model, "")
    assert losses(gang, model, LAYOUTS[model]) == pytest.approx(alone, rel=0, abs=1e-9)
    assert alone[-1] < alone[0] - 1
    if model == "qwen3":
        wrong = losses(gang, model, LAYOUTS[model], fault="norms of heads are not summed over tp")
        assert wrong != pytest.approx(alone, rel=0, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("model", RESUMED)
def test_a_run_resumes_on_another_layout_and_its_export_is_the_model(
    gang: GangPool, model: str, tmp_path: Path
) -> None:
    out, exported, more = tmp_path / "run", tmp_path / "out", RESUMED[model]
    run(gang, hf_config(model, *SHORT, *FIRST, *more), out)
    metrics = run(gang, hf_config(model, *SHORT, *THEN, *more), out, resume="auto")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    TransformersWeights().export(out / "checkpoints/00000003", exported)

    config = as_proof(hf_config(str(exported), "model.weights=folder"))
    own, trained = build_reference(config), saved(out)
    for name, tensor in trained.items():  # the weights of the folder would start a run
        assert torch.equal(own.state_dict()[name], tensor.double()), name
    tokens = torch.randint(3, 256, (2, 32), generator=torch.Generator().manual_seed(1))
    theirs = open_folder(exported)

    def difference() -> Tensor:
        with torch.no_grad():
            return (config.family.run(own, tokens, SimpleBatch(tokens)) - theirs(input_ids=tokens).logits).abs().max()

    assert set(trained) == {name for name, _ in theirs.named_parameters()}
    assert difference() < 1e-6
    with torch.no_grad():
        next(iter(own.parameters())).mul_(1.001)
    assert difference() > 1e-5
