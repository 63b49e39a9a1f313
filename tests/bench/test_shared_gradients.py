"""Tests of `bench shared-gradients`: bytes are counted in the collectives, and the sums of both sides are checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.comm.collectives import all_reduce_sum
from meshwright.config.facts_for_family import model_facts
from meshwright.errors import RunError
from meshwright.parallel import pipeline_shared_gradients
from meshwright.plan.rules import load
from meshwright_bench.benchmarks import Options
from meshwright_bench.byte_counters import SentBytes
from meshwright_bench.report import as_json
from meshwright_bench.shared_gradients.benchmark import bench_shared_gradients, sync_figures
from meshwright_bench.shared_gradients.cases import PP, SyncTask
from meshwright_bench.shared_gradients.sync import both_sides
from tests.bench.tiny import by_name
from tests.gangs.gang import GangError

DIM, ROWS = 16, 11
CONFIG = load("dit-digits", ["model.num_layers=2", f"model.dim={DIM}", "model.num_heads=4", "model.ffn_dim=24",
                             f"model.num_classes={ROWS - 1}"])  # fmt: skip


def measure(rank, world_size, damage=False):
    task = SyncTask(Path(), CONFIG, world_size // PP, rounds=1, steps=1)
    if not damage:
        return both_sides(task)
    pipeline_shared_gradients.all_reduce_sum = lambda x, group: x.mul_(2)  # as if both stages had the same gradient
    try:
        return both_sides(task)
    finally:
        pipeline_shared_gradients.all_reduce_sum = all_reduce_sum


def test_bytes_fall_as_one_over_dp_within_a_row(gang):
    answers = {dp: gang(PP * dp).run(measure)[0] for dp in (1, 2)}
    full_bytes = 4 * model_facts(CONFIG).every[0].num_elements
    assert answers[1]["bytes"] == {"sharded": full_bytes, "whole": full_bytes}
    assert answers[2]["bytes"]["whole"] == full_bytes
    assert 0 < answers[2]["bytes"]["sharded"] - full_bytes / 2 <= 4 * DIM, "an odd number of rows"
    figures = by_name(sync_figures(answers, row_bytes=4 * DIM))
    assert figures["dp_shard_2.share"].is_met and figures["dp_shard_1.share"].is_met is None
    assert all(figures[f"dp_shard_{dp}.{side}_ms"].value > 0 for dp in (1, 2) for side in ("sharded", "whole"))


def test_an_incorrect_sum_is_an_error(gang):
    with pytest.raises(GangError) as caught:
        gang(PP).run(measure, True)
    error = caught.value.exception
    assert isinstance(error, RunError) and "label_embed.weight" in error.what


def count(rank, world_size):
    x = torch.zeros(3, 5, dtype=torch.bfloat16)
    with SentBytes() as sent:
        y = x + 1
        dist.all_reduce(y)
        dist.all_gather([torch.empty(2), torch.empty(2)], torch.ones(2))
    return sent.total


def test_bytes_passed_to_collectives_are_counted(gang):
    assert gang(2).run(count) == [30 + 3 * 8] * 2


def test_figures_are_ratios_and_medians():
    answers = {
        1: {
            "bytes": {"sharded": 1000, "whole": 1000},
            "seconds": {"sharded": [1.0, 2.0, 3.0], "whole": [1.0, 2.0, 6.0]},
        },
        4: {
            "bytes": {"sharded": 260, "whole": 1000},
            "seconds": {"sharded": [1.0, 1.0, 1.0], "whole": [2.0, 3.0, 4.0]},
        },
    }
    figures = by_name(sync_figures(answers, row_bytes=10))
    assert figures["dp_shard_4.share"].value == 0.26 and figures["dp_shard_4.share"].is_met
    assert figures["dp_shard_4.speedup"].value == 3 and figures["dp_shard_4.speedup"].spread == (2, 4)
    assert figures["dp_shard_1.sharded_ms"].value == 2000
    figures = by_name(sync_figures(answers, row_bytes=9))
    assert figures["dp_shard_4.share"].is_met is False


@pytest.mark.slow
def test_the_benchmark_runs():
    figures = as_json(bench_shared_gradients(Options(rounds=1), lambda text: None))["figures"]
    assert all(value is not None for value in figures.values())
    assert figures["dp_shard_1.share"] == 1
    assert 0.25 < figures["dp_shard_4.share"] < 0.2505
