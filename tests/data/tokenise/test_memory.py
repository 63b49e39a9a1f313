"""Memory of tokenising does not grow with the corpus. `meshwright bench tokenise` measures a gigabyte."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from meshwright_bench.tokenise.corpora import Kind, write_corpus

SIZES = (20_000_000, 32_000_000)
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**18)}
"""Has glibc return memory as soon as it is freed: by default it keeps up to 100 MB or so, more for larger corpora."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Kind.ONE_FILE, Kind.JSON_LINES])
def test_memory_is_that_of_a_corpus_of_half_the_size(tmp_path, kind):
    peaks = []
    for size in SIZES:
        source, text_field = write_corpus(kind, tmp_path / f"{size}", size)
        arguments = json.dumps([source, text_field, "bytes", str(tmp_path / "cache")])
        command = [sys.executable, "-m", "meshwright_bench.tokenise.measure", arguments]
        found = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | RETURN_MEMORY)
        peaks.append(json.loads(found.stdout)["peak_bytes"])
    assert peaks[1] - peaks[0] < (SIZES[1] - SIZES[0]) / 2
