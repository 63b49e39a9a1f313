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
"""
AT_END_OF_RANKS = """
import os
from multiprocessing import util

def write_and_exit(exit=util._exit_function):
    if "meshwright.train.training_loop" in (found := ours()):
        with open(f"{os.environ['IMPORTS']}/imports-{os.getpid()}", "w") as file:
            file.write("\\n".join(f"{lines} {name}" for name, lines in found.items()))
    exit()

util._exit_function = write_and_exit
"""
OFF = ("capture", "reshard", "prove", "api", "features.float8.plan", "features.float8.run",
       "features.compression.run", "features.capture.run", "features.all_to_alls.run",
       "nn.experts", "nn.recompute", "comm.kernels",
       "comm.compression.fsdp_compress", "parallel.tensor_parallel", "parallel.expert_dispatch",
       "parallel.context_attention",
       "train.record.figures", "train.record.loss_curves", "train.record.trackers", "train.record.sink", "train.report",
       "train.launch.launcher", "train.own_optimizer", "optim.trial", "config.rules", "plan.rules", "figure",
       "train.rank_checks", "train.choose_folder", "train.continued_run", "config.load", "plan.make_plan",
       "plan.make_kinds", "plan.verify", "plan.memory", "plan.context", "plan.expert_traffic", "plan.matrix_owners",
       "pipeline.generate", "pipeline.verify", "pipeline.draw", "parallel.pipeline_shared_gradients",
       "data.images", "data.chats", "data.tokenise", "data.packed_windows", "data.packed_corpus",
       "data.mixtures.mixture_order", "data.sources.record_files", "data.sources.record_field",
       "data.sources.user_source", "models.tasks.text_reference", "optim.whole_matrix")  # fmt: skip
"""What ranks of a plain run have no use for."""


@pytest.mark.slow
def test_a_rank_of_a_plain_run(tmp_path: Path) -> None:
    """In ranks of a server of their own, which has imported nothing for tests."""
    (tmp_path / "sitecustomize.py").write_text(COUNT + AT_END_OF_RANKS)
    words = ["mesh.dp_shard=2", *SMALL, *small_corpus(tmp_path), "train.steps=2", "train.threads=1"]
    done = meshwright("run", "llama-tiny", *words, "--out", str(tmp_path / "run"),
                      env=clean_environment(PYTHONPATH=str(tmp_path), IMPORTS=str(tmp_path)))  # fmt: skip
    assert done.returncode == 0, done.stderr
    ranks = [path.read_text().splitlines() for path in tmp_path.glob("imports-*")]
    assert len(ranks) == 3  # the ranks, and what asked their server whether an import had started CUDA
    found = dict(line.split()[::-1] for line in max(ranks, key=len))  # rank 0 writes the metrics, too
    needless = [name for name in found for part in OFF if f"{name}.".startswith(f"meshwright.{part}.")]
    assert needless == []
    num_lines = sum(map(int, found.values()))
    assert len(found) <= 150 and num_lines <= 21_900, (len(found), num_lines)


@pytest.mark.parametrize(
    ("words", "num_modules", "num_lines"), [("--help", 19, 2_100), ("plan llama-tiny mesh.dp_shard=2", 111, 16_900)]
)
def test_a_command(words: str, num_modules: int, num_lines: int) -> None:
    code = f"{COUNT}\nimport atexit\natexit.register(lambda: print(len(ours()), sum(ours().values())))\n"
    code += f"from meshwright.__main__ import main\nsys.argv = ['meshwright', *{words.split()!r}]\nmain()\n"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ), check=True
    )
    modules, lines = map(int, done.stdout.splitlines()[-1].split())
    assert (modules <= num_modules) and (lines <= num_lines), (modules, lines)


def test_a_model_is_built_without_dynamo() -> None:
    """Which takes half a second to import; DTensor imports it, too."""
    code = """
import sys, torch
from meshwright.config.facts_for_family import run_facts
from meshwright.models.contract.build_module import build_part
from meshwright.plan.rules import load
for name in ("llama-tiny", "moe-tiny", "dit-digits"):
    config = load(name)
    build_part(config.family, run_facts(config), dtype=torch.float32)
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
