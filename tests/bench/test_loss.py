"""Tests of `bench loss`: both sides have the same gradients, and one whose gradients differ is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.errors import RunError
from meshwright.features.head_loss import apply
from meshwright_bench.loss.benchmark import loss_figures
from meshwright_bench.loss.cases import ALL, LossTask
from meshwright_bench.loss.measure import all_sides
from tests.bench.tiny import by_name

TASK = LossTask(Path(), tokens=256, vocabulary=1024, width=16, chunks=(32, 256), rounds=1)


def test_chunks_take_less_and_compute_the_same() -> None:
    answer = all_sides(TASK)
    assert answer["largest"][ALL] == 256 * 1024 * 4 == answer["largest"]["chunk_256"] > answer["largest"]["chunk_32"]
    figures = by_name(loss_figures(answer))
    assert figures["chunk_32.saving"].value > 4 and figures["chunk_32.speed"].value > 0


def test_other_gradients_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = apply.cross_entropy_
    monkeypatch.setattr(apply, "cross_entropy_", lambda logits, *args: (real(logits, *args), logits.mul_(2))[0])
    with pytest.raises(RunError, match="gradients of chunk_32 differ"):
        all_sides(TASK)
