"""Layer that slices along a sharded dim by moving only the slice's rows.

DTensor gathers the dim and slices the gathered copy. A sharding rule cannot do better, since it can only name
placements of the inputs. Here each rank sends the rows of the slice that it holds to the ranks that shard the dim with
it, so a rank receives the slice less its own rows, the least that can give every rank the slice. The placements of the
result are those of DTensor: replicated over the axis that shards the dim, unchanged over the others.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from meshwright.comm.alltoallv import all_to_all_into
from meshwright.dtensor_ops.private import (
    correct_aliasing,
    has_default_order,
    local_tensor,
    shard_dim,
    with_dim,
    with_meta,
)
from meshwright.dtensor_ops.run_replicated import OpCall, RunOp
from meshwright.reshard.dtensor.redistribute_local import Redistributor

aten = torch.ops.aten
SLICES = (aten.slice.Tensor, aten.select.int)


class ShardedSlices:
    """Layer that slices along a sharded dim.

    Args:
        mover: the hook that counts redistributions; from the count, the view layer infers which views are gathered.
    """

    def __init__(self, mover: Redistributor) -> None:
        self._mover = mover

    def __call__(self, call: OpCall, run: RunOp) -> Any:
        """Compute `call` by moving the rows, if it is a slice along a dim that one axis shards, else with `run`."""
        axis = _sharding_axis(call)
        if axis is None:
            return run(call)
        self._mover.num_redistributions += 1
        return _slice_along(axis, call)


def _sharding_axis(call: OpCall) -> int | None:
    """Return the only axis that shards the sliced dim, unless the slice is the full dim or empty."""
    x = call.args[0]
    if call.operator not in SLICES or not isinstance(x, DTensor) or not x.dim():
        return None
    if any(type(p) not in (Shard, Replicate, Partial) for p in x.placements) or not has_default_order(x):
        return None
    dim = _dim(call)
    axes = [axis for axis, p in enumerate(x.placements) if getattr(p, "dim", None) == dim]
    if len(axes) != 1 or x.device_mesh.get_coordinate() is None:
        return None
    return axes[0] if 0 < len(_rows(call)) < x.shape[dim] else None


def _dim(call: OpCall) -> int:
    x, dim = call.args[0], call.args[1] if len(call.args) > 1 else 0
    return int(dim) % int(x.dim())


def _rows(call: OpCall) -> range:
    """Return the indices that the call selects."""
    size = call.args[0].shape[_dim(call)]
    if call.operator is aten.select.int:
        return range(size)[call.args[2] :][:1]
    start, end, step = (*call.args[2:], *(None,) * 3)[:3]
    return range(size)[slice(start, end, step)]


def _slice_along(axis: int, call: OpCall) -> DTensor:
    x, dim, rows = call.args[0], _dim(call), _rows(call)
    num_ranks, rank = x.device_mesh.size(axis), x.device_mesh.get_coordinate()[axis]
    chunk = math.ceil(x.shape[dim] / num_ranks)
    held = [_between(rows, each * chunk, (each + 1) * chunk) for each in range(num_ranks)]
    own = _take(local_tensor(x), dim, held[rank], rank * chunk)
    local = own.new_empty((len(rows), *own.shape[1:]))
    sent = own.repeat(num_ranks, *[1] * (own.dim() - 1))
    counts = [len(each) for each in held]
    group = x.device_mesh.get_group(axis)
    all_to_all_into(local, sent, send_splits=[len(held[rank])] * num_ranks, recv_splits=counts, group=group)
    local = local.movedim(0, dim).contiguous()
    if call.operator is aten.select.int:
        local = local.squeeze(dim)
    meta = call.operator(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), *call.args[1:])
    placements = [_placement(p, dim, call) for p in x.placements]
    placements[axis] = Replicate()
    result = with_meta(local, x.device_mesh, tuple(placements), meta)
    view: DTensor = correct_aliasing(call.operator, call.args, call.kwargs, result)
    return view


def _between(rows: range, low: int, high: int) -> range:
    return rows[bisect_left(rows, low) : bisect_left(rows, high)]


def _take(local: Tensor, dim: int, rows: range, offset: int) -> Tensor:
    """Return the rows, as a contiguous tensor with `dim` first, of a shard that starts at row `offset`."""
    first = local.movedim(dim, 0)
    taken = first[rows.start - offset : rows[-1] + 1 - offset : rows.step] if rows else first[:0]
    return taken.contiguous()


def _placement(placement: Placement, dim: int, call: OpCall) -> Placement:
    """Return the result's placement over an axis that does not shard the sliced dim; `select` removes that dim."""
    sharded = shard_dim(placement)
    is_later = call.operator is aten.select.int and sharded is not None and sharded > dim
    return with_dim(placement, sharded - 1) if is_later and sharded is not None else placement
