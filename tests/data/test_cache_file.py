"""Cache files: round trip, damage, interruption, concurrent builds and fallback directories."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data import cache_file
from meshwright.data.token_cache import CorpusMetadata, map_tokens
from meshwright.errors import DataError

TOKENS = np.arange(1000, dtype="<u2")
TIMEOUT_S = 120  # A process that imports numpy and pytest takes 0.4 s, and 10 s were seen on an overloaded machine.
FACTS = CorpusMetadata("<u2", 900, 100, TOKENS.nbytes, 1000, 123, 0, "f" * 64)


def build(file):
    file.write(TOKENS.tobytes())
    return FACTS


def forbidden(file):
    raise AssertionError("built although it was there")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return cache_file.open_or_build("x", CorpusMetadata, cache_dir=str(folder), build=build)[0].read_bytes()


def test_built_once_and_read_back(tmp_path):
    folder = tmp_path / "not" / "there yet"
    path, facts = cache_file.open_or_build("x", CorpusMetadata, cache_dir=str(folder), build=build)
    assert facts == FACTS and path.parent == folder
    assert cache_file.open_or_build("x", CorpusMetadata, cache_dir=str(folder), build=forbidden) == (path, facts)
    np.testing.assert_array_equal(map_tokens(path, facts), TOKENS)
    assert not map_tokens(path, facts).flags.writeable
    assert os.listdir(folder) == ["x"]


@settings(max_examples=40)
@given(data=st.data())
def test_a_wrong_size_is_found_and_made_again(tmp_path_factory, whole, data):
    folder = tmp_path_factory.mktemp("damaged")
    cut = data.draw(st.integers(0, len(whole)))
    grown = data.draw(st.binary(max_size=20))
    damaged = data.draw(st.sampled_from([whole[:cut] + grown, whole[cut:], grown + whole]))
    (folder / "x").write_bytes(damaged)
    if damaged != whole:
        assert cache_file.load(folder / "x", CorpusMetadata) is None
    path, facts = cache_file.open_or_build("x", CorpusMetadata, cache_dir=str(folder), build=build)
    assert path.read_bytes() == whole and facts == FACTS


def test_a_damaged_footer_is_found(tmp_path, whole):
    start = len(TOKENS.tobytes())
    for place in (start, len(whole) - 1, len(whole) - 10):
        (tmp_path / "x").write_bytes(whole[:place] + b"\xee" + whole[place + 1 :])
        assert cache_file.load(tmp_path / "x", CorpusMetadata) is None


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_build_leaves_nothing(tmp_path, failure):
    def interrupted(file):
        file.write(b"half")
        raise failure

    with pytest.raises(failure):
        cache_file.open_or_build("x", CorpusMetadata, cache_dir=str(tmp_path), build=interrupted)
    assert os.listdir(tmp_path) == []


def killed(folder):
    def half(file):
        file.write(b"half")
        file.flush()
        os._exit(9)

    cache_file.open_or_build("x", CorpusMetadata, cache_dir=folder, build=half)


def test_a_killed_build_leaves_no_cache_and_its_remains_go_after_a_day(tmp_path):
    process = multiprocessing.get_context("forkserver").Process(target=killed, args=(str(tmp_path),))
    process.start()
    process.join(TIMEOUT_S)
    assert process.exitcode == 9
    (remains,) = tmp_path.glob("*.tmp")
    assert cache_file.load(tmp_path / "x", CorpusMetadata) is None
    cache_file.open_or_build("x", CorpusMetadata, cache_dir=str(tmp_path), build=build)
    assert remains.exists(), "another process may still be writing it"
    os.utime(remains, (time.time() - 2 * 24 * 3600,) * 2)
    cache_file.open_or_build("y", CorpusMetadata, cache_dir=str(tmp_path), build=build)
    assert sorted(os.listdir(tmp_path)) == ["x", "y"]


def race(folder, barrier, num_builds):
    def slow(file):
        with num_builds.get_lock():
            num_builds.value += 1
        time.sleep(0.2)
        return build(file)

    def together(file):
        barrier.wait(TIMEOUT_S)  # All are building at once.
        return build(file)

    barrier.wait(TIMEOUT_S)
    found = [cache_file.open_or_build("locked", CorpusMetadata, cache_dir=folder, build=slow)]
    cache_file.build_lock = contextlib.nullcontext  # As on a file system without locks.
    found.append(cache_file.open_or_build("unlocked", CorpusMetadata, cache_dir=folder, build=together))
    barrier.wait(TIMEOUT_S)
    for path, facts in found:
        np.testing.assert_array_equal(map_tokens(path, facts), TOKENS)


def test_several_processes_make_one_file(tmp_path, whole):
    context = multiprocessing.get_context("forkserver")
    barrier, num_builds = context.Barrier(3), context.Value("i", 0)
    processes = [context.Process(target=race, args=(str(tmp_path), barrier, num_builds)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT_S)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert num_builds.value == 1, "the others wait for the one that builds"
    assert sorted(os.listdir(tmp_path)) == ["locked", "unlocked"]
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {whole}


def test_a_rebuild_leaves_earlier_maps_valid(tmp_path):
    path, facts = cache_file.open_or_build("x", CorpusMetadata, cache_dir=str(tmp_path), build=build)
    tokens = map_tokens(path, facts)
    with cache_file.atomic_write(path) as file:
        file.write(b"something else")
    np.testing.assert_array_equal(tokens, TOKENS)


def test_an_unwritable_directory_falls_back_to_a_private_temporary_one(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(cache_file.tempfile, "gettempdir", lambda: str(tmp_path))
    with caplog.at_level(logging.WARNING):
        path, _ = cache_file.open_or_build("x", CorpusMetadata, cache_dir=str(tmp_path / "file" / "cache"), build=build)
    assert path.parent == tmp_path / f"meshwright-{os.getuid()}"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert str(path.parent) in caplog.text and "data.cache_dir" in caplog.text
    assert (
        cache_file.open_or_build("x", CorpusMetadata, cache_dir=str(tmp_path / "file" / "cache"), build=forbidden)[0]
        == path
    )


def test_a_temporary_directory_that_others_can_write_to_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_file.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(cache_file.tempfile, "mkdtemp", lambda prefix: str(tmp_path / f"{prefix}new"))
    shared = tmp_path / f"meshwright-{os.getuid()}"
    (tmp_path / "elsewhere").mkdir()
    shared.symlink_to(tmp_path / "elsewhere")
    assert cache_file.temporary_directory() == tmp_path / "meshwright-new"
    shared.unlink()
    shared.mkdir()
    shared.chmod(0o777)
    assert cache_file.temporary_directory() == tmp_path / "meshwright-new"


def test_a_cache_that_is_there_is_used_where_nothing_can_be_written(tmp_path, monkeypatch):
    path, facts = cache_file.open_or_build("x", CorpusMetadata, cache_dir=str(tmp_path), build=build)
    monkeypatch.setattr(cache_file.os, "access", lambda *_: False)
    assert cache_file.open_or_build("x", CorpusMetadata, cache_dir=str(tmp_path), build=forbidden) == (path, facts)


def test_the_directory_follows_the_xdg_specification(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert (
        cache_file.open_or_build("x", CorpusMetadata, cache_dir=None, build=build)[0]
        == tmp_path / "xdg" / "meshwright" / "x"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    at_home = tmp_path / "home" / ".cache" / "meshwright" / "x"
    assert cache_file.open_or_build("x", CorpusMetadata, cache_dir=None, build=build)[0] == at_home
    assert (
        cache_file.open_or_build("x", CorpusMetadata, cache_dir="~/mine", build=build)[0]
        == tmp_path / "home" / "mine" / "x"
    )


def test_a_full_disk_is_said(tmp_path):
    def full(file):
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match="No space left on device") as caught:
        cache_file.open_or_build("x", CorpusMetadata, cache_dir=str(tmp_path), build=full)
    assert "data.cache_dir" in caught.value.fix
    assert list(Path(tmp_path).iterdir()) == []


def test_a_file_system_without_locks_is_no_error(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(cache_file.fcntl, "flock", no_locks)
    assert cache_file.open_or_build("x", CorpusMetadata, cache_dir=str(tmp_path), build=build)[1] == FACTS
    assert os.listdir(tmp_path) == ["x"]
