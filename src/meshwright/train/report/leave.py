"""Leave a report in the folder of a run, however it ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.log import get_logger
from meshwright.output_files import write_output
from meshwright.train.continued_run import naming
from meshwright.train.record.events import EVENTS, recording_end

REPORT = "report.html"

_log = get_logger(__name__)


@contextmanager
def reporting(folder: Path) -> Iterator[None]:
    """Write the report of the run of this context when it ends; where it did not start, there is none.

    For the process that outlives the ranks: the launcher or, under another one, rank 0.
    """
    try:
        with recording_end(folder), naming(folder):
            yield
    except BaseException:
        _leave(folder)  # what keeps a report from being made now is likely what the error says
        raise
    if (why := _leave(folder)) is not None:
        _log.warning("no report of %s: %s", folder, why)


def _leave(folder: Path) -> Exception | None:
    """Write the report of a run that started; return what kept it from being made, which changes no run's result."""
    from meshwright.train.report.page import report

    try:
        if (folder / EVENTS).exists():
            write_output(folder / REPORT, report([folder]), where=str(folder))
    except Exception as error:
        return error
    return None
