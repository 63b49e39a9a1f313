"""Expert parallelism in whole steps: the same run on every layout, bitwise the same twice, and through a kill."""

from __future__ import annotations

import pytest
import torch

from meshwright.nn.experts.layer import Experts
from meshwright.plan.expert_traffic import describe_rows
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import predict_memory
from meshwright.plan.rules import load
from tests.helpers import quick_and_slow
from tests.train.jobs import make_job, run_on, trace
from tests.train.runs import Fault, final_state, metrics, train
from tests.train.test_kill import killed

TINY = ["moe-tiny", "model.dim=32", "model.expert_dim=24", "model.num_heads=2", "train.seq_len=32"]
FP64 = "train.precision=float64"
NUM_STEPS = 5
BALANCED = ["model.balance_loss=0.02", "model.balance_bias=true", "model.bias_rate=0.01", "model.z_loss=0.001"]


@pytest.fixture(scope="module")
def alone(corpus):
    """Some steps of one process."""
    return trace(0, 1, [*corpus, *TINY, *BALANCED, FP64], NUM_STEPS)


@pytest.mark.parametrize(("dp", "ep"), quick_and_slow([(2, 2), (4, 2)], quick=[(2, 2)]))
def test_losses_do_not_depend_on_the_layout(gang, corpus, alone, dp, ep):
    words = [*corpus, *TINY, *BALANCED, FP64, f"mesh.dp_shard={dp}", f"mesh.ep={ep}"]
    found = run_on(gang, dp, trace, words, NUM_STEPS)[0]
    torch.testing.assert_close(found.losses, alone.losses, rtol=0, atol=1e-9)
    torch.testing.assert_close(found.norms, alone.norms, rtol=0, atol=1e-8)
    for name, piece in found.final.items():
        torch.testing.assert_close(piece.values, piece.of(alone.final[name].values), rtol=0, atol=1e-8)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits(gang, corpus):
    words = [*corpus, *TINY, *BALANCED, "mesh.dp_shard=4", "mesh.ep=2", "model.num_shared_experts=1"]
    first, second = (run_on(gang, 4, trace, words, 2) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.results == other.results
        assert all(torch.equal(piece.values, other.final[name].values) for name, piece in one.final.items())


def dtypes_of_experts(rank, world_size, words):
    """Dtypes of the rows and of the routing weights that experts get in a step."""
    job, step = make_job(rank, world_size, words)
    found = set()
    for module in (module for module in job.model.modules() if isinstance(module, Experts)):
        module.register_forward_pre_hook(lambda _, inputs: found.add((inputs[0].dtype, inputs[2].dtype)))
    step(1)
    return found


@pytest.mark.parametrize("ep", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_routing_weights_stay_wide_in_bfloat16(gang, corpus, ep):
    words = [*corpus, *TINY, "train.precision=bfloat16", "mesh.dp_shard=2", f"mesh.ep={ep}"]
    for found in run_on(gang, 2, dtypes_of_experts, words):
        assert found == {(torch.bfloat16, torch.float32)}


def sent_in_steps(rank, world_size, words, num_steps):
    job, step = make_job(rank, world_size, words)
    traffic = job.features["all_to_alls"]
    for number in range(1, num_steps + 1):
        with traffic.counting():
            step(number)
    (found,) = traffic.all_to_alls()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["mesh.ep=4", "train.num_microbatches=2", "recompute.policy=full", "model.top_k=3"],
        pytest.param(
            ["mesh.ep=4", "model.drop=over-capacity", "model.capacity_factor=0.75", "model.num_experts=16"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["recomputed", "capacity"],
)
def test_bytes_are_predicted_exactly_with_uniform_routing(gang, corpus, words):
    words = [*corpus, *TINY, "mesh.dp_shard=4", "model.routing=uniform", "model.num_shared_experts=1", *words]
    for found in run_on(gang, 4, sent_in_steps, words, 2):
        assert found.sent == found.predicted > 0


@pytest.mark.slow
def test_bytes_follow_from_the_load_of_a_real_router(gang, corpus):
    """The prediction from the experts' counts is within 5 % on each rank, where the uniform one may be far off."""
    words = [*corpus, *TINY, "mesh.dp_shard=4", "mesh.ep=4", "model.balance_loss=0", "train.lr=1e-2"]
    for found in run_on(gang, 4, sent_in_steps, words, 6):
        assert found.explained == pytest.approx(found.sent, rel=0.05)


def test_the_plan_counts_rows_once_per_rank():
    plan = make_plan(load("moe-tiny", ["mesh.dp_shard=8", "mesh.ep=8", "model.num_experts=64", "model.top_k=8",
                                       "model.dim=1024"]))  # fmt: skip
    assert describe_rows(plan, 0) == ("one row per token and rank: 1.001 × the lower bound, 32% less than per expert")


def test_memory_counts_the_experts_of_a_rank_and_their_capacity():
    def memory(*words):
        return predict_memory(make_plan(load("moe-tiny", ["mesh.dp_shard=8", *words])))

    spread, sharded = memory(), memory("mesh.ep=8")
    assert spread.parameters == sharded.parameters, "the same shards, by another split"
    assert sharded.gathered < spread.gathered / 3, "a rank gathers no experts of others"
    capacity = ["mesh.ep=8", "model.drop=over-capacity"]
    narrow, wide = (memory(*capacity, f"model.capacity_factor={factor}") for factor in (1.0, 2.0))
    assert wide.activations > narrow.activations == pytest.approx(sharded.activations, rel=0.01)  # fewer indices
    full = "recompute.policy=full"
    kept = memory("mesh.ep=8", full).activations - memory(full).activations
    # Per layer and sample, each of 128 tokens is a row of 128 × float32 for 2 of the 8 ranks.
    rows = 4 * 2 * (128 * 2) * 128 * 4
    assert rows < kept < 1.1 * rows, "a recomputed block keeps the rows that it received, their weights and indices"


EXPERTS = [
    "model.kind=moe",
    "model.balance_loss=0",
    "model.balance_bias=true",
    "model.bias_rate=0.01",
    "model.dim=32",
    "model.expert_dim=24",
]


@pytest.mark.slow
def test_a_killed_run_goes_on_with_other_numbers_of_expert_ranks(gang, corpus, tmp_path):
    """ep 2 in a pipeline, then 4: the same counters and biases, bit for bit, as of a run on one process."""
    words = [*corpus, *EXPERTS, FP64]
    pipelined = [*words, "mesh.dp_shard=2", "mesh.ep=2", "mesh.pp=2", "train.num_microbatches=2"]
    killed(pipelined, tmp_path / "moved", Fault(rank=1, step=5))
    train([*words, "mesh.dp_shard=4", "mesh.ep=4"], tmp_path / "moved", resume="auto")
    train(words, tmp_path / "whole")
    moved, whole = final_state(tmp_path / "moved"), final_state(tmp_path / "whole")
    balanced = [name for name in whole if ".load." in name]
    assert len(balanced) == 4 and moved.keys() == whole.keys()
    assert all(torch.equal(moved[name], whole[name]) for name in balanced)
    assert any(moved[name].any() for name in balanced if name.endswith("load.bias"))
    found, expected = metrics(tmp_path / "moved"), metrics(tmp_path / "whole")
    assert [line["expert_counts"] for line in found] == [line["expert_counts"] for line in expected]
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], abs=1e-9)
