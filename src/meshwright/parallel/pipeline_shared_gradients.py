"""Gradient sync for parameters shared between pipeline stages: each copy gets the sum over all copies.

The backward of each copy computes only its stage's contribution. Without the sum, the copies drift apart while the loss
looks fine for a long time. Gradients are summed, not averaged, because the copies represent a single parameter.

Each rank reduces its gradient shards only. FSDP2 and tensor parallelism shard each parameter separately, so the shards
of all copies line up whatever else a stage holds, and each rank sends 1/dp of the bytes. (Evenly split flat buckets of
several parameters would no longer line up once two stages differ in any other parameter.)

Before any collective uses them, all ranks check that they declare the same shared parameters with consistent copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.comm.collectives import all_gather_object, all_reduce_sum, broadcast, world_size
from meshwright.comm.collectives import rank as own_rank
from meshwright.errors import LayoutError
from meshwright.mesh.local_shards import local_box, to_local
from meshwright.mesh.process_groups import new_group
from meshwright.pipeline.split_layers import SharedParameter, stage_groups
from meshwright.units import counted


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
        self, shared: Sequence[SharedParameter], stages: Mapping[int, nn.Module], *,
        pipelines: Sequence[Sequence[int]] | None = None, stage_ranks: Sequence[int] | None = None,
        timeout_s: float = 600.0,
    ) -> None:  # fmt: skip
        """Check consistency across ranks, create the process groups, and broadcast the first copy's weights.

        All ranks of the default process group must call this, including those without a shared parameter.

        Args:
            shared: declared shared parameters; the same on all ranks.
            stages: modules on this rank by stage, already parallelized.
            pipelines: global ranks of each pipeline, by pipeline rank (see `pipelines_on`); None for a single pipeline
                of all ranks.
            stage_ranks: pipeline rank of each stage; None for one stage per rank, in order.

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
        pipeline_ranks = next(pipeline for pipeline in pipelines if own_rank() in pipeline)
        for group in stage_groups(shared):
            members = [p for p in sorted(shared, key=lambda p: p.key) if p.stages() == group]
            copies = {
                p.key: [stages[stage].get_parameter(name) for stage, name in p.sites if stage in stages]
                for p in members
            }  # fmt: skip
            ranks = list(dict.fromkeys(stage_ranks[stage] for stage in group))
            # A group for each pipeline, in the same order on all ranks.
            members_by_pipeline = [[pipeline[rank] for rank in ranks] for pipeline in pipelines if len(ranks) > 1]
            groups = [new_group(members, timeout_s=timeout_s) for members in members_by_pipeline]
            process_group = next((group for group in groups if group is not None), None)
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

        A copy without a gradient counts as zero and receives the sum; frozen parameters are skipped. The index is that
        of the group among those on this rank, in the order of `stage_groups`.
        """
        group = self._groups[group_index]
        trained = {key: copies for key, copies in group.copies.items() if copies[0].requires_grad}
        for gradients in _by_dtype(trained, _local_gradient):
            total = torch.cat([_sum(copies).flatten() for copies in gradients])
            if group.group is not None:
                all_reduce_sum(total, group=group.group)
            _scatter_to_copies(total, gradients)

    @torch.no_grad()
    def _broadcast(self) -> None:
        for group in self._groups:
            for values in _by_dtype(group.copies, lambda copy: to_local(copy.detach())):
                first = torch.cat([copies[0].flatten() for copies in values])
                if group.group is not None:
                    broadcast(first, src=group.source, group=group.group)
                _scatter_to_copies(first, values)


def pipelines_on(mesh: DeviceMesh, axis: str = "pp") -> list[list[int]]:
    """Return the global ranks of each pipeline on a mesh: the lines along `axis`."""
    dim = (mesh.mesh_dim_names or ()).index(axis)
    lines: list[list[int]] = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist()
    return lines


def _by_dtype(
    copies: Mapping[str, list[nn.Parameter]], local: Callable[[nn.Parameter], Tensor]
) -> Iterable[list[list[Tensor]]]:
    """Return local tensors of the copies of each parameter, in key order, which is the same on all ranks, by dtype."""
    by_dtype: dict[torch.dtype, list[list[Tensor]]] = defaultdict(list)
    for parameters in copies.values():
        by_dtype[parameters[0].dtype].append([local(parameter) for parameter in parameters])
    return by_dtype.values()


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


RULE = "every copy of a shared parameter has the same key, shape, dtype, requires_grad and shard layout"
Properties = dict[str, str]


def check_consistency(
    shared: Sequence[SharedParameter], stages: Mapping[int, nn.Module], *, pipelines: Sequence[Sequence[int]],
    stage_ranks: Sequence[int],
) -> None:  # fmt: skip
    """Check that all ranks make the same declarations, and that all copies have the same properties.

    Ranks exchange their declarations before any check, so all of them raise the same error and none hangs.

    Raises:
        LayoutError: ranks or copies differ; the error names the first difference and the ranks.
    """
    declared = [(p.key, p.sites) for p in shared]
    local = {stage: {(p.key, name): _properties(module, name) for p in shared for at, name in p.sites if at == stage}
             for stage, module in stages.items()}  # fmt: skip
    all_ranks = all_gather_object((declared, local, _find_aliases(shared, stages)))
    for rank, (theirs, _, aliases) in enumerate(all_ranks):
        _check_declarations(all_ranks[0][0], theirs, rank)
        if aliases is not None:
            raise LayoutError(
                f"{aliases[0]} and {aliases[1]} are the same tensor",
                where=f"{aliases[1].split(' at ')[0]} on rank {rank}",
                rule="each declared copy is a separate tensor: autograd accumulates the gradients of a tensor used "
                "twice",
                fix="use a separate parameter at each site, or declare a single site",
            )
    held = [set(stages) for _, stages, _ in all_ranks]
    _check_stage_ranks(shared, held, pipelines=pipelines, stage_ranks=stage_ranks)
    for pipeline in pipelines:
        for parameter in sorted(shared, key=lambda p: p.key):
            copies = []
            for stage, name in parameter.sites:
                rank = pipeline[stage_ranks[stage]]
                copies.append((rank, stage, name, all_ranks[rank][1][stage][parameter.key, name]))
            _check_copies(parameter.key, copies)


def _find_aliases(shared: Sequence[SharedParameter], stages: Mapping[int, nn.Module]) -> tuple[str, str] | None:
    """Describe the first two sites on this rank that share a tensor; return None if all are distinct."""
    seen: dict[nn.Parameter, str] = {}
    for key, stage, name in ((p.key, stage, name) for p in shared for stage, name in p.sites if stage in stages):
        parameter, site = _parameter(stages[stage], name), f"{key} at {stage}: {name}"
        if parameter in seen:
            return seen[parameter], site
        if parameter is not None:
            seen[parameter] = site
    return None


def _check_declarations(first: list[Any], other: list[Any], rank: int) -> None:
    """Check that a rank declares each key only once, and makes the same declarations as rank 0."""
    mine, theirs = dict(first), dict(other)
    if len(theirs) < len(other):
        duplicate = next(key for at, (key, _) in enumerate(other) if key in dict(other[:at]))
        raise LayoutError(
            f"rank {rank} declares shared parameter {duplicate} twice",
            where=f"{duplicate} on rank {rank}",
            rule="each shared parameter has a unique key, and one declaration with all its sites",
            fix="merge the declarations, or use another key for one of them",
        )
    if first == other:
        return
    for a, b, holder, lacker in ((mine, theirs, 0, rank), (theirs, mine, rank, 0)):
        missing = sorted(a.keys() - b.keys())
        if missing:
            raise LayoutError(
                f"rank {holder} declares shared parameter {missing[0]}, but rank {lacker} doesn't",
                where=f"{missing[0]} on rank {lacker}",
                rule="all ranks declare the same shared parameters",
                fix="the same model, configuration and version of Meshwright on every rank",
            )
    key = next((key for key in sorted(mine) if mine[key] != theirs[key]), None)
    if key is None:
        key = next(a[0] for a, b in zip(first, other, strict=True) if a != b)
        what = f"ranks 0 and {rank} declare {key} in a different order"
    else:
        what = f"ranks 0 and {rank} declare {key} at {_describe_sites(mine[key])} and at {_describe_sites(theirs[key])}"
    raise LayoutError(
        what,
        where=f"{key} on rank {rank}",
        rule="all ranks declare the same shared parameters, in the same order",
        fix="the same model, configuration and version of Meshwright on every rank",
    )


def _check_stage_ranks(
    shared: Sequence[SharedParameter], held: Sequence[set[int]], *, pipelines: Sequence[Sequence[int]],
    stage_ranks: Sequence[int],
) -> None:  # fmt: skip
    """Check that each rank is in exactly one pipeline, and holds the stages that `stage_ranks` assigns to it."""
    if sorted(rank for pipeline in pipelines for rank in pipeline) != list(range(len(held))):
        raise LayoutError(
            f"pipelines {[list(pipeline) for pipeline in pipelines]} don't match a run of {counted(len(held), 'rank')}",
            where="pipelines",
            rule="each rank of the run is in exactly one pipeline",
            fix="use pipelines_on(mesh), with a mesh of all ranks",
        )
    for key, stage in ((p.key, stage) for p in shared for stage in p.stages()):
        if stage >= len(stage_ranks):
            raise _misplaced(key, stage, f"there are {counted(len(stage_ranks), 'stage')}")
        for rank in (pipeline[stage_ranks[stage]] for pipeline in pipelines):
            if stage not in held[rank]:
                raise _misplaced(key, stage, f"rank {rank} has {sorted(held[rank])}")


def _misplaced(key: str, stage: int, actual: str) -> LayoutError:
    return LayoutError(
        f"a copy of {key} is declared on stage {stage}, but {actual}",
        where=f"{key} on stage {stage}",
        rule="stage_ranks has the rank of each stage, and that rank holds the stage's module",
        fix="use existing stages, and pass each stage's module on its rank",
    )


def _check_copies(key: str, copies: Sequence[tuple[int, int, str, Properties]]) -> None:
    """Check the copies of one parameter in one pipeline."""
    for rank, stage, name, properties in copies:
        if not properties:
            raise LayoutError(
                f"stage {stage} has no parameter {name}, the declared copy of {key}",
                where=f"{key} on rank {rank}",
                rule="a stage has the parameters that are declared on it",
                fix=f"add a parameter {name} to stage {stage}'s module, or declare {key} without stage {stage}",
            )
    for (rank, stage, _, properties), (next_rank, next_stage, _, next_properties) in pairwise(copies):
        for name, value in properties.items():
            if next_properties[name] != value:
                raise LayoutError(
                    f"{key} has {name} {value} on rank {rank} (stage {stage}) and {next_properties[name]} on rank "
                    f"{next_rank} (stage {next_stage})",
                    where=f"{key} on ranks {rank} and {next_rank}",
                    rule=RULE,
                    fix=f"use the same {name} for {key} on all its stages",
                )


def _parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    return dict(module.named_parameters(remove_duplicate=False)).get(name)


def _properties(module: nn.Module, name: str) -> Properties:
    """Return the properties that all copies must agree on; empty if the module has no such parameter."""
    parameter = _parameter(module, name)
    if parameter is None:
        return {}
    layout = "unsharded"
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        axes = zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=False)
        layout = ", ".join(f"{axis}={size} {placement}" for axis, size, placement in axes)
    return {
        "shape": str(list(parameter.shape)),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "requires_grad": str(parameter.requires_grad),
        "shard layout": f"{layout}, {list(local_box(parameter).shape)} local",
    }


def _describe_sites(sites: Sequence[tuple[int, str]]) -> str:
    return ", ".join(f"{stage}: {name}" for stage, name in sites)
