"""Tests of `bench moe`: counts are exact, results are checked before they are timed, figures have their targets."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from meshwright.errors import RunError
from meshwright.nn.experts.grouped_linear import RowMap
from meshwright_bench.benchmarks import DeviceChoice, Options
from meshwright_bench.expert_layers import benchmark, cases, layer_time, row_moves
from meshwright_bench.expert_layers.benchmark import (
    bench_experts,
    combine_figures,
    dispatch_figures,
    grouped_figures,
    layer_figures,
    move_figures,
    pair_figures,
    unmeasured_figures,
)
from meshwright_bench.expert_layers.dispatch_counts import count_dispatch, rows_needed
from meshwright_bench.expert_layers.grouped_gemm import grouped_seconds
from meshwright_bench.expert_layers.layer_time import both_orders, measure_pairs
from meshwright_bench.expert_layers.row_moves import all_moves
from meshwright_bench.report import Report, as_json, table
from tests.bench.tiny import by_name
from tests.gangs.gang import GangError

DISPATCH = cases.DispatchTask(Path(), num_tokens=40, dim=16, num_experts=16, top_k=4)
MOVES = cases.MovesTask(Path(), num_tokens=24, dim=16, num_experts=8, top_k=2, rounds=2, steps=1)
LAYER = cases.LayerTask(Path(), num_tokens=24, dim=16, num_experts=8, top_k=2, expert_dim=8, shared_dim=8, num_layers=3,
                  rounds=1, steps=1)  # fmt: skip


def count(rank, world_size, damage=False):
    if not damage:
        return count_dispatch(DISPATCH)
    original, RowMap.sum = RowMap.sum, lambda rows, x: original(rows, x) * 0
    try:
        return count_dispatch(DISPATCH)
    finally:
        RowMap.sum = original


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_token_travels_once_to_each_rank(gang, num_ranks):
    for counts in gang(num_ranks).run(count):
        assert counts["tokens"] == 40 * num_ranks
        assert counts["rows"] == counts["lower_bound"] <= counts["choices"]
        assert counts["combine_bytes"] == counts["rows"] * counts["row_bytes"]
    if num_ranks == 4:
        figures = by_name(dispatch_figures(num_ranks, counts))
        assert figures["4_ranks.rows_over_lower_bound"].value == 1 and figures["4_ranks.rows_over_lower_bound"].is_met
        assert 0 < figures["4_ranks.rows_saved"].value < 100
        assert figures["4_ranks.dispatch_bytes_over_lower_bound"].value > 1


def test_the_lower_bound_counts_distinct_other_ranks():
    assert rows_needed([[0, 0, 1], [2, 2, 2], [0, 0, 0], [1, 2, 3]], own=0) == 1 + 1 + 0 + 3


def test_rows_beyond_the_lower_bound_miss_the_target():
    counts = {"tokens": 100, "rows": 103, "lower_bound": 100, "choices": 206, "row_bytes": 10,
              "dispatch_bytes": 1200, "combine_bytes": 1000}  # fmt: skip
    figures = by_name(dispatch_figures(4, counts))
    assert figures["4_ranks.rows_over_lower_bound"].is_met is False
    assert figures["4_ranks.rows"].value == 1.03 and figures["4_ranks.rows_per_expert"].value == 2.06
    assert figures["4_ranks.rows_saved"].value == 50
    assert figures["4_ranks.dispatch_bytes_over_lower_bound"].value == 1.2


def test_tokens_that_do_not_return_are_an_error(gang):
    with pytest.raises(GangError) as caught:
        gang(2).run(count, True)
    assert isinstance(caught.value.exception, RunError) and "did not return" in caught.value.exception.what


def test_moves_are_measured():
    figures = by_name(move_figures(all_moves(MOVES)))
    assert all(figure.value > 0 for figure in figures.values())
    targets = {name for name, figure in figures.items() if figure.at_most is not None}
    assert targets == {"permute_over_copy", "combine_over_copy"}


def test_a_wrong_sum_is_an_error(monkeypatch):
    original = RowMap.sum
    monkeypatch.setattr(RowMap, "sum", lambda rows, x: original(rows, x) * 1.1)
    with pytest.raises(RunError) as caught:
        all_moves(MOVES)
    assert "combine" in caught.value.what


def test_ways_to_combine_are_compared_with_a_copy(monkeypatch):
    variants = {"combine.rows_2": row_moves.sum_bags}
    monkeypatch.setattr(row_moves, "tiled_sums", lambda device: variants.items())
    figures = by_name(combine_figures(all_moves(replace(MOVES, only_combine=True))))
    names = {f"cuda.many_rows.{arm}_over_copy" for arm in ("combine", "combine_bags", "combine.rows_2")}
    assert set(figures) == names and all(figure.value > 0 for figure in figures.values())
    variants["combine.rows_2"] = lambda *args: row_moves.sum_bags(*args) * 1.1
    with pytest.raises(RunError) as caught:
        all_moves(replace(MOVES, only_combine=True))
    assert "combine.rows_2" in caught.value.what


def test_moves_are_compared_with_the_copy_of_the_same_memory():
    seconds = {cases.COPY: [1.0, 2.0, 4.0], cases.PERMUTE: [1.0, 3.0, 4.0], cases.COMBINE: [2.0, 4.0, 8.0],
               cases.COMBINE_INDEXED: [4.0, 4.0, 4.0], cases.COPY_FRESH: [8.0, 8.0, 8.0],
               cases.PERMUTE_FRESH: [10.0, 8.0, 8.0]}  # fmt: skip
    figures = by_name(move_figures({"seconds": seconds}, prefix="cuda."))
    assert figures["cuda.permute_over_copy"].value == 1 and figures["cuda.permute_over_copy"].spread == (1, 1.5)
    assert figures["cuda.combine_over_copy"].value == 2 > cases.COMBINE_AT_MOST
    assert figures["cuda.combine_over_copy"].is_met is False
    assert figures["cuda.permute_fresh_over_copy_fresh"].spread == (1, 1.25)
    assert figures["cuda.combine_indexed_over_copy_fresh"].value == 0.5
    assert figures["cuda.copy_ms"].value == 2000


def orders(rank, world_size, damage=False):
    if not damage:
        return both_orders(LAYER)
    original = layer_time._WaitingDispatch.finish
    layer_time._WaitingDispatch.finish = lambda dispatch: original(dispatch) * 2
    try:
        return both_orders(LAYER)
    finally:
        layer_time._WaitingDispatch.finish = original


def test_the_host_reads_once_a_layer(gang):
    for answer in gang(2).run(orders):
        assert answer["host_reads"] == answer["layers"] == 3
    figures = by_name(layer_figures(answer))
    assert figures["layer.host_reads"].is_met
    assert figures["layer.overlapped_ms"].value > 0 and figures["layer.waiting_ms"].value > 0
    assert by_name(layer_figures(answer | {"host_reads": 4}))["layer.host_reads"].is_met is False


def test_a_layer_whose_result_depends_on_waiting_is_an_error(gang):
    with pytest.raises(GangError) as caught:
        gang(2).run(orders, True)
    assert isinstance(caught.value.exception, RunError) and "depends on when" in caught.value.exception.what


def test_layer_figures_are_per_layer():
    seconds = {"overlapped": [2.0, 4.0, 6.0], "waiting": [4.0, 4.0, 6.0]}
    figures = by_name(layer_figures({"seconds": seconds, "host_reads": 2, "layers": 2}))
    assert figures["layer.overlapped_ms"].value == 2000
    assert figures["layer.overlapped_over_waiting"].spread == (0.5, 1)


def test_pair_figures():
    figures = by_name(pair_figures({"pair_s": 0.03, "sum_s": 0.06, "switch_s": 1e-5}))
    assert figures["overlap_pair.pair_over_sum"].value == 0.5
    assert figures["overlap_pair.switch_us"].value == pytest.approx(10)


def test_pairs_are_measured(tmp_path, monkeypatch):
    small = layer_time.measure_pair(compute_s=(1e-4, 1e-4), all_to_all_s=1e-4, num_layers=1, rounds=1)
    monkeypatch.setattr(layer_time, "measure_pair", lambda rounds: small)
    measure_pairs(cases.PairTask(tmp_path / "pair.json"))
    assert "switch_s" in (tmp_path / "pair.json").read_text("utf-8")


def test_grouped_products_are_measured():
    task = cases.GroupedTask(Path(), num_rows=32, num_groups=3, dim=16, width=8, device="cpu", rounds=2, steps=1)
    answer = grouped_seconds(task)
    assert answer["flops"] == 2 * 32 * 16 * 8
    assert set(answer["seconds"]) == {cases.FORWARD, cases.WEIGHT_GRADIENT}


def test_grouped_products_are_a_share_of_the_known_peak():
    answer = {"seconds": {cases.FORWARD: [1e-3], cases.WEIGHT_GRADIENT: [2e-3]}, "flops": 494.5e9}
    figures = by_name(grouped_figures(answer, "NVIDIA H100 80GB HBM3"))
    assert figures["cuda.grouped_gemm_forward_tflops"].value == pytest.approx(494.5)
    assert figures["cuda.grouped_gemm_forward_of_peak"].value == pytest.approx(0.5, rel=1e-3)
    assert figures["cuda.grouped_gemm_weight_gradient_of_peak"].value == pytest.approx(0.25, rel=1e-3)
    figures = by_name(grouped_figures(answer, "NVIDIA Unheard Of"))
    assert figures["cuda.grouped_gemm_forward_of_peak"].value is None


def test_figures_without_a_gpu_are_unmeasured():
    report = Report("moe", "a machine", "2026-11-23", tuple(unmeasured_figures()))
    assert sum("unmeasured: no CUDA device" in line for line in table(report)) == 4
    assert set(as_json(report)["figures"].values()) == {None}


@pytest.mark.gpu
def test_a_gpu_has_grouped_products():
    task = cases.GroupedTask(Path(), num_rows=256, num_groups=3, dim=64, width=64, rounds=1, steps=1)
    assert all(min(values) > 0 for values in grouped_seconds(task)["seconds"].values())
    assert torch.cuda.is_available()


@pytest.mark.slow
def test_the_benchmark_runs(monkeypatch):
    sizes = {"num_tokens": 24, "dim": 16, "num_experts": 16, "top_k": 4}
    for task in (cases.DispatchTask, cases.MovesTask, cases.LayerTask):
        monkeypatch.setattr(benchmark, task.__name__, partial(task, **sizes))
    figures = as_json(bench_experts(Options(DeviceChoice.CPU, rounds=1), lambda text: None))["figures"]
    assert all(figures[f"{num_ranks}_ranks.rows_over_lower_bound"] == 1 for num_ranks in cases.DISPATCH_RANKS)
    assert figures["layer.host_reads"] == 1
    assert all(value is not None for name, value in figures.items() if not name.startswith("cuda."))
