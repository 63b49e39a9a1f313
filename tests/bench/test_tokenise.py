"""Tests of `bench tokenise`: the cases are corpora that open, and each is measured in a process of its own."""

from __future__ import annotations

import pytest

from meshwright.data.text_corpus import open_corpus
from meshwright_bench.benchmarks import Options
from meshwright_bench.tokenise import benchmark
from meshwright_bench.tokenise.corpora import Kind, write_corpus
from tests.bench.tiny import by_name


@pytest.mark.parametrize("kind", Kind)
def test_corpora_have_the_size_asked_for(tmp_path, kind):
    source, text_field = write_corpus(kind, tmp_path / "corpus", 300_000)
    corpus = open_corpus(
        source, tokenizer="bytes", token_dtype="uint8", cache_dir=str(tmp_path / "cache"), text_field=text_field
    )
    assert 300_000 <= len(corpus.train) + len(corpus.validation) < 1_000_000


def test_figures_are_seconds_and_the_memory_of_the_process(monkeypatch):
    monkeypatch.setattr(benchmark, "CASES", ((Kind.JSON_LINES, "bytes", 100_000),))
    report = benchmark.bench_tokenise(Options(), lambda _: None)
    figures = by_name(report.figures)
    assert list(figures) == [f"json_lines.bytes_{name}" for name in ("s", "cpu", "speed", "peak")]
    assert figures["json_lines.bytes_peak"].value > 10e6 and figures["json_lines.bytes_peak"].is_met
