"""Faults that users make in their scripts with FSDP2 and DDP are found by name and cause."""

from __future__ import annotations

import pytest

from tests.prove.script.faults_together import Fault, prove_together
from tests.prove.script.scripts import ACCUMULATED, BFLOAT16, DDP, FSDP2_TP

OPTIMIZER = "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
NORM = "norm = global_norm(model)"
LOCAL_NORM = "norm = torch.stack([local(p.grad).norm() for p in model.parameters()]).norm()"
BUILT = "    model = Model()\n    shard(model, mesh)\n"
SHARDED = "    fully_shard(model, mesh=mesh["
FROZEN = "    model.blocks[0].up.weight.requires_grad_(mesh['dp'].size() == 1)\n"
SUMMED = """    shard(model, mesh)
    for unit in (*model.blocks, model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
"""

FAULTS = {
    "accumulation not divided": Fault(
        [("            loss = loss / options.accumulate\n", "")],
        ["gradient |", "4.000 × the reference", "summed over the 4 micro-batches instead of averaged"],
        "2 --accumulate 4",
    ),
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
        "2 --accumulate 4", own_reference=True,
    ),
    "norms not reduced over tp, in bfloat16": Fault(
        [*BFLOAT16, ("            reduce_norm_gradients(model, mesh)\n", "")],
        ["gradient |", "blocks.1.norm.weight", "the sum over tp is missing: the replicas sum to the reference"],
        "2 --tp 2", own_reference=True,
    ),
    "no set_epoch": Fault(
        [("        sampler.set_epoch(epoch)\n", "")],
        ["samples", "step 3 reads the samples of step 1", "set_epoch(epoch) is not called"]
    ),
    "same data on all ranks": Fault(
        [("num_replicas=dp_size, rank=dp_rank", "num_replicas=1, rank=0")],
        ["ranks 0 and 1 read the same samples, and 8 of 16 samples", "the same data on several ranks"]
    ),
    "data split over tp": Fault(
        [("num_replicas=dp_size, rank=dp_rank", "num_replicas=dist.get_world_size(), rank=dist.get_rank()")],
        ["ranks 0 and 1 are not data parallel to each other", "the data-parallel mesh only"],
        "2 --tp 2 --accumulate 1",
    ),
    "another global batch": Fault(
        [("GLOBAL_BATCH // dp_size //", "GLOBAL_BATCH //")],
        ["step 1 reads 32 samples, 16 in the reference", "another global batch"],
        "2 --accumulate 1",
    ),
    "norm of each rank": Fault(
        [(NORM, LOCAL_NORM)],
        ["norm |", "ranks 0 and 1 report different norms", "local norms not reduced over dp_shard"]
    ),
    "norm of each rank, not recorded": Fault(
        [(NORM, LOCAL_NORM), ("            recorder.norm(norm)\n", "")],
        ["clipping |", "on rank 0", "clipped by a norm of each rank's own shards"],
        own_reference=True,
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
    "norms not reduced over tp": Fault(
        [("            reduce_norm_gradients(model, mesh)\n", "")],
        ["gradient |", "blocks.1.norm.weight", "the sum over tp is missing: the replicas sum to the reference"],
        "2 --tp 2",
    ),
    "learning rate times processes": Fault(
        [("lr=1e-2", "lr=1e-2 * dp_size")],
        ["learning rate |", "0.02 in step 1", "multiplied by the number of"]
    ),
    "initial weights of each rank": Fault(
        [("    model = Model()\n", "    torch.manual_seed(dist.get_rank())\n    model = Model()\n")],
        ["initial |", "initial weights differ on rank 1", "start from different weights"],
        own_reference=True,
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
    "reduced in no micro-batch": Fault(
        [(before, after.replace("at == 1", "at == 2")) for before, after in ACCUMULATED],
        ["gradient |", "differ between ranks 0 and 1", "the mean over dp_replicate is missing"],
        own_reference=True,
    ),
    "another seed of the data": Fault(
        [("manual_seed(step)", "manual_seed(step + size)")],
        ["samples |", "step 1 reads the samples of step 2 of the reference", "1 step ahead"],
        own_reference=True,
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
