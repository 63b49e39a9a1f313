"""A disk that fills up during a save, for real: a small tmpfs."""

from __future__ import annotations

import os
import subprocess

import pytest

from meshwright.checkpoint.manifest import newest_valid, verify
from tests.helpers import shown_error, small_corpus
from tests.train.runs import STEPS, metrics

pytestmark = pytest.mark.slow


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 9 MB, where one checkpoint fits; and a function that makes it larger."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options):
        return subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)

    done = mount("size=9m")
    if done.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {done.stderr.strip()}")
    yield folder, lambda: mount("remount,size=64m")
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_leaves_the_previous_checkpoint_and_says_so(forked_meshwright, small_disk, tmp_path):
    out, enlarge = small_disk
    words = [*STEPS, *small_corpus(tmp_path / "corpus"), "mesh.dp_shard=2", "--out", out]
    done = forked_meshwright("run", *words)
    assert done.returncode == 1, done.stdout
    error = shown_error(done.stderr)
    assert f"the disk at {out}/checkpoints is full" in error["error"] and "step 4" in error["error"]
    assert f"{out}/checkpoints/00000002, is intact" in error["rule"] and "meshwright run " in error["fix"]
    newest, passed_over = newest_valid(out / "checkpoints")
    assert newest == out / "checkpoints/00000002" and not passed_over
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["00000002"]
    assert enlarge().returncode == 0
    done = forked_meshwright("run", *words, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in metrics(out)] == list(range(1, 9))
    assert verify(newest_valid(out / "checkpoints")[0]).step == 8


def fill(path):
    """Write to a file until the disk is full."""
    file = os.open(path, os.O_CREAT | os.O_WRONLY)
    with pytest.raises(OSError, match="No space left"):
        while True:
            os.write(file, b"\0" * 4096)
    os.close(file)


def test_metrics_on_a_full_disk_are_said_to_be_lost(forked_meshwright, small_disk, tmp_path):
    out, _ = small_disk
    fill(out / "ballast")
    done = forked_meshwright("run", *STEPS, *small_corpus(tmp_path / "corpus"), "--out", out)
    assert done.returncode in (1, 2)
    error = shown_error(done.stderr)
    assert "No space left on device" in error["error"]
