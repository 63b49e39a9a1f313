"""Save and load sharded tensors between any two layouts.

`torch.distributed.checkpoint` plans the shards and propagates failures to every rank; `writer` and `reader` do the I/O;
`atomic_directory` commits checkpoints atomically. A checkpoint holds a flat dict of tensors: plain tensors, equal on
all ranks, and DTensors on any mesh.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_planned
from torch.distributed.checkpoint.state_dict_saver import save as save_planned

from meshwright.checkpoint import atomic_directory, layout_file
from meshwright.checkpoint.dcp_planners import CheckedLoadPlanner, CheckedSavePlanner, FetchedSavePlanner, placeholder
from meshwright.checkpoint.layout_file import CheckpointLayout
from meshwright.checkpoint.reader import SafetensorsReader, read_tensor
from meshwright.checkpoint.safetensors_file import TensorToWrite
from meshwright.checkpoint.writer import SafetensorsWriter, SaveRequest
from meshwright.comm import collectives
from meshwright.comm.collective_timeout import name_failed_collective
from meshwright.errors import CheckpointError, MeshwrightError
from meshwright.units import counted


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
    """Save a checkpoint as `save` does, from a single process, with each tensor fetched only when it is written.

    Returns:
        The checkpoint's directory.

    Raises:
        RunError: the checkpoint cannot be written, for example because the disk is full.
        CheckpointError: a tensor or value is not supported.
    """
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
    """Return the names of all tensors in the checkpoint at `path`.

    Raises:
        CheckpointError: the layout cannot be read.
    """
    return set(layout_file.read(path).tensors)


def read_tensors(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Read full tensors of the checkpoint at `path` to the CPU in their saved dtypes, without other ranks.

    Raises:
        CheckpointError: a tensor is not in the checkpoint, or a file cannot be read.
    """
    found = layout_file.read(path)
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
            found = layout_file.read(path)
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
