"""Planners for `torch.distributed.checkpoint`: which pieces each rank writes or reads, with our checks.

PyTorch's default planners do the planning; ours refuse what those would quietly get wrong. Whatever they
refuse is raised inside PyTorch's planning step, which hands it to every rank: a check outside would leave the
ranks that passed it waiting.
"""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem
from torch.distributed.tensor import DTensor

from meshwright.checkpoint.layout_file import Layout
from meshwright.checkpoint.safetensors_file import DTYPES, dtype_name
from meshwright.errors import CheckpointError, MeshwrightError, RunError

P = ParamSpec("P")
R = TypeVar("R")


def shareable(function: Callable[P, R]) -> Callable[P, R]:
    """Make whatever `function` raises fit to be sent to the other ranks.

    PyTorch pickles a rank's exception for the others. One that does not survive that would break the
    exchange on its rank and leave the others waiting, so anything but ours becomes a RuntimeError with the
    traceback as its text.
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
    """Each rank offers its pieces; of replicas of a piece, the rank with the least to write gets it."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors = tensors

    @shareable
    def create_local_plan(self) -> SavePlan:
        """This rank's pieces, without the empty ones of tensors that are smaller than their ranks.

        So a rank with nothing to write writes no file. A tensor without any element keeps its empty piece, to be
        remembered by.

        Raises:
            CheckpointError: a tensor that can't be saved.
        """
        for name, tensor in self._tensors.items():
            _check_dense(name, tensor)
            dtype_name(tensor.dtype)
        plan = super().create_local_plan()
        return replace(plan, items=[item for item in plan.items if _holds_something(tensor_data(item))])

    @shareable
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Give every piece to one rank.

        Raises:
            RunError: two ranks have different pieces at the same place of a tensor.
        """
        _check_agreement(all_plans)
        return super().create_global_plan(all_plans)


class CheckedLoadPlanner(DefaultLoadPlanner):
    """Finds for each piece that this rank needs the saved pieces that overlap it."""

    def __init__(self, tensors: Mapping[str, Tensor], layout: Layout) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors = tensors
        self._layout = layout

    @shareable
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Refuse what can't be filled, first of all: PyTorch would give a meta tensor storage that nobody sees.

        Raises:
            CheckpointError: a tensor without storage, or that is no plain piece of data.
        """
        for name, tensor in self._tensors.items():
            _check_dense(name, tensor)
        super().set_up_planner(state_dict, metadata, is_coordinator)

    @shareable
    def create_local_plan(self) -> LoadPlan:
        """What to read, having checked that it fills every tensor.

        Raises:
            CheckpointError: a tensor is not in the checkpoint, has another shape or an incompatible dtype, or
                the saved pieces leave a part of it open.
        """
        for name, tensor in self._tensors.items():
            self._check_fits(name, tensor)
        plan = super().create_local_plan()
        found: Counter[str] = Counter()
        for item in plan.items:
            found[item.dest_index.fqn] += math.prod(item.lengths)
        for name, tensor in self._tensors.items():
            needed = _local_numel(tensor)
            if found[name] != needed:
                raise CheckpointError(
                    f"the checkpoint holds {found[name]} of the {needed} elements of {name} on this rank",
                    where=str(self._layout.path),
                    rule="the saved pieces of a tensor cover all of it",
                    fix="use another checkpoint",
                )
        return plan

    def _check_fits(self, name: str, tensor: Tensor) -> None:
        entry = self._layout.entry(name)
        if entry.shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{name} has shape {list(tensor.shape)} here and {list(entry.shape)} in the checkpoint",
                where=str(self._layout.path),
                rule="a tensor loads into one of the same global shape",
                fix="build the model with the dimensions it was saved with",
            )
        saved = DTYPES[entry.dtype]
        if saved != tensor.dtype and not (saved.is_floating_point and tensor.dtype.is_floating_point):
            raise CheckpointError(
                f"{name} is {tensor.dtype} here and {saved} in the checkpoint",
                where=str(self._layout.path),
                rule="only floating-point dtypes are converted into each other",
                fix=f"load it into a tensor of {saved}",
            )


def tensor_data(item: WriteItem) -> TensorWriteData:
    """Where the piece that `item` writes sits in its tensor."""
    assert item.tensor_data is not None, f"{item.index.fqn} is not a tensor"
    return item.tensor_data


def _holds_something(data: TensorWriteData) -> bool:
    return math.prod(data.chunk.sizes) > 0 or math.prod(data.size) == 0


def _check_dense(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, not a tensor")
    problem = ""
    if tensor.is_meta:
        problem = "is on the meta device and has no values"
    elif tensor.layout != torch.strided:
        problem = f"has layout {tensor.layout}"
    elif isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        problem = f"is still to be summed over ranks: its placements are {tensor.placements}"
    if problem:
        raise CheckpointError(
            f"{name} {problem}",
            rule="a checkpoint holds dense tensors with values, sharded or replicated",
            fix="materialise or redistribute the tensor first",
        )


def _check_agreement(all_plans: list[SavePlan]) -> None:
    """PyTorch knows replicas by their tensor's name and offset alone; they must have the same shape too."""
    seen: dict[MetadataIndex, tuple[int, TensorWriteData]] = {}
    for rank, plan in enumerate(all_plans):
        for item in plan.items:
            data = tensor_data(item)
            first_rank, first = seen.setdefault(item.index, (rank, data))
            if (first.chunk.sizes, first.size) != (data.chunk.sizes, data.size):
                shapes = f"{list(first.chunk.sizes)} and {list(data.chunk.sizes)}"
                raise RunError(
                    f"ranks {first_rank} and {rank} have different tensors named {item.index.fqn}: "
                    f"pieces of {shapes} at {list(item.index.offset or [])}",
                    rule="a plain tensor is the same on all ranks; a piece of a larger one is a DTensor",
                    fix="save the DTensor, not its local tensor, or give the tensors different names",
                )


def _local_numel(tensor: Tensor) -> int:
    if not isinstance(tensor, DTensor):
        return tensor.numel()
    if tensor.device_mesh.get_coordinate() is None:  # this rank has no part in it
        return 0
    return tensor.to_local().numel()
