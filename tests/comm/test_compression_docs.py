"""The page on compression: its example does what it says, shows that very file, and its errors are what codecs lose."""

from __future__ import annotations

import os
import re
import runpy
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshwright.comm.compression.catalogue import Use, find_method, names
from meshwright.comm.compression.codecs import decode
from tests.comm.data import encode_by

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs/examples/compressed_fsdp2.py"
PAGE = ROOT / "docs/compression.md"


def example(rank, world_size):
    """Run the example in a process group that is there, as `torchrun` has it make one; return what it prints."""
    os.environ["MASTER_PORT"] = "of this gang"
    with (
        mock.patch.object(dist, "init_process_group") as made,
        mock.patch.object(dist, "destroy_process_group"),
        redirect_stdout(StringIO()) as shown,
    ):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    made.assert_called_once_with("gloo")
    return shown.getvalue()


@pytest.mark.slow
def test_the_example_trains_and_sends_less(gang):
    shown, other = gang(2).run(example, timeout_s=120)
    assert other == ""
    lines = shown.splitlines()
    assert "step 10 is skipped on all ranks" in lines
    losses = {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\d+\.\d+)", shown)}
    assert losses[60] < 0.7 * losses[1], "it learns"
    (sent,) = [line for line in lines if line.startswith("bytes sent")]
    assert f"{sent}\n```" in PAGE.read_text("utf-8"), "bytes depend on nothing but sizes"


def test_the_page_shows_the_file():
    [shown] = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert shown == EXAMPLE.read_text("utf-8")


def test_the_page_says_what_is_lost():
    """Every method of the table, its bits, and its errors on fresh numbers."""
    row = r"^\| `([\w-]+)` \| ([\d.]+)[^|]*\|[^|]*\| ([\d.]+) \| ([\d.]+) \|$"
    rows = re.findall(row, PAGE.read_text("utf-8"), re.MULTILINE)
    assert [name for name, *_ in rows] == list(names(Use.GRADIENTS))
    n = 1 << 18
    gaussian = torch.randn(n)
    heavy = torch.randn(n) / (torch.randn(5, n).square().sum(0) / 5).sqrt()
    for name, bits, *errors in rows[1:]:
        method = find_method(name)
        assert float(bits) == pytest.approx(method.codec.encoded_bytes(n) * 8 / n, rel=1e-3)
        for x, expected in zip((gaussian, heavy), map(float, errors), strict=True):
            found = decode(encode_by(method, x), method.codec, num_elements=n, dtype=x.dtype, rotate=method.rotate)
            assert float((found - x).norm() / x.norm()) == pytest.approx(expected, rel=0.05)
