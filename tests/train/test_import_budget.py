"""What a plain run, a plan and a help page import of ours stays within a budget; what is off isn't imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import SMALL, clean_environment, meshwright, small_corpus

COUNT = """
import sys

def ours():
    files = {name: module.__file__ for name, module in sys.modules.items()
             if name.split(".")[0] == "meshwright" and getattr(module, "__file__", None)}
    return {name: sum(1 for _ in open(file, encoding="utf-8")) for name, file in files.items()}

class Count:
    def start(self, run):
        self.path = run.folder / "imports"

    def log(self, step, values):
        pass

    def close(self, failed):
        self.path.write_text("\\n".join(f"{lines} {name}" for name, lines in ours().items()))
"""
OFF = ("capture", "reshard", "prove", "api", "features.float8.plan", "features.float8.run",
       "features.compression.run", "features.capture.run", "features.all_to_alls.run",
       "nn.experts", "nn.recompute", "comm.kernels",
       "comm.compression.fsdp_compress", "parallel.tensor_parallel", "parallel.expert_dispatch",
       "parallel.context.ring",
       "train.record.draw_expert_load", "train.report.page")  # fmt: skip
"""What ranks of a plain run have no use for."""


@pytest.mark.slow
def test_a_rank_of_a_plain_run(tmp_path: Path) -> None:
    """In ranks of a server of their own, which has imported nothing for tests."""
    (tmp_path / "counting.py").write_text(COUNT)
    words = ["mesh.dp_shard=2", *SMALL, *small_corpus(tmp_path), "train.steps=2", "train.threads=1"]
    done = meshwright("run", "llama-tiny", *words, "train.trackers=counting:Count", "--out", str(tmp_path / "run"),
                      env=clean_environment(PYTHONPATH=str(tmp_path)))  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = dict(line.split()[::-1] for line in (tmp_path / "run/imports").read_text().splitlines())
    needless = [name for name in found for part in OFF if f"{name}.".startswith(f"meshwright.{part}.")]
    assert needless == []
    assert len(found) <= 330 and sum(map(int, found.values())) <= 39_000


@pytest.mark.parametrize(
    ("words", "num_modules", "num_lines"), [("--help", 65, 7_200), ("plan llama-tiny mesh.dp_shard=2", 180, 19_000)]
)
def test_a_command(words: str, num_modules: int, num_lines: int) -> None:
    code = f"{COUNT}\nimport atexit\natexit.register(lambda: print(len(ours()), sum(ours().values())))\n"
    code += f"from meshwright.__main__ import main\nsys.argv = ['meshwright', *{words.split()!r}]\nmain()\n"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ), check=True
    )
    modules, lines = map(int, done.stdout.splitlines()[-1].split())
    assert (modules <= num_modules) and (lines <= num_lines), (modules, lines)
