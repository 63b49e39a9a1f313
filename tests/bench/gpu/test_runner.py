"""Tests of running a part as a process with a limit, on processes that pass, fail, hang or leave nothing."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import textwrap
import time

import pytest

from meshwright_bench.gpu.cases import Record, State
from meshwright_bench.gpu.runner import conclude, is_running, run_part

RECORD = {"case": "a", "state": "passed", "note": "", "seconds": 0.0, "figures": {"speed": 1.5}}
FAILED = {**RECORD, "case": "b", "state": "failed", "note": "wrong"}
LEAVE = """
import json, os, sys, time
out = open(sys.argv[1], "a")
leave = lambda record: print(json.dumps(record), file=out, flush=True)
"""


def run(tmp_path, code: str, *, limit_s: float = 60.0):
    records, log = tmp_path / "records.jsonl", tmp_path / "log"
    program = f"{LEAVE}\n{textwrap.dedent(code)}"
    outcome = run_part("p", [sys.executable, "-c", program, str(records)], limit_s=limit_s, log=log, records=records)
    return outcome, log.read_text("utf-8")


def test_a_part_that_ends_well_has_passed_and_its_output_is_in_the_log(tmp_path):
    outcome, log = run(tmp_path, f"leave({RECORD}); print('said')")
    assert (outcome.state, outcome.why, outcome.failed) == (State.PASSED, "", False)
    assert outcome.records == (Record("a", State.PASSED, figures={"speed": 1.5}),)
    assert log == "said\n"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("sys.exit('no kernel')", "no kernel"),  # before any result
        (f"leave({RECORD}); sys.exit(3)", "exit status 3"),  # after one
        (f"leave({RECORD}); leave({FAILED})", "b: wrong"),  # although it ends well
        ("print('fine')", "no results"),
        (f"out.write(json.dumps({RECORD})[:30])", "no results"),  # nothing but a line that was cut off
    ],
)
def test_a_part_that_fails_or_leaves_nothing_has_failed(tmp_path, code, why):
    outcome, _ = run(tmp_path, code)
    assert outcome.state is State.FAILED and outcome.failed
    assert why in outcome.why


# A shell is there at once, so that it has left its record and started its child long before its limit.
SLEEPER = "echo $RECORD >>records.jsonl; sleep 600 & echo $$ >group.part; mv group.part group; "


@pytest.mark.parametrize(("end", "state"), [("wait", State.TIMED_OUT), ("exit 0", State.PASSED)])
def test_a_part_leaves_its_records_and_no_process_behind(tmp_path, end, state):
    records, log = tmp_path / "records.jsonl", tmp_path / "log"
    command = ["sh", "-c", f"cd {shlex.quote(str(tmp_path))}; {SLEEPER}{end}"]
    env = {**os.environ, "RECORD": json.dumps(RECORD)}
    outcome = run_part("p", command, limit_s=1.0, log=log, records=records, env=env)
    assert outcome.state is state and outcome.failed is (state is State.TIMED_OUT)
    assert [record.case for record in outcome.records] == ["a"]
    assert not is_running(int((tmp_path / "group").read_text("utf-8")))


def test_a_part_that_is_interrupted_is_killed_and_leaves_what_it_had(tmp_path, monkeypatch):
    wait = subprocess.Popen.wait

    def interrupted(process, timeout=None):
        if timeout is None:
            return wait(process)
        while not (tmp_path / "group").is_file():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    records = tmp_path / "records.jsonl"
    command = ["sh", "-c", f"cd {shlex.quote(str(tmp_path))}; {SLEEPER}wait"]
    env = {**os.environ, "RECORD": json.dumps(RECORD)}
    outcome = run_part("p", command, limit_s=60.0, log=tmp_path / "log", records=records, env=env)
    assert outcome.interrupted and outcome.failed and len(outcome.records) == 1
    assert not is_running(int((tmp_path / "group").read_text("utf-8")))


def test_a_group_runs_until_it_is_killed():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True) as sleeper:
        assert is_running(sleeper.pid)
        sleeper.kill()
    assert not is_running(sleeper.pid)


@pytest.mark.parametrize(
    ("status", "states", "expected"),
    [
        (0, "", State.FAILED),
        (0, "passed", State.PASSED),
        (0, "passed,not run", State.PASSED),
        (0, "not run,not run", State.NOT_RUN),
        (0, "passed,failed", State.FAILED),
        (1, "not run", State.FAILED),
        (1, "passed,failed", State.FAILED),
        (None, "passed", State.TIMED_OUT),
        (None, "failed", State.TIMED_OUT),
    ],
)
def test_the_state_of_a_part_follows_from_its_status_and_its_cases(status, states, expected):
    records = [Record(str(at), State(state), "why") for at, state in enumerate(filter(None, states.split(",")))]
    state, why = conclude(status, records, limit_s=2.0, last_line="")
    assert state is expected
    assert bool(why) is (expected is not State.PASSED)
