"""Committing, replacing and removing checkpoints. That a kill loses none is shown in `test_kill`."""

from __future__ import annotations

import os

import pytest

from meshwright.checkpoint import atomic_directory, manifest
from meshwright.checkpoint.manifest import write_file
from meshwright.errors import RunError


def make(root, step, content=b"data"):
    temporary = atomic_directory.begin(root, step)
    files = {"data": write_file(temporary / "data", content)}
    return atomic_directory.commit(temporary, step=step, model={}, run={}, files=files)


def names(root):
    return sorted(entry.name for entry in root.iterdir())


def test_nothing_is_a_checkpoint_before_its_commit(tmp_path):
    root = tmp_path / "runs" / "checkpoints"
    write_file(atomic_directory.begin(root, 5) / "left", b"by an interrupted save")
    temporary = atomic_directory.begin(root, 5)
    assert list(temporary.iterdir()) == []
    entry = write_file(temporary / "data", b"data")
    assert manifest.list_checkpoints(root) == []
    path = atomic_directory.commit(temporary, step=5, model={}, run={}, files={"data": entry})
    assert manifest.newest_valid(root) == (path, [])
    assert names(root) == ["00000005"]


@pytest.mark.parametrize("content", [None, b"da", b"longer than it was"])
def test_a_file_that_is_not_there_as_announced_stops_the_commit(tmp_path, content):
    temporary = atomic_directory.begin(tmp_path, 5)
    entry = write_file(temporary / "data", b"data")
    (temporary / "data").unlink()
    if content is not None:
        write_file(temporary / "data", content)
    with pytest.raises(RunError, match="data is") as caught:
        atomic_directory.commit(temporary, step=5, model={}, run={}, files={"data": entry})
    assert "share" in caught.value.fix
    assert manifest.list_checkpoints(tmp_path) == []


def test_saving_a_step_again_replaces_it(tmp_path):
    make(tmp_path, 4)
    make(tmp_path, 5, b"first")
    path = make(tmp_path, 5, b"second")
    assert (path / "data").read_bytes() == b"second"
    assert names(tmp_path) == ["00000004", "00000005"]


def test_a_replacement_takes_the_place_of_a_damaged_one_too(tmp_path):
    (make(tmp_path, 5) / "manifest.json").unlink()
    path = make(tmp_path, 5)
    assert manifest.newest_valid(tmp_path) == (path, [])
    assert names(tmp_path) == ["00000005"]


def test_while_a_step_is_replaced_the_old_one_counts(tmp_path):
    make(tmp_path, 4)
    path = make(tmp_path, 5, b"first")
    old = path.rename(path.with_name("00000005.old"))  # as a kill between the two renames leaves it
    assert manifest.newest_valid(tmp_path) == (old, [])
    assert atomic_directory.clean(tmp_path) == []
    path = make(tmp_path, 5, b"second")
    assert manifest.newest_valid(tmp_path) == (path, [])
    assert names(tmp_path) == ["00000004", "00000005"]


def test_clean_removes_a_replaced_one_only_beside_its_successor(tmp_path):
    old = make(tmp_path, 5).rename(tmp_path / "00000005.old")
    path = make(tmp_path, 6).rename(tmp_path / "00000005")
    assert manifest.newest_valid(tmp_path)[0] == path
    assert atomic_directory.clean(tmp_path) == [old]
    assert names(tmp_path) == ["00000005"]


def test_clean_removes_leftovers_and_nothing_else(tmp_path):
    assert atomic_directory.clean(tmp_path / "nowhere") == []
    path = make(tmp_path, 5)
    write_file(atomic_directory.begin(tmp_path, 6) / "data", b"x")
    path_of_four = make(tmp_path, 4)
    path_of_four.rename(tmp_path / ".del-00000004")
    for mine in (".tmp-mine", "best", "00000003"):
        (tmp_path / mine).mkdir()
    assert {gone.name for gone in atomic_directory.clean(tmp_path)} == {".tmp-00000006", ".del-00000004"}
    assert names(tmp_path) == [".tmp-mine", "00000003", "00000005", "best"]
    assert manifest.newest_valid(tmp_path)[0] == path


def test_prune_keeps_the_newest_and_neither_counts_nor_removes_what_is_no_checkpoint(tmp_path):
    paths = [make(tmp_path, step) for step in (1, 2, 3, 4)]
    (paths[3] / "manifest.json").unlink()
    assert atomic_directory.prune(tmp_path, 2) == paths[:1]
    assert atomic_directory.prune(tmp_path, 5) == []
    assert names(tmp_path) == ["00000002", "00000003", "00000004"]


def test_prune_leaves_the_one_just_saved_even_if_it_is_not_the_newest(tmp_path):
    paths = [make(tmp_path, step) for step in (1, 2, 3)]
    assert atomic_directory.prune(tmp_path, 1, protect=paths[0]) == [paths[1]]


def test_everything_is_flushed_before_its_name_and_names_before_the_return(tmp_path, monkeypatch):
    """Data, manifest, their directory, the rename, the root: in that order."""
    calls = []
    paths = {}
    monkeypatch.setattr(os, "open", _recording(os.open, lambda fd, path, *_: paths.__setitem__(fd, str(path))))
    monkeypatch.setattr(os, "fsync", _recording(os.fsync, lambda _, fd: calls.append(paths[fd])))
    monkeypatch.setattr(os, "rename", _recording(os.rename, lambda _, source, to: calls.append(f"{source}>{to}")))
    make(tmp_path, 5)
    temporary, final = str(tmp_path / ".tmp-00000005"), str(tmp_path / "00000005")
    data = [f"{temporary}/data", f"{temporary}/manifest.json", temporary]
    assert calls == [*data, f"{temporary}>{final}", str(tmp_path)]


def _recording(function, record):
    def recorded(*args, **kwargs):
        result = function(*args, **kwargs)
        record(result, *args)
        return result

    return recorded


def test_a_second_save_is_refused_with_the_first_ones_name_and_touches_nothing(tmp_path):
    held = atomic_directory.lock(tmp_path)
    (tmp_path / ".tmp-00000001").mkdir()
    with pytest.raises(RunError, match=f"process {os.getpid()} on .* is saving a checkpoint here"):
        atomic_directory.lock(tmp_path)
    assert names(tmp_path) == [".saving", ".tmp-00000001"]
    atomic_directory.unlock(tmp_path, held)
    atomic_directory.unlock(tmp_path, atomic_directory.lock(tmp_path))
    assert names(tmp_path) == [".tmp-00000001"]


def test_the_lock_of_a_dead_process_is_none(tmp_path):
    (tmp_path / ".saving").write_text("process 1 on nowhere")
    held = atomic_directory.lock(tmp_path)
    assert (tmp_path / ".saving").read_text().startswith(f"process {os.getpid()} on ")
    atomic_directory.unlock(tmp_path, held)
