"""What PyTorch's own planners would do, as chains of our steps, so that one cost model prices both.

Private names of `torch.distributed.tensor._redistribute` are used here alone. Checked on 2.13.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.distributed.tensor._redistribute as theirs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.mesh.layout import Layout
from meshwright.mesh.shard_intervals import Reduction, Split
from meshwright.reshard.planner.intermediate_layouts import Problem, make_step
from meshwright.reshard.planner.steps import Step


@contextlib.contextmanager
def fake_mesh(axis_sizes: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """A mesh of ranks that exist in name only."""
    assert not dist.is_initialized()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(axis_sizes))
    try:
        yield init_device_mesh("cpu", axis_sizes)
    finally:
        dist.destroy_process_group()
        theirs.clear_redistribute_planner_cache()


def steps(problem: Problem, mesh: DeviceMesh, *, dijkstra: bool) -> list[Step] | None:
    """PyTorch's plan; None where it has none or where its moves lead elsewhere (it does not know strided targets)."""
    theirs.clear_redistribute_planner_cache()  # its answers depend on what was asked before
    with contextlib.suppress(AssertionError, ValueError, IndexError, NotImplementedError):
        infos = theirs._gen_transform_infos_non_cached(
            _spec(problem.src, mesh), _spec(problem.dst, mesh), use_graph_based_transform=dijkstra
        )
        return _chain(problem, mesh, infos)
    return None


def _chain(problem: Problem, mesh: DeviceMesh, infos: list) -> list[Step] | None:
    placements = list(_spec(problem.src, mesh).placements)
    order = {dim: list(problem.src.axes_of(dim)) for dim in range(len(problem.src.shape))}
    at, chain = problem.src, []
    for info in infos:
        theirs._update_shard_order_and_placements(info, placements, order)
        to = _layout(problem, placements, order)
        step = make_step(problem, at, to)
        if step is None:
            return None
        chain.append(step)
        at = to
    return chain if at.same_as(problem.dst) else None


def _spec(layout: Layout, mesh: DeviceMesh) -> DTensorSpec:
    placements = [Partial(str(r)) if r else Replicate() for r in layout.partial]
    for dim in range(len(layout.shape)):
        for split in layout.splits[dim]:
            if split.parts > 1:
                raise NotImplementedError("strided cuts")
            placements[split.axis] = Shard(dim)
    order = tuple(ShardOrderEntry(dim, layout.axes_of(dim)) for dim in range(len(layout.shape)) if layout.splits[dim])
    meta = TensorMeta(torch.Size(layout.shape), torch.empty(layout.shape, device="meta").stride(), torch.bfloat16)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta, shard_order=order)


def _layout(problem: Problem, placements: list, order: dict[int, list[int]]) -> Layout:
    splits = tuple(tuple(Split(axis) for axis in order.get(dim, ())) for dim in range(len(problem.src.shape)))
    partial = tuple(Reduction(p.reduce_op) if isinstance(p, Partial) else None for p in placements)
    return Layout(problem.src.shape, problem.src.axis_sizes, splits, partial)
