"""Package logging, silent unless enabled by a command or the user.

Ranks also keep a file of what they log, of Python's warnings and of the error that ended them. Ranks log before their
run folder is known, so records are held until it is.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path

ROOT = "meshwright"
WARNINGS = "py.warnings"
"""Logger that `logging.captureWarnings` hands Python's warnings to."""


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass `__name__`."""
    return logging.getLogger(name)


class LogFile(logging.Handler):
    """Handler that appends records to a file, which exists once there is a record and the path is known."""

    def __init__(self) -> None:
        """Hold records until `open`."""
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._path: Path | None = None
        self._held: list[logging.LogRecord] = []

    def open(self, path: Path) -> None:
        """Write the records held, and all later ones, to `path`."""
        self._path, held, self._held = path, self._held, []
        for record in held:
            self.handle(record)

    def emit(self, record: logging.LogRecord) -> None:
        """Append a record, unless the file can't be written: the terminal has it too, and a run goes on."""
        if self._path is None:
            self._held.append(record)
            return
        with suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(self.format(record).rstrip() + "\n")


def configure(*, rank: int = 0, level: int = logging.WARNING) -> None:
    """Log to stderr with the rank on each line, and to a file once `open_log_file` names it; Python's warnings too.

    Calling this again replaces the handlers.
    """
    logger, warnings = logging.getLogger(ROOT), logging.getLogger(WARNINGS)
    for handler in (*logger.handlers, *warnings.handlers):
        logger.removeHandler(handler)
        warnings.removeHandler(handler)
    terminal, shown = logging.StreamHandler(sys.stderr), logging.StreamHandler(sys.stderr)
    terminal.setFormatter(logging.Formatter(f"%(levelname)s rank {rank} %(name)s: %(message)s"))
    shown.terminator = ""  # Python's text of a warning ends its line
    file = LogFile()
    for one, handlers in ((logger, (terminal, file)), (warnings, (shown, file))):
        for handler in handlers:
            one.addHandler(handler)
        one.propagate = False
    logger.setLevel(level)
    logging.captureWarnings(True)


def open_log_file(path: Path) -> None:
    """Write what was logged since `configure`, and what is logged from now on, to `path`; its folder may be new."""
    for file in _files():
        file.open(path)


def log_failure(what: str, error: BaseException) -> None:
    """Write an error and its traceback to the file only: a rank's launcher shows it on the terminal."""
    raised = (type(error), error, error.__traceback__)
    for file in _files():
        file.handle(logging.LogRecord(ROOT, logging.ERROR, __file__, 0, what, None, raised))


def _files() -> list[LogFile]:
    return [handler for handler in logging.getLogger(ROOT).handlers if isinstance(handler, LogFile)]
