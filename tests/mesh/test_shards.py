"""The pieces of a tensor: over all ranks they are the tensor, each part as often as it has copies."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshwright.mesh.shards import Box, local_box, num_shards, to_local
from tests.helpers import small_corpus
from tests.train.jobs import make_job, whole

SHAPES = [(8, 4), (7, 5), (3, 2), (1, 9), (2, 3, 5), (5,)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_corpus(tmp_path_factory.mktemp("shards"))


def counts(rank, world_size, shape, mesh_shape, placements):
    """This rank's piece, by its box of the full tensor, and in how many pieces the tensor is."""
    mesh = init_device_mesh("cpu", mesh_shape)
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    tensor = distribute_tensor(full, mesh, placements)
    box = local_box(tensor)
    assert torch.equal(to_local(tensor), full[box.slices()]) and box.numel() == to_local(tensor).numel()
    count = torch.zeros(shape, dtype=torch.int64)
    count[box.slices()] += 1
    return count, num_shards(tensor)


def layouts(shape):
    dims = range(len(shape))
    yield from (((4,), [Shard(d)]) for d in dims)
    yield from (((2, 2), [Shard(a), Shard(b)]) for a in dims for b in dims if a != b)
    yield from (((2, 2), pair) for d in dims for pair in ([Replicate(), Shard(d)], [Shard(d), Replicate()]))
    yield (4,), [Replicate()]


@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_tile_the_tensor(gang, shape):
    for mesh_shape, placements in layouts(shape):
        results = gang(4).run(counts, shape, mesh_shape, placements)
        shards = results[0][1]
        expected = 4
        for size, placement in zip(mesh_shape, placements, strict=True):
            expected = expected // size if isinstance(placement, Shard) else expected
        assert shards == 4 // expected
        assert (sum(count for count, _ in results) == expected).all(), (mesh_shape, placements)


def parameters(rank, world_size, words):
    """Per parameter: its elements' count of holders by this rank's box, and pieces. Checks values too."""
    job, _ = make_job(rank, world_size, words)
    full = whole(job)
    found = {}
    for name, parameter in job.model.named_parameters():
        box = local_box(parameter)
        assert torch.equal(to_local(parameter), full[name][box.slices()]), name
        count = torch.zeros(parameter.shape, dtype=torch.int64)
        count[box.slices()] += 1
        found[name] = count, num_shards(parameter)
    return found


@pytest.mark.parametrize(
    "layout",
    [
        ["mesh.dp_shard=4"],
        ["mesh.tp=2", "mesh.dp_shard=2"],
        ["mesh.tp=2", "mesh.dp_replicate=2"],
        ["mesh.dp_replicate=2", "mesh.dp_shard=2"],
        # Rows that neither tp's nor FSDP2's ranks divide evenly among them: 262 / 2 = 131, and 50 / 2 = 25.
        ["mesh.tp=2", "mesh.dp_shard=2", "model.vocab_size=262", "model.ffn_dim=50"],
        ["mesh.dp_shard=4", "model.vocab_size=257", "model.ffn_dim=3", "model.dim=6", "model.num_heads=1",
         "model.num_kv_heads=1"],
        ["mesh.dp_shard=4", "model.tie_embeddings=true"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_pieces_of_parameters_tile_them(gang, corpus, layout):
    """Also where FSDP2 shards what tensor parallel sharded along the same dim (`_StridedShard`)."""
    results = gang(4).run(parameters, [*corpus, *layout])
    for name, (_, shards) in results[0].items():
        together = sum(result[name][0] for result in results)
        assert (together == 4 // shards).all(), f"{name}: {together.unique()} holders, {shards} pieces"


def test_a_plain_tensor_is_one_piece():
    assert local_box(torch.zeros(3, 2)) == Box((0, 0), (3, 2)) and num_shards(torch.zeros(3)) == 1
    assert Box((1, 0), (2, 3)).slices() == (slice(1, 3), slice(0, 3)) and Box((0,), (0,)).numel() == 0
