"""`meshwright plan --against RUN`, the cluster that a run's device has, and the load of its experts."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.cluster.cluster_file import cluster_toml
from meshwright.cluster.presets import cluster_of_device, cluster_preset, own_file
from meshwright.errors import MeshwrightError
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.plan.stage_sizes import load_rows
from tests.train.report.folders import write_folder

WORDS = ["llama-tiny", "mesh.dp_shard=2"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of this test, without a calibration."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "meshwright"


def shown(*words):
    result = CliRunner().invoke(app, ["plan", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0
    assert max(len(line) for line in result.output.splitlines() if line[0] == " ") <= 80
    return result.output


def calibrate(cache, preset="CPU"):
    """Write this machine's cluster file, with the rates of a preset."""
    cache.mkdir(parents=True)
    text = cluster_toml(cluster_preset(preset), "a test").replace(f'name = "{preset}"', 'name = "mine"', 1)
    own_file().write_text(text)


def test_a_run_is_compared_with_its_own_plan(tmp_path):
    folder = write_folder(tmp_path / "run", WORDS)
    page = shown("--against", folder)
    rows = {line[:34].strip(): line[34:].split("  ") for line in page.splitlines() if line.startswith("  ")}
    assert {"forward and backward", "optimizer", "a step", "parameters", "total"} <= rows.keys()
    assert "as predicted on CPU" in page and "another plan" not in page


def test_another_plan_may_be_judged(tmp_path):
    folder = write_folder(tmp_path / "run", WORDS)
    assert "another plan" in shown(*WORDS, "train.num_microbatches=2", "--against", folder)
    assert "another plan" not in shown(*WORDS, "train.steps=40", "--against", folder)


def test_a_calibrated_machine_predicts_its_runs(tmp_path, cache):
    folder = write_folder(tmp_path / "run", WORDS)
    calibrate(cache)
    assert "as predicted on mine" in shown("--against", folder)
    assert "on H100" in shown("--against", folder, "--cluster", "H100")
    assert "a step takes" in shown("llama-tiny", "--cluster", "here")


def test_devices_have_their_own_clusters(cache):
    assert cluster_of_device("cpu").name == "CPU"
    calibrate(cache)
    assert cluster_of_device("cpu").name == "mine"
    assert cluster_of_device("NVIDIA H200").name == "H200"
    assert cluster_of_device("NVIDIA of 2040") is None


def test_a_calibrated_gpu_is_neither_the_cpu_beside_it_nor_another_gpu(cache):
    calibrate(cache, "H100")
    names = ("cpu", "NVIDIA H100 80GB HBM3", "NVIDIA H200")
    assert [cluster_of_device(name).name for name in names] == ["CPU", "mine", "H200"]


@pytest.mark.parametrize("missing", ["measured", "plan", "device", "folder", "calibration"])
def test_what_cannot_be_compared_is_an_error(tmp_path, missing):
    folder = write_folder(tmp_path / "run", WORDS, measured=missing != "measured")
    if missing == "plan":
        (folder / "plan.json").unlink()
    if missing == "device":
        events = (folder / "events.jsonl").read_text().replace('"device": "cpu"', '"device": "NVIDIA of 2040"')
        (folder / "events.jsonl").write_text(events)
    words = ["--cluster", "here"] if missing == "calibration" else []
    with pytest.raises(MeshwrightError) as caught:
        shown("--against", tmp_path if missing == "folder" else folder, *words)
    assert caught.value.rule and caught.value.fix


def time_of(page):
    return next(line for line in page.splitlines() if line.startswith("a step takes"))


def test_a_run_s_load_of_experts_is_used(tmp_path):
    """Its last step's counts: those of all tokens on one rank take longer than equal ones, which are as balanced."""
    words = ["moe-tiny", "mesh.dp_shard=2", "mesh.ep=2"]
    folder = write_folder(tmp_path / "run", words)
    plan = make_plan(load(words[0], words[1:]))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    def shown_with(counts):
        lines[-1]["expert_counts"] = [counts for _ in load_rows(plan)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return shown(*words, "--cluster", "H100", "--experts", folder)

    plain = shown(*words, "--cluster", "H100")
    even, skewed = shown_with([5] * 8), shown_with([9, 9, 9, 9, 0, 0, 0, 0])
    assert time_of(even) == time_of(plain) != time_of(skewed)
    assert "1.00 ×" in even and "2.00 ×" in skewed and "×" not in plain.split("rates")[0].split("a step takes")[1]


def test_a_page_under_a_load(tmp_path):
    words = ["llama-tiny", "data.packing=documents", "train.seq_len=512", "--cluster", "H100"]
    whole, short = shown(*words), shown(*words, "--documents", "32,64")
    assert "at most" in whole and "at most" not in short
    file = tmp_path / "plan.json"
    shown(*words, "--documents", "32", "--json", file)
    assert json.loads(file.read_text())["time"]["parts"]["attention"] > 0


@pytest.mark.parametrize("options", [
    ("--experts", "zipf"), ("--documents", "512"), ("--cluster", "H100", "--documents", "0"),
    ("--cluster", "H100", "--documents", "a,1"), ("--cluster", "H100", "--experts", "zipf:x"),
    ("--devices", "8xH100", "--experts", "zipf"), ("--cluster", "H100", "--experts", "llama-run"),
])  # fmt: skip
def test_a_load_that_says_nothing_is_an_error(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "llama-run", WORDS)
    with pytest.raises(MeshwrightError) as caught:
        shown("moe-tiny", "mesh.ep=2", "mesh.dp_shard=2", *options)
    assert caught.value.rule and caught.value.fix
