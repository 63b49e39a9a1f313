"""Tests of `bench attention`: arms that run on a device, a wrong result stops it, figures and their target."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.errors import RunError
from meshwright.nn.attention.backend import Backend
from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright_bench.attention import times
from meshwright_bench.attention.benchmark import time_figures
from meshwright_bench.attention.cases import MASKS, AttentionTask, Pass, flops_over_causal, target_arm
from meshwright_bench.report import Report, as_json
from tests.bench.tiny import by_name

SMALL = AttentionTask(Path(), seq_len=64, num_heads=2, head_dim=8, backends=(Backend.SDPA,), rounds=1)
SMALL_MASKS = {
    "causal": MASKS["causal"], "window": MaskSpec(causal=True, window=8),
    "documents": MaskSpec(causal=True, documents=((16, 48),)),
}  # fmt: skip


def test_all_arms_are_timed_and_reported(monkeypatch):
    monkeypatch.setattr(times, "MASKS", SMALL_MASKS)
    answer = {timed: times.time_pass(SMALL, timed) for timed in Pass}
    figures = by_name(time_figures(answer, target_arm("cpu", "float32")))
    assert set(figures) == {f"sdpa.causal_{timed}_ms" for timed in Pass} | {
        f"sdpa.{mask}_over_causal_{timed}" for timed in Pass for mask in ("window", "documents")
    }
    assert {name for name, figure in figures.items() if figure.at_most} == {"sdpa.window_over_causal_forward"}
    assert as_json(Report("attention", "", "", tuple(figures.values())))["figures"]["sdpa.causal_forward_ms"] > 0


def test_a_wrong_result_stops_it(monkeypatch):
    monkeypatch.setattr(times, "MASKS", SMALL_MASKS)
    right = times.attention
    monkeypatch.setattr(times, "attention", lambda q, k, v, *, mask, **other: right(q, k, v, mask=MaskSpec(), **other)
                        if other else right(q, k, v, mask=mask))  # fmt: skip
    with pytest.raises(RunError):
        times.time_pass(SMALL, Pass.FORWARD)


@pytest.mark.parametrize(("device", "dtype", "timed", "backends"), [
    ("cpu", "float32", Pass.FORWARD, {"sdpa", "flex"}), ("cpu", "float32", Pass.BOTH, {"sdpa"}),
    ("cuda", "bfloat16", Pass.BOTH, {"sdpa", "flex", "varlen"}),
])  # fmt: skip
def test_backends_that_run_are_timed(device, dtype, timed, backends):
    arms = AttentionTask(Path(), device, dtype).arms(timed)
    assert arms[0] == ("sdpa", "causal")
    assert sorted(arms) == sorted((backend, mask) for backend in backends for mask in MASKS)


def test_the_target_is_for_the_backend_that_auto_takes():
    assert target_arm("cpu", "float32") == "sdpa.window"
    assert target_arm("cuda", "bfloat16") == "varlen.window"


def test_flops_are_those_of_the_masks():
    assert flops_over_causal("window") == pytest.approx(0.1211, abs=1e-4)
    assert flops_over_causal("documents") == pytest.approx(0.2502, abs=1e-4)
