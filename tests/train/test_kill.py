"""A rank is killed: the others end, the message names rank and step, and the run goes on as if nothing had happened.

A rank of the command, killed from outside, is in `test_command`.
"""

from __future__ import annotations

import shutil
from functools import cache

import pytest
import torch

from meshwright.checkpoint.manifest import list_checkpoints, newest_valid, verify
from meshwright.checkpoint.save_load import read_tensors, tensor_names
from meshwright.errors import CONTINUE, RunError
from tests.helpers import small_corpus
from tests.train.runs import Fault, assert_bitwise_equal, choose, metrics, num_steps, train

FP64 = "train.precision=float64"
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("gang")]  # whose server ranks are forked from


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return small_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def uninterrupted(words, tmp_path_factory):
    """Folders of runs that nobody disturbed, each run once."""

    @cache
    def run(*layout):
        out = tmp_path_factory.mktemp("uninterrupted")
        train([*words, *layout], out)
        return out

    return run


def killed(words, out, fault, *, resume=None):
    """A run that a kill ends; what the launcher said."""
    with pytest.raises(RunError) as caught:
        train(words, out, fault=fault, resume=resume)
    error = caught.value
    assert f"rank {fault.rank} was killed by SIGKILL" in error.what
    assert error.where.startswith(f"rank {fault.rank} of ") and CONTINUE in error.fix
    return error


MOMENTS = {
    "while starting": Fault(1, "starting", 0),
    "while saving (step 2)": Fault(0, "saving", 2),
    "while validating (step 4)": Fault(1, "validating", 4),
    "in step 5": Fault(0, "step", 5),
    "while generating text (step 8)": Fault(1, "generating text", 8),
    "while finishing (step 8)": Fault(0, "finishing", 8),
}


def test_a_killed_rank_costs_nothing(words, uninterrupted, tmp_path):
    """The others end, the message names rank and step, and what follows is bitwise what would have been.

    One run is killed at every moment, each time a little later. With tp: `test_nodes`.
    """
    words = [*words, "mesh.dp_shard=2"]
    for place, fault in MOMENTS.items():
        error = killed(words, tmp_path, fault, resume="auto")
        assert place in error.what and "the other ranks were killed" in error.what
    train(words, tmp_path, resume="auto")
    assert_bitwise_equal(tmp_path, uninterrupted("mesh.dp_shard=2"))


def test_it_goes_on_with_other_numbers_of_processes(words, uninterrupted, tmp_path):
    """2 → 4 → 1 processes: same samples, and losses as of a run that was never stopped."""
    words = [*words, FP64]
    killed([*words, "mesh.dp_shard=2"], tmp_path, Fault(rank=1, step=4))
    assert num_steps(tmp_path) == 3
    killed([*words, "mesh.tp=2", "mesh.dp_shard=2"], tmp_path, Fault(rank=2, step=7), resume="auto")
    train(words, tmp_path, resume="auto")
    found, expected = metrics(tmp_path), metrics(uninterrupted(FP64))
    for key in ("step", "lr", "samples", "skipped"):
        assert [line[key] for line in found] == [line[key] for line in expected]
    for key in ("loss", "grad_norm"):
        torch.testing.assert_close(
            *(torch.tensor([line[key] for line in lines], dtype=torch.float64) for lines in (found, expected)),
            rtol=0, atol=1e-8 if key == "grad_norm" else 1e-9,
        )  # fmt: skip


def test_killed_within_a_save_an_earlier_checkpoint_always_loads(words, uninterrupted, tmp_path):
    """On rank 0, which commits, and on rank 1, which only writes its file. At every operation: tests/checkpoint."""
    words = [*words, "mesh.dp_shard=2"]
    for rank, operation in ((0, 11), (1, 2)):
        fault = Fault(rank=rank, phase="saving", step=4, action=operation)
        killed(words, tmp_path, fault, resume="auto")
        newest, _ = newest_valid(tmp_path / "checkpoints")
        assert newest is not None and verify(newest).step == 2
        assert len(read_tensors(newest, tensor_names(newest))) > 20
    train(words, tmp_path, resume="auto")
    assert_bitwise_equal(tmp_path, uninterrupted("mesh.dp_shard=2"))
    assert not list((tmp_path / "checkpoints").glob(".*"))


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 4
    path.unlink() if how == "remove" else path.write_bytes(data[: -1 if how == "truncate" else None])


def test_a_damaged_newest_checkpoint_is_passed_over_and_named(words, uninterrupted, tmp_path):
    words, whole = [*words, "mesh.dp_shard=2"], uninterrupted("mesh.dp_shard=2")
    for how in ("truncate", "remove", "flip"):
        for victim in ("rank-00001.safetensors", "layout.json", "manifest.json"):
            out = shutil.copytree(whole, tmp_path / f"{how} {victim}")
            newest = list_checkpoints(out / "checkpoints")[-1]
            damage(newest / victim, how)
            chosen = choose(words, out=out, resume="auto")
            assert chosen.checkpoint == newest.with_name("00000006")
            assert any(str(newest) in note and victim in note for note in chosen.notes)
    out = tmp_path / "flip rank-00001.safetensors"
    train(words, out, resume="auto")
    assert_bitwise_equal(out, whole)


def test_asked_to_stop_it_stops_after_the_step_saved(words, uninterrupted, tmp_path):
    words = [*words, "mesh.dp_shard=2"]
    with pytest.raises(RunError, match="stopped after step 3, as requested; saved .*00000003") as caught:
        train(words, tmp_path, fault=Fault(rank=1, step=3, action="stop"))
    assert caught.value.exit_code == 3 and f"meshwright run {tmp_path}," in caught.value.fix
    assert num_steps(tmp_path) == 3
    train(words, tmp_path, resume="auto")
    # One checkpoint more was saved, so that other ones are kept; the last is the same.
    assert_bitwise_equal(tmp_path, uninterrupted("mesh.dp_shard=2"))


def test_a_rank_that_raises_is_named_with_its_step(words, tmp_path):
    with pytest.raises(RunError, match="rank 1 failed in step 3") as caught:
        train([*words, "mesh.dp_shard=2"], tmp_path, fault=Fault(rank=1, step=3, action="raise"))
    log = (tmp_path / "logs/rank-1.log").read_text("utf-8")
    assert "rank 1 of 2 failed: step 3" in log and "Traceback" in log and "Input/output error" in log
    assert "Input/output error" in caught.value.what


def test_it_stops_when_steps_stay_not_finite(words, uninterrupted, tmp_path):
    """On the rank that saw it and on the others; and goes on from what was good, as the error says."""
    words = [*words, "mesh.dp_shard=2"]
    limits = ["train.max_skipped_steps=3", "train.validate_every=0"]
    with pytest.raises(RunError, match="4 steps in a row were not finite .* good checkpoint is .*00000002") as caught:
        train([*words, *limits], tmp_path, fault=Fault(rank=1, step=4, action="nan"))
    assert caught.value.where == "step 7, samples 48 … 55" and "train.lr" in caught.value.fix
    lines = metrics(tmp_path)
    assert [line["skipped"] for line in lines] == [False] * 3 + [True] * 4
    assert lines[3]["loss"] is None and lines[3]["samples"] == [24, 31]
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["00000002"]
    assert "meshwright run " in caught.value.fix
    train(words, tmp_path, resume="auto")
    assert_bitwise_equal(tmp_path, uninterrupted("mesh.dp_shard=2"))
