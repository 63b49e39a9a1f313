"""`meshwright plan --against RUN`, and the cluster that a run's device has."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.cluster.cluster_file import cluster_toml
from meshwright.cluster.presets import cluster_of_device, cluster_preset, own_file
from meshwright.errors import MeshwrightError
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
