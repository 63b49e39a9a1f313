"""A run leaves a report however it ends, and no report changes how it ended."""

from __future__ import annotations

import json
import logging

import pytest

from meshwright.errors import RunError, StoppedError
from meshwright.train.record.record_files import REPORT, EventLog, read_events
from meshwright.train.record.reporter import reporting
from tests.train.report.folders import write_folder


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "run", ["llama-tiny"], ended="")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "complete"),
        (StoppedError("stopped after step 3", fix="--resume auto"), "stopped"),
        (RunError("rank 1 failed", where="rank 1", fix="--resume auto"), "failed"),
        (KeyboardInterrupt(), "failed"),
    ],
)
def test_the_end_is_recorded_and_reported(folder, error, outcome):
    def run():
        with reporting(folder):
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)) as raised:
            run()
        assert raised.value is error
    end = read_events(folder)[-1]
    assert end["event"] == "end" and end["outcome"] == outcome
    assert outcome in (folder / REPORT).read_text("utf-8")


def test_a_run_that_did_not_start_leaves_nothing(tmp_path):
    with pytest.raises(RunError), reporting(tmp_path):
        raise RunError("no memory")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["metrics.jsonl", "config.toml"])
def test_a_report_that_cannot_be_made_is_said_and_changes_nothing(folder, damage, caplog):
    (folder / damage).write_text("damaged = \n")
    logging.getLogger("meshwright").propagate = True
    with pytest.raises(RunError, match="rank 1 failed"), reporting(folder):
        raise RunError("rank 1 failed")
    assert not caplog.text, "one error is enough"
    with reporting(folder):
        pass
    assert not (folder / REPORT).exists() and f"no report of {folder}" in caplog.text


def test_events_that_cannot_be_written_end_a_run_but_not_what_is_over(folder):
    with pytest.raises(RunError, match=r"can't write events\.jsonl"):
        EventLog(folder / "missing").write("note", text="a")
    (folder / "events.jsonl").unlink()
    (folder / "events.jsonl").mkdir()
    with reporting(folder):
        pass


def test_events_that_were_cut_off_are_left_out(tmp_path):
    EventLog(tmp_path).write("note", text="a")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('[1]\n{"event": "no')
    assert [event["text"] for event in read_events(tmp_path)] == ["a"]
    assert json.loads((tmp_path / "events.jsonl").read_text().splitlines()[0])["event"] == "note"
