"""The example scripts, copies of them with a planted fault, and proofs of both."""

from __future__ import annotations

from pathlib import Path

from meshwright.api import prove_script

ROOT = Path(__file__).parents[3]
FSDP2_TP = ROOT / "docs/examples/script_fsdp2_tp.py"
PIPELINE = ROOT / "docs/examples/script_pipeline.py"
ACCELERATE = ROOT / "docs/examples/script_accelerate.py"
DDP = Path(__file__).with_name("ddp_script.py")

BFLOAT16 = [
    ("import fully_shard\n", """import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as shard_fully


def fully_shard(module: nn.Module, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_fully(module, mesh=mesh, mp_policy=policy)


"""),
]  # fmt: skip
"""Changes of the FSDP2 script to mixed precision."""

ACCUMULATED = [
    ("        recorder.loss(loss)\n", ""),
    ("""        recorder.batch(inputs)
        loss = (model(inputs) - inputs.roll(1, dims=1)).square().mean()
        loss.backward()
""", """        for at, half in enumerate(inputs.chunk(2)):
            model.require_backward_grad_sync = at == 1
            recorder.batch(half)
            loss = (model(half) - half.roll(1, dims=1)).square().mean()
            recorder.loss(loss)
            (loss / 2).backward()
"""),
]  # fmt: skip
"""Changes of the DDP script to two micro-batches, of which the second reduces gradients, as accelerate does it."""


def planted(script, folder, *changes):
    """A copy of a script in `folder` with pieces of its source replaced, each of which it has once."""
    return written(script, folder / "train.py", *changes)


def written(script, copy, *changes):
    """Write a copy of a script with pieces of its source replaced, each of which it has once."""
    text = script.read_text("utf-8")
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    copy.write_text(text, "utf-8")
    return copy


def prove(script, *layouts, arguments=(), steps=3):
    return prove_script(script, layouts, arguments=arguments, steps=steps, timeout_s=200)


def causes(proof):
    """What a proof says: of each finding that follows from no other, all words."""
    return causes_in(
        [*proof.report["findings"], *(one for layout in proof.report["layouts"] for one in layout["findings"])]
    )


def causes_in(findings):
    """The words of each finding that follows from no other."""
    return [
        " | ".join([one["about"], *one["members"], one["symptom"], one["cause"], one["detail"]])
        for one in findings
        if not one["is_consequence"]
    ]
