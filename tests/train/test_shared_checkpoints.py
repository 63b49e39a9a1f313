"""Checkpoints of runs with shared and frozen parameters: every copy goes on from what was saved."""

from __future__ import annotations

import shutil

import pytest
import torch

from meshwright.checkpoint import save_load
from meshwright.config.facts_for_family import run_facts
from meshwright.data.images import ImageDataset
from meshwright.train.build_job import refresh_shared_parameters
from meshwright.train.optimizer import named_state
from meshwright.train.train_step import TrainStep
from tests.helpers import for_pictures
from tests.prove.proofs import few_pictures
from tests.train.runs import STEPS, assert_bitwise_equal, final_state, metrics
from tests.train.test_shared_copies import CHUNKED, SMALL, copies_of, largest_difference, load, make_job

FREEZE = "train.freeze=['time_embed.fc1.*','blocks.0.*','embed.*']"
MIDDLE, LAST = 3, 5


def continued(rank, world_size, words, pictures: ImageDataset, folder, resumes):
    """Train to the last step, saving in the middle; or go on from there. This rank's losses, copies and pieces."""
    job = make_job(rank, world_size, words)
    step = TrainStep(job, job.family.task(run_facts(job.config), pictures, job.device), lambda: False)
    tensors = named_state(job.model, job.optimizer)
    if resumes:
        save_load.load(folder / f"{MIDDLE:08d}", tensors)
        refresh_shared_parameters(job)
    losses = []
    for number in range(MIDDLE + 1 if resumes else 1, LAST + 1):
        losses.append(step(number).loss)
        if number == MIDDLE:
            save_load.save(folder, MIDDLE, tensors, model={}, run={}, keep=1)
    return losses[-(LAST - MIDDLE) :], copies_of(job)


def results(gang, words, folder, *, resumes):
    config = load("dit-digits", words)
    ranks, arguments = config.mesh.axes().num_ranks(), (words, few_pictures(config), folder, resumes)
    return [continued(0, 1, *arguments)] if ranks == 1 else gang(ranks).run(continued, *arguments, timeout_s=120)


CHUNKS = ("pipeline.chunks=2", "train.num_microbatches=4")
PAIRS = {
    "the same chunks": (CHUNKS, CHUNKS),
    "the same, sharded": ((*CHUNKED, "mesh.dp_shard=2"),) * 2,
    "from a pipeline to one process": (CHUNKED, CHUNKS),
    "from sharded to V-shaped": ((*CHUNKED, "mesh.dp_shard=2"), ("mesh.pp=2", "pipeline.schedule=zb-v", *CHUNKS[1:])),
}
QUICK = {"from a pipeline to one process"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in PAIRS])
def test_all_copies_go_on_from_a_checkpoint(gang, tmp_path, name):
    before, after = ([*SMALL, FREEZE, "train.precision=float64", *words] for words in PAIRS[name])
    whole = results(gang, before, tmp_path, resumes=False)
    again = results(gang, after, tmp_path, resumes=True)
    assert largest_difference([(None, [copies]) for _, copies in again], 0)[0] == 0.0
    assert again[0][0] == pytest.approx(whole[0][0], rel=1e-9)
    if before == after:
        for (losses, copies), (other_losses, others) in zip(whole, again, strict=True):
            assert losses == other_losses and copies.keys() == others.keys()
            for place, found in copies.items():
                assert all(map(torch.equal, found, others[place])), place


RUN = [word for word in for_pictures(STEPS) if "num_layers" not in word] + [
    *SMALL[:8], "model.num_layers=5", "train.precision=float64", "train.steps=4",
    "diffusion.num_samples=10", "diffusion.sampling_steps=3",
]  # fmt: skip


@pytest.mark.slow
def test_a_run_with_frozen_parameters_goes_on(forked_meshwright, tmp_path):
    def run(out, *more):
        done = forked_meshwright("run", "dit-digits", *RUN, FREEZE, *CHUNKED, "--out", out, *more)
        assert done.returncode == 0, done.stderr

    run(tmp_path / "run")
    start = final_state(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "same")
    shutil.rmtree(tmp_path / "same/checkpoints/00000004")
    run(tmp_path / "same", "--resume", "auto")
    assert len(metrics(tmp_path / "same")) == 4
    assert_bitwise_equal(tmp_path / "same", tmp_path / "run")
    kept = [name for name in start if name.startswith(("model.time_embed.fc1", "model.blocks.0."))]
    assert len(kept) > 10 and not any(f"optimizer.exp_avg.{name.removeprefix('model.')}" in start for name in kept)
