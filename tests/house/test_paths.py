"""Paths of the machine that a file was written on are caught."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import pytest

from tests.helpers import covering_pairs
from tests.house.paths import machine_folders, path_breaches
from tests.house.plant import plant

FOLDERS = {
    "the repository": "code/root",
    "beside it": "code",
    "home": "home/ada",
    "an environment": "envs/ours",
}
ENDS = ("", "/.cache/x.py", ": as it is")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A repository on a machine of its own, which is under `tmp_path`."""
    monkeypatch.setenv("HOME", str(tmp_path / FOLDERS["home"]))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / FOLDERS["an environment"]))
    root = tmp_path / FOLDERS["the repository"]
    root.mkdir(parents=True)
    return root


@pytest.mark.parametrize(("folder", "end", "with_git"), covering_pairs(product(FOLDERS, ENDS, (True, False))))
def test_paths_of_one_machine_are_caught(root, tmp_path, folder, end, with_git):
    if with_git:
        subprocess.run(["git", "init", "-q", str(root)], check=True)
        (root / ".gitignore").write_text("runs/\n")
    own = tmp_path / FOLDERS[folder]
    plant(root, {"docs/a.md": f"one\nsee `{own}{end}`\n", "docs/b.md": f"src{own}/x ~{own}/x ${{HOME}}{own}\n"})
    (root / "runs").mkdir()
    (root / "runs/log.txt").write_text(f"{own}{end}")
    (root / "docs/picture.png").write_bytes(b"\xff\xfe" + f"{own}{end}".encode())
    (breach,) = path_breaches(root)
    assert breach == f"docs/a.md:2 names {own}, of one machine"


def test_other_folders_are_no_breach(root, tmp_path):
    home = tmp_path / FOLDERS["home"]
    plant(root, {"docs/a.md": f"{home}m/x {home}-2\n{tempfile.gettempdir()}/x\n#!/usr/bin/env bash\n"})
    assert path_breaches(root) == []


def test_folders_that_every_machine_has_are_nobodys(root, tmp_path, monkeypatch):
    assert machine_folders(root) == {tmp_path / folder for folder in FOLDERS.values()}
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setattr(tempfile, "tempdir", str(root.parent))
    monkeypatch.setenv("HOME", "/")
    assert machine_folders(root) == {root}
    assert machine_folders(Path("/repository")) == {Path("/repository")}
