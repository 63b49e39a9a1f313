"""The command `meshwright bench` and its table of benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress

import pytest

from meshwright.cli.main import main
from meshwright.errors import InputError
from meshwright.plan.rules import load
from meshwright_bench import devices
from meshwright_bench.benchmarks import BENCHMARKS, Benchmark, DeviceChoice, Options, find_benchmark, load_body
from meshwright_bench.train import cases
from tests.helpers import clean_environment, meshwright, small_corpus


@pytest.mark.parametrize(
    ("words", "environment", "says"),
    [
        ("trian", {}, "meshwright bench train"),
        ("train", {"WORLD_SIZE": "1", "RANK": "0"}, "torchrun"),
        ("moe --ruonds 1", {}, "--rounds"),
        pytest.param("train --json none/x.json", {}, "mkdir", marks=pytest.mark.slow),
        pytest.param("train --json .", {}, "can't write", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_is_an_error_before_measuring(tmp_path, words, environment, says):
    done = meshwright("bench", *words.split(), env=clean_environment(**environment), cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr and "Traceback" not in done.stderr


def test_help_lists_the_benchmarks():
    done = meshwright("bench", "--help", env=clean_environment(COLUMNS="200"))
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
    assert "unmeasured: needs a CUDA device" in shown and "\x1b" not in shown


@pytest.mark.parametrize("part", Benchmark)
def test_every_benchmark_has_a_function_which_refuses_a_device_that_is_not_there(monkeypatch, part):
    monkeypatch.setattr(devices, "launch", lambda body, result, **options: result.write_text("null", "utf-8"))
    assert BENCHMARKS[part].title and find_benchmark(str(part)) is part
    with pytest.raises(InputError) as caught:
        load_body(part)(Options(DeviceChoice.CUDA), lambda text: None)
    assert "--device cpu" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "nearest"), [("trian", "train"), ("TRAIN", "train"), ("nothing-like-it", ""), ("", "")]
)
def test_the_error_for_an_unknown_name_lists_all_and_suggests_the_nearest(name, nearest):
    with pytest.raises(InputError) as caught:
        find_benchmark(name)
    assert caught.value.exit_code == 2 and all(part in caught.value.rule for part in Benchmark)
    suggested = caught.value.fix.removeprefix("meshwright bench ")
    assert suggested == nearest if nearest else suggested in set(Benchmark)


def test_the_launcher_side_imports_no_torch():
    parts = ("train", "pipeline", "shared_gradients", "comm", "reshard", "operators")
    files = ["command", "report", "alternate", *(f"{part}.benchmark" for part in parts)]
    modules = ", ".join(f"meshwright_bench.{file}" for file in files)
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
