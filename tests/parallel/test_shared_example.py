"""The shared-parameter example works as documented, and the docs show the file verbatim."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import clean_environment

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs/examples/shared_parameter.py"
PAGE = ROOT / "docs/shared-gradients.md"


@pytest.mark.slow
def test_the_example_trains_and_its_copies_stay_equal(tmp_path):
    environment = clean_environment(OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    first, last, equal = done.stdout.splitlines()
    assert equal == "copies bitwise equal: True"
    losses = [float(re.fullmatch(r"step \d+: loss (\d+\.\d+)", line)[1]) for line in (first, last)]
    assert losses[1] < 0.7 * losses[0], "it learns"
    assert f"\n{equal}\n```" in PAGE.read_text("utf-8")


def test_the_page_shows_the_file():
    [shown] = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert shown == EXAMPLE.read_text("utf-8")
