"""Copies of shared parameters: alike after every step, checked at the start, and saved once."""

from __future__ import annotations

import re
import shutil

import pytest
import torch

from meshwright.checkpoint import save_load
from meshwright.config.facts_for_family import run_facts
from meshwright.data.images import ImageDataset
from meshwright.errors import DataError, LayoutError
from meshwright.mesh.local_shards import local_box, to_local
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.train.build_job import build_job, refresh_shared_parameters
from meshwright.train.optimizer import named_state
from meshwright.train.pipeline_stages import Pipeline
from meshwright.train.rank_run import check_agreement
from meshwright.train.train_step import TrainStep
from tests.helpers import for_pictures, quick_and_slow, rank_context
from tests.prove.proofs import SMALL_DIT, SMALL_PICTURES, few_pictures
from tests.train.runs import STEPS, assert_bitwise_equal, final_state, metrics

NUM_STEPS = 8
CHUNKED = ("mesh.pp=2", "pipeline.chunks=2", "train.num_microbatches=4")
SMALL = (*SMALL_DIT, *SMALL_PICTURES, "model.num_layers=5", "train.warmup_steps=0", "train.lr=1e-2")


def make_job(rank, world_size, words):
    torch.set_num_threads(1)
    config = load("dit-digits", [*words, "train.device=cpu"])
    context = rank_context(rank, world_size)
    return build_job(config, make_plan(config), context, torch.device("cpu"))


def copies_of(job):
    """This rank's copies of shared parameters: by key and place in the whole, a list."""
    found = {}
    for part in job.parts().values():
        for name, key in part.shared_parameter_keys().items():
            copy = part.module.get_parameter(name).detach()
            box = local_box(copy)
            found.setdefault((key, box.offset, box.shape), []).append(to_local(copy).clone())
    return found


def train(rank, world_size, words, pictures, num_steps, sync=True):
    """The losses, and half-way and after the last step this rank's copies."""
    job = make_job(rank, world_size, words)
    step = TrainStep(job, job.family.task(run_facts(job.config), pictures, job.device), lambda: False)
    if not sync:
        step.pipeline.shared.sync = lambda number: None
    losses, seen = [], []
    for number in range(1, num_steps + 1):
        losses.append(step(number).loss)
        if number in (num_steps // 2, num_steps):
            seen.append(copies_of(job))
    return losses, seen


def run(gang, words, *, small=True, sync=True):
    config = load("dit-digits", words)
    pictures = few_pictures(config) if small else open_digits(config)
    num_ranks = config.mesh.axes().num_ranks()
    arguments = (words, pictures, NUM_STEPS, sync)
    return [train(0, 1, *arguments)] if num_ranks == 1 else gang(num_ranks).run(train, *arguments, timeout_s=300)


def open_digits(config):
    from tests.helpers import open_data

    return open_data(config)


def largest_difference(results, at):
    """Between any two copies of a shared parameter, over all ranks and chunks; and how many copies there are."""
    copies = {}
    for _, seen in results:
        for place, found in seen[at].items():
            copies.setdefault(place, []).extend(found)
    assert copies
    most = max(float((copy - found[0]).abs().max()) for found in copies.values() if found[0].numel() for copy in found)
    return most, min(map(len, copies.values()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "tolerance", "axes"),
    [("float32", 1e-4, ("mesh.dp_shard=2",)), ("float32", 1e-4, ())],
)
def test_copies_stay_bitwise_equal_and_losses_are_those_of_one_process(gang, precision, tolerance, axes):
    words = [*SMALL, f"train.precision={precision}"]
    results = run(gang, [*words, *CHUNKED, *axes])
    assert largest_difference(results, 0) == largest_difference(results, 1) == (0.0, 4)
    ((expected, _),) = run(gang, words)
    assert max(expected) > min(expected) + 100 * tolerance  # what is compared is a training
    for losses, _ in results:
        assert losses == pytest.approx(expected, rel=0, abs=tolerance)


def test_without_the_sum_copies_drift_apart(gang):
    assert largest_difference(run(gang, [*SMALL, *CHUNKED], sync=False), 1)[0] > 1e-3


@pytest.mark.slow
def test_the_presets_losses_are_those_of_one_process(gang):
    words = ["train.warmup_steps=0", "train.precision=float64"]
    results = run(gang, [*words, "mesh.pp=2", "pipeline.chunks=2"], small=False)
    assert largest_difference(results, 0) == largest_difference(results, 1) == (0.0, 4)
    [(expected, _)] = run(gang, words, small=False)
    assert expected[-1] < 0.9 * expected[0]
    for losses, _ in results:
        assert losses == pytest.approx(expected, rel=0, abs=1e-9)


DISAGREEMENTS = {
    "frozen": (("train.freeze=label_embed.*",), ()),
    "a part of it frozen": (("train.freeze=time_embed.fc2.bias",), ()),
    "classes": (("model.num_classes=12",), ()),
    "width": (("model.dim=21",), ()),
    "dtype": (("train.precision=float64",), ()),
    "frozen, sharded": (("train.freeze=label_embed.*",), ("mesh.dp_shard=2",)),
}
SAYS = {
    "frozen": r"label_embed.weight has requires_grad True on rank 0 \(stage 0\) and False on rank 1 \(stage 1\)",
    "a part of it frozen": r"time_embed.fc2.bias has requires_grad True on rank 0 .* and False on rank 1",
    "classes": r"label_embed.weight has shape \[14, 19\] on rank 0 .* and \[13, 19\] on rank 1",
    "width": r"label_embed.weight has shape \[14, 19\] on rank 0 .* and \[14, 21\] on rank 1",
    "dtype": r"label_embed.weight has dtype float32 on rank 0 .* and float64 on rank 1",
    "frozen, sharded": r"label_embed.weight has requires_grad True on rank 0 .* and False on rank 2",
}


QUICK = {("frozen",), ("classes",), ("dtype",)}
"""One of each fact that is compared."""


def compare_configurations(rank, world_size, all_words, pictures):
    try:
        check_agreement(load("dit-digits", all_words[rank]), pictures)
    except DataError as error:
        return error.what, error.where
    return None


@pytest.mark.parametrize(
    ("word", "key", "values"),
    [
        ("train.freeze=label_embed.*", "train.freeze", r"\(\) and \('label_embed\.\*',\)"),
        ("model.num_classes=12", "model.num_classes", "13 and 12"),
    ],
)
def test_a_run_names_the_key_that_ranks_differ_in(gang, word, key, values):
    pictures = few_pictures(load("dit-digits", SMALL))
    words = [*SMALL, *CHUNKED]
    for what, where in gang(2).run(compare_configurations, [words, [*words, word]], pictures):
        assert re.fullmatch(rf"ranks 0 and 1 have different values of {key}: {values}", what)
        assert where == f"command line, {key}"


def disagree(rank, world_size, words, other_words, odd_ranks):
    job = make_job(rank, world_size, other_words if rank in odd_ranks else words)
    try:
        Pipeline(job)
    except LayoutError as error:
        return error.what, error.where, error.fix
    return None


@pytest.mark.parametrize("what", quick_and_slow(((name,) for name in DISAGREEMENTS), QUICK))
def test_ranks_that_are_configured_apart_stop_alike_and_at_once(gang, what):
    """Without the comparison of configurations that a run begins with. None waits in vain: collectives would do so for
    longer than a gang's limit."""
    change, axes = DISAGREEMENTS[what]
    words = [*SMALL, *CHUNKED, *axes]
    num_ranks = load("dit-digits", words).mesh.axes().num_ranks()
    odd_ranks = range(num_ranks // 2, num_ranks)
    results = gang(num_ranks).run(disagree, words, [*words, *change], odd_ranks)
    assert results[0] is not None and all(result == results[0] for result in results)
    words, where, fix = results[0]
    assert re.search(SAYS[what], words) and fix and re.search(r"on ranks 0 and [12]$", where)


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
QUICK_CHECKPOINTS = {"from a pipeline to one process"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK_CHECKPOINTS else pytest.mark.slow) for n in PAIRS]
)
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
