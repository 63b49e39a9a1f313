"""A slice along a sharded dim moves only its rows, and equals DTensor's in values, placements and gradients."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from meshwright.dtensor_ops import operator_context
from meshwright.dtensor_ops.fallback import replicate_fallback
from meshwright.dtensor_ops.operator_context import for_dtensor
from meshwright.reshard.dtensor.redistribute import redistribute

S0, S1, R = Shard(0), Shard(1), Replicate()
SLICES = {
    "rows": lambda x: x[3:6], "one shard's rows": lambda x: x[:3], "a row": lambda x: x[7], "last row": lambda x: x[-1],
    "stride": lambda x: x[1:10:3], "columns": lambda x: x[:, 2:5], "a column": lambda x: x[:, 4],
    "of a transposed": lambda x: x.t()[2:5], "both dims": lambda x: x[2:7, 1:4],
}  # fmt: skip
PLACED = {"rows": (S0, R), "both": (S0, S1), "columns": (R, S1), "partial": (S0, Partial()), "both on rows": (S0, S0)}


def sliced(rank, world_size):
    """Compare slices of 11 x 6 with those of plain tensors and with DTensor's placements; return differences."""
    mesh, found = init_device_mesh("cpu", (2, 2)), []
    full = torch.arange(66.0).view(11, 6)
    for where, placements in PLACED.items():
        for name, take in SLICES.items():
            x = redistribute(distribute_tensor(full, mesh, [R, R]), placements).requires_grad_()
            theirs = take(x)
            for context in (for_dtensor, lambda: replicate_fallback(warn="error")):
                x.grad = None
                with context():
                    ours = take(x)
                    values = ours.full_tensor()
                    (values * values.detach()).sum().backward()
                expected = full.clone().requires_grad_()
                part = take(expected)
                (part * part.detach()).sum().backward()
                same = torch.equal(values, part) and ours.stride() == theirs.stride()
                if not same or not torch.equal(x.grad.full_tensor(), expected.grad):
                    found.append((where, name, "values"))
                if where != "partial" and ours.placements != theirs.placements:
                    found.append((where, name, ours.placements, theirs.placements))
    return found


@pytest.mark.slow
def test_slices_equal_dtensors(gang):
    assert gang(4).run(sliced) == [[]] * 4


def received(rank, world_size):
    """Return the rows that this rank receives for a slice of three of 4,096 rows, and for one as wide as two shards."""
    mesh = init_device_mesh("cpu", (world_size,))
    x = distribute_tensor(torch.arange(8192.0).view(4096, 2), mesh, [S0])
    rows, send = [], operator_context.all_to_all_into

    def counted(out, given, *, send_splits, recv_splits, group):
        rows.append(sum(recv_splits) - recv_splits[rank])
        send(out, given, send_splits=send_splits, recv_splits=recv_splits, group=group)

    with pytest.MonkeyPatch.context() as patch, torch.distributed.tensor.debug.CommDebugMode() as messages:
        patch.setattr(operator_context, "all_to_all_into", counted)
        with for_dtensor():
            x[1022:1025], x[512:2560]
    return rows, messages.get_total_counts()


def test_a_slice_moves_only_its_rows(gang):
    """A rank receives the rows that it does not hold, which no other way to replicate the slice can undercut."""
    held = [(2, 512), (1, 1024), (0, 512), (0, 0)]
    for (few, many), (rows, messages) in zip(held, gang(4).run(received), strict=True):
        assert rows == [3 - few, 2048 - many] and messages == 2
