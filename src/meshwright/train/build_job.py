"""Build this rank's job from a plan: mesh, model and optimizer.

The model is sharded on the meta device before storage is allocated, so no rank ever holds more than its shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.comm.collective_log import name_failed_collective
from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError, LayoutError
from meshwright.features.contract import OnRank
from meshwright.features.registry import start_features
from meshwright.mesh.axes import Axes
from meshwright.mesh.local_shards import local_box, to_local
from meshwright.mesh.process_groups import build_mesh, process_group
from meshwright.models.contract.build_module import build_part, tie_parameters
from meshwright.models.contract.family import Family, RunFacts
from meshwright.models.contract.model_facts import Computed, Constant, Normal, Stored, Uniform
from meshwright.nn.weight_init import LARGE_ELEMENTS, normal_shard, uniform_shard
from meshwright.parallel.apply_plan import apply_plan, check_placements, needs_mesh
from meshwright.parallel.data_parallel import reduce_unused, secondary_shards
from meshwright.parallel.rank_model import RankModel, StagePart, part_of
from meshwright.pipeline.schedule_table import Schedule
from meshwright.plan.run_plan import RunPlan
from meshwright.train.launch.rank_context import MODEL, VALUES, RankContext, StartTimes
from meshwright.train.optimizer import RunOptimizer
from meshwright.units import counted


@dataclass
class Job:
    """Mesh, model, optimizer and plan of a run on one rank."""

    config: RunConfig
    plan: RunPlan
    context: RankContext
    device: torch.device
    mesh: DeviceMesh | None
    model: RankModel
    """Pipeline stages on this rank."""
    optimizer: RunOptimizer
    features: dict[str, OnRank] = field(default_factory=dict)
    """Features that are on, by name, in the order of their work in a step."""
    start: StartTimes = field(default_factory=StartTimes)

    @cached_property
    def axes(self) -> Axes:
        """Mesh axes."""
        return self.config.mesh.axes()

    @property
    def schedule(self) -> Schedule:
        """Lowered pipeline table that runs one step."""
        return self.plan.schedule

    @property
    def data_index(self) -> int:
        """Data-parallel index of this rank."""
        return self.axes.data_index(self.context.rank)

    @property
    def pipeline_rank(self) -> int:
        """Pipeline-parallel index of this rank."""
        return self.plan.mesh.position(self.context.rank, "pp")

    @property
    def microbatch_size(self) -> int:
        """Samples per micro-batch."""
        return self.plan.batch.samples

    @property
    def family(self) -> Family:
        """Model family."""
        return self.config.family

    def parts(self) -> dict[int, StagePart]:
        """Return the stages on this rank by stage number."""
        return self.model.parts

    def counted_parameters(self) -> list[nn.Parameter]:
        """Return the parameters included in the gradient norm; shared ones are included on their first stage only."""
        omitted = set(self.plan.norm_omits)
        return [
            parameter
            for number, part in self.parts().items()
            for key, parameter in part.named_parameters()
            if (number, key) not in omitted
        ]


def choose_device(config: RunConfig, context: RankContext) -> torch.device:
    """Return this rank's device.

    Raises:
        LayoutError: this machine has fewer CUDA devices than ranks.
    """
    wanted = config.train.device
    available = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "cpu" or (wanted == "auto" and available == 0):
        return torch.device("cpu")
    if available < context.local_ranks:
        raise LayoutError(
            f"{counted(context.local_ranks, 'rank')} on this machine but {available} CUDA devices",
            where="train.device",
            rule="each rank has its own CUDA device",
            fix="train.device=cpu"
            + (f", or a mesh of at most {counted(available, 'rank')} per machine" if available else ""),
        )
    device = torch.device("cuda", context.local_rank)
    torch.cuda.set_device(device)
    return device


@contextmanager
def rank_group(config: RunConfig, plan: RunPlan, context: RankContext, device: torch.device) -> Iterator[None]:
    """Hold the process group of a rank, if its plan needs one, and name the collective that fails."""
    group = process_group(
        rank=context.rank,
        num_ranks=context.num_ranks,
        device=device,
        timeout_s=config.train.timeout_s,
        store_path=context.store_path,
        needed=needs_mesh(plan),
    )
    with group, name_failed_collective():
        yield


def build_job(
    config: RunConfig, plan: RunPlan, context: RankContext, device: torch.device, start: StartTimes | None = None
) -> Job:
    """Build this rank's job, with the times of its start; a process group must already exist if the plan needs one."""
    start = start or StartTimes()
    mesh = build_mesh(plan.mesh.atoms, device) if needs_mesh(plan) else None
    f, facts = run_facts(config), model_facts(config)
    parts = {}
    with secondary_shards(mesh, plan):
        for number in plan.stages_of(context.rank):
            dtype = getattr(torch, plan.masters)
            module = build_part(config.family, f, dtype=dtype, part=part_of(plan, number))
            part = StagePart(plan, number, module)
            freeze(part)
            apply_plan(module, mesh, plan, part.stage, facts)
            if config.family.derives:
                reduce_unused(module)
            check_placements(part)
            module.to_empty(device=device)
            tie_parameters(module, facts)
            start.end(MODEL)
            initialize(chain(part.named_parameters(), module.named_buffers()), config.family, f)
            start.end(VALUES)
            parts[number] = part
    model = RankModel(parts)
    job = Job(
        config=config,
        plan=plan,
        context=context,
        device=device,
        mesh=mesh,
        model=model,
        optimizer=RunOptimizer(model, plan, config.train, rank=context.rank),
        start=start,
    )
    job.features |= start_features(job)
    return job


def freeze(part: StagePart) -> None:
    """Freeze the parameters that the plan does not train."""
    for kind, layer, parameter in part.plan.parameters(part.stage):
        if not parameter.trained:
            part.module.get_parameter(kind.full_name(parameter.name, layer)).requires_grad_(False)


def initialize(tensors: Iterable[tuple[str, torch.Tensor]], family: Family, f: RunFacts) -> None:
    """Initialize local shards of parameters and buffers from their names, with the same values on every layout."""
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads) if threads > 1 else nullcontext() as pool:
        drawn = []
        for name, tensor in tensors:
            fill = family.initial(f, name)
            if not isinstance(fill, Normal | Uniform):
                _fill(tensor, fill)
            elif pool is not None and tensor.numel() < LARGE_ELEMENTS:  # of too few blocks for all threads
                drawn.append(pool.submit(_draw, tensor, name, fill, f.seed, None))
            else:
                _draw(tensor, name, fill, f.seed, pool)
        for one in drawn:
            one.result()


@torch.no_grad()
def _fill(tensor: torch.Tensor, fill: Constant | Computed | Stored) -> None:
    local, box = to_local(tensor), local_box(tensor)
    if not box.numel():
        return
    if isinstance(fill, Constant):
        local.fill_(fill.value)
    else:
        local.copy_(fill.compute()[box.slices()] if isinstance(fill, Computed) else fill.read(box.slices()))


@torch.no_grad()
def _draw(
    tensor: torch.Tensor,
    name: str,
    fill: Normal | Uniform,
    seed: int,
    pool: ThreadPoolExecutor | None,
) -> None:
    """Draw the local shard: in place if it is float32 on the CPU."""
    local = to_local(tensor)
    if not local.is_floating_point():
        dtype = str(local.dtype).removeprefix("torch.")
        raise ConfigError(
            f"{name} has dtype {dtype}, but its initial values are random",
            where="Family.initial",
            rule="random values are for floating-point parameters and buffers",
            fix=f"Constant or Computed for {name}",
        )
    out, index = (
        local if local.device.type == "cpu" and local.dtype is torch.float32 else None,
        local_box(tensor).slices(),
    )
    if isinstance(fill, Normal):
        found = normal_shard(seed, name, tensor.shape, std=fill.std, index=index, out=out, pool=pool)
    else:
        found = uniform_shard(seed, name, tensor.shape, bound=fill.bound, index=index, out=out, pool=pool)
    if out is None:
        local.copy_(found)


@torch.no_grad()
def refresh_shared_parameters(job: Job) -> None:
    """Copy each shared parameter and its optimizer state from its first stage on this rank to the others.

    Call after loading a checkpoint. Other ranks load their replicas from the checkpoint by parameter name.
    """
    first: dict[str, nn.Parameter] = {}
    for part in job.parts().values():
        for name, replica in part.named_parameters():
            original = first.setdefault(name, replica)
            if original is not replica:
                to_local(replica).copy_(to_local(original))
                for kind, state in job.optimizer.state.get(replica, {}).items():
                    to_local(state).copy_(to_local(job.optimizer.state[original][kind]))
