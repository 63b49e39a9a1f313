"""Local shards: over all ranks they tile the tensor, each element as often as it is replicated."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshwright.mesh.local_shards import TensorBox, local_box, num_shards, to_local
from tests.helpers import small_corpus
from tests.train.jobs import make_job

SHAPES = [(8, 4), (7, 5), (3, 2), (1, 9), (2, 3, 5), (5,)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return [*small_corpus(tmp_path_factory.mktemp("shards")), "model.num_layers=1"]


def layouts(shape):
    dims = range(len(shape))
    yield from (((4,), [Shard(d)]) for d in dims)
    yield from (((2, 2), [Shard(a), Shard(b)]) for a in dims for b in dims if a != b)
    yield from (((2, 2), pair) for d in dims for pair in ([Replicate(), Shard(d)], [Shard(d), Replicate()]))
    yield (4,), [Replicate()]


CASES = [(shape, mesh_shape, placements) for shape in SHAPES for mesh_shape, placements in layouts(shape)]


def boxes(rank, world_size):
    """Return this rank's box and the number of shards, by case; check that the local shard is that box."""
    meshes = {shape: init_device_mesh("cpu", shape) for shape in ((4,), (2, 2))}
    found = []
    for shape, mesh_shape, placements in CASES:
        full = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
        tensor = distribute_tensor(full, meshes[mesh_shape], placements, src_data_rank=None)
        box = local_box(tensor)
        assert torch.equal(to_local(tensor), full[box.slices()]) and box.numel() == to_local(tensor).numel()
        found.append((box, num_shards(tensor)))
    return found


def assert_tiled(shape, boxes, num_pieces, what):
    """Check that each element is in as many boxes as there are replicas of a shard."""
    count = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        count[box.slices()] += 1
    assert (count == len(boxes) // num_pieces).all(), f"{what}: {count.unique().tolist()} holders, {num_pieces} pieces"


def test_pieces_tile_the_tensor(gang):
    by_rank = gang(4).run(boxes)
    for i, (shape, mesh_shape, placements) in enumerate(CASES):
        expected = 1
        for size, placement in zip(mesh_shape, placements, strict=True):
            expected *= size if isinstance(placement, Shard) else 1
        assert {of_rank[i][1] for of_rank in by_rank} == {expected}
        assert_tiled(shape, [of_rank[i][0] for of_rank in by_rank], expected, placements)


def parameters(rank, world_size, words):
    """Return, by parameter, this rank's shard, its box, and the number of shards."""
    job, _ = make_job(rank, world_size, words)
    return {n: (to_local(p.detach()), local_box(p), num_shards(p)) for n, p in job.model.named_parameters()}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["mesh.tp=2", "mesh.dp_replicate=2"], marks=pytest.mark.slow),
        ["mesh.dp_replicate=2", "mesh.dp_shard=2", "model.tie_embeddings=true"],
        # Rows that neither tp's nor FSDP2's ranks divide evenly among them: 262 / 2 = 131, and 50 / 2 = 25.
        ["mesh.tp=2", "mesh.dp_shard=2", "model.vocab_size=262", "model.ffn_dim=50"],
        pytest.param(["mesh.dp_shard=4", "model.vocab_size=257", "model.ffn_dim=3", "model.dim=6", "model.num_heads=1",
                      "model.num_kv_heads=1"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)  # fmt: skip
def test_pieces_of_parameters_tile_them(gang, corpus, layout):
    """Check the shards of parameters, including dims sharded by both FSDP2 and tensor parallelism."""
    plain = parameters(0, 1, [*corpus, *(word for word in layout if word.startswith("model."))])
    by_rank = gang(4).run(parameters, [*corpus, *layout])
    for name, (whole, _, _) in plain.items():
        for values, box, _ in (of_rank[name] for of_rank in by_rank):
            assert torch.equal(values, whole[box.slices()]), name
        assert_tiled(whole.shape, [of_rank[name][1] for of_rank in by_rank], by_rank[0][name][2], name)


def test_a_plain_tensor_is_one_piece():
    assert local_box(torch.zeros(3, 2)) == TensorBox((0, 0), (3, 2)) and num_shards(torch.zeros(3)) == 1
    assert TensorBox((1, 0), (2, 3)).slices() == (slice(1, 3), slice(0, 3)) and TensorBox((0,), (0,)).numel() == 0
