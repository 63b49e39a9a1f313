"""The example scripts, copies of them with planted faults, and proofs of both.

Many faults of one script are in one proof: they share the reference, which takes most of a proof's time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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


START = """import runpy
import sys
from pathlib import Path

runpy.run_path(str(Path(__file__).with_name(sys.argv.pop(1))), run_name="__main__")
"""
"""A script that runs the one that a layout names first, and leaves it the other arguments."""


@dataclass(frozen=True)
class Fault:
    """Changes of a script, and what its proof has to say.

    On one process without accumulation the changes have no effect, so that the right script is the reference for all.
    If they need what it lacks, as a schedule, `right` has the changes that give it to the right script.
    """

    changes: list[tuple[str, str]]
    words: list[str]
    layout: str = "2"
    right: list[tuple[str, str]] = field(default_factory=list)

    def assert_named(self, found):
        """The first cause found is this fault's, and at most one other is."""
        assert 1 <= len(found) <= 2, found
        assert all(word in found[0] for word in self.words), found


def prove_together(script, faults, folder, *, one, base=(), steps=3):
    """Prove copies of a script with one fault each; return the causes found by name of fault.

    Args:
        one: arguments of the script on one process, the reference.
        base: changes of all copies and of the reference.
    """
    found = {}
    groups = {str(fault.right): {} for fault in faults.values()}
    for name, fault in faults.items():
        groups[str(fault.right)][name] = fault
    for group in groups.values():
        found |= _prove_group(script, group, folder / str(len(found)), one, base, steps)
    return found


def _prove_group(script, faults, folder, one, base, steps):
    folder.mkdir()
    (folder / "train.py").write_text(START, "utf-8")
    (first, *_) = faults.values()
    written(script, folder / "right.py", *base, *first.right)
    layouts = []
    for at, fault in enumerate(faults.values()):
        written(script, folder / f"fault-{at}.py", *base, *fault.changes)
        number, *arguments = fault.layout.split()
        layouts.append(" ".join([number, f"fault-{at}.py", *arguments]))
    proof = prove(folder / "train.py", f"1 right.py {one}", *layouts, steps=steps)
    results = zip(faults, proof.report["layouts"], strict=True)
    return {name: causes_in(layout["findings"]) for name, layout in results}
