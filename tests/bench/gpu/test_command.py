"""Tests of `bench/gpu`: its options, fake parts through the processes that run the real ones, and a dry run of all."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright_bench.gpu import command
from meshwright_bench.gpu.cases import State
from meshwright_bench.gpu.command import LOGS, SUMMARY, Call, main, run_parts
from meshwright_bench.gpu.parts import PARTS, Part
from meshwright_bench.gpu.report import Machine
from meshwright_bench.gpu.runner import Outcome
from tests.helpers import clean_environment

ROOT = Path(__file__).parents[3]
MACHINE = Machine(None, {"torch": "2.11.0"}, "2026-01-02")


def fake(name: str, limit_s: float = 60.0) -> Part:
    return Part(name, f"a {name} part", f"tests.bench.gpu.fakes:{name}", limit_s, ("*.speed",))


def run_fakes(tmp_path, *parts: Part, limit_s: float = 300.0) -> tuple[int, dict, Path]:
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    (out / LOGS).mkdir(parents=True)
    scratch.mkdir()
    status = run_parts(parts, Call(out, True, limit_s, scratch, time.monotonic()), MACHINE)
    return status, json.loads((out / SUMMARY).read_text("utf-8")), out


def test_parts_that_pass_or_can_not_run_are_a_success(tmp_path, capsys):
    status, summary, out = run_fakes(tmp_path, fake("good"), fake("absent"))
    assert status == 0
    assert {name: part["state"] for name, part in summary["parts"].items()} == {"good": "passed", "absent": "not run"}
    assert summary["parts"]["absent"]["why"] == "no such device"
    found = json.loads((out / "good.json").read_text("utf-8"))
    assert found["figures"] == {"first.speed": 2.0}
    assert [case["state"] for case in found["cases"]] == ["passed", "not run"]
    assert (found["device"], found["date"], found["versions"]) == ("CPU, dry run", "2026-01-02", {"torch": "2.11.0"})
    shown = capsys.readouterr().out
    assert "first.speed  2" in shown and "no_such_package" in shown


@pytest.mark.parametrize(
    ("name", "why"), [("failing", "bad: wrong in"), ("silent", "no results"), ("broken", "RuntimeError")]
)
def test_a_part_that_fails_says_so_and_the_next_one_runs(tmp_path, name, why):
    status, summary, out = run_fakes(tmp_path, fake(name), fake("good"))
    assert status == 1
    assert summary["parts"][name]["state"] == "failed" and why in summary["parts"][name]["why"]
    assert summary["parts"]["good"]["state"] == "passed"


def test_a_case_that_fails_does_not_stop_the_others_and_its_reason_names_no_folder(tmp_path):
    _, summary, out = run_fakes(tmp_path, fake("failing"))
    found = json.loads((out / "failing.json").read_text("utf-8"))
    assert found["figures"] == {"before.speed": 1.0, "after.speed": 3.0}
    assert str(tmp_path) not in json.dumps([found, summary])


def test_a_part_that_hangs_is_cut_off_and_the_next_one_runs(tmp_path):
    status, summary, out = run_fakes(tmp_path, fake("hanging", limit_s=1.0), fake("good"))
    assert status == 1
    assert summary["parts"]["hanging"]["state"] == "timed out"
    assert summary["parts"]["good"]["state"] == "passed"
    assert json.loads((out / "hanging.json").read_text("utf-8"))["state"] == "timed out"


def test_parts_without_time_left_are_not_run_and_say_why(tmp_path):
    status, summary, _ = run_fakes(tmp_path, fake("good"), limit_s=1.0)
    assert status == 0
    assert summary["parts"]["good"] == {"state": "not run", "why": "no time left of 0.0166667 minutes"}


def test_after_an_interruption_the_other_parts_are_not_run(tmp_path, monkeypatch):
    def interrupted(part, *given, **named):
        return Outcome(part, State.FAILED, "interrupted, no case done", interrupted=True)

    monkeypatch.setattr(command, "run_part", interrupted)
    status, summary, _ = run_fakes(tmp_path, fake("good"), fake("absent"))
    assert status == 1
    assert [part["state"] for part in summary["parts"].values()] == ["failed", "not run"]


@pytest.mark.parametrize("words", [["--parts", "start,trian"], ["--limit-minutes", "0"], ["--limit-minutes", "soon"]])
def test_what_can_not_be_is_an_error_before_anything_starts(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert words[1].rpartition(",")[2] in capsys.readouterr().err


def test_the_list_names_every_part(capsys):
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [part.name for part in PARTS]


def test_without_a_gpu_the_error_names_the_dry_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(command, "run_parts", lambda *given: pytest.fail("a part was started"))
    assert main(["--out", str(tmp_path / "out")]) == 2
    assert "--dry" in capsys.readouterr().err
    assert not any(tmp_path.iterdir()), "nothing is written"


def test_results_that_can_not_be_written_are_an_error(tmp_path, capsys):
    (tmp_path / "file").write_text("", "utf-8")
    assert main(["--dry", "--out", str(tmp_path / "file")]) == 2
    assert "--out DIR" in capsys.readouterr().err


def test_what_python_lacks_is_said_in_80_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "PROCESS", "no_such_module")
    assert main(["--dry", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "no_such_module" in said and "PYTHONPATH" in said
    assert max(len(line) for line in said.splitlines() if sys.executable not in line) <= 80


@pytest.mark.slow
def test_a_dry_run_of_all_parts_passes_or_says_why_not(tmp_path):
    """As on a bare machine: by the file, with nothing of ours on Python's path."""
    done = subprocess.run(
        [sys.executable, "bench/gpu", "--dry", "--out", str(tmp_path)],
        cwd=ROOT,
        env=clean_environment(COLUMNS="80"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / SUMMARY).read_text("utf-8"))
    assert list(summary["parts"]) == [part.name for part in PARTS]
    for name, part in summary["parts"].items():
        assert part["state"] == ("not run" if name == "tests" else "passed"), (name, part)
        found = json.loads((tmp_path / f"{name}.json").read_text("utf-8"))
        assert found["part"] == name and found["cases"]
    assert "CUDA" in summary["parts"]["tests"]["why"]
    assert max(len(line) for line in done.stdout.splitlines() if line != str(tmp_path)) <= 80
    written = "".join(path.read_text("utf-8") for path in tmp_path.glob("*.json"))
    assert not re.search(rf"{re.escape(str(ROOT))}|\b{re.escape(socket.gethostname())}\b", written)
