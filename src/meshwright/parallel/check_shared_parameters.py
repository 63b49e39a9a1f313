"""Check that all ranks declare the same shared parameters with consistent copies, before any collective uses them."""

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
from meshwright.units import counted

RULE = "every copy of a shared parameter has the same key, shape, dtype, requires_grad and shard layout"
Properties = dict[str, str]


def check_consistency(
    shared: Sequence[SharedParameter],
    stages: Mapping[int, nn.Module],
    *,
    pipelines: Sequence[Sequence[int]],
    stage_ranks: Sequence[int],
) -> None:
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
            raise _alias_error(*aliases, rank)
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
        parameter = _parameter(stages[stage], name)
        if parameter is None:
            continue
        site = f"{key} at {stage}: {name}"
        if parameter in seen:
            return seen[parameter], site
        seen[parameter] = site
    return None


def _alias_error(site: str, alias: str, rank: int) -> LayoutError:
    return LayoutError(
        f"{site} and {alias} are the same tensor",
        where=f"{alias.split(' at ')[0]} on rank {rank}",
        rule="each declared copy is a separate tensor: autograd accumulates the gradients of a tensor used twice",
        fix="use a separate parameter at each site, or declare a single site",
    )


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
    shared: Sequence[SharedParameter],
    held: Sequence[set[int]],
    *,
    pipelines: Sequence[Sequence[int]],
    stage_ranks: Sequence[int],
) -> None:
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
