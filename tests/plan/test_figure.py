"""Figures of plans: the same each time, with what a plan has."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.cluster.presets import cluster_preset
from meshwright.errors import MeshwrightError
from meshwright.plan.figure import draw_plan
from tests.plan.plans import plan_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/planning.md").read_text("utf-8")
PIPELINE = "llama-tiny mesh.pp=2 mesh.dp_shard=2 mesh.tp=2 train.num_microbatches=4 recompute.policy=full"


def words_of(path):
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


@pytest.mark.parametrize("device", ["H100", "CPU"])
def test_a_figure_has_memory_step_and_micro_batch(tmp_path, device):
    one, two = tmp_path / "one.svg", tmp_path / "two.svg"
    for path in (one, two):
        draw_plan("a plan", plan_of(PIPELINE), path, cluster=cluster_preset(device))
    assert one.read_bytes() == two.read_bytes()
    found = set(words_of(one))
    assert {"parameters", "gradients", "optimizer", "gathered", "activations", "buffers"} <= found
    assert {"rank 0", "rank 1", "forward", "backward", "recompute", "weights", "tensor"} <= found
    assert ("memory of H100 SXM5" in found) == (device == "H100")


def test_without_a_cluster_there_is_only_memory(tmp_path):
    draw_plan("a plan", plan_of("dit-digits"), tmp_path / "plan.svg")
    found = set(words_of(tmp_path / "plan.svg"))
    assert "activations" in found and "forward" not in found


def test_deep_pipelines_show_their_first_ranks(tmp_path):
    words = "llama3-8b mesh.dp_shard=1 mesh.pp=33 model.num_layers=33 train.num_microbatches=33 train.global_batch=33"
    draw_plan("deep", plan_of(words), tmp_path / "plan.svg", cluster=cluster_preset("H100"))
    assert "rank 31" in words_of(tmp_path / "plan.svg") and "rank 32" not in words_of(tmp_path / "plan.svg")


def test_the_command_draws_and_refuses_other_formats(tmp_path):
    run = CliRunner()
    words = ["plan", "llama-tiny", "--cluster", "CPU", "--figure"]
    assert run.invoke(app, [*words, str(tmp_path / "plan.png")], catch_exceptions=False).exit_code == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(MeshwrightError):
        run.invoke(app, [*words, str(tmp_path / "plan.pdf")], catch_exceptions=False)


def test_the_docs_picture_is_what_the_command_draws(tmp_path):
    command = re.search(r"meshwright (plan .* --figure) docs/plan\.svg", PAGE)
    assert command and "(plan.svg)" in PAGE, "the page has the command that draws its picture"
    words = [*shlex.split(command[1]), str(tmp_path / "plan.svg")]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    assert words_of(tmp_path / "plan.svg") == words_of(ROOT / "docs/plan.svg") != []
