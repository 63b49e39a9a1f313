"""Paths of the machine that a file was written on are caught."""

from __future__ import annotations

import subprocess

import pytest

from tests.house.paths import path_breaches
from tests.house.plant import plant


@pytest.mark.parametrize("folder", ["work/x.py", "root/.cache", "tmp/venv/bin"])
@pytest.mark.parametrize("with_git", [True, False])
def test_paths_of_one_machine_are_caught(tmp_path, folder, with_git):
    if with_git:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
        (tmp_path / ".gitignore").write_text("runs/\n")
    plant(
        tmp_path, {"docs/a.md": f"one\nsee `/{folder}`\n", "docs/b.md": f"src/{folder} ~/{folder}\n/tmp/x\n"}
    )
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/log.txt").write_text(f"/{folder}")
    (tmp_path / "docs/picture.png").write_bytes(b"\xff\xfe/" + folder.encode())
    breaches = path_breaches(tmp_path)
    assert len(breaches) == 1
    assert breaches[0].startswith("docs/a.md:2 ")
