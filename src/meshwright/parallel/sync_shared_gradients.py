"""Gradients of parameters that are on several pipeline stages: every copy gets the sum over all of them.

Each copy's backward gives only its stage's part. Unless the parts are added up the copies drift apart, while the loss
looks fine for a long time. It is a sum and no mean: the copies together are one parameter.

The sum is taken of what each rank holds of the gradient. FSDP2 and tensor parallel divide every parameter by itself, so
pieces of one parameter line up over the stages whatever else a stage has, and a rank sends 1/dp of the bytes. (Buckets
that hold several parameters, cut into equal shares, do not line up as soon as two stages differ in anything else.)
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
from meshwright.parallel.check_shared_parameters import check_agreement
from meshwright.pipeline.shared_parameters import SharedParameter, stage_groups


@dataclass(frozen=True)
class _Group:
    """Parameters that the same stages share."""

    copies: dict[str, list[nn.Parameter]]
    """By key, in sorted order: the copies on this rank, the lowest stage's first."""
    source: int
    """The global rank whose weights all copies start from."""
    group: ProcessGroup | None
    """The ranks with copies; None if there is only one."""


class SharedGradients:
    """The shared parameters of one rank's stages."""

    def __init__(
        self,
        shared: Sequence[SharedParameter],
        stages: Mapping[int, nn.Module],
        *,
        pipelines: Sequence[Sequence[int]] | None = None,
        stage_ranks: Sequence[int] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Compare what all ranks declare, create the groups, and give all copies the weights of the first.

        All ranks of the process group call it, those without a shared parameter included.

        Args:
            shared: what the model declares; the same on all ranks.
            stages: the modules on this rank, by stage, laid on their mesh if they are to be.
            pipelines: the global ranks of each pipeline, by rank of the pipeline (see `pipelines_on`); None for one of
                all ranks.
            stage_ranks: of each stage, its rank of the pipeline; None for one stage a rank, in order.
            timeout_s: seconds a sum may take.

        Raises:
            LayoutError: ranks differ in what they declare or hold; on all ranks alike.
        """
        pipelines = [range(world_size())] if pipelines is None else pipelines
        stage_ranks = range(len(pipelines[0])) if stage_ranks is None else stage_ranks
        check_agreement(shared, stages, pipelines=pipelines, stage_ranks=stage_ranks)
        self.repeats = {
            stages[stage].get_parameter(name) for p in shared for stage, name in p.sites[1:] if stage in stages
        }
        """Copies here whose first is on a lower stage, which counts it: a norm over all stages leaves these out."""
        self._groups: list[_Group] = []
        mine = next(pipeline for pipeline in pipelines if rank() in pipeline)
        for group in stage_groups(shared):
            members = [p for p in sorted(shared, key=lambda p: p.key) if p.stages() == group]
            copies = {
                p.key: [stages[stage].get_parameter(name) for stage, name in p.sites if stage in stages]
                for p in members
            }  # fmt: skip
            ranks = list(dict.fromkeys(stage_ranks[stage] for stage in group))
            found = _new_groups(ranks, pipelines, timeout_s=timeout_s) if len(ranks) > 1 else None
            if any(copies.values()):
                self._groups.append(_Group(copies, mine[stage_ranks[group[0]]], found))
        self._broadcast()

    @property
    def num_groups(self) -> int:
        """Sets of stages that share something and have a stage here: a step's table syncs each once."""
        return len(self._groups)

    def sync_all(self) -> None:
        """Add up the gradients of all copies, where no table says when."""
        for number in range(self.num_groups):
            self.sync(number)

    @torch.no_grad()
    def sync(self, number: int) -> None:
        """Add up the gradients of a group's copies, after the last backward that feeds them.

        A copy without a gradient counts as zero, and has the sum afterwards; a frozen parameter is left out.

        Args:
            number: of the groups on this rank, in the order of `stage_groups`.
        """
        group = self._groups[number]
        trained = {key: copies for key, copies in group.copies.items() if copies[0].requires_grad}
        by_dtype: dict[torch.dtype, list[list[Tensor]]] = defaultdict(list)
        for copies in trained.values():
            by_dtype[copies[0].dtype].append([_local_gradient(copy) for copy in copies])
        for gradients in by_dtype.values():  # in the order of the keys, so in one order on all ranks
            total = torch.cat([_added_up(copies).flatten() for copies in gradients])
            if group.group is not None:
                all_reduce_sum(total, group=group.group)
            _hand_out(total, gradients)

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
                _hand_out(first, values)


def pipelines_on(mesh: DeviceMesh, axis: str = "pp") -> list[list[int]]:
    """The global ranks of each pipeline on a mesh, by rank of the pipeline: the lines along `axis`."""
    dim = (mesh.mesh_dim_names or ()).index(axis)
    lines: list[list[int]] = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist()
    return lines


def _new_groups(ranks: Sequence[int], pipelines: Sequence[Sequence[int]], *, timeout_s: float) -> ProcessGroup | None:
    """The group of these ranks of each pipeline, in one order on all ranks; this rank's."""
    found = [new_group([pipeline[rank] for rank in ranks], timeout_s=timeout_s) for pipeline in pipelines]
    return next((group for group in found if group is not None), None)


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's piece of a gradient; zero, and the parameter's from here on, where there was none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return to_local(parameter.grad)


def _added_up(copies: Sequence[Tensor]) -> Tensor:
    return copies[0] if len(copies) == 1 else torch.stack(list(copies)).sum(0)


def _hand_out(flat: Tensor, values: Sequence[Sequence[Tensor]]) -> None:
    """Parts of `flat` to the copies of each parameter, in order."""
    pieces = torch.split(flat, [copies[0].numel() for copies in values])
    for piece, copies in zip(pieces, values, strict=True):
        for copy in copies:
            copy.copy_(piece.view_as(copy))
