"""A save or load that fails on one rank fails on all of them, soon, in the same words, and loses nothing."""

from __future__ import annotations

import errno
import os
import subprocess

import pytest
import torch

from meshwright.checkpoint import manifest, save_load
from meshwright.errors import RunError
from tests.checkpoint import failures
from tests.gangs.gang import GangError


def only(results):
    """What all ranks were told alike. None waited in vain: collectives would do so for longer than a gang's limit."""
    assert all(result is not None for result in results)
    assert len({(result.kind, result.text) for result in results}) == 1
    return results[0]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(
    ("failing", "file"), [(0, "rank-00000"), (1, "rank-00001"), (0, "layout.json"), (0, "manifest.json")]
)
def test_a_full_disk_is_told_to_every_rank(gang, tmp_path, failing, code, file):
    outcome = gang(2).run(failures.fail_to_write, tmp_path, failing, code, file)
    told = only([result for result, _ in outcome])
    assert told.kind == "RunError"
    assert f"the disk at {tmp_path} is full" in told.text and f"rank {failing}" in told.text
    assert f"the newest earlier checkpoint, {tmp_path / '00000001'}, is intact" in told.text
    assert " free" in told.text and "fix" in told.text
    if file.startswith("rank"):
        assert "of the 2.0 KiB of its part" in told.text.replace("1.95", "2.0")  # 500 floats
        assert "free 3.91 KiB on that disk" in told.text
    assert all(left == ["00000001"] for _, left in outcome)
    assert manifest.newest_valid(tmp_path) == (tmp_path / "00000003", [])
    manifest.verify(tmp_path / "00000001")


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.EIO, ("rank 1 can't write rank-00001.safetensors: Input/output error",)),
     (errno.ENOENT, ("rank 1 can't find", "share"))],
)  # fmt: skip
def test_another_error_of_writing_names_the_rank_and_what_to_do(gang, tmp_path, code, words):
    outcome = gang(2).run(failures.fail_to_write, tmp_path, 1, code, "rank-00001")
    told = only([result for result, _ in outcome])
    assert told.kind == "RunError" and all(word in told.text for word in words)
    assert all(left == ["00000001"] for _, left in outcome)


def test_an_exception_that_cannot_be_pickled_still_reaches_every_rank(gang, tmp_path):
    outcome = gang(2).run(failures.fail_beyond_pickling, tmp_path)
    for results in zip(*outcome, strict=True):
        told = only(results)
        assert told.kind == "RuntimeError"
        assert "no pickle" in told.text and "failures.py" in told.text, "the traceback is lost"
    assert list(tmp_path.iterdir()) == []


def test_a_load_that_fails_on_one_rank_fails_on_all(gang, tmp_path):
    more, nowhere = zip(*gang(2).run(failures.ask_for_more_on_one_rank, tmp_path / "a"), strict=True)
    assert "other is not in the checkpoint" in only(more).text
    assert only(nowhere).kind == "CheckpointError"
    lost = only(gang(2).run(failures.lose_a_file_of_one_rank, tmp_path / "b"))
    assert lost.kind == "CheckpointError" and "rank-00001.safetensors" in lost.text


def test_shards_and_partial_sums_are_not_saved_as_if_they_were_full(gang, tmp_path):
    told = only(gang(3).run(failures.save_local_tensors, tmp_path))
    assert told.kind == "RunError"
    assert "ranks 0 and 2 have different tensors named w: shards of [334] and [332]" in told.text
    told = only(gang(2).run(failures.save_partial_sums, tmp_path))
    assert told.kind == "CheckpointError" and "is partial" in told.text


def test_a_rank_killed_while_saving_costs_only_that_checkpoint(gang, tmp_path):
    with pytest.raises(GangError) as caught:
        gang(2).run(failures.die_while_writing, tmp_path)
    assert 1 in caught.value.ranks
    assert manifest.newest_valid(tmp_path) == (tmp_path / "00000001", [])
    gang(2).run(failures.fail_to_write, tmp_path / "next", 1, errno.ENOSPC, "rank-00001")  # the gang is replaced


def test_the_failure_of_one_process_alone_reads_the_same(tmp_path, monkeypatch):
    save_load.save(tmp_path, 1, {"w": torch.ones(2)}, model={}, run={}, keep=1)

    def fail(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(RunError, match="is full") as caught:
        save_load.save(tmp_path, 2, {"w": torch.ones(2)}, model={}, run={}, keep=1)
    assert str(tmp_path / "00000001") in caught.value.rule
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small tmpfs here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_a_disk_that_is_really_full_loses_nothing(gang, small_disk):
    root = small_disk / "checkpoints"
    numel = 380_000  # 1.45 MiB: two fit, and the third must be written before the first is removed
    outcome = gang(2).run(failures.fill_the_disk, root, numel)
    told = only([result for result, _ in outcome])
    assert [step for _, step in outcome] == [3, 3]
    assert f"the disk at {root} is full" in told.text
    assert f"the newest earlier checkpoint, {root / '00000002'}, is intact" in told.text
    assert sorted(path.name for path in root.iterdir()) == ["00000001", "00000002"]
    assert manifest.newest_valid(root) == (root / "00000002", [])
    manifest.verify(root / "00000001")
    found = save_load.read_tensors(root / "00000002", ["w"])["w"]
    assert torch.equal(found, torch.arange(float(numel)))


def test_of_two_processes_that_save_one_step_the_second_is_told_who_the_first_is(gang, tmp_path):
    (pid, first), (_, (refused, again)) = gang(2).run(failures.save_at_once, tmp_path)
    assert first == [None] and again is None
    assert refused.kind == "RunError" and f"process {pid} on " in refused.text
    manifest.verify(tmp_path / "00000001")
    assert [entry.name for entry in tmp_path.iterdir()] == ["00000001"]
    assert save_load.read_tensors(tmp_path / "00000001", ["w"])["w"].unique().tolist() == [1.0]


@pytest.mark.slow
def test_a_rank_that_does_not_save_is_missed(gang, tmp_path):
    told, nothing = gang(2).run(failures.save_without_rank_1, tmp_path)
    assert nothing is None and told.kind == "CollectiveError"
    assert "rank 1: reported no failed collective" in told.text
