"""Save and load sharded tensors between any two layouts.

`torch.distributed.checkpoint` plans the shards and propagates failures to every rank; the writer below and `reader` do
the I/O; `atomic_directory` commits checkpoints atomically. A checkpoint holds a flat dict of tensors: plain tensors,
equal on all ranks, and DTensors on any mesh.

Each rank with data to write creates one safetensors file; the coordinator adds `layout.json` and commits. Uses only
public PyTorch names, checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as load_planned
from torch.distributed.checkpoint.state_dict_saver import save as save_planned
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from meshwright.checkpoint import atomic_directory, manifest
from meshwright.checkpoint.dcp_planners import (
    CheckedLoadPlanner,
    CheckedSavePlanner,
    FetchedSavePlanner,
    placeholder,
    tensor_data,
    with_picklable_errors,
)
from meshwright.checkpoint.manifest import DurableFile, FileEntry, sidecar_path, sync_directory, write_file
from meshwright.checkpoint.reader import SafetensorsReader, read_tensor
from meshwright.checkpoint.safetensors_file import (
    LAYOUT,
    CheckpointLayout,
    StoredShard,
    TensorEntry,
    TensorToWrite,
    dtype_name,
    encode_layout,
    read_layout,
    shard_key,
    write_tensors,
)
from meshwright.comm import collectives
from meshwright.comm.collective_log import name_failed_collective
from meshwright.errors import CONTINUE, CheckpointError, MeshwrightError, RunError
from meshwright.log import get_logger
from meshwright.units import counted, format_bytes


def save(
    root: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    *,
    model: Mapping[str, Any],
    run: Mapping[str, Any],
    keep: int,
    sidecars: Mapping[str, bytes] | None = None,
    group: ProcessGroup | None = None,
) -> Path:
    """Save a checkpoint of `step`, then remove all but the `keep` newest. All ranks of `group` must call this.

    Each replicated shard is written once, by the rank with the least to write. Once the call returns on any rank, the
    checkpoint is complete and on disk. If the call fails, it raises on every rank, earlier checkpoints are unchanged,
    and the files of this one are removed.

    Args:
        root: directory for this run's checkpoints only, on a file system that all ranks share.
        step: completed optimizer steps. A checkpoint of the same step is replaced atomically.
        tensors: tensors by name, on CUDA or CPU; copied to the CPU one at a time.
        model: the model's identity, for `manifest.check_model`. Rank 0's value is used, also for `run`.
        run: JSON values that the trainer needs to resume.
        keep: number of checkpoints to keep, including this one.
        sidecars: contents of sidecar files by name; rank 0's are written.
        group: the ranks that save; the default group if None.

    Returns:
        The checkpoint's directory.

    Raises:
        RunError: the checkpoint cannot be written, for example because the disk is full.
        CheckpointError: a tensor or value is not supported.
    """
    request = SaveRequest(root, step, model, run, keep, sidecars or {})
    return _save(request, tensors, CheckedSavePlanner(tensors), group)


def save_fetched(
    root: Path,
    step: int,
    tensors: Sequence[TensorToWrite],
    *,
    model: Mapping[str, Any],
    run: Mapping[str, Any],
    keep: int,
    sidecars: Mapping[str, bytes] | None = None,
) -> Path:
    """Save a checkpoint as `save` does, from a single process, with each tensor fetched only when it is written."""
    assert not collectives.is_distributed(), "save_fetched saves from a single process"
    placeholders = {tensor.key: placeholder(tensor) for tensor in tensors}
    request = SaveRequest(root, step, model, run, keep, sidecars or {})
    return _save(request, placeholders, FetchedSavePlanner(tensors), None)


def load(path: Path, tensors: Mapping[str, Tensor], *, group: ProcessGroup | None = None) -> None:
    """Fill `tensors` in place from the checkpoint at `path`, saved from any layout.

    All ranks of `group` must call this; each reads only the data of its own shards. Floating-point values are converted
    to the dtype of the target tensor. Other tensors in the checkpoint are ignored.

    Hashes are not checked: call `manifest.verify` on one rank first, while the others wait.

    Raises:
        CheckpointError: a tensor is not in the checkpoint or has another shape there, or a file cannot be read. Raised
            on every rank.
    """
    found = _broadcast_layout(path, group)
    with name_failed_collective(), _unwrap_rank_failures():
        load_planned(
            dict(tensors),
            storage_reader=SafetensorsReader(found),
            planner=CheckedLoadPlanner(tensors, found),
            process_group=group,
            no_dist=not collectives.is_distributed(),
        )


def tensor_names(path: Path) -> set[str]:
    """Return the names of all tensors in the checkpoint at `path`."""
    return set(read_layout(path).tensors)


def read_tensors(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Read full tensors of the checkpoint at `path` to the CPU in their saved dtypes, without other ranks.

    Raises:
        CheckpointError: a tensor is not in the checkpoint, or a file cannot be read.
    """
    found = read_layout(path)
    return {name: read_tensor(found, name) for name in names}


def _save(
    request: SaveRequest, tensors: Mapping[str, Tensor], planner: CheckedSavePlanner, group: ProcessGroup | None
) -> Path:
    writer = SafetensorsWriter(request, rank=collectives.rank(group))
    try:
        with name_failed_collective(), _unwrap_rank_failures():
            save_planned(
                dict(tensors),
                storage_writer=writer,
                planner=planner,
                process_group=group,
                no_dist=not collectives.is_distributed(),
            )
    finally:
        writer.close()
    return atomic_directory.final_path(request.root, request.step)


def _broadcast_layout(path: Path, group: ProcessGroup | None) -> CheckpointLayout:
    """Read the layout on rank 0 and broadcast it; the file can be large, and a failure must reach all ranks."""
    found: CheckpointLayout | CheckpointError | None = None
    if collectives.rank(group) == 0:
        try:
            found = read_layout(path)
        except CheckpointError as error:
            found = error
    found = collectives.broadcast_object(found, group=group)
    if isinstance(found, CheckpointError):
        raise found
    assert found is not None
    return found


@contextmanager
def _unwrap_rank_failures() -> Iterator[None]:
    """Replace PyTorch's CheckpointException, raised on every rank, by the original error of one rank."""
    try:
        with warnings.catch_warnings():
            # Running without a process group is supported.
            warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
            yield
    except CheckpointException as failure:
        raise _first_error(failure) from None


def _first_error(failure: CheckpointException) -> BaseException:
    errors = [error for _, (error, _) in sorted(failure.failures.items())]
    for error in errors:
        if not isinstance(error, Exception):  # KeyboardInterrupt, SystemExit
            return error
    ours = [error for error in errors if isinstance(error, MeshwrightError)]
    if not ours:  # a bug: keep every rank's traceback
        return RuntimeError(str(failure))
    first = ours[0]
    others = {error.what for error in ours[1:]} - {first.what}
    if others:
        what = f"{first.what} (and {counted(len(others), 'more rank')} failed)"
        return type(first)(what, where=first.where, rule=first.rule, fix=first.fix)
    return first


FULL_DISK = (errno.ENOSPC, errno.EDQUOT)

_log = get_logger(__name__)


@dataclass(frozen=True)
class SaveRequest:
    """Arguments of `save`."""

    root: Path
    step: int
    model: Mapping[str, Any]
    run: Mapping[str, Any]
    keep: int
    sidecars: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class WrittenShard:
    """A written shard, as reported to the coordinator."""

    name: str
    dtype: str
    full_shape: tuple[int, ...]
    shard: StoredShard
    file_entry: FileEntry


class SafetensorsWriter(StorageWriter):
    """Storage writer of one rank for one checkpoint; on the coordinator, it also commits the checkpoint."""

    def __init__(self, request: SaveRequest, *, rank: int) -> None:
        self._request = request
        self._rank = rank
        self._temporary = atomic_directory.temporary_path(request.root, request.step)
        self._lock: int | None = None
        """Descriptor of the lock of the root, on the coordinator."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer serves one save."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Reject ids: the request contains the path."""
        return False

    @with_picklable_errors
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """On the coordinator, create the directory that all ranks write to."""
        if not is_coordinator:
            return
        request = self._request
        # Values that the manifest cannot hold should fail now, not after all data has been written.
        manifest.encode(step=request.step, model=request.model, run=request.run, files={})
        with self._translate_os_errors(self._temporary):
            self._lock = atomic_directory.lock(request.root)
            atomic_directory.clean(request.root)
            atomic_directory.begin(request.root, request.step)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the planner's plan unchanged."""
        return plan

    @with_picklable_errors
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Add the checkpoint's total size to every rank's plan, for the error message if the disk is full."""
        total = sum(_num_bytes(item) for plan in plans for item in plan.items)
        return [replace(plan, storage_data=total) for plan in plans]

    @with_picklable_errors
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, if it has data to write.

        Raises:
            RunError: the file cannot be written.
        """
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._write_items(plan, planner) if plan.items else [])
        return future

    @with_picklable_errors
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint on the coordinator once all ranks have written, and prune old checkpoints.

        Raises:
            RunError: the layout or the manifest cannot be written, or a rank's file is not visible here.
        """
        request = self._request
        shards: list[WrittenShard] = [result.storage_data for of_rank in results for result in of_rank]
        entries = {stored.shard.file: stored.file_entry for stored in shards}
        with self._translate_os_errors(self._temporary / LAYOUT):
            entries |= self._write_sidecars()
            entries[LAYOUT] = write_file(self._temporary / LAYOUT, encode_layout(_tensor_entries(shards)))
            final = atomic_directory.commit(
                self._temporary, step=request.step, model=request.model, run=request.run, files=entries
            )
        try:
            atomic_directory.prune(request.root, request.keep, protect=final)
        except OSError as error:  # the new checkpoint is saved
            _log.warning("%s is saved, but an older checkpoint can't be removed: %s", final, error)

    def close(self) -> None:
        """End the save on the coordinator, and remove what it has written after a failure."""
        if self._lock is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            atomic_directory.unlock(self._request.root, self._lock)

    def _write_items(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        path = self._temporary / f"rank-{self._rank:05d}.safetensors"
        tensors = [_tensor_to_write(item, planner) for item in plan.items]
        needed = sum(tensor.num_bytes() for tensor in tensors)
        with self._translate_os_errors(path, needed=needed, total=plan.storage_data), DurableFile(path) as file:
            entry = write_tensors(file, tensors)
        return [_write_result(item, path.name, entry) for item in plan.items]

    def _write_sidecars(self) -> dict[str, FileEntry]:
        entries = {}
        for name, content in self._request.sidecars.items():
            path = self._temporary / sidecar_path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            entries[sidecar_path(name)] = write_file(path, content)
        for folder in {(self._temporary / name).parent for name in entries}:
            sync_directory(folder)
        return entries

    @contextmanager
    def _translate_os_errors(self, path: Path, *, needed: int = 0, total: int = 0) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in FULL_DISK:
                raise self._disk_full(path, needed=needed, total=total) from error
            if isinstance(error, FileNotFoundError):
                raise RunError(
                    f"rank {self._rank} can't find {self._temporary}, which rank 0 created",
                    where=str(path),
                    rule="all ranks write to the same directory",
                    fix="put the run folder on a file system that all nodes share",
                ) from error
            raise RunError(
                f"rank {self._rank} can't write {path.name}: {error.strerror or error}",
                where=str(path),
                fix=f"make the directory writable, and continue with {CONTINUE}",
            ) from error

    def _disk_full(self, path: Path, *, needed: int, total: int) -> RunError:
        root = self._request.root
        free = shutil.disk_usage(next(place for place in (root, *root.absolute().parents) if place.exists())).free
        written = path.stat().st_size if path.is_file() else 0
        size = f"{format_bytes(written)} of the {format_bytes(needed)} of its part" if needed else "all but the index"
        earlier = manifest.newest_complete(root)
        room = f"{format_bytes(total)} on that disk" if total else "some room on that disk"
        return RunError(
            f"the disk at {root} is full: {format_bytes(free)} free when rank {self._rank} had written {size}"
            f" of the checkpoint of step {self._request.step}",
            where=str(path),
            rule=f"the newest earlier checkpoint, {earlier}, is intact" if earlier else "no earlier checkpoint exists",
            fix=f"free {room} and continue with {CONTINUE}; a smaller checkpoint.keep needs less",
        )


def _num_bytes(item: WriteItem) -> int:
    data = tensor_data(item)
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _tensor_to_write(item: WriteItem, planner: SavePlanner) -> TensorToWrite:
    data = tensor_data(item)
    offset, shape = tuple(data.chunk.offsets), tuple(data.chunk.sizes)

    def fetch() -> Tensor:
        value = planner.resolve_data(item)
        assert isinstance(value, Tensor)
        return value

    key = shard_key(item.index.fqn, offset, shape, tuple(data.size))
    return TensorToWrite(key, data.properties.dtype, shape, fetch)


def _write_result(item: WriteItem, file: str, entry: FileEntry) -> WriteResult:
    data = tensor_data(item)
    offset, shape, full_shape = tuple(data.chunk.offsets), tuple(data.chunk.sizes), tuple(data.size)
    shard = StoredShard(offset, shape, file, shard_key(item.index.fqn, offset, shape, full_shape))
    stored = WrittenShard(item.index.fqn, dtype_name(data.properties.dtype), full_shape, shard, entry)
    return WriteResult(item.index, _num_bytes(item), stored)


def _tensor_entries(shards: list[WrittenShard]) -> dict[str, TensorEntry]:
    by_name: dict[str, list[WrittenShard]] = defaultdict(list)
    for stored in shards:
        by_name[stored.name].append(stored)
    return {
        name: TensorEntry(stored[0].dtype, stored[0].full_shape, tuple(one.shard for one in stored))
        for name, stored in by_name.items()
    }
