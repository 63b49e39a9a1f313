"""Tests of `bench float8`: its sides train on the same batches, and its figures compare them with bfloat16."""

from __future__ import annotations

import pytest
import torch

from meshwright.mesh.process_groups import process_group
from meshwright_bench.float8.benchmark import findings, layer_figures, loss_figures
from meshwright_bench.float8.cases import ARMS, LAYERS, SIDES, LayerTask
from meshwright_bench.float8.layer_times import sides, time_sides
from meshwright_bench.float8.train_arms import train_arms
from tests.bench.tiny import by_name
from tests.helpers import rank_context, small_corpus


def test_figures_of_losses():
    losses = {"bfloat16": [[9.0, *[2.0] * 20]], "current": [[9.0, *[2.01] * 20]], "delayed": [[9.0, *[2.1] * 20]]}
    figures = by_name(loss_figures(losses))
    assert figures["loss_nats_per_token.bfloat16"].value == 2 and figures["loss_nats_per_token.delayed"].value == 2.1
    assert figures["loss_nats_per_token.current.over_bfloat16"].value == pytest.approx(0.005)
    assert (
        figures["loss_nats_per_token.current.over_bfloat16"].is_met
        and not figures["loss_nats_per_token.delayed.over_bfloat16"].is_met
    )


def test_layers_are_unmeasured_without_a_gpu():
    figures = layer_figures(None)
    assert len(figures) == 8 and all(figure.value is None and "CUDA" in figure.note for figure in figures)
    assert not list(findings(figures))


def test_a_side_that_is_slower_than_bfloat16_is_a_finding():
    times = {layer: {"bfloat16": [3.0], **dict.fromkeys(SIDES, [2.0])} for layer in LAYERS}
    times["4096"]["delayed"] = [4.0]
    del times["2048"]["current.torchao"]
    figures = by_name(layer_figures(times))
    assert figures["cuda.2048.current.torchao.over_bfloat16"].note == "needs torchao"
    assert figures["cuda.2048.cached.over_bfloat16"].value == 1.5 and figures["cuda.2048.cached.over_bfloat16"].is_met
    (finding,) = findings(list(figures.values()))
    assert "cuda.4096.delayed is slower than bfloat16 (0.75 ×)" in finding


def test_sides_train_on_the_same_batches(tmp_path):
    words = ("llama-tiny", "train.precision=bfloat16", "train.num_microbatches=2", "train.steps=3", "train.seq_len=32",
             "train.global_batch=4", "model.num_layers=1", *small_corpus(tmp_path))  # fmt: skip
    context = rank_context()
    device = torch.device("cpu")
    with process_group(rank=0, num_ranks=1, device=device, timeout_s=60, store_path=None):
        losses = train_arms(context, words, device, seed=0)
    assert losses.keys() == ARMS.keys() and all(len(found) == 3 for found in losses.values())
    assert losses["cached"] == losses["current"] != losses["bfloat16"]
    assert all(found[0] == pytest.approx(losses["bfloat16"][0], abs=0.02) for found in losses.values())


def test_layers_of_all_sides_compute_the_same():
    pytest.importorskip("torchao")
    layers = sides(32, 64, torch.device("cpu"))
    x = torch.randn(1, 16, 32, dtype=torch.bfloat16)
    outputs = {side: layer(x) for side, layer in layers.items()}
    plain = outputs.pop("bfloat16")
    assert outputs.keys() == SIDES.keys() and all(torch.equal(y, outputs["delayed"]) for y in outputs.values())
    assert 0 < (outputs["delayed"] - plain).norm() <= 0.1 * plain.norm()


def test_all_sides_are_timed(tmp_path, monkeypatch):
    pytest.importorskip("torchao")
    monkeypatch.setattr(torch, "compile", lambda layer: layer)
    task = LayerTask(tmp_path / "result.json", rounds=2, steps=1)
    times = time_sides(32, 32, 64, device=torch.device("cpu"), task=task)
    assert times.keys() == {"bfloat16", *SIDES} and all(len(found) == 2 for found in times.values())


@pytest.mark.gpu
def test_layers_are_timed_on_a_gpu(tmp_path):
    task = LayerTask(tmp_path / "result.json", rounds=1, steps=2)
    times = time_sides(256, 128, 128, device=torch.device("cuda"), task=task)
    assert all(found[0] > 0 for found in times.values())
