"""Tests of the other side of part `train`: transformers' Llama, of the size and on the tokens of ours."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from meshwright.config.facts_for_family import model_facts
from meshwright_bench.gpu import train_arms
from meshwright_bench.gpu.cases import CaseError, NotRunError, Setting
from meshwright_bench.gpu.commands import RunRecord, config_of, random_tokens
from meshwright_bench.gpu.sizes import DRY, LARGE
from meshwright_bench.gpu.train_arms import check_first_loss, figures, our_arm, their_arm
from meshwright_bench.gpu.trainer_loop import Loop, batches, build_model, run_loop

transformers = pytest.importorskip("transformers")


@pytest.fixture
def loop(tmp_path) -> Loop:
    tokens = random_tokens(Setting("cpu", tmp_path), vocab_size=DRY.vocab_size, count=DRY.num_tokens(3))
    return Loop(DRY, 3, "cpu", str(tokens), str(tmp_path / "result.json"))


@pytest.mark.parametrize("size", [DRY, LARGE])
def test_both_sides_have_as_many_parameters(size, tmp_path):
    ours = model_facts(config_of(size.words(Setting("cpu", tmp_path), steps=2))).num_params()
    assert sum(one.numel() for one in build_model(size, "meta").parameters()) == ours


def test_the_loop_trains_on_each_batch_once_from_the_models_own_loss(loop):
    answer = run_loop(loop)
    assert len(answer["losses"]) == len(answer["seconds"]) == 3 and answer["peak_bytes"] is None
    torch.manual_seed(0)
    model = build_model(DRY, "cpu")
    first_bt, second_bt, _ = batches(loop)
    ids = np.load(loop.tokens)
    assert first_bt.flatten().tolist() + second_bt.flatten().tolist() == ids[: 2 * first_bt.numel()].tolist()
    logits_btv = model(input_ids=first_bt).logits
    due = F.cross_entropy(logits_btv[:, :-1].flatten(0, 1), first_bt[:, 1:].flatten())
    assert answer["losses"][0] == pytest.approx(due.item(), rel=1e-5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    due.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    second = F.cross_entropy(model(input_ids=second_bt).logits[:, :-1].flatten(0, 1), second_bt[:, 1:].flatten())
    assert answer["losses"][1] == pytest.approx(second.item(), rel=1e-5)


def test_an_arm_that_the_device_is_too_small_for_is_not_run(tmp_path, monkeypatch):
    def fake(label, *words):
        (tmp_path / f"{label}.json").write_text('{"out_of_memory": true}', "utf-8")

    monkeypatch.setattr(train_arms, "run_command", fake)
    with pytest.raises(NotRunError):
        their_arm("transformers.eager", Setting("cpu", tmp_path))


def test_an_arm_without_a_result_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(train_arms, "run_command", lambda label, *words: [])
    with pytest.raises(CaseError):
        their_arm("transformers.eager", Setting("cpu", tmp_path))


@pytest.mark.parametrize("losses", [[11.7, float("nan")], [8.0, 8.0], [13.0]])
def test_an_arm_that_computes_another_loss_has_failed(losses):
    check_first_loss([11.9, 11.5], LARGE.vocab_size)
    with pytest.raises(CaseError):
        check_first_loss(losses, LARGE.vocab_size)


def test_figures_are_tokens_and_flops_over_the_step_time(tmp_path):
    setting = Setting("cuda", tmp_path, "NVIDIA H200")
    found = figures(16_384, 989e12 * 0.15, 0.3, 5, setting)
    assert found["tokens_per_s"] == pytest.approx(16_384 / 0.3)
    assert found["mfu"] == pytest.approx(0.5, rel=1e-2)
    assert figures(1, 1.0, 1.0, None, replace(setting, gpu="NVIDIA X1"))["mfu"] is None


def test_our_arm_has_memory_as_predicted_and_the_phases_of_its_start(tmp_path, monkeypatch):
    setting = Setting("cpu", tmp_path)
    config = config_of(DRY.words(setting, steps=2))
    run = RunRecord(config, tmp_path, (4.6, 4.5), 0.5, peak_bytes=20, predicted_bytes=21, start_s={"model": 1.5})
    monkeypatch.setattr(train_arms, "measured_run", lambda *given: run)
    found = our_arm("ours.compiled", setting)
    assert found["tokens_per_s"] == pytest.approx(2 * 16 / 0.5) and found["mfu"] is None
    assert (found["peak_bytes"], found["predicted_bytes"], found["start.model_s"]) == (20, 21, 1.5)
