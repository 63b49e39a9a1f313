"""Tests of the table of benchmarks: every entry has a function, unknown names are errors with a suggestion."""

from __future__ import annotations

import subprocess
import sys

import pytest

from meshwright.errors import InputError
from meshwright_bench.benchmarks import BENCHMARKS, Benchmark, find_benchmark, load_body


@pytest.mark.parametrize("part", Benchmark)
def test_every_benchmark_has_an_entry_with_an_existing_function(part):
    assert BENCHMARKS[part].title
    assert callable(load_body(part))
    assert find_benchmark(str(part)) is part


@pytest.mark.parametrize("name, nearest", [("trian", "train"), ("TRAIN", "train"), ("pipelines", "pipeline")])
def test_the_error_for_an_unknown_name_suggests_the_nearest(name, nearest):
    with pytest.raises(InputError) as caught:
        find_benchmark(name)
    assert caught.value.fix == f"meshwright bench {nearest}"


@pytest.mark.parametrize("name", ["trian", "nothing-like-it", ""])
def test_the_error_for_an_unknown_name_lists_all_benchmarks(name):
    with pytest.raises(InputError) as caught:
        find_benchmark(name)
    assert caught.value.exit_code == 2
    assert caught.value.fix.removeprefix("meshwright bench ") in set(Benchmark)
    assert all(part in caught.value.rule for part in Benchmark)


def test_the_launcher_side_imports_no_torch():
    parts = ("train", "pipeline", "shared_gradients", "comm", "reshard", "operators")
    files = ["command", "report", "alternate", *(f"{part}.benchmark" for part in parts)]
    modules = ", ".join(f"meshwright_bench.{file}" for file in files)
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
