"""A save killed with SIGKILL at any of its operations leaves a complete checkpoint, and the next save works."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from meshwright.checkpoint import manifest, save_load
from tests.checkpoint.killed_save import NUM_DELAYS, kill_all, save


@pytest.fixture(scope="module")
def kills(gang, tmp_path_factory):
    """What the kills left, a folder for each scenario.

    In memory where possible: it is a hundred saves to wait for, and a kill loses nothing that was written.
    """
    memory = Path("/dev/shm")
    folder = tmp_path_factory.mktemp("kills")
    if os.access(memory, os.W_OK):
        folder = Path(tempfile.mkdtemp(dir=memory))
    process = multiprocessing.get_context("forkserver").Process(target=kill_all, args=(folder,))
    try:
        process.start()
        process.join()
        assert process.exitcode == 0
        yield folder
    finally:
        shutil.rmtree(folder)


def checkpoints(root):
    """Step and value of every checkpoint, each of which must be valid and loadable."""
    found = []
    for path in manifest.list_checkpoints(root):
        checked = manifest.verify(path)
        tensors = save_load.read_tensors(path, ["model.w", "optimizer.step.w"])
        value = checked.run["value"]
        assert all((tensor == value).all() for tensor in tensors.values())
        found.append((checked.step, value))
    return found


ALLOWED = {
    # What may be there after the kill: before the commit, in the middle of it (a step's old one has given up its
    # name), after it, and when what is no longer kept is gone.
    "first": [[], [(2, 3.0)]],
    "next": [[(1, 1.0)], [(1, 1.0), (2, 3.0)], [(2, 3.0)]],
    "again": [[(1, 1.0), (2, 2.0)], [(1, 1.0), (2, 2.0), (2, 3.0)], [(1, 1.0), (2, 3.0)]],
    "leftovers": [[(1, 1.0), (1, 1.5)], [(1, 1.5)], [(1, 1.5), (2, 3.0)], [(2, 3.0)]],
}
FEWEST_OPERATIONS = {"first": 15, "next": 25, "again": 25, "leftovers": 40}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ALLOWED)
def test_a_kill_at_any_operation_leaves_complete_checkpoints(kills, scenario):
    *killed, finished = sorted(path for path in (kills / scenario).iterdir() if path.name != "before")
    assert len(killed) >= FEWEST_OPERATIONS[scenario]
    stages = [ALLOWED[scenario].index(checkpoints(root)) for root in killed]
    assert stages == sorted(stages), "a kill later in the save left an earlier state"
    assert stages[0] == 0 and set(stages) >= {0, len(ALLOWED[scenario]) - 1}
    assert checkpoints(finished) == ALLOWED[scenario][-1]
    for root in killed:
        save(root, 3, 4.0, keep=1)
        assert checkpoints(root) == [(3, 4.0)]
        assert [path.name for path in root.iterdir()] == ["00000003"], "leftovers were not cleaned up"


@pytest.mark.slow
def test_a_kill_at_any_moment_loses_nothing_that_was_saved(kills):
    roots = sorted((kills / "delays").iterdir())
    assert len(roots) == NUM_DELAYS
    for root in roots:
        num_saved = int(root.name.split("-")[1])
        found = checkpoints(root)
        assert all(step == value for step, value in found)
        # The save that was killed may have got as far as its commit.
        assert max((step for step, _ in found), default=0) in (num_saved, num_saved + 1)
