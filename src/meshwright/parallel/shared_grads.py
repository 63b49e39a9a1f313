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
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from meshwright.comm.collectives import all_gather_object, all_reduce_sum, broadcast
from meshwright.errors import LayoutError
from meshwright.mesh.groups import new_group
from meshwright.mesh.shards import local_box, to_local
from meshwright.pipeline.shared import SharedParameter, stage_groups

RULE = "every copy of a shared parameter has the same key, shape, dtype, trainability and shard layout"
Facts = dict[str, str]


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
        stage_ranks: Sequence[int],
        pipelines: Sequence[Sequence[int]],
        rank: int,
        timeout_s: float = 600.0,
    ) -> None:
        """Compare what all ranks declare, create the groups, and give all copies the weights of the first.

        All ranks of the run call it, those without a shared parameter included.

        Args:
            shared: what the model declares; the same on all ranks.
            stages: the modules on this rank, by stage, laid on their mesh if they are to be.
            stage_ranks: of each stage, its rank of the pipeline.
            pipelines: the global ranks of each pipeline, by rank of the pipeline.
            rank: this global rank.
            timeout_s: seconds a sum may take.

        Raises:
            LayoutError: ranks differ in what they declare or hold; on all ranks alike.
        """
        check_agreement(shared, stages, pipelines=pipelines, stage_ranks=stage_ranks)
        self._groups: list[_Group] = []
        mine = next(pipeline for pipeline in pipelines if rank in pipeline)
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


def check_agreement(
    shared: Sequence[SharedParameter],
    stages: Mapping[int, nn.Module],
    *,
    pipelines: Sequence[Sequence[int]],
    stage_ranks: Sequence[int],
) -> None:
    """See that all ranks declare the same, and hold what they declare alike.

    Whatever a rank lacks is told to the others first: nobody waits for a rank that has stopped.

    Raises:
        LayoutError: the first difference, with the ranks.
    """
    declared = [(p.key, p.sites) for p in shared]
    own = {stage: {p.key: _facts(stages[stage], name) for p in shared for at, name in p.sites if at == stage}
           for stage in stages}  # fmt: skip
    everyone = all_gather_object((declared, own))
    for rank, (theirs, _) in enumerate(everyone):
        _check_declared(everyone[0][0], theirs, rank)
    for pipeline in pipelines:
        for parameter in sorted(shared, key=lambda p: p.key):
            found = []
            for stage, name in parameter.sites:
                rank = pipeline[stage_ranks[stage]]
                found.append((rank, stage, name, everyone[rank][1][stage][parameter.key]))
            _check_sites(parameter.key, found)


def _check_declared(first: list[Any], other: list[Any], rank: int) -> None:
    """Two ranks' declarations."""
    if first == other:
        return
    mine, theirs = dict(first), dict(other)
    for a, b, holder, lacker in ((mine, theirs, 0, rank), (theirs, mine, rank, 0)):
        lacking = sorted(a.keys() - b.keys())
        if lacking:
            raise LayoutError(
                f"rank {holder} declares the shared parameter {lacking[0]}, rank {lacker} doesn't",
                where=f"{lacking[0]} on rank {lacker}",
                rule="all ranks declare the same shared parameters",
                fix="the same model, configuration and version of Meshwright on every rank",
            )
    key = next((key for key in sorted(mine) if mine[key] != theirs[key]), None)
    if key is None:
        key = next(a[0] for a, b in zip(first, other, strict=True) if a != b)
        what = f"ranks 0 and {rank} declare {key} in a different order"
    else:
        what = f"ranks 0 and {rank} declare {key} at {_site_words(mine[key])} and at {_site_words(theirs[key])}"
    raise LayoutError(
        what,
        where=f"{key} on rank {rank}",
        rule="all ranks declare the same shared parameters, in one order",
        fix="the same model, configuration and version of Meshwright on every rank",
    )


def _check_sites(key: str, found: Sequence[tuple[int, int, str, Facts]]) -> None:
    """The copies of one parameter in one pipeline."""
    for rank, stage, name, facts in found:
        if not facts:
            raise LayoutError(
                f"stage {stage} has no parameter {name}, the declared copy of {key}",
                where=f"{key} on rank {rank}",
                rule="a stage holds the parameters that are declared on it",
                fix=f"a parameter {name} in stage {stage}'s module, or a declaration without stage {stage}",
            )
    for (rank, stage, _, facts), (other, another, _, others) in pairwise(found):
        for fact, value in facts.items():
            if others[fact] != value:
                raise LayoutError(
                    f"{key} has {fact} {value} on rank {rank} (stage {stage}) and {others[fact]} on rank {other} "
                    f"(stage {another})",
                    where=f"{key} on ranks {rank} and {other}",
                    rule=RULE,
                    fix=f"the same {fact} of {key} on all its stages",
                )


def _facts(module: nn.Module, name: str) -> Facts:
    """What must be equal on all copies; empty if there is no such parameter."""
    parameter = dict(module.named_parameters(remove_duplicate=False)).get(name)
    if parameter is None:
        return {}
    layout = "whole"
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        axes = zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=False)
        layout = ", ".join(f"{axis}={size} {placement}" for axis, size, placement in axes)
    return {
        "shape": str(list(parameter.shape)),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "trainability": "trained" if parameter.requires_grad else "frozen",
        "shard layout": f"{layout}, {list(local_box(parameter).shape)} here",
    }


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


def _site_words(sites: Sequence[tuple[int, str]]) -> str:
    return ", ".join(f"{stage}: {name}" for stage, name in sites)
