"""Saves and loads that fail on one rank. Every body runs in a gang and says what each rank was told."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from meshwright.checkpoint import save_load
from meshwright.checkpoint.manifest import DurableFile
from meshwright.errors import MeshwrightError


@dataclass(frozen=True)
class Told:
    """What one rank was told of a failure."""

    kind: str
    text: str


def tensors(numel=1000):
    """One tensor over all ranks, so that each has something to write."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(torch.arange(float(numel)), mesh, [Shard(0)])}


def told(attempt):
    try:
        attempt()
    except (MeshwrightError, RuntimeError) as error:
        return Told(type(error).__name__, str(error))
    return None


def save(root, step, values=None):
    return save_load.save(root, step, values or tensors(), model={}, run={}, keep=2)


def fail_to_write(rank, world_size, root, failing, code, file):
    """Save step 1; fail to write step 2, on one rank, in one of its files; save step 3."""
    save(root, 1)
    real = DurableFile.write

    def write(self, data):
        name = os.readlink(f"/proc/self/fd/{self._fd}")
        if file in name:
            real(self, data[:16])
            raise OSError(code, os.strerror(code))
        real(self, data)

    with mock.patch.object(DurableFile, "write", write) if rank == failing else mock.MagicMock():
        result = told(lambda: save(root, 2))
    dist.barrier()
    left = sorted(os.listdir(root))
    dist.barrier()  # nobody saves before everyone has looked
    save(root, 3)
    return result, left


class Unpicklable(Exception):
    """An exception that can't be sent: pickled, it wants an argument that it doesn't have."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}")
        self.function = lambda: None


def fail_beyond_pickling(rank, world_size, root):
    """Rank 1 meets an exception that can't be pickled, in planning and then in writing."""
    results = []
    for place in ("dcp_planners._check_dense", "save_load.write_tensors"):

        def fail(*args, **kwargs):
            raise Unpicklable("no", "pickle")

        with mock.patch(f"meshwright.checkpoint.{place}", fail) if rank == 1 else mock.MagicMock():
            results.append(told(lambda: save(root, 1)))
    return results


def ask_for_more_on_one_rank(rank, world_size, root):
    """Rank 1 asks for a tensor that is not there, then rank 0 for a checkpoint that is not there for anyone."""
    path = save(root, 1)
    wanted = tensors() | ({"other": torch.zeros(1)} if rank == 1 else {})
    return told(lambda: save_load.load(path, wanted)), told(lambda: save_load.load(root / "nowhere", tensors()))


def lose_a_file_of_one_rank(rank, world_size, root):
    """Only rank 1's file is missing, which only rank 1 reads."""
    path = save(root, 1)
    dist.barrier()
    if rank == 1:
        (path / "rank-00001.safetensors").unlink()
    dist.barrier()
    return told(lambda: save_load.load(path, tensors()))


def save_local_tensors(rank, world_size, root):
    """The mistake of saving shards as if they were whole, of different shapes: 1000 over 3 ranks is uneven."""
    return told(lambda: save(root, 1, {"w": tensors()["w"].to_local()}))


def save_partial_sums(rank, world_size, root):
    """Gradients before their all-reduce."""
    mesh = init_device_mesh("cpu", (world_size,))
    return told(lambda: save(root, 1, {"w": DTensor.from_local(torch.ones(2), mesh, [Partial()])}))


def fill_the_disk(rank, world_size, root, numel):
    """Save until the disk is full; what each rank was told, and the step."""
    for step in range(1, 100):
        result = told(lambda step=step: save(root, step, tensors(numel)))
        if result is not None:
            return result, step
    return None


def die_while_writing(rank, world_size, root):
    """Save step 1; rank 1 is killed in the middle of its file of step 2."""
    save(root, 1)
    real = DurableFile.write

    def write(self, data):
        real(self, data[:16])
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        DurableFile.write = write
    save(root, 2)


def save_at_once(rank, world_size, root):
    """Each rank saves step 1 by itself, rank 1 while rank 0 is writing, and again afterwards; what each was told."""
    alone = [dist.new_group([one]) for one in range(world_size)][rank]
    real, found = DurableFile.finish, []

    def attempt():
        values = {"w": torch.full((1000,), float(rank))}
        found.append(told(lambda: save_load.save(root, 1, values, model={}, run={}, keep=2, group=alone)))

    def finish(self):
        if "rank-" in os.readlink(f"/proc/self/fd/{self._fd}"):
            dist.barrier()
            dist.barrier()
        return real(self)

    with mock.patch.object(DurableFile, "finish", finish) if rank == 0 else mock.MagicMock():
        if rank == 1:
            dist.barrier()
        attempt()
        if rank == 1:
            dist.barrier()
    dist.barrier()
    if rank == 1:
        attempt()
    return os.getpid(), found


def save_without_rank_1(rank, world_size, root):
    group = dist.new_group()
    dist.barrier(group)
    group.set_timeout(timedelta(seconds=2))
    values = {"w": torch.ones(3)}
    return told(lambda: save_load.save(root, 1, values, model={}, run={}, keep=2, group=group)) if rank == 0 else None
