"""Files to be written are asked for before anything is computed, and are left as they were."""

from __future__ import annotations

import os
import subprocess

import pytest

from meshwright.errors import InputError
from meshwright.output_files import check_output, write_output


@pytest.mark.parametrize("name", ["new.json", "old.json", "link.json", "./a b.json"])
def test_what_can_be_written_is_left_as_it_was(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").write_text("before")
    (tmp_path / "link.json").symlink_to("nothing-yet.json")
    before = sorted(os.listdir())
    check_output(tmp_path / name, where="--json")
    assert sorted(os.listdir()) == before and (tmp_path / "old.json").read_text() == "before"
    write_output(tmp_path / name, "after", where="--json")
    assert (tmp_path / name).read_text() == "after"


@pytest.mark.parametrize("call", [check_output, lambda path, where: write_output(path, "x", where=where)])
@pytest.mark.parametrize("name", ["a folder", "a-file/x.json", "/proc/x.json", "x" * 300, ""])
def test_what_can_not_be_written_is_named(tmp_path, monkeypatch, name, call):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a-file").write_text("")
    with pytest.raises(InputError) as caught:
        call(type(tmp_path)(name), where="command line, --json")
    assert caught.value.where == "command line, --json" and caught.value.rule and caught.value.fix
    assert name in caught.value.what


def test_a_folder_that_is_not_there_can_be_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "not there/nor this/x.json"
    with pytest.raises(InputError, match="folder not found: ") as caught:
        check_output(path, where="--json")
    subprocess.run(caught.value.fix, shell=True, check=True)
    check_output(path, where="--json")
    assert os.listdir() == ["not there"] and os.listdir(path.parent) == []


def test_a_pipe_is_not_opened_twice(tmp_path):
    """Opening it would wait for a reader, and closing it would end him before anything came."""
    os.mkfifo(tmp_path / "pipe")
    check_output(tmp_path / "pipe", where="--json")
