"""Mutants are what they say, and what becomes of one is told right."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.prove.mutants.mutate import mutants_of, mutated

SOURCE = '''
"""A module."""
LIMIT: int = 3

def step(loss: float = 1.0) -> float:
    """Not a change."""
    if loss > 2 and not done(loss):
        raise ValueError(1 + 1)
    total.value = loss / 4
    total.count += 1
    clear()
    return total.value if loss == 0 else -loss * 0.5
'''
EXPECTED = {
    "loss > 2 → loss >= 2", "2 → 3", "loss > 2 and (not done(loss)) → loss > 2 or not done(loss)",
    "not done(loss) → done(loss)", "total.value = loss / 4 → pass", "loss / 4 → loss * 4", "4 → 5",
    "total.count += 1 → total.count -= 1", "total.count += 1 → pass", "1 → 2", "clear() → pass",
    "total.value if loss == 0 else -loss * 0.5 → total.value", "loss == 0 → loss != 0", "0 → 1", "-loss → loss",
    "total.value if loss == 0 else -loss * 0.5 → -loss * 0.5", "-loss * 0.5 → -loss / 0.5", "0.5 → 2.0",
}  # fmt: skip


def test_every_change_is_one_of_an_operator_a_constant_or_a_statement(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(SOURCE, "utf-8")
    mutants = mutants_of("module", path, set(range(100)))
    found = {f"{one.before} → {one.after}" for one in mutants}
    dropped = {one for one in found if one.startswith("if ")}
    assert found - dropped == EXPECTED and len(dropped) == 1 and "if False" in dropped.pop()
    assert {one.line for one in mutants_of("module", path, {11})} == {11}
    right = ast.unparse(ast.parse(SOURCE))
    wrong = {ast.unparse(mutated(one, path)) for one in mutants}
    assert len(wrong) == len(mutants) and right not in wrong
    for one in wrong:
        lines = zip(right.splitlines(), one.splitlines(), strict=False)
        assert "Not a change" in one and sum(a != b for a, b in lines) >= 1
        compile(one, "module", "exec")


TRIED = {
    "loss_sum(out, targets) / num_units  →": "caught",
    "register_parameter(name, nn.Parameter(": "loud",
    "cache.kept = (*cache.kept": "same",
}


@pytest.mark.slow
def test_what_becomes_of_mutants_is_told_right(tmp_path: Path) -> None:
    root, results = Path(__file__).parents[3], tmp_path / "results.json"
    words = [word for text in TRIED for word in ("--match", text)]
    command = [sys.executable, "-m", "tests.prove.mutants", "--only", "tp", *words, "--json", str(results)]
    subprocess.run(command, cwd=root, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    for one in json.loads(results.read_text("utf-8")):
        name = f"{one['before']}  →  {one['after']}"
        [kind] = {kind for text, kind in TRIED.items() if text in name}
        assert one["kind"] == kind, one
