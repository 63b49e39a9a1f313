"""The shared-parameter example works as documented, and the docs show the file verbatim."""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs/examples/shared_parameter.py"
PAGE = ROOT / "docs/shared-gradients.md"


def run_example(output):
    """Run the file as a program, but its ranks are forked from this process, which has imported torch."""
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), sys.stdout.fileno())
    forked = partial(torch.multiprocessing.start_processes, start_method="fork")
    with mock.patch.object(torch.multiprocessing, "spawn", forked):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


@pytest.mark.slow
def test_the_example_trains_and_its_copies_stay_equal(gang, tmp_path):
    """From a process of its own, which is forked from the server of gangs."""
    process = multiprocessing.get_context("forkserver").Process(target=run_example, args=(tmp_path / "shown",))
    process.start()
    process.join()
    assert process.exitcode == 0
    first, last, equal = (tmp_path / "shown").read_text().splitlines()
    assert equal == "copies bitwise equal: True"
    losses = [float(re.fullmatch(r"step \d+: loss (\d+\.\d+)", line)[1]) for line in (first, last)]
    assert losses[1] < 0.7 * losses[0], "it learns"
    assert f"\n{equal}\n```" in PAGE.read_text("utf-8")


def test_the_page_shows_the_file():
    [shown] = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert shown == EXAMPLE.read_text("utf-8")
