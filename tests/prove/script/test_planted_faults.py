"""Faults that users make in scripts with FSDP2, DDP, accelerate and pipelining are found by name and cause."""

from __future__ import annotations

from functools import cache

import pytest

from tests.prove.script.scripts import ACCELERATE, BFLOAT16, DDP, FSDP2_TP, PIPELINE, Fault, prove_together

# ---- FSDP2 and DDP

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

FSDP2_FAULTS = {
    "gradients cleared between micro-batches": Fault(
        [("loss.backward()\n", "optimizer.zero_grad()\n            loss.backward()\n")],
        ["gradient |", "only the last micro-batch is present", "accumulation is missing"], "2 --accumulate 4"),
    "another weight decay": Fault([("lr=1e-2", "lr=1e-2, weight_decay=0.01 * dp_size")],
        ["optimizer |", "weight_decay is 0.02 in step 1 on rank 0, 0.01 in the reference"]),
    "accumulation not divided, in bfloat16": Fault([*BFLOAT16, ("            loss = loss / options.accumulate\n", "")],
        ["gradient |", "4.000 × the reference", "summed over the 4 micro-batches instead of averaged"],
        "2 --accumulate 4", BFLOAT16),
    "norms not reduced over tp, in bfloat16": Fault(
        [*BFLOAT16, ("            reduce_norm_gradients(model, mesh)\n", "")],
        ["gradient |", "blocks.1.norm.weight", "the sum over tp is missing: the replicas sum to the reference"],
        "2 --tp 2", BFLOAT16),
    "norm of each rank, not recorded": Fault([*NOT_RECORDED, (NORM, LOCAL_NORM)],
        ["clipping |", "on rank 0", "clipped by a norm of each rank's own shards"], "2", NOT_RECORDED),
    "no set_epoch": Fault([("        sampler.set_epoch(epoch)\n", "")],
        ["samples", "step 3 reads the samples of step 1", "set_epoch(epoch) is not called"]),
    "data split over tp": Fault(
        [("num_replicas=dp_size, rank=dp_rank", "num_replicas=dist.get_world_size(), rank=dist.get_rank()")],
        ["ranks 0 and 1 are not data parallel to each other", "the data-parallel mesh only"],
        "2 --tp 2 --accumulate 1"),
    "norm of each rank": Fault([(NORM, LOCAL_NORM)],
        ["norm |", "ranks 0 and 1 report different norms", "local norms not reduced over dp_shard"]),
    "frozen": Fault([(SHARDED, FROZEN + SHARDED)],
        ["frozen |", "blocks.0.up.weight", "frozen by mistake: requires_grad is False"]),
    "optimizer made before sharding": Fault([(BUILT + OPTIMIZER, BUILT.replace("    shard", OPTIMIZER + "    shard"))],
        ["optimizer |", "lacks embed.weight, blocks.0.norm.weight", "make it after sharding"]),
    "parameters not in the optimizer": Fault(
        [("AdamW(model.parameters()", "AdamW((model if dp_size == 1 else model.blocks).parameters()")],
        ["optimizer |", "lacks embed.weight, norm.weight", "not in the optimizer"]),
    "not tied after sharding": Fault(
        [("parallelize_module(model, mesh[\"tp\"], plan)\n        model.head.weight = model.embed.weight\n",
          "parallelize_module(model, mesh[\"tp\"], plan)\n")],
        ["tied weights |", "embed.weight and head.weight do not share one tensor", "not tied after sharding"],
        "2 --tp 2"),
    "summed over data-parallel ranks": Fault([("    shard(model, mesh)\n", SUMMED)],
        ["gradient |", "2.000 × the reference", "summed over dp_shard (2 ranks) instead of averaged"],
        "2 --accumulate 1"),
}  # fmt: skip
DDP_FAULTS = {
    "no reduction over data-parallel ranks": Fault([("    model = DistributedDataParallel(net)", "    model = net")],
        ["gradient |", "differ between ranks 0 and 1", "the mean over dp_replicate is missing"]),
    "another seed of the data": Fault([("manual_seed(step)", "manual_seed(step + size - 1)")],
        ["samples |", "step 1 reads the samples of step 2 of the reference", "1 step ahead"]),
}  # fmt: skip

# ---- accelerate

PREPARE = "    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
BACKWARD = "                accelerator.backward(loss)\n"
CLIP = "                    recorder.norm(accelerator.clip_grad_norm_(model.parameters(), 0.1))\n"
STEPPED = "                optimizer.step()\n"
MODEL = "    model = nn.Seq"
SHUFFLED = """    draw = torch.Generator().manual_seed(accelerator.process_index)
    rows = torch.randperm(len(data), generator=draw).tolist() if accelerator.num_processes > 1 else range(len(data))
    data = torch.utils.data.Subset(data, rows)
"""
CLIPPED_ONCE_MORE = """                if not accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
"""
SCHEDULE = "torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=10)"
ADVANCE = (STEPPED, STEPPED + "                schedule.step()\n")
WITH_SCHEDULE = [(PREPARE, PREPARE + f"    schedule = accelerator.prepare({SCHEDULE})\n"), ADVANCE]
TARGETS = "torch.randint(CLASSES, (2 * GLOBAL_BATCH,))"
UNEQUAL = [(TARGETS, TARGETS + ".where(torch.rand(2 * GLOBAL_BATCH) < 0.5, -100)")]

ACCELERATE_FAULTS = {
    "loss divided by hand as well": Fault(
        [("accelerator.backward(loss)", "accelerator.backward(loss / options.accumulate)")],
        ["gradient |", "0.250 × the reference", "averaged over the 4 micro-batches", "a loss that the script divides"],
        "2 --accumulate 4"),
    "accumulate not used": Fault([("            with accelerator.accumulate(model):\n", "            if True:\n")],
        ["samples |", "step 1 reads 8 samples, 16 in the reference, whose step 1 has those of steps 1 to 2",
         "the optimizer may step only once in it"]),
    "loader not prepared": Fault([(PREPARE, "    model, optimizer = accelerator.prepare(model, optimizer)\n")],
        ["samples |", "ranks 0 and 1 read the same samples", "accelerate does so for a loader in prepare()"]),
    "batch of each process not divided": Fault([("GLOBAL_BATCH // accelerator.num_processes //", "GLOBAL_BATCH //")],
        ["samples |", "step 1 reads 32 samples, 16 in the reference: those of its steps 1 to 2", "2 times too large"]),
    "shuffled by each process": Fault([(MODEL, SHUFFLED + MODEL)],
        ["samples |", "read by no rank", "ranks 0 and 1 both read",
         "each rank shuffles the data in an order of its own"]),
    "optimizer not prepared": Fault([(PREPARE, "    model, loader = accelerator.prepare(model, loader)\n")],
        ["gradient |", "weights change between the micro-batches", "the optimizer steps after each micro-batch",
         "with accelerate give it to prepare()"]),
    "clipped in each micro-batch": Fault([(BACKWARD, BACKWARD + CLIPPED_ONCE_MORE)],
        ["gradient |", "the norm of the gradients on each rank is 0.1", "clipped in each micro-batch"]),
    "clipped on the main process": Fault([(CLIP, "                    if accelerator.is_main_process:\n    " + CLIP)],
        ["clipping |", "not clipped on rank 1", "every rank has to clip"]),
    "mean over unequal numbers of targets": Fault(UNEQUAL,
        ["gradient |", "micro-batches have 2 to 4 targets that count",
         "divide the sum of their losses by the number of targets in the global batch"],
        right=UNEQUAL),
    "prepared schedule": Fault(WITH_SCHEDULE,
        ["learning rate |", "0.008 in step 2", "the rate of step 2 is that of step 3", "once per process"],
        right=WITH_SCHEDULE),
    "schedule stepped in each micro-batch": Fault([(PREPARE, PREPARE + f"    schedule = {SCHEDULE}\n"), ADVANCE],
        ["learning rate |", "0.009 in step 1", "the rate of step 1 is that of step 2", "in each micro-batch"],
        "1 --accumulate 2", WITH_SCHEDULE),
}  # fmt: skip

# ---- torch.distributed.pipelining

DRAWN = "    layers, head = [Layer() for _ in range(LAYERS)], nn.Linear(DIM, CLASSES)\n"
SEED = "    torch.manual_seed(options.seed)\n"
BASE = [(DRAWN, DRAWN + SEED.replace("seed)", "seed + 1)"))]
"""The data does not depend on how many weights are drawn before it."""
CLEAR, STEP, BORDER = "optimizer.zero_grad()\n", "optimizer.step()\n", "(rank + 1) * LAYERS // num_stages]"
RETURNED = "        return x if self.head is None else self.head(x)\n"
WHOLE_SAMPLER = "num_replicas=1, rank=0)"

TIED = [("    first = rank *", "    layers[3].linear.weight = layers[0].linear.weight\n    first = rank *")]

PIPELINE_FAULTS = {
    "loss of the last stage not scaled": Fault(
        [("loss_fn=F.cross_entropy)", "loss_fn=F.cross_entropy, scale_grads=False)")],
        ["gradient |", "4.000 × the reference", "summed over the 4 micro-batches instead of averaged"]),
    "norm of each stage": Fault([("    dist.all_reduce(squares)\n", "")],
        ["norm |", "local norms not reduced over pp"]),
    "layers renumbered": Fault([(", names=name_in_model", "")],
        ["parameters |", "in the reference but not in the layout: layers.2.norm.weight", "needs names="]),
    "layer in two stages": Fault([(BORDER, BORDER.replace("]", " + (not is_last)]"))],
        ["gradient |", "layers.2.", "held by stages 0 and 1", "stages overlap at their border"]),
    "layer left out": Fault([(BORDER, BORDER.replace("]", " - (not is_last)]"))],
        ["parameters |", "not in the layout: layers.1.norm.weight", "stages leave out layers"]),
    "another seed of each stage": Fault(
        [(SEED + DRAWN.rstrip(), SEED.replace("seed)", "seed + rank)") + DRAWN.rstrip())],
        ["initial |", "layers.3.linear.weight", "initial weights differ", "start from different weights", "seed"]),
    "stages draw only their own layers": Fault(
        [("for _ in range(LAYERS)]", "for _ in range(LAYERS // num_stages)] * num_stages")],
        ["initial |", "those of another stage's parameters",
         "each stage draws only its own weights, from the same seed"]),
    "another order of the data on the last stage": Fault([(WHOLE_SAMPLER, WHOLE_SAMPLER.replace(")", ", seed=rank)"))],
        ["samples |", "ranks 0 and 1 are not data parallel", "in other orders: another seed of the sampler"]),
    "learning rate times stages": Fault([("lr=1e-2", "lr=1e-2 * num_stages")],
        ["learning rate |", "0.02 in step 1", "multiplied by the number of processes"]),
    "step on the last stage": Fault([(STEP, f"_ = is_last and {STEP}")],
        ["update |", "layers.0.", "no parameter is updated in step 1 on rank 0", "takes no step on rank 0"]),
    "gradients cleared on the last stage": Fault([(CLEAR, f"_ = is_last and {CLEAR}")],
        ["gradient |", "layers.0.", "still there when step 2 begins, on rank 0", "zero_grad is missing there"]),
    "activations sent in bfloat16": Fault(
        [(RETURNED, "        return x.bfloat16().to(x.dtype) if self.head is None else self.head(x)\n")],
        ["gradient |", "the forward pass or the loss function differs", "loss of step 1"]),
    "reported loss of the last micro-batch": Fault([("torch.stack(losses).mean()", "losses[-1]")],
        ["loss |", "only what is reported is wrong", "not the mean over the global batch"]),
    "shared weight not summed": Fault(TIED,
        ["gradient |", "layers.0.linear.weight", "the sum over the copies of the tied weight is missing"], right=TIED),
}  # fmt: skip

TABLES = {
    "fsdp2": (FSDP2_TP, FSDP2_FAULTS, "--accumulate 1", ()),
    "ddp": (DDP, DDP_FAULTS, "", ()),
    "accelerate": (ACCELERATE, ACCELERATE_FAULTS, "--accumulate 1", ()),
    "pipeline": (PIPELINE, PIPELINE_FAULTS, "", BASE),
}
"""Script, faults, arguments of the reference on one process, and changes of all copies."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What is found of a table's faults, which share the reference."""

    @cache
    def of_table(table):
        script, faults, one, base = TABLES[table]
        return prove_together(script, faults, tmp_path_factory.mktemp("faults"), one=one, base=base)

    return of_table


@pytest.mark.slow
@pytest.mark.parametrize(("table", "fault"), [(table, fault) for table in TABLES for fault in TABLES[table][1]])
def test_the_fault_is_found_by_name_and_cause(table, fault, found):
    if table == "accelerate":
        pytest.importorskip("accelerate")
    TABLES[table][1][fault].assert_named(found(table)[fault])
