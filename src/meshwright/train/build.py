"""From a config to the live parts of a job on this rank: mesh, model, optimizer.

The model is laid on the mesh on the meta device and only then given storage, so no rank ever holds more than its
piece of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.comm.catalogue import EXACT
from meshwright.config.pipeline import layers_per_stage, lowered_table
from meshwright.config.schema import RunConfig
from meshwright.errors import LayoutError
from meshwright.mesh.axes import Axes
from meshwright.mesh.groups import build_mesh
from meshwright.mesh.shards import local_box, to_local
from meshwright.models.build import build_model
from meshwright.models.chunks import Chunks
from meshwright.models.part import ModelPart
from meshwright.models.shapes import Part
from meshwright.nn.init import normal_piece
from meshwright.parallel.apply import ParallelOptions, apply_parallel, needs_mesh
from meshwright.pipeline.stages import layer_ranges
from meshwright.pipeline.table import Schedule
from meshwright.train.compression import RunCompression
from meshwright.train.context import RankContext
from meshwright.train.optimizer import STATE_NAMES, build_optimizer

MASTER_DTYPES = {"float32": torch.float32, "bfloat16": torch.float32, "float64": torch.float64}
"""Dtype that parameters and optimizer state are kept in, by `train.precision`."""

COMPUTE_DTYPES = MASTER_DTYPES | {"bfloat16": torch.bfloat16}
"""Dtype of activations."""


@dataclass
class Job:
    """The live parts of a run on one rank."""

    config: RunConfig
    context: RankContext
    axes: Axes
    device: torch.device
    mesh: DeviceMesh | None
    model: ModelPart | Chunks
    """The whole model, or this rank's parts of it."""
    optimizer: torch.optim.AdamW
    schedule: Schedule
    """The lowered table of a step."""
    compression: RunCompression

    @property
    def data_index(self) -> int:
        """Which share of the batch this rank works on."""
        return self.axes.data_index(self.context.rank)

    @property
    def pipeline_rank(self) -> int:
        """Position in the pipeline."""
        return self.axes.coordinate(self.context.rank)["pp"]

    @property
    def microbatch_size(self) -> int:
        """Samples of a micro-batch."""
        train = self.config.train
        return train.global_batch // (self.axes.data_parallel() * train.num_microbatches)

    def parts(self) -> dict[int, ModelPart]:
        """The stages on this rank, by number."""
        return self.model.parts() if isinstance(self.model, Chunks) else {0: self.model}

    def counted_parameters(self) -> list[nn.Parameter]:
        """Parameters without the copies of shared ones, which the first of their stages counts."""
        parts = self.parts()
        declared = next(iter(parts.values())).shared_parameters()
        further = {site for parameter in declared for site in parameter.sites[1:]}
        named = ((stage, name, p) for stage, part in parts.items() for name, p in part.named_parameters())
        return [parameter for stage, name, parameter in named if (stage, name) not in further]


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
        reshard_after_forward=config.comm.secondary_shards or config.mesh.reshard_after_forward,
        param_dtype=torch.bfloat16 if mixed else None,
        reduce_dtype=torch.float32 if mixed else None,
        replicas_apart=config.comm.gradients != EXACT,
        recompute=config.recompute.policy == "full",
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
    schedule = lowered_table(config)
    parts = {}
    for stage, part in _parts(config, schedule, axes.coordinate(context.rank)["pp"]).items():
        module = build_model(config.model.spec(), dtype=MASTER_DTYPES[config.train.precision], part=part)
        freeze(module, config.train.freeze)
        apply_parallel(module, mesh, axes, options)
        module.to_empty(device=device)
        module.tie()
        initialize(module, config.train.seed)
        parts[stage] = module
    model = Chunks(parts) if schedule.num_stages > 1 else parts[0]
    return Job(
        config=config,
        context=context,
        axes=axes,
        device=device,
        mesh=mesh,
        model=model,
        optimizer=build_optimizer(model, config.train),
        schedule=schedule,
        compression=RunCompression(config, parts, mesh, rank=context.rank),
    )


def _parts(config: RunConfig, schedule: Schedule, pipeline_rank: int) -> dict[int, Part]:
    """What each stage on a rank of the pipeline holds."""
    layers = layer_ranges(layers_per_stage(config))
    return {
        stage: Part(layers[stage], stage=stage, num_stages=schedule.num_stages)
        for stage in schedule.stages_of(pipeline_rank)
    }


def freeze(model: ModelPart, globs: Sequence[str]) -> None:
    """Leave the parameters whose name in the whole model matches one of `globs` as they start."""
    for name, parameter in model.whole_model_parameters():
        if any(fnmatchcase(name, glob) for glob in globs):
            parameter.requires_grad_(False)


@torch.no_grad()
def initialize(model: ModelPart, seed: int) -> None:
    """Fill every parameter's local piece with its initial values, the same on every layout."""
    for name, parameter in model.whole_model_parameters():
        std = model.initial_std(name)
        local, box = to_local(parameter), local_box(parameter)
        if not std:
            local.fill_(1.0 if std is None else 0.0)
        elif box.numel():
            local.copy_(normal_piece(seed, name, parameter.shape, std=std, index=box.slices()))


@torch.no_grad()
def refresh_copies(job: Job) -> None:
    """After a checkpoint was loaded: give this rank's further copies of a shared parameter what the first one got.

    Copies on other ranks are loaded by the parameter's name.
    """
    first: dict[str, nn.Parameter] = {}
    for part in job.parts().values():
        for name, copy in part.whole_model_parameters():
            original = first.setdefault(name, copy)
            if original is not copy:
                to_local(copy).copy_(to_local(original))
                for kind in STATE_NAMES if copy in job.optimizer.state else ():
                    to_local(job.optimizer.state[copy][kind]).copy_(to_local(job.optimizer.state[original][kind]))
