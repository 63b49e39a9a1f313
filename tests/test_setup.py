"""The environment that make sets up: the demo's, the tests' packages added to it, and anew where it is unfinished."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = """#!/usr/bin/env bash
# Stands in for Python: makes environments that hold only it, and says what pip would install, or fails.
case "$*" in
    "-c import sys; print"*) echo 3.11 ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo new >>calls ;;
    "-m pip install "*) echo "install ${*: -1}" >>calls; [ ! -e broken ] || exit 1 ;;
esac
"""
LEAN, DEV = "install .", "install ./bench"


@pytest.fixture
def project(tmp_path):
    """A folder with what make needs of this repository."""
    folder = tmp_path / "project"
    for name in ("Makefile", ".ci/setup", "pyproject.toml", "bench/pyproject.toml", "constraints.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "python").write_text(PYTHON)
    (folder / "python").chmod(0o755)
    return folder


def make(folder, *targets):
    """What was done, and whether make succeeded."""
    (folder / "calls").write_text("")
    command = ["make", f"PYTHON={folder}/python", *targets]
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=outside)
    return (folder / "calls").read_text().splitlines(), done.returncode == 0


def test_the_demos_environment_is_the_tests_without_their_packages(project):
    assert make(project, "setup") == (["new", LEAN], True)
    assert make(project, "setup") == ([], True)
    assert make(project, "setup-dev") == ([DEV], True)
    assert make(project, "setup", "setup-dev") == ([], True)


def test_at_once(project):
    assert make(project, "-j", "setup-dev", "setup") == (["new", LEAN, DEV], True)


def test_changed_dependencies_are_installed(project):
    make(project, "setup-dev")
    later = (project / ".venv/.ready-dev").stat().st_mtime + 10
    os.utime(project / "constraints.txt", (later, later))
    calls, succeeded = make(project, "setup")
    assert (calls, succeeded) == ([LEAN], True)
    for stamp in (".ready", ".ready-dev"):
        os.utime(project / ".venv" / stamp, (later + (stamp == ".ready"),) * 2)
    assert make(project, "setup-dev") == ([DEV], True)


@pytest.mark.parametrize("target", ["setup", "setup-dev"])
def test_what_was_left_unfinished_is_made_anew(project, target):
    """Also by the demo, when it was left while the tests' packages were added: one may be there in half."""
    make(project, "setup")
    later = (project / ".venv/.ready").stat().st_mtime + 10
    os.utime(project / "constraints.txt", (later, later))
    (project / "broken").touch()
    assert not make(project, target)[1]
    (project / "broken").unlink()
    os.utime(project / "constraints.txt", (0, 0))
    assert make(project, "setup") == (["new", LEAN], True)


def test_a_copy_and_one_without_its_python_are_made_anew(project):
    make(project, "setup-dev")
    copy = shutil.copytree(project, project.parent / "copy")
    assert make(copy, "setup-dev") == (["new", LEAN, DEV], True)
    (project / ".venv/bin/python").unlink()
    assert make(project, "setup") == (["new", LEAN], True)
    assert make(project, "setup-dev") == ([DEV], True)
