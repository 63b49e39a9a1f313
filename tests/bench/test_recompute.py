"""Tests of `bench recompute`: what it counts, and its figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.errors import InputError
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.train.launch.rank_context import RankContext, StatusBoard
from meshwright_bench.benchmarks import DeviceChoice, Options
from meshwright_bench.recompute.benchmark import bench_recompute, recompute_figures
from meshwright_bench.recompute.cases import RecomputeTask
from meshwright_bench.recompute.live_bytes import live_bytes
from meshwright_bench.recompute.measure import measure_policies
from tests.helpers import small_corpus


class Square(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, table):
        return (self.linear(x) * table).square().exp()


def test_live_bytes_are_those_that_the_backward_needs():
    """The input, the product before the square, and the result of exp; not parameters or the table."""
    found = live_bytes(Square(), (torch.randn(4, 8), torch.randn(8)))
    assert found == 3 * 4 * 8 * 4


@pytest.mark.slow
def test_figures(tmp_path):
    words = ("llama-tiny", "model.num_layers=1", "train.seq_len=16", "train.global_batch=2", *small_corpus(tmp_path))
    context = RankContext(0, 1, 0, 1, None, StatusBoard([0] * StatusBoard.length(1)))
    answer = measure_policies(context, RecomputeTask(Path(), words, rounds=1, steps=1))
    figures = {figure.name: figure for figure in recompute_figures({"tiny": answer})}
    sizes = [figures[f"tiny.{policy}.bytes"].value for policy in RecomputePolicy]
    assert sizes == sorted(sizes, reverse=True) and all(figures[f"tiny.{p}.predicted"].is_met for p in RecomputePolicy)
    assert {name for name in figures if name.endswith("extra")} == {"tiny.selective.extra", "tiny.full.extra"}


def test_a_gpu_is_refused():
    with pytest.raises(InputError, match="cuda"):
        bench_recompute(Options(device=DeviceChoice.CUDA), print)
