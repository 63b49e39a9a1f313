"""Read the slices that a rank needs from safetensors files.

Contains a `StorageReader` for `torch.distributed.checkpoint`, which matches saved shards to requested ones, and a
single-process reader for full tensors. Uses only public PyTorch names, checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from meshwright.checkpoint.dcp_planners import with_picklable_errors
from meshwright.checkpoint.safetensors_file import (
    DTYPES,
    CheckpointLayout,
    StoredShard,
    TensorEntry,
    open_tensors,
    read_slices,
)
from meshwright.errors import CheckpointError


class SafetensorsReader(StorageReader):
    """Storage reader of one rank for one load."""

    def __init__(self, layout: CheckpointLayout) -> None:
        self._layout = layout

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader serves one load."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Reject ids: the layout contains the path."""
        return False

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Convert the layout to PyTorch's metadata."""
        found: dict[str, Any] = {}
        for name, entry in self._layout.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(one.offset), torch.Size(one.shape)) for one in entry.shards]
            properties = TensorProperties(dtype=DTYPES[entry.dtype])
            found[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        return Metadata(found)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the layout is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the planner's plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the planner's plans unchanged."""
        return plans

    @with_picklable_errors
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill this rank's tensors, one file at a time.

        Raises:
            CheckpointError: a file cannot be read.
        """
        wanted = {item.storage_index.fqn for item in plan.items}
        shards = {(name, shard.offset): shard for name in wanted for shard in self._layout.tensors[name].shards}
        by_file: dict[str, list[tuple[ReadItem, StoredShard]]] = defaultdict(list)
        for item in plan.items:
            assert item.storage_index.offset is not None
            shard = shards[item.storage_index.fqn, tuple(item.storage_index.offset)]
            by_file[shard.file].append((item, shard))
        for name in sorted(by_file):
            with open_tensors(self._layout.path / name) as file, torch.no_grad():
                for item, shard in by_file[name]:
                    index = _slices(tuple(item.storage_offsets), tuple(item.lengths))
                    target = planner.resolve_tensor(item)
                    target.copy_(read_slices(file, shard.key, index))
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def read_tensor(layout: CheckpointLayout, name: str) -> Tensor:
    """Read a full tensor to the CPU in its saved dtype, assembled from its shards.

    Raises:
        CheckpointError: the tensor is missing, its shards do not cover it, or a file cannot be read.
    """
    entry = _covered_entry(layout, name)
    value = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    for shard in entry.shards:
        with open_tensors(layout.path / shard.file) as file:
            part = read_slices(file, shard.key, tuple(slice(size) for size in shard.shape))
            value[_slices(shard.offset, shard.shape)] = part
    return value


def read_row(layout: CheckpointLayout, name: str, row: int) -> Tensor:
    """Read a tensor's entry `row` along its first dim, as `read_tensor(layout, name)[row]`, without the others.

    Raises:
        CheckpointError: the tensor is missing, its shards do not cover it, or a file cannot be read.
    """
    entry = _covered_entry(layout, name)
    value = torch.empty(entry.shape[1:], dtype=DTYPES[entry.dtype])
    for shard in entry.shards:
        first, num_rows = shard.offset[0], shard.shape[0]
        if first <= row < first + num_rows:
            offset, shape = (row - first, *(0 for _ in shard.shape[1:])), (1, *shard.shape[1:])
            with open_tensors(layout.path / shard.file) as file:
                part = read_slices(file, shard.key, _slices(offset, shape))
            value[_slices(shard.offset[1:], shard.shape[1:])] = part[0]
    return value


def _covered_entry(layout: CheckpointLayout, name: str) -> TensorEntry:
    entry = layout.entry(name)
    found = sum(math.prod(shard.shape) for shard in entry.shards)
    if found != entry.numel():
        raise CheckpointError(
            f"the checkpoint holds {found} of the {entry.numel()} elements of {name}",
            where=str(layout.path),
            rule="the saved shards of a tensor cover all of it",
            fix="use another checkpoint",
        )
    return entry


def _slices(offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
