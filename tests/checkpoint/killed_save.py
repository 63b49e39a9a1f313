"""Saves that are killed with SIGKILL: at their k-th operation on files, for every k, or after a delay.

Run by `test_kill` in a process of its own, which has torch from the server of gangs: it forks for each kill, which
takes milliseconds. An operation is whatever Python reports to audit hooks of opening, listing, renaming, making and
removing under the root, and every write and flush; a write is killed half done.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from meshwright.checkpoint import save_load

AUDITED = {"open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}
MOST_OPERATIONS = 500
NUM_DELAYS = 24
KEEP = {"first": 1, "next": 1, "again": 2, "leftovers": 1}
"""Scenarios, and the number of checkpoints that the killed save keeps."""


def save(root: Path, step: int, value: float, *, keep: int, numel: int = 64) -> Path:
    """Save a checkpoint whose tensors are full of `value`."""
    tensors = {"model.w": torch.full((numel,), value), "optimizer.step.w": torch.tensor(value)}
    return save_load.save(root, step, tensors, model={"kind": "test"}, run={"value": value}, keep=keep)


def prepare(scenario: str, root: Path) -> None:
    """What is there before the save that is killed."""
    root.mkdir(parents=True)
    if scenario != "first":
        save(root, 1, 1.0, keep=9)
    if scenario == "again":
        save(root, 2, 2.0, keep=9)
    if scenario == "leftovers":
        # Killed between the renames of a replacement, in a removal, and in a save.
        aside = (root / "00000001").rename(root / "aside")
        save(root, 1, 1.5, keep=9)
        aside.rename(root / "00000001.old")
        for name in (".tmp-00000002", ".del-00000000"):
            shutil.copytree(root / "00000001", root / name)


def killed_save(scenario: str, root: Path) -> None:
    """The save that is killed: of step 2, with value 3."""
    save(root, 2, 3.0, keep=KEEP[scenario])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(operation: int, root: Path) -> None:
    """Have this process die at its `operation`-th operation on files, from 1."""
    count = 0

    def due() -> bool:
        nonlocal count
        count += 1
        return count == operation

    def audit(event: str, args: tuple[object, ...]) -> None:
        # Removing a tree works with descriptors and names relative to them; other absolute paths are imports.
        here = event in AUDITED and (not str(args[0]).startswith("/") or str(args[0]).startswith(str(root)))
        if here and due():
            die()

    real_write, real_fsync = os.write, os.fsync

    def write(fd: int, data: memoryview) -> int:
        if due():
            real_write(fd, data[: len(data) // 2])
            die()
        return real_write(fd, data)

    def fsync(fd: int) -> None:
        if due():
            die()
        real_fsync(fd)

    os.write, os.fsync = write, fsync
    sys.addaudithook(audit)


def fork(body: object, *args: object) -> int:
    """Run `body` in a child. Returns its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            body(*args)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return pid


def enumerate_kills(scenario: str, folder: Path) -> None:
    """Kill the save at each of its operations; `folder/<k>` is what the k-th kill left, the last was not killed."""
    prepare(scenario, folder / "before")

    def body(operation: int, root: Path) -> None:
        kill_at(operation, root)
        killed_save(scenario, root)

    for operation in range(1, MOST_OPERATIONS):
        root = folder / f"{operation:03d}"
        shutil.copytree(folder / "before", root)
        _, status = os.waitpid(fork(body, operation, root), 0)
        if status == 0:
            return
        assert os.WIFSIGNALED(status), f"the save failed: {os.waitstatus_to_exitcode(status)}"
    raise AssertionError(f"not done after {MOST_OPERATIONS} operations")


def kill_after_delays(folder: Path, num_kills: int) -> None:
    """Kill a process that saves one checkpoint after another, `num_kills` times.

    Each leaves a root whose name is the number of the kill and how many saves had returned before it.
    """

    def body(root: Path, done: int) -> None:
        for step in range(1, 10_000):
            save(root, step, float(step), keep=2, numel=100_000)
            os.write(done, b".")

    for i in range(num_kills):
        root = folder / f"{i:03d}"
        root.mkdir(parents=True)
        reading, writing = os.pipe()
        pid = fork(body, root, writing)
        os.close(writing)
        num_saved = sum(len(os.read(reading, 1)) for _ in range(i % 4))
        time.sleep(0.0005 * i)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while os.read(reading, 1):
            num_saved += 1
        os.close(reading)
        root.rename(root.with_name(f"{root.name}-{num_saved}"))


def kill_all(folder: Path) -> None:
    """Do both, in folders of their names."""
    for name in KEEP:
        enumerate_kills(name, folder / name)
    kill_after_delays(folder / "delays", NUM_DELAYS)
