"""Tests of the command `meshwright bench`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress

import pytest

from meshwright.cli.main import main
from meshwright.plan.rules import load
from meshwright_bench.train import cases
from tests.helpers import small_corpus

CLEAN = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}


def bench(*words, **environment):
    command = [sys.executable, "-m", "meshwright", "bench", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=CLEAN | environment)


def test_an_unknown_part_exits_2():
    done = bench("trian")
    assert done.returncode == 2
    assert "meshwright bench train" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_unwritable_file_is_an_error_before_measuring(tmp_path):
    for path, words in ((tmp_path / "none" / "x.json", "mkdir"), (tmp_path, "can't write")):
        done = bench("train", "--json", str(path))
        assert done.returncode == 2
        assert words in done.stderr and "Traceback" not in done.stderr


def test_under_a_launcher_is_an_error():
    done = bench("train", WORLD_SIZE="1", RANK="0")
    assert done.returncode == 2
    assert "torchrun" in done.stderr


def test_help_lists_the_benchmarks():
    done = bench("--help", COLUMNS="200")
    assert done.returncode == 0
    assert "train: the training step against a bare PyTorch loop" in done.stdout


@pytest.mark.slow
def test_bench_train_prints_a_table_and_writes_json(tmp_path, monkeypatch, capsys, gang):
    """In this process, from which its ranks are forked sooner, with a small batch and corpus."""
    words = [*small_corpus(tmp_path / "corpus"), "train.global_batch=2", "train.seq_len=16", "model.num_layers=2"]
    monkeypatch.setattr(cases, "load", lambda preset, more: load(preset, [*more, *words]))
    path = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["meshwright", *f"bench train --device cpu --rounds 1 --json {path}".split()])
    with suppress(SystemExit):
        main()
    answer, shown = json.loads(path.read_text("utf-8")), capsys.readouterr().out
    assert answer["part"] == "train"
    assert answer["figures"]["one_process.ratio"] > 0
    assert answer["figures"]["fsdp2_two_processes.ratio"] > 0
    assert answer["figures"]["cuda_1b_eager.ratio"] is None
    assert "unmeasured: needs a CUDA device" in shown
    assert "\x1b" not in shown
