"""Faults that users make in their scripts with FSDP2 and DDP are found by name and cause."""

from __future__ import annotations

import pytest

from tests.prove.script.faults_together import Fault, prove_together
from tests.prove.script.scripts import BFLOAT16, DDP, FSDP2_TP

OPTIMIZER = "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
NORM = "norm = global_norm(model)"
LOCAL_NORM = "norm = torch.stack([local(p.grad).norm() for p in model.parameters()]).norm()"
NOT_RECORDED = [("            recorder.norm(norm)\n", "")]
"""Changes of the script to a norm that it keeps for itself."""
BUILT = "    model = Model()\n    shard(model, mesh)\n"
SHARDED = "    fully_shard(model, mesh=mesh["
FROZEN = "    model.blocks[0].up.weight.requires_grad_(mesh['dp'].size() == 1)\n"
SUMMED = """    shard(model, mesh)
    for unit in (*model.blocks, model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
"""

FAULTS = {
    "gradients cleared between micro-batches": Fault(
        [("loss.backward()\n", "optimizer.zero_grad()\n            loss.backward()\n")],
        ["gradient |", "only the last micro-batch is present", "accumulation is missing"],
        "2 --accumulate 4",
    ),
    "another weight decay": Fault(
        [("lr=1e-2", "lr=1e-2, weight_decay=0.01 * dp_size")],
        ["optimizer |", "weight_decay is 0.02 on rank 0, 0.01 in the reference"]
    ),
    "accumulation not divided, in bfloat16": Fault(
        [*BFLOAT16, ("            loss = loss / options.accumulate\n", "")],
        ["gradient |", "4.000 × the reference", "summed over the 4 micro-batches instead of averaged"],
        "2 --accumulate 4", BFLOAT16,
    ),
    "norms not reduced over tp, in bfloat16": Fault(
        [*BFLOAT16, ("            reduce_norm_gradients(model, mesh)\n", "")],
        ["gradient |", "blocks.1.norm.weight", "the sum over tp is missing: the replicas sum to the reference"],
        "2 --tp 2", BFLOAT16,
    ),
    "norm of each rank, not recorded": Fault(
        [*NOT_RECORDED, (NORM, LOCAL_NORM)],
        ["clipping |", "on rank 0", "clipped by a norm of each rank's own shards"],
        "2", NOT_RECORDED,
    ),
    "no set_epoch": Fault(
        [("        sampler.set_epoch(epoch)\n", "")],
        ["samples", "step 3 reads the samples of step 1", "set_epoch(epoch) is not called"]
    ),
    "data split over tp": Fault(
        [("num_replicas=dp_size, rank=dp_rank", "num_replicas=dist.get_world_size(), rank=dist.get_rank()")],
        ["ranks 0 and 1 are not data parallel to each other", "the data-parallel mesh only"],
        "2 --tp 2 --accumulate 1",
    ),
    "norm of each rank": Fault(
        [(NORM, LOCAL_NORM)],
        ["norm |", "ranks 0 and 1 report different norms", "local norms not reduced over dp_shard"]
    ),
    "frozen": Fault(
        [(SHARDED, FROZEN + SHARDED)],
        ["frozen |", "blocks.0.up.weight", "frozen by mistake: requires_grad is False"]
    ),
    "optimizer made before sharding": Fault(
        [(BUILT + OPTIMIZER, BUILT.replace("    shard", OPTIMIZER + "    shard"))],
        ["optimizer |", "lacks embed.weight, blocks.0.norm.weight", "make it after sharding"]
    ),
    "parameters not in the optimizer": Fault(
        [("AdamW(model.parameters()", "AdamW((model if dp_size == 1 else model.blocks).parameters()")],
        ["optimizer |", "lacks embed.weight, norm.weight", "not in the optimizer"]
    ),
    "not tied after sharding": Fault(
        [("parallelize_module(model, mesh[\"tp\"], plan)\n        model.head.weight = model.embed.weight\n",
          "parallelize_module(model, mesh[\"tp\"], plan)\n")],
        ["tied weights |", "embed.weight and head.weight do not share one tensor", "not tied after sharding"],
        "2 --tp 2",
    ),
    "summed over data-parallel ranks": Fault(
        [("    shard(model, mesh)\n", SUMMED)],
        ["gradient |", "2.000 × the reference", "summed over dp_shard (2 ranks) instead of averaged"],
        "2 --accumulate 1",
    ),
}  # fmt: skip
DDP_FAULTS = {
    "no reduction over data-parallel ranks": Fault(
        [("    model = DistributedDataParallel(net)", "    model = net")],
        ["gradient |", "differ between ranks 0 and 1", "the mean over dp_replicate is missing"]
    ),
    "another seed of the data": Fault(
        [("manual_seed(step)", "manual_seed(step + size - 1)")],
        ["samples |", "step 1 reads the samples of step 2 of the reference", "1 step ahead"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return prove_together(FSDP2_TP, FAULTS, tmp_path_factory.mktemp("faults"), one="--accumulate 1")


@pytest.fixture(scope="module")
def found_in_ddp(tmp_path_factory):
    return prove_together(DDP, DDP_FAULTS, tmp_path_factory.mktemp("faults"), one="")


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_found_by_name_and_cause(fault, found):
    FAULTS[fault].assert_named(found[fault])


@pytest.mark.slow
@pytest.mark.parametrize("fault", DDP_FAULTS)
def test_the_fault_is_found_in_ddp(fault, found_in_ddp):
    DDP_FAULTS[fault].assert_named(found_in_ddp[fault])
