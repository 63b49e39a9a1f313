"""Predicted bytes per rank and step, compared with sums by hand; `tests/train/test_traffic.py` compares actual
traffic."""

from __future__ import annotations

import subprocess
import sys

import pytest

from meshwright.comm.compression.catalogue import encoded_bytes
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.plan.traffic import LinkBytes, Purpose, predict_traffic

BLOCK = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384 + 2 * 128
ROOT = 2 * 256 * 128 + 128
NUM_BLOCKS = 4


def sent(purpose, words, *, rank=None, ranks_per_node=None):
    traffic = predict_traffic(make_plan(load("llama-tiny", words), nodes=ranks_per_node), rank=rank)
    return traffic.of(purpose).sent, traffic.of(purpose).exact


def test_one_rank_sends_nothing():
    assert predict_traffic(make_plan(load("llama-tiny"))).entries == ()


def test_a_sharded_model():
    """A reduce-scatter and an all-gather of everything; blocks are gathered a second time."""
    words = ["mesh.dp_shard=4"]
    reduced = 3 * (NUM_BLOCKS * BLOCK + ROOT)
    assert sent(Purpose.GRADIENTS, words) == (LinkBytes(reduced),) * 2
    assert sent(Purpose.WEIGHTS, words)[0] == LinkBytes(reduced + 3 * NUM_BLOCKS * BLOCK)
    assert sent(Purpose.WEIGHTS, [*words, "mesh.reshard_after_forward=false"])[0] == LinkBytes(reduced)
    assert sent(Purpose.WEIGHTS, [*words, "train.precision=bfloat16"])[0] == LinkBytes(
        (reduced + 3 * NUM_BLOCKS * BLOCK) // 2
    )
    assert sent(Purpose.GRADIENTS, [*words, "train.precision=bfloat16"])[0] == LinkBytes(reduced)


@pytest.mark.parametrize("option", [True, False])
def test_nodes(option):
    """Two nodes of two ranks, as set by the launcher or the configuration."""
    words = ["mesh.dp_shard=4", *([] if option else ["comm.ranks_per_node=2"])]
    piece = NUM_BLOCKS * BLOCK + ROOT  # a quarter, of four bytes an element
    for rank in range(4):
        found = sent(Purpose.GRADIENTS, words, rank=rank, ranks_per_node=2 if option else None)
        assert found[0] == LinkBytes(3 * piece // 2, 3 * piece // 2)  # a ring crosses each node of two ranks once


def test_tensor_parallel_ranks_are_neighbours():
    """With tp inside a node, only data-parallel traffic crosses nodes."""
    words = ["mesh.dp_shard=2", "mesh.tp=2"]
    assert sent(Purpose.GRADIENTS, words, ranks_per_node=2)[0].inside_node == 0
    tensor = sent(Purpose.TENSOR, words, ranks_per_node=2)[0]
    assert tensor.inside_node > 0 == tensor.between_nodes


def test_one_stage_of_compression():
    """On one node, or with one rank of the group per node, each shard is encoded once, per unit."""
    words = ["mesh.dp_shard=2", "comm.gradients=loco4", "comm.weights=int8"]
    units = [BLOCK // 2] * NUM_BLOCKS + [ROOT // 2]
    gradients = sum(encoded_bytes("int4", n, element_bytes=4) for n in units)
    assert sent(Purpose.GRADIENTS, words) == (LinkBytes(gradients), LinkBytes(4 * sum(units)))
    assert sent(Purpose.GRADIENTS, words, ranks_per_node=1)[0] == LinkBytes(0, gradients)
    weights = sum(encoded_bytes("int8", n, element_bytes=4) for n in [*units, *units[:-1]])
    assert sent(Purpose.WEIGHTS, words)[0] == LinkBytes(weights)


@pytest.mark.parametrize(
    ("words", "inside"),
    [([], "int8"), (["comm.inside_node=bf16"], "bf16"), (["comm.gradients=exact-via-all-to-all"], "exact")],
)
def test_two_stages_of_compression(words, inside):
    """Half of the gradient goes to each peer on the node in the intra-node codec, then an eighth to each node."""
    words = ["mesh.dp_shard=8", "comm.gradients=int4", *words]
    way = load("llama-tiny", words).comm.gradients
    units = [BLOCK // 8] * NUM_BLOCKS + [ROOT // 8]
    near = 4 * sum(encoded_bytes(inside, n, element_bytes=4) for n in units)
    far = sum(encoded_bytes(way, n, element_bytes=4) for n in units)
    for rank in range(8):
        found = sent(Purpose.GRADIENTS, words, rank=rank, ranks_per_node=2)
        assert found == (LinkBytes(near, 3 * far), LinkBytes(*[7 * 4 * sum(units) // 2] * 2))


def test_uneven_nodes_take_one_stage():
    words = ["mesh.dp_shard=3", "comm.gradients=int4", "train.global_batch=33"]
    assert sent(Purpose.GRADIENTS, words, rank=0, ranks_per_node=2)[0] == sent(Purpose.GRADIENTS, words, rank=1,
                                                                            ranks_per_node=2)[0]  # fmt: skip
    lonely = sent(Purpose.GRADIENTS, words, rank=2, ranks_per_node=2)[0]
    assert lonely.inside_node == 0 < lonely.between_nodes


def test_replicas():
    """Shards inside a node are reduced between nodes, by an all-reduce or two passes of encoded shards."""
    words = ["mesh.dp_shard=2", "mesh.dp_replicate=2"]
    units = [BLOCK // 2] * NUM_BLOCKS + [ROOT // 2]
    exact = LinkBytes(0, 2 * 4 * sum(units) // 2)
    assert sent(Purpose.REPLICAS, words, ranks_per_node=2) == (exact, exact)
    encoded = sum(2 * encoded_bytes("int8", n // 2, element_bytes=4) for n in units)
    found = sent(Purpose.REPLICAS, [*words, "comm.gradients=int8"], ranks_per_node=2)
    assert found == (LinkBytes(0, encoded), exact)


def test_secondary_shards():
    """Blocks are gathered for their backward among two ranks, half of the weights each; the rest as ever."""
    words = ["mesh.dp_shard=4", "comm.secondary_shards=2"]
    once = NUM_BLOCKS * BLOCK + ROOT
    for rank in range(4):
        found, _ = sent(Purpose.WEIGHTS, words, rank=rank, ranks_per_node=2)
        assert found == LinkBytes(3 * once // 2 + 2 * NUM_BLOCKS * BLOCK, 3 * once // 2)


def test_stages_send_the_stream_once_each_way():
    words = ["mesh.pp=2", "train.global_batch=8", "train.seq_len=64", "train.num_microbatches=4"]
    for rank in (0, 1):
        assert sent(Purpose.STAGES, words, rank=rank, ranks_per_node=1)[0] == LinkBytes(0, 8 * 64 * 128 * 4)


def test_the_rank_that_sends_most():
    """The last stage of an uneven model sends more, and steps add up."""
    plan = make_plan(load("llama-tiny", ["mesh.pp=2", "mesh.dp_shard=2", "pipeline.layers_per_stage=[1,3]"]))
    most = predict_traffic(plan)
    assert most.rank == 2
    assert most.sent().total() == max(predict_traffic(plan, rank=rank).sent().total() for rank in range(4))
    assert most.over(3).sent() == most.sent() * 3 and most.over(3).exact().total() == 3 * most.exact().total()


def test_predicting_needs_no_torch():
    code = (
        "import sys; from meshwright.plan.rules import load; from meshwright.plan.make_plan import make_plan; "
        "from meshwright.plan.traffic import predict_traffic; "
        "predict_traffic(make_plan(load('llama3-405b'), nodes=8)); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
