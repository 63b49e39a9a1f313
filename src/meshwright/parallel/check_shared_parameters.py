"""Seeing that all ranks declare the same shared parameters and hold them alike, before one waits for another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.comm.collectives import all_gather_object
from meshwright.errors import LayoutError
from meshwright.mesh.local_shards import local_box
from meshwright.pipeline.shared_parameters import SharedParameter

RULE = "every copy of a shared parameter has the same key, shape, dtype, trainability and shard layout"
Facts = dict[str, str]


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
    own = {stage: {(p.key, name): _facts(stages[stage], name) for p in shared for at, name in p.sites if at == stage}
           for stage in stages}  # fmt: skip
    everyone = all_gather_object((declared, own, _declared_twice(shared, stages)))
    for rank, (theirs, _, twice) in enumerate(everyone):
        _check_declared(everyone[0][0], theirs, rank)
        if twice is not None:
            raise _one_tensor(*twice, rank)
    _check_places(shared, [set(stages) for _, stages, _ in everyone], pipelines=pipelines, stage_ranks=stage_ranks)
    for pipeline in pipelines:
        for parameter in sorted(shared, key=lambda p: p.key):
            found = []
            for stage, name in parameter.sites:
                rank = pipeline[stage_ranks[stage]]
                found.append((rank, stage, name, everyone[rank][1][stage][parameter.key, name]))
            _check_sites(parameter.key, found)


def _declared_twice(shared: Sequence[SharedParameter], stages: Mapping[int, nn.Module]) -> tuple[str, str] | None:
    """The first two sites here that are one tensor, in words."""
    seen: dict[nn.Parameter, str] = {}
    for key, stage, name in ((p.key, stage, name) for p in shared for stage, name in p.sites if stage in stages):
        parameter = _parameter(stages[stage], name)
        if parameter is None:
            continue
        place = f"{key} at {stage}: {name}"
        if parameter in seen:
            return seen[parameter], place
        seen[parameter] = place
    return None


def _one_tensor(place: str, other: str, rank: int) -> LayoutError:
    return LayoutError(
        f"{place} and {other} are one tensor",
        where=f"{other.split(' at ')[0]} on rank {rank}",
        rule="each declared copy is a tensor of its own: autograd has added up the gradient of one that is used twice",
        fix="a parameter of its own at each site, or one site for both",
    )


def _check_declared(first: list[Any], other: list[Any], rank: int) -> None:
    """Two ranks' declarations, of which the other has each key once."""
    mine, theirs = dict(first), dict(other)
    if len(theirs) < len(other):
        again = next(key for at, (key, _) in enumerate(other) if key in dict(other[:at]))
        raise LayoutError(
            f"rank {rank} declares the shared parameter {again} twice",
            where=f"{again} on rank {rank}",
            rule="a shared parameter has a key of its own, and all its sites in one declaration",
            fix="one declaration with all sites, or another key for one of them",
        )
    if first == other:
        return
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


def _check_places(
    shared: Sequence[SharedParameter],
    held: Sequence[set[int]],
    *,
    pipelines: Sequence[Sequence[int]],
    stage_ranks: Sequence[int],
) -> None:
    """Every rank is in one pipeline, and holds the stages that are said to be there."""
    if sorted(rank for pipeline in pipelines for rank in pipeline) != list(range(len(held))):
        raise LayoutError(
            f"pipelines of the ranks {[list(pipeline) for pipeline in pipelines]} in a run of {len(held)}",
            where="pipelines",
            rule="every rank of the run is in one pipeline",
            fix="pipelines_on(mesh), with a mesh of all ranks",
        )
    for key, stage in ((p.key, stage) for p in shared for stage in p.stages()):
        if stage >= len(stage_ranks):
            raise _misplaced(key, stage, f"there are {len(stage_ranks)}")
        for rank in (pipeline[stage_ranks[stage]] for pipeline in pipelines):
            if stage not in held[rank]:
                raise _misplaced(key, stage, f"rank {rank} has {sorted(held[rank])}")


def _misplaced(key: str, stage: int, but: str) -> LayoutError:
    return LayoutError(
        f"a copy of {key} is declared on stage {stage}, and {but}",
        where=f"{key} on stage {stage}",
        rule="stage_ranks has the rank of each stage, and that rank was given the stage's module",
        fix="a declaration with the numbers of the stages that there are, and each stage's module on its rank",
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


def _parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    return dict(module.named_parameters(remove_duplicate=False)).get(name)


def _facts(module: nn.Module, name: str) -> Facts:
    """What must be equal on all copies; empty if there is no such parameter."""
    parameter = _parameter(module, name)
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


def _site_words(sites: Sequence[tuple[int, str]]) -> str:
    return ", ".join(f"{stage}: {name}" for stage, name in sites)
