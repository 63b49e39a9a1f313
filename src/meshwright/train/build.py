"""From a config to the live parts of a job on this rank: mesh, model, optimizer.

The model is laid on the mesh on the meta device and only then given storage, so no rank ever holds more than its
piece of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.config.schema import RunConfig
from meshwright.errors import LayoutError
from meshwright.mesh.axes import Axes
from meshwright.mesh.groups import build_mesh
from meshwright.mesh.shards import local_box, to_local
from meshwright.models.llama import Llama, build_llama
from meshwright.nn.init import normal_piece
from meshwright.parallel.apply import ParallelOptions, apply_parallel, needs_mesh
from meshwright.train.context import RankContext
from meshwright.train.optimizer import build_optimizer

MASTER_DTYPES = {"float32": torch.float32, "bfloat16": torch.float32, "float64": torch.float64}
"""Dtype that parameters and optimizer state are kept in, by `train.precision`."""


@dataclass
class Job:
    """The live parts of a run on one rank."""

    config: RunConfig
    context: RankContext
    axes: Axes
    device: torch.device
    mesh: DeviceMesh | None
    model: Llama
    optimizer: torch.optim.AdamW

    @property
    def data_index(self) -> int:
        """Which share of the batch this rank works on."""
        return self.axes.data_index(self.context.rank)


def choose_device(config: RunConfig, context: RankContext) -> torch.device:
    """The device this rank computes on.

    Raises:
        LayoutError: CUDA was asked for and there are fewer devices than ranks on this machine.
    """
    wanted = config.train.device
    available = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "cpu" or (wanted == "auto" and available == 0):
        return torch.device("cpu")
    if available < context.local_ranks:
        raise LayoutError(
            f"{context.local_ranks} ranks on this machine but {available} CUDA devices",
            where="train.device",
            rule="each rank has a CUDA device of its own",
            fix="train.device=cpu" + (f", or a mesh of at most {available} ranks a machine" if available else ""),
        )
    device = torch.device("cuda", context.local_rank)
    torch.cuda.set_device(device)
    return device


def parallel_options(config: RunConfig) -> ParallelOptions:
    """How the config lays the model on its mesh."""
    mixed = config.train.precision == "bfloat16"
    return ParallelOptions(
        sequence_parallel=config.mesh.sequence_parallel,
        reshard_after_forward=config.mesh.reshard_after_forward,
        param_dtype=torch.bfloat16 if mixed else None,
        reduce_dtype=torch.float32 if mixed else None,
        compile=config.train.compile,
    )


def layout_needs_mesh(config: RunConfig) -> bool:
    """Whether the run needs a process group and a mesh at all."""
    return needs_mesh(config.mesh.axes(), parallel_options(config))


def build_job(config: RunConfig, context: RankContext, device: torch.device) -> Job:
    """Build everything on this rank. The process group exists already if the layout needs one."""
    axes = config.mesh.axes()
    options = parallel_options(config)
    mesh = build_mesh(axes, device) if layout_needs_mesh(config) else None
    model = build_llama(config.model.spec(), dtype=MASTER_DTYPES[config.train.precision])
    apply_parallel(model, mesh, axes, options)
    model.to_empty(device=device)
    model.tie()
    initialize(model, config.train.seed)
    return Job(config, context, axes, device, mesh, model, build_optimizer(model, config.train))


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Fill every parameter's local piece with its initial values, the same on every layout."""
    for name, parameter in model.named_parameters():
        std = model.initial_std(name)  # type: ignore[operator]
        local, box = to_local(parameter), local_box(parameter)
        if std is None:
            local.fill_(1.0)
        elif box.numel():
            local.copy_(normal_piece(seed, name, parameter.shape, std=std, index=box.slices()))
