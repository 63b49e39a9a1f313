"""Tests of `bench pipeline`: figures and properties that do not depend on the machine; no test asserts a duration."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from meshwright.mesh.process_groups import process_group
from meshwright.nn.linear import compute_deferred
from meshwright.pipeline.generate import generate
from meshwright.pipeline.lower import lower, num_slots
from meshwright.pipeline.verify import verify
from meshwright_bench.benchmarks import Options
from meshwright_bench.byte_counters import LiveBytes
from meshwright_bench.pipeline import benchmark, cases
from meshwright_bench.pipeline.benchmark import bench_pipeline, engine_figures, memory_figures, wait_figures
from meshwright_bench.pipeline.engine_overhead import bare_loop, engine_arms
from meshwright_bench.pipeline.memory import count_all
from meshwright_bench.pipeline.sides import CPU
from meshwright_bench.pipeline.step_time import SleepingGradients, SleepingStage, measure_kind
from meshwright_bench.report import as_json
from tests.bench.tiny import by_name
from tests.helpers import quick_and_slow

TINY = cases.MemoryTask(Path(), width=16, num_rows=512, num_layers=2)


def count_on_rank(rank, world_size):
    return count_all(rank, TINY)


def measure_on_rank(rank, world_size, kind):
    return measure_kind(kind, rank=rank, task=cases.WaitTask(Path(), rounds=1, kernel_s=0.0))


@pytest.mark.parametrize("kind", cases.ENGINE_STAGES)
def test_a_merged_schedule_has_the_same_actions_on_one_rank(kind):
    four_ranks = cases.on_four_ranks(kind)
    table = cases.merge_ranks(four_ranks)
    verify(table)
    assert table.num_ranks == 1
    assert {str(a) for _, _, a in table.positions()} == {str(a) for _, _, a in four_ranks.positions()}


@pytest.mark.parametrize("kind", quick_and_slow(zip(cases.ENGINE_STAGES), {("interleaved",), ("zb-v",)}))
def test_the_engine_arms_run_and_both_engines_do_every_computation(tmp_path, kind):
    with process_group(rank=0, num_ranks=1, device=CPU, timeout_s=30, store_path=str(tmp_path / "store")):
        arms, actions = engine_arms(kind)
        for step in arms.values():
            step()
    assert set(arms) == {"ours", "torch", "bare", "ours_merged", "bare_merged"}
    least = 2 * cases.on_one_rank(kind).num_stages * cases.NUM_MICROBATCHES
    assert least <= actions["torch"] and least <= actions["ours"] < actions["ours_merged"]


@pytest.mark.parametrize("forwards_first", [True, False])
def test_the_bare_loop_computes_the_gradients_of_the_whole_chain(forwards_first):
    modules = [torch.nn.Linear(8, 8) for _ in range(3)]
    batch = torch.randn(cases.NUM_MICROBATCHES, 8)
    bare_loop(modules, batch, forwards_first=forwards_first)()
    found = [module.weight.grad for module in modules]
    for module in modules:
        module.zero_grad()
    torch.nn.Sequential(*modules)(batch).sum().backward()
    for module, gradient in zip(modules, found, strict=True):
        torch.testing.assert_close(gradient, module.weight.grad)


def test_live_bytes_are_counted_once_until_freed():
    before = torch.ones(1000)
    with LiveBytes() as live:
        x = before * 2
        view = x.view(10, 100).T
        assert (live.now, live.peak) == (4000, 4000)
        before.add_(1)
        y = x + 1
        del x
        assert live.now == 8000, "the view holds it"
        live.sample()
        del view
        assert live.now == 4000
        del y
    assert (live.now, live.held, live.peak) == (0, 8000, 8000)


def test_saved_activations_are_counted_in_backward_too():
    weight = torch.ones(100, requires_grad=True)
    with LiveBytes() as live:
        y = (weight * 2).exp().sum()
        assert live.now == 404, "what exp saved, and the sum"
        y.backward()
        del y
        assert live.now == 400, "the gradient"


@pytest.mark.slow
def test_the_counts_meet_the_targets(gang):
    answer = gang(4).run(count_on_rank)[0]
    figures = {figure.name: figure.value for figure in memory_figures(answer, TINY.unit_bytes)}
    full, none = "memory.recompute_full", "memory.recompute_none"
    assert figures[f"{full}.ours_turn"] <= cases.NUM_MICROBATCHES + 2
    assert figures[f"{full}.torch_turn"] == pytest.approx(3 * cases.NUM_MICROBATCHES, abs=0.01)
    assert figures[f"{full}.torch_buffers"] == figures[f"{full}.ours_kept_buffers"] == 2 * cases.NUM_MICROBATCHES
    for policy in (full, none):
        for count in ("turn", "held", "peak"):
            ours, kept, theirs = (figures[f"{policy}.{side}_{count}"] for side in ("ours", "ours_kept", "torch"))
            assert ours + 12 < min(kept, theirs)
            assert kept <= theirs + 0.01
    assert figures["slots.1f1b_m32.torch"] == 64
    assert 0.9 < figures["predicted.f-then-b.held_bytes"] <= 1
    assert 0.9 < figures["predicted.1f1b.held_bytes"] <= 1
    by_rank = answer["full"]["ours"]
    assert by_rank[cases.MIDDLE]["turn"] <= by_rank[cases.MIDDLE]["held"] < by_rank[cases.MIDDLE]["peak"]


@pytest.mark.parametrize("num_microbatches", [4, 8, 32, 64])
def test_receive_slots_do_not_grow_with_micro_batches(num_microbatches):
    table = lower(generate("1f1b", num_stages=cases.NUM_RANKS, num_microbatches=num_microbatches))
    for rank in range(cases.NUM_RANKS):
        assert max(num_slots(table, rank).values()) <= cases.NUM_RANKS - rank + 1


def test_a_kernel_sleeps_once_for_each_computation(monkeypatch):
    slept = []
    monkeypatch.setattr("meshwright_bench.pipeline.step_time.time.sleep", slept.append)
    stage = SleepingStage(1.0)
    stage.store = store = SleepingGradients(1.0)
    stage(torch.ones(4)).sum().backward()
    assert len(slept) == 3, "F, and B for I and W"
    slept.clear()
    store.defers = True
    stage(torch.ones(4)).sum().backward()
    assert len(slept) == 2, "F and I"
    compute_deferred(store.take())
    assert len(slept) == 3, "W"


@pytest.mark.parametrize("kind", [pytest.param("interleaved", marks=pytest.mark.slow), "zb-v"])
def test_both_engines_run_a_schedule(gang, kind):
    found = gang(4).run(measure_on_rank, kind)[0]
    assert all(seconds > 0 for arm in ("ours", "torch") for seconds in found["seconds"][arm])


def test_figures_are_relative_to_the_bare_loop_and_the_ideal():
    seconds = {"ours": [3e-3], "torch": [5e-3], "bare": [1e-3], "ours_merged": [9e-3], "bare_merged": [1e-3]}
    actions = {"ours": 100, "torch": 100, "ours_merged": 400}
    figures = {f.name: f.value for f in engine_figures({"1f1b": {"seconds": seconds, "actions": actions}})}
    assert figures == pytest.approx(
        {"engine.1f1b.ours_us": 20, "engine.1f1b.torch_us": 40, "engine.1f1b.ours_merged_us": 20}
    )
    kind = {"seconds": {"ours": [1.05], "torch": [1.5]}, "ideal_s": 1.0, "torch_ideal_s": 1.25}
    answer = {"kinds": {"zb-v": kind | {"predicted": [[0.9, 1.0]]}}, "sleep_over_nominal": 0.5}
    figures = by_name(wait_figures(answer))
    assert figures["wait.zb-v.ours_over_ideal"].value == pytest.approx(5)
    assert figures["wait.zb-v.ours_over_ideal"].is_met
    assert figures["wait.zb-v.torch_over_its_own_ideal"].value == pytest.approx(20)
    assert figures["wait.zb-v.step_time_ratio"].value == pytest.approx(0.7)
    assert figures["predicted.zb-v.makespan"].value == pytest.approx(0.9)


@pytest.mark.slow
def test_the_benchmark_runs(monkeypatch):
    monkeypatch.setattr(benchmark, "WaitTask", lambda result, rounds: cases.WaitTask(result, rounds, kernel_s=0.001))
    monkeypatch.setattr(benchmark, "EngineTask", lambda result, rounds: cases.EngineTask(result, rounds, steps=1))
    monkeypatch.setattr(benchmark, "MemoryTask", partial(cases.MemoryTask, width=16, num_rows=512, num_layers=2))
    figures = as_json(bench_pipeline(Options(rounds=1), lambda text: None))["figures"]
    assert all(value is not None for value in figures.values())
    for kind in cases.WAIT_KINDS:
        assert figures[f"wait.{kind}.step_time_ratio"] > 0
