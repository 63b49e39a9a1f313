"""`meshwright plan --devices`."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.errors import InputError, LayoutError
from meshwright.plan.rules import load

WORDS = ("llama3-8b", "--devices", "4xH100", "--global-batch", "8")


def shown(*words):
    result = CliRunner().invoke(app, ["plan", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    return result.output


def test_the_page_ranks_layouts():
    page = shown(*WORDS, "--top", 2, "--price", 2)
    assert page.startswith("llama3-8b on 4 × H100: 8 samples of 8192 tokens per step\n1  ")
    assert "\n2  " in page and "\n3  " not in page
    assert page.count("per M tokens") == 2


def test_the_file_is_a_configuration_of_the_layout(tmp_path):
    path = tmp_path / "plan.toml"
    shown(*WORDS, "mesh.tp=2", "-o", path)
    config = load(str(path))
    assert config.mesh.tp == 2
    assert config.mesh.axes().num_ranks() == 4
    assert shown(path, "--cluster", "H100")


@pytest.mark.parametrize(
    ("words", "part"),
    [("tp=3", "the devices are a multiple"), ("tp=2,recompute=full", "fits"), ("pp=4 mesh.dp_shard=2", "the devices")],
)
def test_why(words, part):
    assert part in shown(*WORDS, "--why", words)


def test_what_does_not_fit_comes_with_what_does():
    with pytest.raises(LayoutError) as caught:
        shown("llama3-8b", "--devices", "1xH100", "--global-batch", "8")
    assert "H200" in caught.value.fix
    assert "optimizer" in caught.value.rule


@pytest.mark.parametrize(
    "words", [["--devices", "H100"], ["--devices", "8"], ["--devices", "8xH100", "--cluster", "H100"]]
)
def test_devices_are_a_number_of_one_kind(words):
    with pytest.raises(InputError):
        shown("llama3-8b", *words)


def test_it_needs_no_torch():
    code = (
        "import sys; from meshwright.cli.plan_search import search_page; "
        "search_page(['llama3-8b'], devices='4xH100', cluster=None, batch=8, top=1, why=None, price=None, out=None); "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.slow
def test_the_layout_proves_and_runs(tmp_path):
    path = tmp_path / "plan.toml"
    shown("llama-tiny", "--devices", "4", "--cluster", "CPU", "--global-batch", "8", "-o", path)
    for command in (["prove", path], ["run", path, "train.steps=2", "train.validation_samples=0"]):
        words = [sys.executable, "-m", "meshwright", *map(str, command)]
        subprocess.run(words, check=True, cwd=tmp_path, timeout=600)
