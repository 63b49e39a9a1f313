"""Many faults of one script in one proof: they share the reference, which takes most of a proof's time."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.prove.script.scripts import causes_in, prove, written

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
