"""Tests of the shares of a step, on made-up traces like those of PyTorch's profiler."""

from __future__ import annotations

import pytest

from meshwright.cluster.hardware import Rate
from meshwright.cluster.presets import device_for
from meshwright_bench.gpu.cases import CaseError
from meshwright_bench.gpu.kernel_classes import Busy
from meshwright_bench.gpu.step_profile import longest, step_figures

GPU = "NVIDIA H200"


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}


STEPS = [event("user_annotation", "step 5", 1000, 400), event("user_annotation", "step 6", 1400, 400)]
KERNELS = [
    event("kernel", "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN", 1100, 500),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1050, 50),
    event("kernel", "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", 1700, 300),
    event("cpu_op", "aten::mm", 1000, 800),
    event("gpu_user_annotation", "step 5", 1050, 500),
]


def test_shares_are_those_of_the_device_until_its_last_kernel():
    found = step_figures([*STEPS, *KERNELS], flops=1.0, device=GPU)
    assert found["step_ms"] == pytest.approx(0.5)
    assert found["share.products"] == pytest.approx(0.5)
    assert found["share.copies"] == pytest.approx(0.05)
    assert found["share.optimizer"] == pytest.approx(0.3)
    assert found["share.idle"] == pytest.approx(0.15)
    assert {name: value for name, value in found.items() if name.startswith("launches.")} == {
        "launches.products": 0.5, "launches.copies": 0.5, "launches.optimizer": 0.5,
    }  # fmt: skip
    assert found["kernel_ms.Memcpy HtoD (Pinned -> Device)"] == pytest.approx(0.025)


def test_the_longest_kernels_are_kept_and_those_that_no_rule_knows():
    busy = [Busy(f"nvjet_{number}", 0, 100 - number) for number in range(40)]
    found = longest([*busy, Busy("nvjet_39", 0, 200), Busy("a kernel of tomorrow", 0, 1)])
    assert list(found)[:2] == ["nvjet_39", "nvjet_0"]
    assert found["nvjet_39"] == 261 and "nvjet_38" not in found
    assert found["a kernel of tomorrow"] == 1


def test_the_mfu_and_what_it_lacks_are_of_the_profiled_steps():
    peak = device_for(GPU).peak(Rate.BF16)
    found = step_figures([*STEPS, *KERNELS], flops=0.4 * 0.5e-3 * peak, device=GPU)
    assert found["mfu"] == pytest.approx(0.4)
    lacking = {name: value for name, value in found.items() if name.startswith("below_peak.")}
    assert sum(lacking.values()) == pytest.approx(0.6)
    assert lacking["below_peak.products and attention below the peak rate"] == pytest.approx(0.1)
    assert lacking["below_peak.optimizer"] == pytest.approx(0.3)


def test_on_a_cpu_operators_are_classified_and_there_is_no_mfu():
    operators = [
        event("cpu_op", "aten::linear", 1000, 400),
        event("cpu_op", "aten::addmm", 1100, 200),
        event("cpu_op", "MulBackward0", 1400, 200, tid=2),
        event("cpu_op", "aten::mul", 1450, 100, tid=2),
    ]
    found = step_figures([*STEPS, *operators], flops=1.0, device=None)
    assert found["share.products"] == pytest.approx(0.5)
    assert found["share.elementwise"] == pytest.approx(0.125)
    assert found["share.other"] == pytest.approx(0.125)
    assert found["share.idle"] == pytest.approx(0.25)
    assert "mfu" not in found


def test_an_unknown_gpu_has_shares_and_no_mfu():
    found = step_figures([*STEPS, *KERNELS], flops=1.0, device="NVIDIA X1")
    assert "mfu" not in found and found["share.products"] > 0


def test_a_trace_without_steps_is_an_error():
    with pytest.raises(CaseError):
        step_figures(KERNELS, flops=1.0, device=GPU)
