"""Faults that users of torch.distributed.pipelining make are found by name and cause."""

from __future__ import annotations

import pytest

from tests.prove.script.faults_together import Fault, prove_together
from tests.prove.script.scripts import PIPELINE

DRAWN = "    layers, head = [Layer() for _ in range(LAYERS)], nn.Linear(DIM, CLASSES)\n"
SEED = "    torch.manual_seed(options.seed)\n"
BASE = [(DRAWN, DRAWN + SEED.replace("seed)", "seed + 1)"))]
"""The data does not depend on how many weights are drawn before it."""
CLEAR, STEP, BORDER = "optimizer.zero_grad()\n", "optimizer.step()\n", "(rank + 1) * LAYERS // num_stages]"
RETURNED = "        return x if self.head is None else self.head(x)\n"
SAMPLER = "num_replicas=1, rank=0)"

TIED = [("    first = rank *", "    layers[3].linear.weight = layers[0].linear.weight\n    first = rank *")]

FAULTS = {
    "loss of the last stage not scaled": Fault(
        [("loss_fn=F.cross_entropy)", "loss_fn=F.cross_entropy, scale_grads=False)")],
        ["gradient |", "4.000 × the reference", "summed over the 4 micro-batches instead of averaged"],
    ),
    "norm of each stage": Fault(
        [("    dist.all_reduce(squares)\n", "")], ["norm |", "local norms not reduced over pp"]
    ),
    "layers renumbered": Fault(
        [(", names=name_in_model", "")],
        ["parameters |", "in the reference but not in the layout: layers.2.norm.weight", "needs names="],
    ),
    "layer in two stages": Fault(
        [(BORDER, BORDER.replace("]", " + (not is_last)]"))],
        ["gradient |", "layers.2.", "held by stages 0 and 1", "stages overlap at their border"],
    ),
    "layer left out": Fault(
        [(BORDER, BORDER.replace("]", " - (not is_last)]"))],
        ["parameters |", "not in the layout: layers.1.norm.weight", "stages leave out layers"],
    ),
    "another seed of each stage": Fault(
        [(SEED + DRAWN.rstrip(), SEED.replace("seed)", "seed + rank)") + DRAWN.rstrip())],
        ["initial |", "layers.3.linear.weight", "initial weights differ", "start from different weights", "seed"],
    ),
    "stages draw only their own layers": Fault(
        [("for _ in range(LAYERS)]", "for _ in range(LAYERS // num_stages)] * num_stages")],
        ["initial |", "those of another stage's parameters",
         "each stage draws only its own weights, from the same seed"],
    ),
    "another order of the data on the last stage": Fault(
        [(SAMPLER, SAMPLER.replace(")", ", seed=rank)"))],
        ["samples |", "ranks 0 and 1 are not data parallel", "in other orders: another seed of the sampler"],
    ),
    "learning rate times stages": Fault(
        [("lr=1e-2", "lr=1e-2 * num_stages")],
        ["learning rate |", "0.02 in step 1", "multiplied by the number of processes"]
    ),
    "step on the last stage": Fault(
        [(STEP, f"_ = is_last and {STEP}")],
        ["after_first_step |", "layers.0.", "no parameter is updated in step 1 on rank 0", "takes no step on rank 0"],
    ),
    "gradients cleared on the last stage": Fault(
        [(CLEAR, f"_ = is_last and {CLEAR}")],
        ["gradient |", "layers.0.", "still there when step 2 begins, on rank 0", "zero_grad is missing there"],
    ),
    "activations sent in bfloat16": Fault(
        [(RETURNED, "        return x.bfloat16().to(x.dtype) if self.head is None else self.head(x)\n")],
        ["gradient |", "the forward pass or the loss function differs", "loss of step 1"],
    ),
    "reported loss of the last micro-batch": Fault(
        [("torch.stack(losses).mean()", "losses[-1]")],
        ["loss |", "only what is reported is wrong", "not the mean over the global batch"],
    ),
    "shared weight not summed": Fault(
        TIED,
        ["gradient |", "layers.0.linear.weight", "the sum over the copies of the tied weight is missing"],
        right=TIED,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return prove_together(PIPELINE, FAULTS, tmp_path_factory.mktemp("faults"), one="", base=BASE)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_found_by_name_and_cause(fault, found):
    FAULTS[fault].assert_named(found[fault])
