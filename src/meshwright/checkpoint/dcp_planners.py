"""Planners for `torch.distributed.checkpoint` with additional checks.

PyTorch's default planners do the planning; these subclasses raise on input that the defaults would silently get wrong.
They raise inside PyTorch's planning step, which forwards errors to every rank. A check elsewhere would raise on some
ranks and leave the others waiting.
"""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from meshwright.checkpoint.safetensors_file import DTYPES, CheckpointLayout, TensorToWrite, check_name, dtype_name
from meshwright.comm import collectives
from meshwright.errors import CheckpointError, MeshwrightError, RunError
from meshwright.log import get_logger
from meshwright.units import counted

_log = get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def with_picklable_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate `function` so that its exceptions can be pickled.

    PyTorch pickles a rank's exception for the other ranks. If pickling fails, the other ranks hang, so any exception
    that is not a MeshwrightError is converted to a RuntimeError with the traceback as text.
    """

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except MeshwrightError:
            raise
        except Exception as error:
            raise RuntimeError("".join(traceback.format_exception(error))) from None

    return wrapped


class CheckedSavePlanner(DefaultSavePlanner):
    """Save planner that assigns each replicated shard to the rank with the least to write."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors = tensors

    @with_picklable_errors
    def create_local_plan(self) -> SavePlan:
        """Plan this rank's shards, without the empty shards of tensors with fewer rows than ranks.

        A rank with nothing to write therefore creates no file. A tensor without elements keeps its empty shard, to
        record its shape and dtype.

        Raises:
            CheckpointError: a tensor can't be saved.
        """
        for name, tensor in self._tensors.items():
            check_name(name)
            _check_dense(name, tensor)
            dtype_name(tensor.dtype)
        plan = super().create_local_plan()
        items = [item for item in plan.items if _is_needed(tensor_data(item))]
        sums = {item.index: _checksum(self.resolve_data(item)) for item in items if self._is_replicated(item)}
        return replace(plan, items=items, planner_data=sums)

    def _is_replicated(self, item: WriteItem) -> bool:
        """Return whether other ranks plan the same shard."""
        tensor = self._tensors[item.index.fqn]
        if isinstance(tensor, DTensor):
            axes = enumerate(tensor.placements)
            return any(one.is_replicate() and tensor.device_mesh.size(axis) > 1 for axis, one in axes)
        return collectives.world_size() > 1

    @with_picklable_errors
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Assign every shard to one rank, and warn of replicas that differ.

        Raises:
            RunError: two ranks have different shards at the same offset of a tensor.
        """
        _check_agreement(all_plans)
        return super().create_global_plan(all_plans)


class FetchedSavePlanner(CheckedSavePlanner):
    """Save planner of a single process for tensors that are fetched only when they are written."""

    def __init__(self, tensors: Sequence[TensorToWrite]) -> None:
        self._fetch = {tensor.key: tensor.fetch for tensor in tensors}
        super().__init__({tensor.key: placeholder(tensor) for tensor in tensors})

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Fetch a tensor."""
        return self._fetch[index.fqn]()


def placeholder(tensor: TensorToWrite) -> Tensor:
    """Return a tensor of the same dtype and shape whose elements share the memory of one."""
    return torch.empty((), dtype=tensor.dtype).expand(tensor.shape)


class CheckedLoadPlanner(DefaultLoadPlanner):
    """Load planner that finds the saved shards overlapping each of this rank's shards, and checks the coverage."""

    def __init__(self, tensors: Mapping[str, Tensor], layout: CheckpointLayout) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors = tensors
        self._layout = layout

    @with_picklable_errors
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Check the tensors before planning; PyTorch would load a meta tensor into storage that is then dropped.

        Raises:
            CheckpointError: a tensor is on the meta device, not strided, or partial.
        """
        for name, tensor in self._tensors.items():
            _check_dense(name, tensor)
        super().set_up_planner(state_dict, metadata, is_coordinator)

    @with_picklable_errors
    def create_local_plan(self) -> LoadPlan:
        """Plan this rank's reads, and check that they fill every tensor.

        Raises:
            CheckpointError: a tensor is not in the checkpoint, has a different shape or an incompatible dtype, or
                is not fully covered by the saved shards.
        """
        for name, tensor in self._tensors.items():
            self._check_fits(name, tensor)
        plan = super().create_local_plan()
        num_planned: Counter[str] = Counter()
        for item in plan.items:
            num_planned[item.dest_index.fqn] += math.prod(item.lengths)
        for name, tensor in self._tensors.items():
            needed = _local_numel(tensor)
            if num_planned[name] != needed:
                raise CheckpointError(
                    f"the checkpoint holds {num_planned[name]} of the {needed} elements of {name} on this rank",
                    where=str(self._layout.path),
                    rule="the saved shards of a tensor cover all of it",
                    fix="use another checkpoint",
                )
        return plan

    def _check_fits(self, name: str, tensor: Tensor) -> None:
        entry = self._layout.entry(name)
        if entry.shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{name} has shape {list(tensor.shape)} here and {list(entry.shape)} in the checkpoint",
                where=str(self._layout.path),
                rule="a tensor loads into a tensor of the same global shape",
                fix="build the model with the dimensions it was saved with",
            )
        saved = DTYPES[entry.dtype]
        if saved != tensor.dtype and not (saved.is_floating_point and tensor.dtype.is_floating_point):
            raise CheckpointError(
                f"{name} is {tensor.dtype} here and {saved} in the checkpoint",
                where=str(self._layout.path),
                rule="only floating-point dtypes are converted to each other",
                fix=f"load it into a tensor of {saved}",
            )


def tensor_data(item: WriteItem) -> TensorWriteData:
    """Return the offset, shape and dtype of the shard that `item` writes."""
    assert item.tensor_data is not None, f"{item.index.fqn} is not a tensor"
    return item.tensor_data


def _is_needed(data: TensorWriteData) -> bool:
    return math.prod(data.chunk.sizes) > 0 or math.prod(data.size) == 0


def _check_dense(name: str, tensor: object) -> None:
    problem = ""
    if not isinstance(tensor, Tensor):
        problem = f"is a {type(tensor).__name__}, not a tensor"
    elif tensor.is_meta:
        problem = "is on the meta device and has no values"
    elif tensor.layout != torch.strided:
        problem = f"has layout {tensor.layout}"
    elif is_lazy(tensor) or _has_no_memory(tensor):
        problem = f"is a {type(tensor).__name__} without memory of its own"
    elif isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        problem = f"is partial: its placements are {tensor.placements}"
    if problem:
        raise CheckpointError(
            f"{name} {problem}",
            rule="only materialized dense tensors, sharded or replicated, can be saved",
            fix="materialize or redistribute the tensor first",
        )


def _has_no_memory(tensor: Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() > 0 and local.data_ptr() == 0


def _checksum(value: Any) -> int:
    """Return a number that depends on each bit and its place, computed on the tensor's device."""
    words = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(_WORDS[value.dtype.itemsize])
    weights = torch.arange(min(len(words), _CHUNK), device=words.device) * 2 + 1  # odd: no bit is multiplied away
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for chunk in words.split(_CHUNK):
        total = total * 31 + (chunk * weights[: len(chunk)]).sum()
    return int(total)


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22
"""Elements summed at a time, so that products take little memory."""


def _check_agreement(all_plans: list[SavePlan]) -> None:
    """Raise if replicas differ in shape, and warn if they do in values; PyTorch compares only names and offsets."""
    seen: dict[MetadataIndex, tuple[int, TensorWriteData]] = {}
    different: dict[str, tuple[int, int]] = {}
    for rank, plan in enumerate(all_plans):
        for item in plan.items:
            data = tensor_data(item)
            first_rank, first = seen.setdefault(item.index, (rank, data))
            if (first.chunk.sizes, first.size) != (data.chunk.sizes, data.size):
                shapes = f"{list(first.chunk.sizes)} and {list(data.chunk.sizes)}"
                raise RunError(
                    f"ranks {first_rank} and {rank} have different tensors named {item.index.fqn}: "
                    f"shards of {shapes} at {list(item.index.offset or [])}",
                    rule="a plain tensor is the same on all ranks; a shard of a larger one is a DTensor",
                    fix="save the DTensor, not its local tensor, or give the tensors different names",
                )
            if all_plans[first_rank].planner_data.get(item.index) != plan.planner_data.get(item.index):
                different.setdefault(item.index.fqn, (first_rank, rank))
    if different:
        name, (first_rank, rank) = next(iter(different.items()))
        _log.warning(
            "%s has other values on rank %d than on rank %d%s: the checkpoint holds those of one of them; broadcast "
            "tensors that should be equal, and give those of single ranks names of their own", name, rank, first_rank,
            f", and so have {counted(len(different) - 1, 'more tensor')}" if len(different) > 1 else "",
        )  # fmt: skip


def _local_numel(tensor: Tensor) -> int:
    if not isinstance(tensor, DTensor):
        return tensor.numel()
    if tensor.device_mesh.get_coordinate() is None:  # this rank is outside the mesh
        return 0
    return tensor.to_local().numel()
