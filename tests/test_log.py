"""A rank's log file: what was logged before it had a name is in it, and the terminal shows what it did without it."""

from __future__ import annotations

import logging
import warnings

import pytest

from meshwright.errors import RunError, StoppedError
from meshwright.log import ROOT, WARNINGS, configure, get_logger, open_log_file


@pytest.fixture(autouse=True)
def _loggers_as_before():
    loggers = [logging.getLogger(name) for name in (ROOT, WARNINGS)]
    before = [(one, list(one.handlers), one.level, one.propagate) for one in loggers]
    yield
    logging.captureWarnings(False)
    for logger, handlers, level, propagate in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate


def lines(path):
    """The lines of a log file, without their times."""
    return [line.split(" ", 2)[-1] for line in path.read_text("utf-8").splitlines()]


def test_the_file_has_all_that_the_terminal_shows_from_the_start(tmp_path, capfd):
    configure(rank=3)
    get_logger("meshwright.early").warning("before the folder is known")
    open_log_file(tmp_path / "logs/rank-3.log")
    get_logger("meshwright.late").warning("später")
    get_logger("meshwright.late").info("not shown by default")
    warnings.warn("from a library", UserWarning, stacklevel=1)
    shown, found = capfd.readouterr().err, lines(tmp_path / "logs/rank-3.log")
    assert found[:2] == ["WARNING meshwright.early: before the folder is known", "WARNING meshwright.late: später"]
    assert found[2].startswith("WARNING py.warnings: ") and found[2].endswith("UserWarning: from a library")
    first, second, third, source = shown.splitlines()
    assert first == "WARNING rank 3 meshwright.early: before the folder is known" and second.endswith("später")
    assert third.startswith(__file__) and third.endswith("UserWarning: from a library") and "warnings.warn" in source


def test_there_is_no_file_without_a_record_and_a_new_one_appends(tmp_path):
    path = tmp_path / "logs/rank-0.log"
    for word in ("", "first run", "resumed"):
        configure()
        open_log_file(path)
        if word:
            get_logger("meshwright.x").error(word)
        assert path.exists() == bool(word)
    assert lines(path) == ["ERROR meshwright.x: first run", "ERROR meshwright.x: resumed"]


def test_a_file_that_cannot_be_written_ends_nothing(tmp_path, capfd):
    (tmp_path / "logs").write_text("a file")
    configure()
    open_log_file(tmp_path / "logs/rank-0.log")
    get_logger("meshwright.x").warning("shown")
    assert "WARNING rank 0 meshwright.x: shown" in capfd.readouterr().err


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), RunError("bad input"), StoppedError("as requested")])
def test_the_error_that_ends_a_rank_is_in_its_file_with_the_traceback(tmp_path, capfd, error):
    from meshwright.train.launch.local_worker import run_here
    from meshwright.train.launch.rank_context import RankContext, StatusBoard

    def failing_body(context, path):
        open_log_file(path)
        context.post("step", 7)
        raise error

    path = tmp_path / "logs/rank-1.log"
    with pytest.raises(type(error)):
        run_here(failing_body, path, RankContext(1, 2, 0, 1, None, StatusBoard([0] * StatusBoard.length(2))))
    assert "Traceback" not in capfd.readouterr().err
    if isinstance(error, StoppedError):
        assert not path.exists()
    else:
        found = lines(path)
        assert found[0] == "ERROR meshwright: rank 1 of 2 failed: step 7"
        assert "in failing_body" in path.read_text("utf-8") and str(error).splitlines()[0] in path.read_text("utf-8")
