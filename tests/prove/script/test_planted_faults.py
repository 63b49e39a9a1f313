"""Faults that users make in their scripts with FSDP2 and DDP are found by name and cause."""

from __future__ import annotations

import pytest

from tests.prove.script.scripts import ACCUMULATED, BFLOAT16, DDP, FSDP2_TP, causes, planted, prove

ONE = "1 --accumulate 1"
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
    "accumulation not divided": (
        FSDP2_TP, [("            loss = loss / options.accumulate\n", "")], [ONE, "2 --accumulate 4"],
        ["gradient |", "4.000 × the reference", "summed over the 4 micro-batches instead of averaged"],
    ),
    "gradients cleared between micro-batches": (
        FSDP2_TP, [("loss.backward()\n", "optimizer.zero_grad()\n            loss.backward()\n")],
        [ONE, "2 --accumulate 4"],
        ["gradient |", "only the last micro-batch is present", "accumulation is missing"],
    ),
    "another weight decay": (
        FSDP2_TP, [("lr=1e-2", "lr=1e-2, weight_decay=0.01 * dp_size")], [ONE, "2"],
        ["optimizer |", "weight_decay is 0.02 on rank 0, 0.01 in the reference"],
    ),
    "accumulation not divided, in bfloat16": (
        FSDP2_TP, [*BFLOAT16, ("            loss = loss / options.accumulate\n", "")], [ONE, "2 --accumulate 4"],
        ["gradient |", "4.000 × the reference", "summed over the 4 micro-batches instead of averaged"],
    ),
    "norms not reduced over tp, in bfloat16": (
        FSDP2_TP, [*BFLOAT16, ("            reduce_norm_gradients(model, mesh)\n", "")], [ONE, "2 --tp 2"],
        ["gradient |", "blocks.1.norm.weight", "the sum over tp is missing: the replicas sum to the reference"],
    ),
    "no set_epoch": (
        FSDP2_TP, [("        sampler.set_epoch(epoch)\n", "")], [ONE, "2"],
        ["samples", "step 3 reads the samples of step 1", "set_epoch(epoch) is not called"],
    ),
    "same data on all ranks": (
        FSDP2_TP, [("num_replicas=dp_size, rank=dp_rank", "num_replicas=1, rank=0")], [ONE, "2"],
        ["ranks 0 and 1 read the same samples, and 8 of 16 samples", "the same data on several ranks"],
    ),
    "data split over tp": (
        FSDP2_TP, [("num_replicas=dp_size, rank=dp_rank", "num_replicas=dist.get_world_size(), rank=dist.get_rank()")],
        [ONE, "2 --tp 2 --accumulate 1"],
        ["ranks 0 and 1 are not data parallel to each other", "the data-parallel mesh only"],
    ),
    "another global batch": (
        FSDP2_TP, [("GLOBAL_BATCH // dp_size //", "GLOBAL_BATCH //")], [ONE, "2 --accumulate 1"],
        ["step 1 reads 32 samples, 16 in the reference", "another global batch"],
    ),
    "norm of each rank": (
        FSDP2_TP, [(NORM, LOCAL_NORM)], [ONE, "2"],
        ["norm |", "ranks 0 and 1 report different norms", "local norms not reduced over dp_shard"],
    ),
    "norm of each rank, not recorded": (
        FSDP2_TP, [(NORM, LOCAL_NORM), ("            recorder.norm(norm)\n", "")], [ONE, "2"],
        ["clipping |", "on rank 0", "clipped by a norm of each rank's own shards"],
    ),
    "frozen": (
        FSDP2_TP, [(SHARDED, FROZEN + SHARDED)], [ONE, "2"],
        ["frozen |", "blocks.0.up.weight", "frozen by mistake: requires_grad is False"],
    ),
    "optimizer made before sharding": (
        FSDP2_TP, [(BUILT + OPTIMIZER, BUILT.replace("    shard", OPTIMIZER + "    shard"))], [ONE, "2"],
        ["optimizer |", "lacks embed.weight, blocks.0.norm.weight", "make it after sharding"],
    ),
    "parameters not in the optimizer": (
        FSDP2_TP, [("AdamW(model.parameters()", "AdamW((model if dp_size == 1 else model.blocks).parameters()")],
        [ONE, "2"], ["optimizer |", "lacks embed.weight, norm.weight", "not in the optimizer"],
    ),
    "not tied after sharding": (
        FSDP2_TP, [("parallelize_module(model, mesh[\"tp\"], plan)\n        model.head.weight = model.embed.weight\n",
          "parallelize_module(model, mesh[\"tp\"], plan)\n")], [ONE, "2 --tp 2"],
        ["tied weights |", "embed.weight and head.weight do not share one tensor", "not tied after sharding"],
    ),
    "norms not reduced over tp": (
        FSDP2_TP, [("            reduce_norm_gradients(model, mesh)\n", "")], [ONE, "2 --tp 2"],
        ["gradient |", "blocks.1.norm.weight", "the sum over tp is missing: the replicas sum to the reference"],
    ),
    "learning rate times processes": (
        FSDP2_TP, [("lr=1e-2", "lr=1e-2 * dp_size")], [ONE, "2"],
        ["learning rate |", "0.02 in step 1", "multiplied by the number of"],
    ),
    "initial weights of each rank": (
        FSDP2_TP, [("    model = Model()\n", "    torch.manual_seed(dist.get_rank())\n    model = Model()\n")],
        [ONE, "2"],
        ["initial |", "initial weights differ on rank 1", "start from different weights"],
    ),
    "summed over data-parallel ranks": (
        FSDP2_TP, [("    shard(model, mesh)\n", SUMMED)], [ONE, "2 --accumulate 1"],
        ["gradient |", "2.000 × the reference", "summed over dp_shard (2 ranks) instead of averaged"],
    ),
    "no reduction over data-parallel ranks": (
        DDP, [("    model = DistributedDataParallel(net)", "    model = net")], ["1", "2"],
        ["gradient |", "differ between ranks 0 and 1", "the mean over dp_replicate is missing"],
    ),
    "reduced in no micro-batch": (
        DDP, [(before, after.replace("at == 1", "at == 2")) for before, after in ACCUMULATED], ["1", "2"],
        ["gradient |", "differ between ranks 0 and 1", "the mean over dp_replicate is missing"],
    ),
    "another seed of the data": (
        DDP, [("manual_seed(step)", "manual_seed(step + size)")], ["1", "2"],
        ["samples |", "step 1 reads the samples of step 2 of the reference", "1 step ahead"],
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_found_by_name_and_cause(fault, tmp_path):
    script, changes, layouts, words = FAULTS[fault]
    proof = prove(planted(script, tmp_path, *changes), *layouts)
    assert not proof
    found = causes(proof)
    assert len(found) <= 2, found
    assert all(word in found[0] for word in words), found
