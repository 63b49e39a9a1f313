"""Gradient sync for parameters shared between pipeline stages: each copy gets the sum over all copies.

The backward of each copy computes only its stage's contribution. Without the sum, the copies drift apart while the loss
looks fine for a long time. Gradients are summed, not averaged, because the copies represent a single parameter.

Each rank reduces its gradient shards only. FSDP2 and tensor parallelism shard each parameter separately, so the shards
of all copies line up whatever else a stage holds, and each rank sends 1/dp of the bytes. (Evenly split flat buckets of
several parameters would no longer line up once two stages differ in any other parameter.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from meshwright.comm.collectives import all_reduce_sum, broadcast, rank, world_size
from meshwright.mesh.local_shards import to_local
from meshwright.mesh.process_groups import new_group
from meshwright.parallel.check_shared_parameters import check_consistency
from meshwright.pipeline.shared_parameters import SharedParameter, stage_groups


@dataclass(frozen=True)
class _Group:
    """Parameters that are shared by the same set of stages."""

    copies: dict[str, list[nn.Parameter]]
    """Copies on this rank by key, in sorted order; the lowest stage's copy comes first."""
    source: int
    """Global rank whose weights initialize all copies."""
    group: ProcessGroup | None
    """Process group of the ranks with copies; None if there is only one such rank."""


class SharedGradients:
    """Gradient sync of the shared parameters in one rank's stages."""

    def __init__(
        self,
        shared: Sequence[SharedParameter],
        stages: Mapping[int, nn.Module],
        *,
        pipelines: Sequence[Sequence[int]] | None = None,
        stage_ranks: Sequence[int] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Check consistency across ranks, create the process groups, and broadcast the first copy's weights.

        All ranks of the default process group must call this, including those without a shared parameter.

        Args:
            shared: declared shared parameters; the same on all ranks.
            stages: modules on this rank by stage, already parallelized.
            pipelines: global ranks of each pipeline, by pipeline rank (see `pipelines_on`); None for a single pipeline
                of all ranks.
            stage_ranks: pipeline rank of each stage; None for one stage per rank, in order.
            timeout_s: timeout of the collectives in seconds.

        Raises:
            LayoutError: ranks differ in their declarations or copies; raised on all ranks.
        """
        pipelines = [range(world_size())] if pipelines is None else pipelines
        stage_ranks = range(len(pipelines[0])) if stage_ranks is None else stage_ranks
        check_consistency(shared, stages, pipelines=pipelines, stage_ranks=stage_ranks)
        self.duplicates = {
            stages[stage].get_parameter(name) for p in shared for stage, name in p.sites[1:] if stage in stages
        }
        """Copies to exclude from a norm over all stages, because the copy on a lower stage is counted."""
        self._groups: list[_Group] = []
        pipeline_ranks = next(pipeline for pipeline in pipelines if rank() in pipeline)
        for group in stage_groups(shared):
            members = [p for p in sorted(shared, key=lambda p: p.key) if p.stages() == group]
            copies = {
                p.key: [stages[stage].get_parameter(name) for stage, name in p.sites if stage in stages]
                for p in members
            }  # fmt: skip
            ranks = list(dict.fromkeys(stage_ranks[stage] for stage in group))
            process_group = _new_groups(ranks, pipelines, timeout_s=timeout_s) if len(ranks) > 1 else None
            if any(copies.values()):
                self._groups.append(_Group(copies, pipeline_ranks[stage_ranks[group[0]]], process_group))
        self._broadcast()

    @property
    def num_groups(self) -> int:
        """Number of groups with a stage on this rank; the schedule table syncs each group once per step."""
        return len(self._groups)

    def sync_all(self) -> None:
        """Sum the gradients of all groups; for training loops without a pipeline table."""
        for group_index in range(self.num_groups):
            self.sync(group_index)

    @torch.no_grad()
    def sync(self, group_index: int) -> None:
        """Sum the gradients of a group's copies; call after the last backward that contributes to them.

        A copy without a gradient counts as zero and receives the sum; frozen parameters are skipped.

        Args:
            group_index: index of the group among those on this rank, in the order of `stage_groups`.
        """
        group = self._groups[group_index]
        trained = {key: copies for key, copies in group.copies.items() if copies[0].requires_grad}
        by_dtype: dict[torch.dtype, list[list[Tensor]]] = defaultdict(list)
        for copies in trained.values():
            by_dtype[copies[0].dtype].append([_local_gradient(copy) for copy in copies])
        for gradients in by_dtype.values():  # in key order, which is the same on all ranks
            total = torch.cat([_sum(copies).flatten() for copies in gradients])
            if group.group is not None:
                all_reduce_sum(total, group=group.group)
            _scatter_to_copies(total, gradients)

    @torch.no_grad()
    def _broadcast(self) -> None:
        for group in self._groups:
            by_dtype: dict[torch.dtype, list[list[Tensor]]] = defaultdict(list)
            for copies in group.copies.values():
                by_dtype[copies[0].dtype].append([to_local(copy.detach()) for copy in copies])
            for values in by_dtype.values():
                first = torch.cat([copies[0].flatten() for copies in values])
                if group.group is not None:
                    broadcast(first, src=group.source, group=group.group)
                _scatter_to_copies(first, values)


def pipelines_on(mesh: DeviceMesh, axis: str = "pp") -> list[list[int]]:
    """Return the global ranks of each pipeline on a mesh: the lines along `axis`."""
    dim = (mesh.mesh_dim_names or ()).index(axis)
    lines: list[list[int]] = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist()
    return lines


def _new_groups(ranks: Sequence[int], pipelines: Sequence[Sequence[int]], *, timeout_s: float) -> ProcessGroup | None:
    """Create a process group of `ranks` for each pipeline, in the same order on all ranks; return this rank's group."""
    groups = [new_group([pipeline[rank] for rank in ranks], timeout_s=timeout_s) for pipeline in pipelines]
    return next((group for group in groups if group is not None), None)


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the local shard of a parameter's gradient, setting the gradient to zero if it is None."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return to_local(parameter.grad)


def _sum(copies: Sequence[Tensor]) -> Tensor:
    return copies[0] if len(copies) == 1 else torch.stack(list(copies)).sum(0)


def _scatter_to_copies(flat: Tensor, values: Sequence[Sequence[Tensor]]) -> None:
    """Split `flat` by parameter, and write each part to all copies of its parameter."""
    parts = torch.split(flat, [copies[0].numel() for copies in values])
    for part, copies in zip(parts, values, strict=True):
        for copy in copies:
            copy.copy_(part.view_as(copy))
