"""Tests of `bench comm` and `bench comm-loss`: byte counts, comparison of results, figures, and small trainings."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from meshwright.comm.compression.fsdp_collectives import CompressedAllGather, CompressedReduceScatter
from meshwright.comm.kernels import dispatch
from meshwright.errors import RunError
from meshwright_bench import devices
from meshwright_bench.benchmarks import DeviceChoice, Options
from meshwright_bench.comm import benchmark, collectives, kernels_cuda
from meshwright_bench.comm.benchmark import bench_comm, cuda_figures, kernel_figures, unmeasured_figures, wire_figures
from meshwright_bench.comm.cases import DTYPES, FLOOR_BYTES, CudaTask, KernelTask, WireTask
from meshwright_bench.comm.kernels import check_bits, cpu_kernels
from meshwright_bench.comm.kernels_cuda import device_kernels
from meshwright_bench.comm.loss_cost import (
    four_bits_figures,
    recovered,
    train_all,
    two_bits_figures,
    validation_loss,
)
from meshwright_bench.report import as_json
from tests.bench.tiny import by_name
from tests.gangs.gang import GangError
from tests.helpers import small_corpus

N = 128 * 96
"""Number of elements, a multiple of the block alignment on 2 and on 3 ranks."""
WIRE = WireTask(Path(), num_elements=N, rounds=2, steps=1)


def measure(rank, world_size, damage=""):
    """Run the measurement, optionally with an injected fault."""
    originals = CompressedReduceScatter.__call__, CompressedAllGather.__call__

    def damaged(self, output, *args, **kwargs):
        originals[damage != "sum"](self, output, *args, **kwargs)
        if damage == "count":
            self.sent.payload += 1
        else:
            output.mul_(1.3)

    if damage:
        damaged_class = CompressedReduceScatter if damage == "sum" else CompressedAllGather
        damaged_class.__call__ = damaged
    try:
        return collectives.all_collectives(WIRE)
    finally:
        CompressedReduceScatter.__call__, CompressedAllGather.__call__ = originals


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_bytes_are_those_of_codes_and_scales(gang, num_ranks):
    answer = gang(num_ranks).run(measure)[0]
    others = N * (num_ranks - 1) // num_ranks
    for found in answer.values():
        for dtype in DTYPES:
            assert found[dtype]["bytes"]["builtin"] == others * getattr(torch, dtype).itemsize
            assert found[dtype]["bytes"]["int8"] == others + others // 128 * 2
    figures = by_name(wire_figures(answer))
    for dtype in DTYPES:
        loco4 = figures[f"reduce_scatter.{dtype}.loco4_bits"]
        assert loco4.value == 4.125 and loco4.is_met
        assert figures[f"reduce_scatter.{dtype}.loco4_speedup"].value > 0
        assert figures[f"all_gather.{dtype}.int8_bits"].value == 8.125


@pytest.mark.parametrize("damage, words", [("sum", "reduce_scatter in loco4 differs"), ("gather", "all_gather in int8"),
                                           ("count", "and counts")])  # fmt: skip
def test_incorrect_results_or_counts_are_errors(gang, damage, words):
    with pytest.raises(GangError) as caught:
        gang(2).run(measure, damage)
    error = caught.value.exception
    assert isinstance(error, RunError) and words in error.what


def test_wire_figures_are_medians_of_ratios():
    found = {
        "bytes": {"builtin": 4000, "loco4": 600},
        "seconds": {"builtin": [2.0, 9.0, 4.0], "loco4": [1.0, 1.0, 1.0]},
        "elements_sent": 1000,
    }
    figures = by_name(wire_figures({"reduce_scatter": {"float32": found, "bfloat16": found}}))
    assert figures["reduce_scatter.float32.loco4_speedup"].value == 4
    assert figures["reduce_scatter.float32.loco4_speedup"].spread == (2, 9)
    assert figures["reduce_scatter.float32.loco4_speedup"].is_met
    assert figures["reduce_scatter.bfloat16.loco4_speedup"].at_least == 3
    assert figures["reduce_scatter.float32.builtin_ms"].value == 4000
    assert figures["reduce_scatter.float32.builtin_bits"].value == 32
    assert figures["reduce_scatter.float32.loco4_bits"].is_met is False, "4.8 bits"


def test_kernels_on_one_core(monkeypatch):
    answer = cpu_kernels(KernelTask(Path(), num_elements=N, rounds=1, steps=1))
    assert json.loads(json.dumps(answer))["bytes"] == answer["bytes"]
    error, payload = N * 130 // 128, N * 66 // 128
    assert answer["bytes"]["loco4_float32"] == 4 * N + 2 * error + payload
    assert answer["bytes"]["int4_bfloat16"] == 2 * N + payload
    assert answer["bytes"]["decode_sum_8_float32"] == 8 * payload + 4 * N
    assert abs(answer["bytes"]["copy"] - answer["bytes"]["loco4_float32"]) <= 1
    names = {figure.name for figure in kernel_figures(answer)}
    assert {"kernels.copy", "kernels.loco4_bfloat16", "kernels.decode_sum_2_bfloat16_of_copy"} <= names


@pytest.mark.parametrize("isa, target", [("avx512", 1.5), ("avx2", None)])
def test_rates_count_elements_and_ratios_count_bytes(isa, target):
    answer = {
        "isa": isa,
        "num_elements": 2e9,
        "bytes": {"loco4_float32": 12e9, "decode_sum_2_float32": 3e9, "copy": 8e9},
        "seconds": {"loco4_float32": [1.0], "decode_sum_2_float32": [1.0], "copy": [0.5]},
    }
    figures = by_name(kernel_figures(answer))
    assert figures["kernels.loco4_float32"].value == 2 and figures["kernels.loco4_float32"].at_least == target
    assert figures["kernels.decode_sum_2_float32"].at_least is None
    assert figures["kernels.copy"].value == 16
    assert figures["kernels.loco4_float32_of_copy"].value == 0.75


def test_a_kernel_that_differs_from_the_reference_is_an_error(monkeypatch):
    cpu, right = torch.device("cpu"), dispatch.loco_quantise
    check_bits(torch.bfloat16, cpu)
    monkeypatch.setattr(dispatch, "loco_quantise", lambda g, *rest, **named: right(g * 1.01, *rest, **named))
    with pytest.raises(RunError) as caught:
        check_bits(torch.bfloat16, cpu)
    assert "payload and new error" in caught.value.what


def test_the_device_measurement_runs_on_a_cpu():
    answer = device_kernels(CudaTask(Path(), num_elements=N, num_sets=2, rounds=2, steps=3, device="cpu"))
    assert answer["bytes"]["loco4"] == 2 * N + 2 * (N * 130 // 128) + N * 66 // 128
    assert answer["bytes"]["decode_sum_8"] == 8 * (N * 66 // 128) + 2 * N
    figures = by_name(cuda_figures(answer))
    assert all(math.isfinite(figure.value) and figure.value > 0 for figure in figures.values())
    assert set(figures) >= {figure.name for figure in unmeasured_figures()}


def test_variants_are_measured_if_they_give_the_same_bits(monkeypatch):
    variant = SimpleNamespace(loco_quantise=dispatch.loco_quantise, decode_sum=dispatch.decode_sum)
    monkeypatch.setattr(kernels_cuda, "variants", lambda device: [({"elements": 16}, variant)])
    answer = device_kernels(TINY_DEVICE)
    names = {figure.name for figure in cuda_figures(answer)}
    assert {f"cuda.{kernel}.elements_16_over_floor" for kernel in ("loco4", "decode_sum_8")} <= names
    variant.decode_sum = lambda payloads, codec, *, out, multiplier: out.fill_(1.0)
    with pytest.raises(RunError) as caught:
        device_kernels(TINY_DEVICE)
    assert "incorrect sum" in caught.value.what


def test_the_floor_is_that_of_the_copy():
    """At 4.3 TB/s, the the floors are 534 and 727 ns per MB."""
    num_elements = 10**9
    seconds = {"loco4": [1.18 * 534e-9 * 2000], "decode_sum_8": [2 * 727e-9 * 2000], "copy": [4.547 / 4300]}
    num_bytes = {"loco4": 4.547e9, "decode_sum_8": 6.125e9, "copy": 4.547e9}
    answer = {"num_elements": num_elements, "bytes": num_bytes, "seconds": seconds}
    figures = by_name(cuda_figures(answer))
    assert figures["cuda.copy"].value == pytest.approx(4300)
    assert figures["cuda.loco4_floor"].value == pytest.approx(534, rel=1e-3)
    assert figures["cuda.decode_sum_8_floor"].value == pytest.approx(727, rel=1e-3)
    assert figures["cuda.loco4"].value == pytest.approx(630, rel=1e-3)
    assert figures["cuda.loco4_over_floor"].value == pytest.approx(1.18, rel=1e-3)
    assert figures["cuda.decode_sum_8_over_floor"].is_met is False
    assert figures["cuda.loco4_of_copy"].value == pytest.approx(4.547 / 4.59 / 1.18, rel=1e-3)
    assert FLOOR_BYTES.keys() == {"loco4", "decode_sum_8"}


def test_with_a_device_its_kernels_are_measured(monkeypatch):
    def launch(body, result, **options):
        result.write_text(json.dumps("NVIDIA H200"), "utf-8")

    monkeypatch.setattr(devices, "launch", launch)
    monkeypatch.setattr(benchmark, "CudaTask", lambda path, rounds: replace(TINY_DEVICE, result=path, rounds=rounds))
    monkeypatch.setattr(benchmark, "run_measurement", lambda body, task, num_ranks: device_kernels(task(Path())))
    report = bench_comm(Options(rounds=1), lambda text: None)
    assert report.device.startswith("NVIDIA H200, ")
    assert all(figure.value is not None and figure.name.startswith("cuda.") for figure in report.figures)


TINY_DEVICE = CudaTask(Path(), num_elements=N, num_sets=2, rounds=1, steps=1, device="cpu")


@pytest.mark.slow
def test_the_benchmark_runs(monkeypatch):
    for task in (WireTask, KernelTask):
        monkeypatch.setattr(benchmark, task.__name__, partial(task, num_elements=N, steps=1))
    report = bench_comm(Options(DeviceChoice.CPU, rounds=1), lambda text: None)
    figures = as_json(report)["figures"]
    assert all((value is None) == name.startswith("cuda.") for name, value in figures.items())
    assert figures["reduce_scatter.float32.loco4_bits"] <= 4.2


LOSSES = {"exact": [2.0, 3.0], "int2": [2.2, 3.2], "loco2": [2.1, 3.05], "loco4": [2.004, 3.03]}


def test_figures_and_their_targets():
    assert recovered(LOSSES) == pytest.approx(0.625)
    figures = by_name([*two_bits_figures(LOSSES), *four_bits_figures(LOSSES)])
    assert figures["two_bits.recovered"].is_met and figures["two_bits.int2.loss_bits_per_byte"].value == pytest.approx(
        2.7
    )
    assert figures["two_bits.gap"].value == pytest.approx(0.08)
    over = figures["four_bits.over_exact"]
    assert over.value == pytest.approx(0.034 / 5) and over.is_met is False
    assert over.spread == (pytest.approx(0.002), pytest.approx(0.01))
    assert not {f.name: f for f in two_bits_figures({**LOSSES, "loco2": [2.2, 3.15]})}["two_bits.recovered"].is_met


@pytest.mark.slow
def test_each_method_trains_and_returns_its_loss(tmp_path):
    words = [*small_corpus(tmp_path), "mesh.dp_shard=2", "train.steps=3", "model.num_layers=1", "train.seq_len=32",
             "train.global_batch=4", "train.validation_samples=4", "train.sample_tokens=0"]  # fmt: skip
    told = []
    losses = train_all(("exact", "int2", "loco4"), [0], words, told.append)
    ((exact,), (few,), (with_feedback,)) = losses.values()
    assert validation_loss("exact", seed=0, words=words) == exact != few and with_feedback not in (exact, few)
    assert len(told) == 3 and "comm.gradients=loco4" in told[-1]
