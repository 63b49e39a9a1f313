"""Joined mesh axes for FSDP2, and the groups of its secondary shards."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.distributed import device_mesh
from torch.distributed.fsdp import fully_shard

from meshwright.mesh.axes import Axes
from meshwright.mesh.process_groups import build_mesh, consecutive_groups
from meshwright.parallel.data_parallel import fsdp_modules
from meshwright.parallel.private import joined_mesh, unit_info
from tests.train.jobs import make_job


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


def secondary(rank, world_size, num_layers):
    """How many groups a rank with secondary shards creates, and to how many ranks its units reshard."""
    words = [f"model.num_layers={num_layers}", "mesh.dp_shard=4", "comm.secondary_shards=2"]
    with mock.patch.object(device_mesh, "new_group", side_effect=device_mesh.new_group) as created:
        job, _ = make_job(rank, world_size, words)
    units = (unit_info(module) for module in fsdp_modules(job.model))
    return created.call_count, {unit[1] for unit in units if unit is not None}


@pytest.mark.slow
def test_stages_of_more_layers_create_no_more_groups(gang):
    """All ranks of the world must create the same groups, and the stages of a pipeline differ in their units."""
    few, many = (gang(4).run(secondary, num_layers) for num_layers in (1, 3))
    assert few == many and len(set(map(str, few))) == 1 and 2 in few[0][1]


def consecutive(rank, world_size):
    mesh = build_mesh(Axes(dp_replicate=2, dp_shard=2), torch.device("cpu"))
    axes = (["dp_shard"], ["dp_replicate"], ["dp_replicate", "dp_shard"])
    groups = [consecutive_groups(mesh, one, 2).mesh.tolist() for one in axes]
    return groups, consecutive_groups(mesh, ["dp_shard"], 1).mesh.tolist()


def test_consecutive_ranks_of_axes_form_groups(gang):
    apart, found = [[0, 1], [2, 3]], gang(4).run(consecutive)
    for rank, (groups, single) in enumerate(found):
        assert groups == [[apart[rank // 2]], [[rank % 2, rank % 2 + 2]], apart]
        assert single == [[one] for one in apart[rank // 2]]
