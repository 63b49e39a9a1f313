"""Tests of `bench recompute`: what it counts, and its figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright_bench.recompute.benchmark import recompute_figures
from meshwright_bench.recompute.cases import RecomputeTask
from meshwright_bench.recompute.live_bytes import live_bytes
from meshwright_bench.recompute.measure import measure_policies
from tests.helpers import rank_context, small_corpus


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
    context = rank_context()
    answer = measure_policies(context, RecomputeTask(Path(), words, rounds=1, steps=1))
    figures = {figure.name: figure for figure in recompute_figures({"tiny": answer})}
    sizes = [figures[f"tiny.{policy}.bytes"].value for policy in RecomputePolicy]
    assert sizes == sorted(sizes, reverse=True) and all(figures[f"tiny.{p}.predicted"].is_met for p in RecomputePolicy)
    assert {name for name in figures if name.endswith("extra")} == {"tiny.selective.extra", "tiny.full.extra"}
