"""Tests of `bench packing`: its sides train on the same documents, and its figures count real targets only."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from meshwright.config.facts_for_family import run_facts
from meshwright.plan.rules import load
from meshwright_bench.packing.benchmark import packing_figures
from meshwright_bench.packing.cases import PackingTask
from meshwright_bench.packing.measure import measure_sides, one_per_sample
from tests.helpers import rank_context

SEQ_LEN = 16


def words(folder):
    """A model of one block on documents of 5 to 11 characters, of which two rarely fit a sample exactly."""
    for number in range(60):
        (folder / f"{number}.txt").write_text("x" * (5 + number % 7), "utf-8")
    model = ("llama-tiny", "model.num_layers=1", f"train.seq_len={SEQ_LEN}", "train.global_batch=2")
    return (*model, f"data.source={folder}/*.txt", f"data.cache_dir={folder}/cache")


def test_one_document_per_sample_keeps_every_target(tmp_path):
    preset, *rest = words(tmp_path)
    config = load(preset, [*rest, "data.packing=documents"])
    packed = config.family.open_data(run_facts(config))
    own, alone = packed.packed.train, one_per_sample(packed).packed.train
    assert alone.num_windows == len(own.pieces) and alone.fill < own.fill

    everything = [w.read(np.arange(w.num_windows), ignored_target=-1)[1] for w in (own, alone)]
    targets = [sorted(part[part >= 0].tolist()) for part in everything]
    assert targets[0] == targets[1] and len(targets[0]) == own.num_targets


def test_figures_of_a_measurement(tmp_path):
    context = rank_context()
    answer = measure_sides(context, PackingTask(Path(), words(tmp_path), rounds=2))
    figures = {figure.name: figure.value for figure in packing_figures(SEQ_LEN, 2, answer)}
    assert figures["16.stream.fill"] == 1 >= figures["16.packed.fill"] > figures["16.alone.fill"]
    assert all(value > 0 for value in figures.values())


def test_rates_count_targets_only():
    answer = {
        "seconds": {"stream": [2.0, 2.0], "packed": [1.0, 1.0], "alone": [1.0, 2.0]},
        "fill": {"stream": 1.0, "packed": 0.5, "alone": 0.25},
    }
    figures = {figure.name: figure.value for figure in packing_figures(100, 4, answer)}
    assert figures["100.stream.targets_per_s"] == figures["100.packed.targets_per_s"] == 200
    assert figures["100.packed_over_stream"] == 1 and figures["100.packed_over_alone"] == 3
