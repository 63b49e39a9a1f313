"""Tests of `bench interface`: its sides have the same losses with the same parameters, and others are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.errors import RunError
from meshwright_bench.interface import measure
from meshwright_bench.interface.benchmark import mask_figures
from meshwright_bench.interface.cases import MASKS, InterfaceTask
from tests.helpers import rank_context

pytest.importorskip("transformers")


def tiny(folder: Path, mask: str) -> InterfaceTask:
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"{number}" * (5 + number % 7), "utf-8")
    words = (f"data.source={folder}/*.txt", f"data.cache_dir={folder}/cache")
    return InterfaceTask(folder / "result", mask, seq_len=16, batch=2, more=words, rounds=2)


@pytest.mark.parametrize("mask", [pytest.param("window", marks=pytest.mark.slow), "documents"])
def test_figures_of_a_measurement(mask: str, tmp_path: Path) -> None:
    figures = mask_figures(mask, measure.measure_sides(rank_context(), tiny(tmp_path, mask)))
    assert len(figures) == len(MASKS[mask])
    assert all(figure.value is not None and figure.value > 0 for figure in figures)


@pytest.mark.parametrize(("mask", "packing"), [("causal", "none"), ("documents", "documents")])
def test_all_sides_read_the_same_samples(mask: str, packing: str, tmp_path: Path) -> None:
    task = tiny(tmp_path, mask)
    assert {task.config(side, tmp_path).data.packing for side in MASKS[mask]} == {packing}


def test_sides_with_other_parameters_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_set", lambda *_: None)
    with pytest.raises(RunError, match="other losses"):
        measure.measure_sides(rank_context(), tiny(tmp_path, "causal"))
