"""Context parallelism in whole runs: the same losses, text and checkpoints as of one process."""

from __future__ import annotations

import pytest
import torch

from meshwright.train.forward_only import validate
from meshwright.train.pipeline_stages import Pipeline
from tests.train.jobs import generate_on, make_job, make_task, run_on
from tests.train.runs import Fault, metrics, train
from tests.train.test_kill import killed

SMALL = ["model.dim=32", "model.ffn_dim=48", "model.num_heads=4", "model.num_kv_heads=2", "train.seq_len=32"]
FP64 = "train.precision=float64"
WINDOWS = ["model.window=12", "model.global_every=2"]
DOCUMENTS = ["data.packing=documents"]
LAYOUTS = {
    "ring 2, windows": (2, WINDOWS, ["mesh.cp=2", "mesh.cp_method=ring"]),
    "heads 2, documents, tp": (
        4,
        DOCUMENTS,
        ["mesh.cp=2", "mesh.cp_method=heads", "model.num_kv_heads=4", "mesh.tp=2"],
    ),
    "ring 2, documents, zb-v": (
        4,
        DOCUMENTS,
        ["mesh.cp=2", "mesh.pp=2", "pipeline.schedule=zb-v", "model.num_layers=4", "train.num_microbatches=4"],
    ),
    "ring 4": (4, [], ["mesh.cp=4", "train.num_microbatches=2"]),
}
NUM_STEPS = 4


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Many files shorter than a sample, of different lengths."""
    folder = tmp_path_factory.mktemp("documents")
    for number in range(500):
        words = " ".join(f"{(number * 37 + word) % 91}" for word in range(1 + number * number % 7))
        (folder / f"{number}.txt").write_text(words, "utf-8")
    return [f"data.source={folder}/*.txt", f"data.cache_dir={folder}/cache"]


def run_steps(
    rank: int, world_size: int, words: list[str]
) -> tuple[list[float], list[float], tuple[float, ...], list[int]]:
    """Losses and norms of some steps, the validation loss after them, and tokens that the model then writes."""
    job, step = make_job(rank, world_size, [*SMALL, *words, FP64])
    results = [step(number) for number in range(1, NUM_STEPS + 1)]
    validation = validate(Pipeline(job), make_task(job.config))
    tokens = generate_on(job, [100, 101, 32], num_tokens=6, temperature=0.7, seed=3)
    return [one.loss for one in results], [one.grad_norm for one in results], validation, tokens


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if "windows" in n else pytest.mark.slow) for n in LAYOUTS])
def test_losses_and_text_do_not_depend_on_cp(gang, corpus, documents, name):  # type: ignore[no-untyped-def]
    num_ranks, data, layout = LAYOUTS[name]
    source = [*(documents if data == DOCUMENTS else corpus), *data]
    alone = run_steps(0, 1, [*source, *(word for word in layout if word.startswith("model."))])
    assert len(set(alone[0])) == NUM_STEPS and len(alone[3]) == 6
    for found in run_on(gang, num_ranks, run_steps, [*source, *layout]):
        torch.testing.assert_close(found[0], alone[0], rtol=0, atol=1e-9)
        torch.testing.assert_close(found[1], alone[1], rtol=0, atol=1e-8)
        assert found[2] == pytest.approx(alone[2], rel=1e-11)
        assert found[3] == alone[3]


@pytest.mark.slow
def test_it_goes_on_with_other_cp(gang, corpus, tmp_path):  # type: ignore[no-untyped-def]
    """cp 2 × dp_shard 2 → cp 2: the same losses as of a run on one process."""
    words = [*corpus, *SMALL, *WINDOWS, FP64]
    killed([*words, "mesh.cp=2", "mesh.dp_shard=2"], tmp_path / "moved", Fault(rank=1, step=5))
    train([*words, "mesh.cp=2"], tmp_path / "moved", resume="auto")
    train(words, tmp_path / "whole")
    found, expected = metrics(tmp_path / "moved"), metrics(tmp_path / "whole")
    assert len(found) == len(expected) == 8
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], abs=1e-9)
