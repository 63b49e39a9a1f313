"""Trackers: each step once however often a run was resumed, named by unit, and no sink can end a run."""

from __future__ import annotations

import logging
import math
import os
import re
import sqlite3
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from meshwright.errors import ConfigError, InputError, MeshwrightError
from meshwright.models.contract.model_facts import LossUnit, unit_of_metric
from meshwright.models.tasks.next_token import text_unit
from meshwright.train.record import trackers
from meshwright.train.record.metrics import tracked_values
from meshwright.train.record.record_files import in_unit
from meshwright.train.record.sink import RunInfo, TensorBoardSink, TrackioSink, WandbSink, continue_run
from meshwright.train.record.trackers import Trackers, check_trackers
from tests.helpers import clean_environment
from tests.train.runs import Fault, metrics, train

DOCS = Path(__file__).parents[2] / "docs/running.md"

SINKS = """
class Calls:
    def start(self, run):
        self.path = run.folder / f"{type(self).__name__}.txt"
        self.write(f"start after {run.after_step}: {run.layout}, {run.config['train']['steps']} steps, {run.plan}")

    def write(self, line):
        with self.path.open("a") as file:
            file.write(line + "\\n")

    def log(self, step, values):
        self.write(f"log {step}")

    def text(self, step, name, text):
        self.write(f"{name} {step}")

    def close(self, failed):
        self.write(f"close {failed}")

class Fails(Calls):
    def log(self, step, values):
        super().log(step, values)
        raise ValueError("no network")

class Images(Calls):
    def image(self, step, name, path):
        self.write(f"image {step} {name} {path.relative_to(self.path.parent)} {path.exists()}")

class Short:
    def start(self, run): pass

class Needs(Calls):
    def __init__(self, url): pass

class Losses(Calls):
    def log(self, values): pass

def losses(): return Losses()

class Plain:
    @staticmethod
    def start(run): pass

    @classmethod
    def log(cls, *values): pass

    close = print

def nothing(): return None

def broken(): raise OSError("no server")

number = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's with sinks, and the one of the docs."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/own_sinks.py").write_text(SINKS)
    section = DOCS.read_text("utf-8").partition("## Trackers")[2]
    (tmp_path / "code/losses.py").write_text(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1])
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    for name in ("own_sinks", "losses"):  # another test may have imported them from its own folder
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def run(tmp_path):
    """A run in `tmp_path`."""
    return RunInfo("x", tmp_path, {"train": {"steps": 8}}, "f00d", "dp_shard 2", after_step=0, recorded_step=0)


def record(sink, run, steps):
    sink.start(run)
    for step in steps:
        sink.log(step, {"loss_bits_per_byte": 100.0 * run.after_step + step})
    sink.close(True)


def resumed(run):
    """The run after it was killed in step 6, with a checkpoint of step 3."""
    return replace(run, after_step=3, recorded_step=6)


@pytest.mark.slow
def test_a_resumed_run_has_no_step_twice_in_a_users_sink_and_tensorboard(own, tmp_path):
    """Killed in step 7, it repeats 5 and 6 from the checkpoint of step 4. A sink that fails is not called again."""
    words = [
        "checkpoint.every=4",
        'train.trackers=["tensorboard","losses:LossFile","own_sinks:Fails","own_sinks:Calls"]',
    ]
    out = tmp_path / "run"
    with pytest.raises(MeshwrightError):
        train(words, out, fault=Fault(step=7))
    assert len(metrics(out)) == 6
    train(words, out, resume="auto")
    losses = [line["loss"] for line in metrics(out)]
    found = [line.split(",") for line in (out / "losses.csv").read_text().splitlines()]
    assert [int(step) for step, _ in found] == list(range(1, 9))
    assert [float(loss) for _, loss in found] == pytest.approx(losses)
    assert scalars(out / "tensorboard", "loss_bits_per_byte") == pytest.approx(
        dict(enumerate(losses, start=1)), rel=1e-5
    )
    assert set(scalars(out / "tensorboard", "validation_loss_bits_per_byte")) == {4, 8}
    first, *_, sample, last = (out / "Calls.txt").read_text().splitlines()
    assert first.startswith("start after 0: one rank, 8 steps, ") and (sample, last) == ("sample 8", "close False")
    lines = (out / "Fails.txt").read_text().splitlines()
    assert [line.split(":")[0] for line in lines] == ["start after 0", "log 1", "start after 4", "log 5"]


def test_a_stopped_run_closes_its_sinks_on_rank_0_alone(own, tmp_path):
    words = ["mesh.dp_shard=2", "train.trackers=own_sinks:Calls"]
    with pytest.raises(MeshwrightError, match="stopped after step 3"):
        train(words, tmp_path / "run", fault=Fault(rank=1, action="stop"))
    lines = (tmp_path / "run/Calls.txt").read_text().splitlines()
    assert lines[0].startswith("start after 0: dp_shard 2") and lines[1:] == ["log 1", "log 2", "log 3", "close True"]


@pytest.mark.slow
def test_the_sample_grids_of_a_run_reach_a_sink(forked_meshwright, own, tmp_path):
    words = ["dit-digits", "train.steps=2", "train.validate_every=1", "train.global_batch=8", "model.num_layers=1",
             "diffusion.sampling_steps=2", "diffusion.num_samples=2", "train.validation_samples=8",
             "train.trackers=own_sinks:Images"]  # fmt: skip
    out, env = tmp_path / "run", clean_environment(PYTHONPATH=os.pathsep.join(sys.path), OMP_NUM_THREADS="1")
    done = forked_meshwright("run", *words, "--out", out, env=env)
    assert done.returncode == 0, done.stderr
    images = [line for line in (out / "Images.txt").read_text().splitlines() if line.startswith("image")]
    assert images == [f"image {step} samples samples/step-{step:08d}.png True" for step in (1, 2)]


def scalars(folder, name):
    """Values by step that TensorBoard shows."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars(name)]
    assert len(dict(found)) == len(found)
    return dict(found)


def test_tensorboard_shows_the_last_values_images_and_texts(run, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    record(TensorBoardSink(), run, range(1, 7))
    record(TensorBoardSink(), resumed(run), range(4, 9))
    expected = {1: 1, 2: 2, 3: 3, 4: 304, 5: 305, 6: 306, 7: 307, 8: 308}
    assert scalars(tmp_path / "tensorboard", "loss_bits_per_byte") == expected
    image(tmp_path)
    sink = TensorBoardSink()
    sink.start(replace(run, folder=tmp_path / "more"))
    sink.image(1, "samples", tmp_path / "grid.png")
    sink.text(1, "sample", "def f(x):")
    sink.close(False)
    [events] = (tmp_path / "more/tensorboard").iterdir()
    assert b"samples" in events.read_bytes() and b"    def f(x):" in events.read_bytes()


def image(folder):
    import numpy as np
    from PIL import Image

    Image.fromarray(np.zeros((4, 6), np.uint8)).save(folder / "grid.png")


@pytest.mark.slow
def test_wandb_goes_on_with_the_same_run(run, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true"), ("WANDB_DISABLE_GIT", "true")):
        monkeypatch.setenv(name, value)
    try:
        record(WandbSink(), run, range(1, 7))
        sink = WandbSink()
        sink.start(resumed(run))
        logged = []
        monkeypatch.setattr(sink._run, "log", lambda values, step: logged.append(step))
        image(tmp_path)
        for step in range(4, 9):
            sink.log(step, {"lr": 0.1})
            sink.image(step, "samples", tmp_path / "grid.png")
        assert logged == [7, 7, 8, 8]
        sink.text(8, "sample", "def f(x):")
        sink.close(False)
    finally:
        wandb.teardown()
    files = list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len({path.name for path in files}) == 1 and len(list(tmp_path.glob("wandb-run.json"))) == 1
    recorded = min(files).read_bytes()
    assert b"loss_bits_per_byte" in recorded and b"dp_shard 2" in recorded


STAND_IN = """
logged = []

class Run:
    def __init__(self, **facts): self.facts = facts
    def log(self, metrics, step=None): logged.append((self.facts["name"], step, metrics))
    def finish(self): logged.append((self.facts["name"], "finish", {}))

def init(project, name=None, config=None, resume="never", embed=True): return Run(name=name)

def Image(value, caption=None): return value
"""
"""The part of Trackio's documented interface that its sink uses."""


def test_trackio_goes_on_with_the_same_run(run, tmp_path, monkeypatch):
    trackio = ModuleType("trackio")
    exec(STAND_IN, vars(trackio))
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    record(TrackioSink(), run, range(1, 7))
    record(TrackioSink(), resumed(run), range(4, 9))
    names, steps, _ = zip(*trackio.logged, strict=True)
    assert len(set(names)) == 1 and names[0].startswith(tmp_path.name)
    assert steps == (1, 2, 3, 4, 5, 6, "finish", 7, 8, "finish")


@pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio_itself_keeps_each_step_once(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    record(TrackioSink(), run, range(1, 7))
    record(TrackioSink(), resumed(run), range(4, 9))
    [path] = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(path) as database:
        assert [step for (step,) in database.execute("select step from metrics order by id")] == list(range(1, 9))


def test_a_third_attempt_repeats_nothing_either(run):
    """The second one ended before the steps that the first had recorded; one that did not start has recorded none."""
    steps = []
    with pytest.raises(OSError), continue_run(run, "run.json", "none"):
        raise OSError
    for recorded in (0, 10, 8):
        with continue_run(replace(run, recorded_step=recorded), "run.json", f"name-{recorded}") as (name, step):
            steps.append((name, step))
    assert steps == [("name-0", 0), ("name-0", 10), ("name-0", 10)]


@pytest.mark.parametrize(
    ("unit", "name", "value"),
    [(text_unit(1.0), "loss_bits_per_byte", 2.0), (text_unit(None), "loss_nats_per_token", 2 * math.log(2)),
     (LossUnit("squared error"), "loss_squared_error", 2 * math.log(2)),
     (LossUnit("per token"), "loss_per_token", 2 * math.log(2))],
)  # fmt: skip
def test_losses_say_their_unit(unit, name, value):
    line = {"step": 3, "loss": 2 * math.log(2), "validation_loss": 2 * math.log(2), "lr": 0.1}
    expected = {name: value, f"validation_{name}": value, "lr": 0.1}
    found = in_unit(line, unit)
    assert found == pytest.approx({"step": 3, **expected}) and in_unit(found, unit) == found
    assert tracked_values(found) == pytest.approx(expected)
    assert unit_of_metric(name) == unit_of_metric(f"validation_{name}") == unit.name


def test_trackers_get_finite_numbers_only():
    line = {"step": 1, "loss": math.nan, "grad_norm": math.inf, "samples": [0, 7], "skipped": True,
            "expert_load": {"max_over_mean": None, "unused": 2}, "expert_counts": [[1, 2]]}  # fmt: skip
    found = tracked_values(line)
    assert found == {"skipped": 1, "expert_load/unused": 2} and type(found["skipped"]) is int


def test_a_sink_that_raises_is_reported_once_with_its_place(own, run, caplog, tmp_path):
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        found = Trackers(["own_sinks:Fails", "own_sinks:broken", "own_sinks:Calls"], run)
        for step in (1, 2):
            found.log(step, {})
        found.image(2, "samples", tmp_path / "grid.png")  # neither has `image`
        found.close(failed=False)
        found.close(failed=True)
    made, failed = (entry.getMessage() for entry in caplog.records)
    assert "own_sinks:broken can't be made" in made and "OSError('no server')" in made
    assert (
        "own_sinks:Fails failed in log" in failed and "ValueError('no network')" in failed and "own_sinks.py:" in failed
    )
    assert (tmp_path / "Calls.txt").read_text().splitlines()[1:] == ["log 1", "log 2", "close False"]


def test_a_slow_sink_is_noted_once(own, run, caplog, monkeypatch):
    monkeypatch.setattr(trackers, "SLOW_S", 1e-9)
    monkeypatch.setattr(trackers, "SLOW_SHARE", 0.0)
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        found = Trackers(["own_sinks:Calls"], run)
        found.log(1, {})
        found.log(2, {})
    [entry] = caplog.records
    assert "own_sinks:Calls has taken" in entry.getMessage()


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [("own_sinks:Short", "lacks log, close", "define start(run)"),
     ("own_sinks:Needs", "without arguments", "defaults"),
     ("own_sinks:Losses", "Losses.log can't be called with step and values", "log(step, values)"),
     ("own_sinks:number", "not a class or function: 3", "class"),
     ("own_sinks:Cals", "has no Cals", "train.trackers='[\"losses:LossFile\",\"own_sinks:Calls\"]'"),
     ("no_such_module:Sink", "module not found: no_such_module", "PYTHONPATH")],
)  # fmt: skip
def test_what_is_no_sink_is_said_before_the_run(own, name, what, fix):
    with pytest.raises(ConfigError) as caught:
        check_trackers(["losses:LossFile", name])
    error = caught.value
    assert what in error.what and error.where == "train.trackers" and error.rule and fix in error.fix


@pytest.mark.parametrize(
    ("name", "what"),
    [("losses", "losses.log can't be called with step and values: too many"), ("nothing", "returned None")],
)
def test_what_a_function_returns_is_tried_before_the_first_step(own, run, name, what):
    check_trackers([f"own_sinks:{name}", "own_sinks:Plain"])
    with pytest.raises(ConfigError, match=what):
        Trackers([f"own_sinks:{name}"], run)


@pytest.mark.parametrize("name", trackers.SINKS)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, tmp_path, name):
    """Also where wandb has left a folder of its name."""
    (tmp_path / name).mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(InputError, match=f"{name} is not installed") as error:
        check_trackers([name])
    assert error.value.fix == f"pip install {name}, or train.trackers=[]"
    assert error.value.exit_code == 2
