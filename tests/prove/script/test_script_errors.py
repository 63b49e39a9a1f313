"""Scripts and layouts that can't be proved: what is wrong, where, and a fix."""

from __future__ import annotations

import re

import pytest

from meshwright.api import prove_script
from meshwright.errors import InputError, MeshwrightError
from meshwright.prove.script.layout_choice import parse_layout
from tests.prove.script.scripts import DDP, planted, prove


@pytest.mark.parametrize("text", ["", "two", "0", "-1", "--tp 2", "1.5", "'", "²"])
def test_a_layout_begins_with_a_number_of_processes(text):
    with pytest.raises(InputError, match="does not begin with a number of processes") as caught:
        parse_layout(text)
    assert "--layout" in caught.value.fix


def test_a_layout_has_arguments():
    assert parse_layout("4 --tp 2 --name 'a b'").arguments == ("--tp", "2", "--name", "a b")


def test_a_script_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="file not found"):
        prove_script(tmp_path / "no.py", ["1", "2"])


@pytest.mark.parametrize("layouts", [[], ["1"]])
def test_one_layout_is_too_few(layouts):
    with pytest.raises(InputError, match="layout") as caught:
        prove_script(DDP, layouts)
    assert caught.value.fix == '--layout "1" --layout "2"'


CASES = {
    "no recorder": (
        [("recorder = Recorder(model, optimizer)", "from unittest.mock import Mock; recorder = Mock()")],
        ["ended without 3 recorded steps on rank 0", "meshwright.prove.Recorder"],
    ),
    "fewer steps": ([("range(10)", "range(2)")], ["ended without 3 recorded steps", "--steps"]),
    "no gradients": ([("        recorder.gradients()\n", "")], ["recorded no gradient", "recorder.gradients()"]),
    "no samples": ([("        recorder.batch(inputs)\n", "")], ["recorded no sample", "recorder.batch"]),
    "no loss": ([("        recorder.loss(loss)\n", "")], ["recorded no loss", "recorder.loss"]),
    "seed of the weights": (
        [("    torch.manual_seed(0)\n", "    torch.seed()\n")],
        ["not deterministic", "start from different weights", "seed everything"],
    ),
    "seed of the data": (
        [(".manual_seed(step)", "")] + [("torch.Generator()", "torch.Generator(); draw.seed()")],
        ["not deterministic", "read different samples"],
    ),
    "dropout": (
        [("nn.Tanh(),", "nn.Dropout(0.5),"), ("    recorder =", "    torch.seed()\n    recorder =")],
        ["not deterministic", "different gradients in step 1"],
    ),
    "an error of the script": (
        [("        optimizer.step()\n", "        optimizer.no_step()\n")],
        ["train.py failed on rank 0 of layout '1'", "no attribute 'no_step'", "train.py, line 36", "torchrun"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_a_script_that_cannot_be_proved_is_told_why(case, tmp_path):
    changes, words = CASES[case]
    with pytest.raises(MeshwrightError) as caught:
        prove(planted(DDP, tmp_path, *changes), "1", "2")
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.slow
def test_a_script_that_hangs_is_ended_and_shows_where(tmp_path):
    script = planted(DDP, tmp_path, ("        optimizer.step()\n", "        import time; time.sleep(100)\n"))
    with pytest.raises(MeshwrightError) as caught:
        prove_script(script, ["1", "2"], timeout_s=5)
    assert "did not end within 5 s on layout '1'" in str(caught.value), str(caught.value)
    assert re.search(r"rank 0: File .*train.py.*, line 36 in main", str(caught.value)), str(caught.value)
