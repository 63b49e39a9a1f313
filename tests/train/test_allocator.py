"""What the allocator of a rank on a CPU does with memory that a step frees."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshwright.train.launch.launcher import launch
from meshwright.units import MIB

ROOT = Path(__file__).parents[2]
SMALL, MIDDLE, LARGE, NUMBER = 4 * MIB, 7 * MIB, 16 * MIB, 8


def resident_bytes():
    """Return the bytes of this process that are no file's."""
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


def tensor(size):
    return torch.ones(size, dtype=torch.uint8)


def measure(context, path):
    """Write by how much the process grows beyond what it holds if large tensors leave before smaller ones come to stay,
    as gathered blocks do, and how much of many small tensors it keeps."""
    begin, stay = resident_bytes(), []
    for _ in range(NUMBER):
        large = tensor(LARGE)
        stay.append(tensor(MIB // 8))  # above it in the heap, if it is there
        del large
        stay.append(tensor(MIDDLE))
    grown, before = resident_bytes() - begin - NUMBER * (MIDDLE + MIB // 8), resident_bytes()
    tensors = [tensor(SMALL) for _ in range(NUMBER)]
    tensors.clear()
    Path(path).write_text(json.dumps([grown, resident_bytes() - before]))


def start(path):
    launch(measure, path, num_ranks=1, threads=1)


@pytest.mark.skipif(sys.platform != "linux", reason="settings of glibc's allocator")
def test_large_tensors_leave_no_holes_and_small_ones_are_kept_for_the_next_step(tmp_path):
    # In a process of its own: the server that ranks are forked from keeps the settings that it started with.
    code = "import sys; from tests.train.test_allocator import start; start(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "found.json")], check=True, cwd=ROOT)
    grown, kept = json.loads((tmp_path / "found.json").read_text())
    assert grown < 2 * LARGE
    assert kept > 0.7 * NUMBER * SMALL
