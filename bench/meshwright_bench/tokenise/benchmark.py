"""`bench tokenise`: seconds and peak memory of tokenising a gigabyte of text. Torch-free.

Each case is a process of its own, which opens a corpus that is not in the cache, as the first run on it does.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from meshwright.data.tokenizer_files import BYTES
from meshwright_bench.benchmarks import Benchmark, Options, Say
from meshwright_bench.devices import refuse_cuda
from meshwright_bench.report import Figure, Report, cpu_name, of_rounds
from meshwright_bench.tokenise.corpora import VOCAB_SIZE, Kind, train_tokenizer, write_corpus

GB = 10**9
BPE = "bpe"
CASES = ((Kind.FILES, BYTES, GB), (Kind.JSON_LINES, BYTES, GB), (Kind.ONE_FILE, BYTES, GB),
         (Kind.ONE_FILE, BPE, GB // 10), (Kind.JSON_LINES, BPE, GB))  # fmt: skip
"""Corpus, tokenizer and characters. One file with a BPE takes most memory; a tenth of it shows how much."""
AT_MOST_BYTES = 10**9
"""Target: memory of the process, everything included."""

NOTES = (
    "the source of Python's standard library again and again, 1 GB: as files of their own, as one file of JSON lines, "
    "and as one text file (0.1 GB for bpe)",
    f"bytes: data.tokenizer=bytes; bpe: a tokenizer.json, byte-level BPE of {VOCAB_SIZE:,} tokens",
    "s: open_corpus without a cache, documents included; cpu: seconds of all cores together, which other programs "
    "change little; peak: most memory of the process at any time",
)


def bench_tokenise(options: Options, say: Say) -> Report:
    """Measure each case.

    Raises:
        InputError: CUDA was requested.
    """
    refuse_cuda(options, Benchmark.TOKENISE, because="text is tokenised on the host")
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as name:
        folder = Path(name)
        for kind, tokenizer, num_chars in CASES:
            case = f"{kind}.{tokenizer}"
            if tokenizer == BPE and importlib.util.find_spec("tokenizers") is None:
                figures.append(Figure(f"{case}_s", None, "s", note="needs the tokenizers package"))
                continue
            say(f"{kind} with {tokenizer} …")
            figures += _case_figures(case, kind, tokenizer, folder, num_chars, rounds=options.rounds or 1)
    return Report(Benchmark.TOKENISE, cpu_name(), date.today().isoformat(), tuple(figures), NOTES)


def _case_figures(case: str, kind: Kind, tokenizer: str, folder: Path, num_chars: int, *, rounds: int) -> list[Figure]:
    path = folder / "tokenizer.json"
    if tokenizer == BPE and not path.exists():
        train_tokenizer(path)
    found = []
    for number in range(rounds):
        with tempfile.TemporaryDirectory(dir=folder) as here:
            source, text_field = write_corpus(kind, Path(here) / "corpus", num_chars)
            name = str(path) if tokenizer == BPE else tokenizer
            found.append(_measure([source, text_field, name, f"{here}/cache-{number}"]))
    return [
        of_rounds(f"{case}_s", [one["s"] for one in found], "s"),
        of_rounds(f"{case}_cpu", [one["cpu_s"] for one in found], "s"),
        of_rounds(f"{case}_speed", [num_chars / 1e6 / one["s"] for one in found], "MB/s"),
        of_rounds(f"{case}_peak", [one["peak_bytes"] for one in found], "bytes", at_most=AT_MOST_BYTES),
    ]


def _measure(arguments: list[str | None]) -> dict[str, float]:
    command = [sys.executable, "-m", "meshwright_bench.tokenise.measure", json.dumps(arguments)]
    result: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result
