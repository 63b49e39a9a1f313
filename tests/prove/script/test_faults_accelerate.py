"""Faults that users of accelerate make are found by name and cause."""

from __future__ import annotations

import pytest

from tests.prove.script.faults_together import Fault, prove_together
from tests.prove.script.scripts import ACCELERATE

PREPARE = "    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
BACKWARD = "                accelerator.backward(loss)\n"
CLIP = "                    recorder.norm(accelerator.clip_grad_norm_(model.parameters(), 0.1))\n"
STEP = "                optimizer.step()\n"
MODEL = "    model = nn.Seq"
SHUFFLED = """    draw = torch.Generator().manual_seed(accelerator.process_index)
    rows = torch.randperm(len(data), generator=draw).tolist() if accelerator.num_processes > 1 else range(len(data))
    data = torch.utils.data.Subset(data, rows)
"""
CLIPPED_ONCE_MORE = """                if not accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
"""
SCHEDULE = "torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=10)"
ADVANCE = (STEP, STEP + "                schedule.step()\n")
WITH_SCHEDULE = [(PREPARE, PREPARE + f"    schedule = accelerator.prepare({SCHEDULE})\n"), ADVANCE]
TARGETS = "torch.randint(CLASSES, (2 * GLOBAL_BATCH,))"
UNEQUAL = [(TARGETS, TARGETS + ".where(torch.rand(2 * GLOBAL_BATCH) < 0.5, -100)")]

FAULTS = {
    "loss divided by hand as well": Fault(
        [("accelerator.backward(loss)", "accelerator.backward(loss / options.accumulate)")],
        ["gradient |", "0.250 × the reference", "averaged over the 4 micro-batches", "a loss that the script divides"],
        "2 --accumulate 4",
    ),
    "accumulate not used": Fault(
        [("            with accelerator.accumulate(model):\n", "            if True:\n")],
        ["samples |", "step 1 reads 8 samples, 16 in the reference, whose step 1 has those of steps 1 to 2",
         "the optimizer may step only once in it"],
    ),
    "loader not prepared": Fault(
        [(PREPARE, "    model, optimizer = accelerator.prepare(model, optimizer)\n")],
        ["samples |", "ranks 0 and 1 read the same samples", "accelerate does so for a loader in prepare()"],
    ),
    "batch of each process not divided": Fault(
        [("GLOBAL_BATCH // accelerator.num_processes //", "GLOBAL_BATCH //")],
        ["samples |", "step 1 reads 32 samples, 16 in the reference: those of its steps 1 to 2", "2 times too large"],
    ),
    "shuffled by each process": Fault(
        [(MODEL, SHUFFLED + MODEL)],
        ["samples |", "read by no rank", "ranks 0 and 1 both read",
         "each rank shuffles the data in an order of its own"],
    ),
    "optimizer not prepared": Fault(
        [(PREPARE, "    model, loader = accelerator.prepare(model, loader)\n")],
        ["gradient |", "weights change between the micro-batches", "the optimizer steps after each micro-batch",
         "with accelerate give it to prepare()"],
    ),
    "clipped in each micro-batch": Fault(
        [(BACKWARD, BACKWARD + CLIPPED_ONCE_MORE)],
        ["gradient |", "the norm of the gradients on each rank is 0.1", "clipped in each micro-batch"],
    ),
    "clipped on the main process": Fault(
        [(CLIP, "                    if accelerator.is_main_process:\n    " + CLIP)],
        ["clipping |", "not clipped on rank 1", "every rank has to clip"],
    ),
    "mean over unequal numbers of targets": Fault(
        UNEQUAL,
        ["gradient |", "micro-batches have 2 to 4 targets that count",
         "divide the sum of their losses by the number of targets in the global batch"],
        right=UNEQUAL,
    ),
    "prepared schedule": Fault(
        WITH_SCHEDULE,
        ["learning rate |", "0.008 in step 2", "the rate of step 2 is that of step 3", "once per process"],
        right=WITH_SCHEDULE,
    ),
    "schedule stepped in each micro-batch": Fault(
        [(PREPARE, PREPARE + f"    schedule = {SCHEDULE}\n"), ADVANCE],
        ["learning rate |", "0.009 in step 1", "the rate of step 1 is that of step 2", "in each micro-batch"],
        "1 --accumulate 2", WITH_SCHEDULE,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    pytest.importorskip("accelerate")
    return prove_together(ACCELERATE, FAULTS, tmp_path_factory.mktemp("faults"), one="--accumulate 1")


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_found_by_name_and_cause(fault, found):
    FAULTS[fault].assert_named(found[fault])
