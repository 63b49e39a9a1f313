"""Tests of the commands of a part's cases, and of what is read from a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from meshwright_bench.gpu import commands
from meshwright_bench.gpu.cases import Case, CaseError, Setting, State, read_records, run_cases
from meshwright_bench.gpu.commands import config_of, measured_run, random_tokens, read_run, reason, run_command

WORDS = ("llama-tiny", "train.steps=8", "train.global_batch=2", "train.seq_len=16")


def write_run(folder, *, step_ms: list[float], measured: list[int]) -> None:
    folder.mkdir(parents=True)
    lines = [
        {"step": step, "loss_nats_per_token": 5.0 / step, "tokens_per_s": 32 / (ms / 1e3)}
        for step, ms in enumerate(step_ms, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    events = [
        {"event": "start", "predicted_bytes": 2000},
        {"event": "under way", "ranks": [{"model": 0.5, "values": 1.5}]},
        {"event": "measured", "steps": measured, "memory": [{"peak": 1600}]},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), "utf-8")


def test_a_runs_step_is_the_median_of_those_that_nothing_disturbed(tmp_path):
    config = config_of([*WORDS, "train.profile=8"])
    write_run(tmp_path / "run", step_ms=[900, 90, 90, 10, 12, 70, 14, 80], measured=[6])
    run = read_run(config, tmp_path / "run")
    assert run.step_s == pytest.approx(12e-3)
    assert run.tokens == 32
    assert (run.peak_bytes, run.predicted_bytes) == (1600, 2000)
    assert run.start_s == {"model": 0.5, "values": 1.5}
    assert run.losses[0] == 5.0 and len(run.losses) == 8


def test_a_run_of_the_same_words_is_run_once(tmp_path, monkeypatch):
    started = []

    def fake_command(label, *words):
        started.append(words)
        write_run(Path(words[-1]), step_ms=[1.0] * 8, measured=[8])
        return []

    monkeypatch.setattr(commands, "run_command", fake_command)
    setting = Setting("cpu", tmp_path)
    first, again = (measured_run("a", WORDS, setting) for _ in range(2))
    assert first == again and len(started) == 1
    assert "checkpoint.at_end=false" in started[0] and "train.device=cpu" in started[0]
    measured_run("b", (*WORDS, "train.lr=1e-4"), setting)
    assert len(started) == 2


def test_a_run_that_failed_is_not_taken_for_one_that_passed(tmp_path, monkeypatch):
    def failing_command(label, *words):
        write_run(Path(words[-1]), step_ms=[1.0] * 8, measured=[8])
        raise CaseError("it failed after its last step")

    monkeypatch.setattr(commands, "run_command", failing_command)
    for _ in range(2):
        with pytest.raises((CaseError, FileExistsError)):
            measured_run("a", WORDS, Setting("cpu", tmp_path))


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["a note", "error  mesh.tp = 3 does not divide 4", "where  here"], "error  mesh.tp = 3 does not divide 4"),
        (["✗ gradients differ", "NOT PROVED in 3 s"], "✗ gradients differ"),
        (
            ["a note", "✗ rank 0 failed", "cause   RuntimeError: no", "where   rank 0"],
            "✗ rank 0 failed (RuntimeError: no)",
        ),
        (["Traceback", "RuntimeError: no kernel", ""], "RuntimeError: no kernel"),
        ([], "it printed nothing"),
    ],
)
def test_the_reason_of_a_failure_is_the_error_that_it_shows(lines, why):
    assert reason(lines) == why


def test_a_command_that_fails_is_an_error_with_its_reason():
    assert run_command("a", "-c", "print('one'); print('two')") == ["one", "two"]
    with pytest.raises(CaseError, match="exit status 4: error  no device"):
        run_command("a", "-c", "import sys; print('error  no device'); sys.exit(4)")


def test_random_tokens_are_the_same_for_all_who_ask(tmp_path):
    setting = Setting("cpu", tmp_path)
    path = random_tokens(setting, vocab_size=50, count=1000)
    ids = np.load(path)
    assert ids.shape == (1000,) and ids.max() == 49 and ids.min() == 0
    assert random_tokens(setting, vocab_size=50, count=1000) == path
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_cases_run_at_once_and_each_leaves_a_record(tmp_path):
    def fail():
        raise ValueError("no such number\nmore")

    cases = [
        Case("a", lambda: {"x": 1.0}),
        Case("b", fail),
        Case("c", dict, needs=("no_such_package", "json")),
    ]
    for jobs in (1, 3):
        path = tmp_path / f"{jobs}.jsonl"
        assert run_cases(cases, path, jobs=jobs) is False
        found = {record.case: record for record in read_records(path)}
        assert {name: record.state for name, record in found.items()} == {
            "a": State.PASSED, "b": State.FAILED, "c": State.NOT_RUN,
        }  # fmt: skip
        assert found["a"].figures == {"x": 1.0}
        assert found["b"].note == "ValueError: no such number"
        assert "no_such_package" in found["c"].note and "json" not in found["c"].note
    assert run_cases(cases[::2], tmp_path / "fine.jsonl") is True
