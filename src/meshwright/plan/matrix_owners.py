"""Matrices whose update needs all of them, with the rank that computes it, from the plan. Doesn't import torch.

Every rank with a shard may own a matrix; the most expensive go first, each to the rank with the least to compute so far
(Graham 1969, "Bounds on multiprocessing timing anomalies": at most 4/3 of the best). All ranks of a stage get the same
answer, so none has to be told.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from heapq import heapreplace

from meshwright.optim.catalogue import find_optimizer
from meshwright.optim.contract import MatrixOptimizer
from meshwright.optim.whole_matrix import WholeMatrix
from meshwright.plan.run_plan import BYTES, Atoms, LayerSpec, Parameter, RunPlan, Stage

BUCKET_ELEMENTS = 2**25
"""Elements that an owner gathers at once, before it sends updates back: 128 MiB in float32."""


@lru_cache(maxsize=8)
def whole_matrices(plan: RunPlan, pipeline_rank: int) -> tuple[WholeMatrix, ...]:
    """Return the matrices of all stages of a pipeline rank that are updated by their owners, in stage order."""
    found = [
        one
        for number in plan.schedule.stages_of(pipeline_rank)
        for kind, layer, parameter in plan.parameters(plan.stages[number])
        if parameter.trained and plan.optimizer.update_of(parameter.role).whole
        for one in _matrices(plan, number, kind, layer, parameter, pipeline_rank)
    ]
    costs = [cost_of(plan, one) for one in found]
    owned: Counter[int] = Counter()
    elements: Counter[int] = Counter()
    queues: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    for place in sorted(range(len(found)), key=lambda place: (-costs[place], place)):
        ranks = found[place].ranks
        queue = queues.setdefault(ranks, sorted((owned[rank], elements[rank], rank) for rank in ranks))
        while queue[0] != (current := (owned[rank := queue[0][2]], elements[rank], rank)):
            heapreplace(queue, current)  # the rank has got matrices of other ranks' groups meanwhile
        found[place] = replace(found[place], owner=rank)
        owned[rank] += costs[place]
        elements[rank] += found[place].num_elements
        heapreplace(queue, (owned[rank], elements[rank], rank))
    return tuple(_in_buckets(found))


def cost_of(plan: RunPlan, matrix: WholeMatrix) -> int:
    """Return the floating-point operations of a matrix's update."""
    optimizer = find_optimizer(plan.optimizer.name)
    assert isinstance(optimizer, MatrixOptimizer), "only its updates need whole matrices"
    return optimizer.cost(*matrix.shape)


def operations_by_owner(plan: RunPlan, pipeline_rank: int) -> Counter[int]:
    """Return the floating-point operations of the updates that each rank computes for the others."""
    owned: Counter[int] = Counter()
    for one in whole_matrices(plan, pipeline_rank):
        owned[one.owner] += cost_of(plan, one)
    return owned


def _in_buckets(matrices: list[WholeMatrix]) -> Iterator[WholeMatrix]:
    """Give each matrix the number of its bucket: its owner's elements before it, in buckets of a fixed size."""
    gathered: Counter[int] = Counter()
    for one in matrices:
        yield replace(one, bucket=gathered[one.owner] // BUCKET_ELEMENTS)
        gathered[one.owner] += one.num_elements


def _matrices(
    plan: RunPlan, number: int, kind: LayerSpec, layer: int | None, parameter: Parameter, pipeline_rank: int
) -> Iterator[WholeMatrix]:
    """Yield the matrix of a parameter with two dims, or those stacked along dim 0 of one with three."""
    name, stacked = kind.full_name(parameter.name, layer), len(parameter.shape) - 2
    first = pipeline_rank * (plan.mesh.num_ranks() // plan.mesh.size("pp"))
    groups = _groups(plan, plan.stages[number], kind, parameter)
    over_stack = [atoms for dim, atoms in groups if dim is not None and dim < stacked]
    others = [(dim, atoms) for dim, atoms in groups if dim is None or dim >= stacked]
    # FSDP shards within the shards of tensor and expert parallelism: in a dim, their axes come first.
    splits = [[axis for axis, (dim, _) in enumerate(others) if dim == stacked + side] for side in (0, 1)]
    sizes = tuple(plan.mesh.size(*atoms) for _, atoms in others)
    ranks: dict[int, tuple[int, ...]] = {}
    for index in range(parameter.shape[0]) if stacked else (None,):
        base = first if index is None else _holder(plan, first, over_stack, parameter.shape[0], index)
        if base not in ranks:
            ranks[base] = _ranks(plan, base, [atoms for _, atoms in others])
        yield WholeMatrix(
            stage=number,
            name=name,
            index=index,
            shape=(parameter.shape[-2], parameter.shape[-1]),
            axis_sizes=sizes,
            splits=(tuple(splits[0]), tuple(splits[1])),
            ranks=ranks[base],
        )


def _ranks(plan: RunPlan, base: int, groups: list[Atoms]) -> tuple[int, ...]:
    """Return the ranks of a mesh whose axes are groups of atoms, from its first rank on."""
    found = [base]
    for atoms in groups:
        offsets = [other - base for other in plan.mesh.line(base, atoms)]
        found = [rank + offset for rank in found for offset in offsets]
    return tuple(found)


def _groups(plan: RunPlan, stage: Stage, kind: LayerSpec, parameter: Parameter) -> list[tuple[int | None, Atoms]]:
    """Return the atoms of a stage in groups that shard a dim of the parameter together, or replicate it (None)."""
    unit = plan.unit_of(stage, kind, parameter)
    sharding: list[tuple[int | None, Atoms]] = [(shard.dim, shard.axes) for shard in parameter.used]
    sharding.append((parameter.stored_dim, unit.sharded))
    known = {atom for _, atoms in sharding for atom in atoms}
    replicas = tuple(atom for atom in plan.mesh.in_stage() if atom not in known)
    found = [*((None, (atom,)) for atom in replicas), *sharding]
    return [(dim, atoms) for dim, atoms in found if plan.mesh.size(*atoms) > 1]


def _holder(plan: RunPlan, first: int, over_stack: list[Atoms], size: int, index: int) -> int:
    """Return the first rank that has a matrix of a stack, which groups of atoms shard one after the other."""
    rank, left = first, index
    for atoms in over_stack:
        chunk = -(-size // plan.mesh.size(*atoms))
        at, left = divmod(left, chunk)
        size = min(chunk, size - at * chunk)
        rank += plan.mesh.line(first, atoms)[at] - first
    return rank


def moved_bytes(plan: RunPlan, rank: int) -> dict[int, int]:
    """Return the bytes that a rank sends to each other rank for the updates of a step."""
    sent: Counter[int] = Counter()
    for one in whole_matrices(plan, plan.mesh.position(rank, "pp")):
        if rank in one.ranks:
            sent.update(one.elements_sent(rank))
    return {peer: elements * BYTES[plan.optimizer.moved] for peer, elements in sent.items() if elements}


@lru_cache(maxsize=8)
def bytes_moved_by_rank(plan: RunPlan, pipeline_rank: int) -> dict[int, int]:
    """Return the bytes that each rank of a pipeline rank sends for the updates of a step; empty if there are none."""
    sent: Counter[int] = Counter()
    alike: dict[object, list[WholeMatrix]] = defaultdict(list)
    for one in whole_matrices(plan, pipeline_rank):
        alike[one.shape, one.axis_sizes, one.splits, one.ranks].append(one)
    for matrices in alike.values():
        shards = dict(zip(matrices[0].ranks, matrices[0].shards(), strict=True))
        whole = sum(shard.elements for shard in shards.values())
        at_home = Counter(shards[one.owner].place for one in matrices)
        for rank, shard in shards.items():
            start, stop = shard.replica_part()
            sent[rank] += (len(matrices) - at_home[shard.place]) * (stop - start)
        for one in matrices:
            sent[one.owner] += whole - shards[one.owner].elements
    return {rank: elements * BYTES[plan.optimizer.moved] for rank, elements in sent.items()}
