"""Checkpoints of float8 runs: bitwise resumed, and the amax history restored on any layout."""

from __future__ import annotations

import shutil

import pytest
import torch

from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.save_load import read_tensors
from meshwright.features.float8.run import HISTORY
from meshwright.plan.rules import load
from tests.train.jobs import job_of, run_on
from tests.train.runs import STEPS, assert_bitwise_equal, final_state, train

DELAYED = "float8.recipe=delayed"


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """A run that was not interrupted."""
    out = tmp_path_factory.mktemp("whole")
    train([*corpus, DELAYED, "mesh.dp_shard=2"], out)
    return out


def until_fourth_step(whole, out):
    shutil.copytree(whole, out)
    for last in ("00000006", "00000008"):
        shutil.rmtree(out / "checkpoints" / last)


@pytest.mark.slow
def test_a_resumed_run_is_bitwise_the_whole_one(corpus, whole, tmp_path):
    until_fourth_step(whole, tmp_path / "resumed")
    train([*corpus, DELAYED, "mesh.dp_shard=2"], tmp_path / "resumed", resume="auto")
    assert_bitwise_equal(tmp_path / "resumed", whole)
    assert (final_state(whole)[HISTORY] > 0).any()


def restored(rank, world_size, words, path):
    """What a job says of the checkpoint's amax history, and what it has of it then."""
    job, _ = job_of(load(None, [*STEPS, *words]), rank, world_size)
    said = job.features["float8"].restore(path, read_manifest(path))
    history = job.features["float8"].history
    return said, None if history is None else (history.history.clone(), history.known.clone())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(1, ["train.precision=float32"]), (2, ["mesh.pp=2", "train.num_microbatches=4"]), (2, ["mesh.cp=2"])],
)
def test_the_history_is_restored_on_another_layout(gang, corpus, whole, world_size, layout):
    path = whole / "checkpoints/00000008"
    saved = read_tensors(path, [HISTORY])[HISTORY]
    for said, (history, known) in run_on(gang, world_size, restored, [*corpus, DELAYED, *layout], path):
        assert said == "" and torch.equal(history, saved) and torch.equal(known, saved.amax(0))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param([DELAYED, "float8.amax_history=4"], "is of other layers or steps", marks=pytest.mark.slow),
        ([DELAYED, "float8.keep_first=1"], "is of other layers or steps"),
        (["float8.recipe=current"], ""),
    ],
)
def test_another_history_starts_anew_and_says_so(corpus, whole, words, said):
    found, history = restored(0, 1, [*corpus, *words], whole / "checkpoints/00000008")
    assert found.endswith(said) and bool(found) is bool(said)
    assert history is None or history[0].eq(0).all()


@pytest.mark.slow
def test_a_run_goes_on_in_float8_from_a_checkpoint_without(corpus, tmp_path):
    train([*corpus, "train.steps=4"], tmp_path)
    train([*corpus, DELAYED, "train.steps=8"], tmp_path, resume="auto")
    assert (final_state(tmp_path)[HISTORY][:4] > 0).any() and final_state(tmp_path)[HISTORY][4:].eq(0).all()
