"""Joined mesh axes for FSDP2."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import fully_shard

from meshwright.mesh.axes import Axes
from meshwright.mesh.process_groups import build_mesh
from meshwright.parallel.private import joined_mesh


def joined(rank, world_size):
    """A linear layer that FSDP2 shards over two axes as one: its shard, and its gradient's sum, on this rank."""
    mesh = build_mesh(Axes(dp_shard=2, cp=2), torch.device("cpu"))
    assert joined_mesh(mesh, [["dp_replicate"], ["dp_shard"]]).mesh_dim_names == ("dp_replicate", "dp_shard")
    assert joined_mesh(mesh, [["dp_replicate"], ["dp_shard", "cp"]]).mesh.tolist() == [[0, 1, 2, 3]]
    layer = torch.nn.Linear(3, 8, bias=False)
    torch.nn.init.ones_(layer.weight)
    fully_shard(layer, mesh=joined_mesh(mesh, [["dp_shard", "cp"]]))
    layer.set_gradient_divide_factor(1.0)
    layer.set_force_sum_reduction_for_comms(True)
    layer(torch.full((1, 3), rank + 1.0)).sum().backward()
    gradient = layer.weight.grad
    return gradient.device_mesh.mesh_dim_names, tuple(gradient.to_local().shape), gradient.to_local().unique().tolist()


def test_axes_are_joined_into_one_dim(gang):
    assert gang(4).run(joined) == [(("dp_shard+cp",), (2, 3), [10.0])] * 4
