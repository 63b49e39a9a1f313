"""Output that may go away: `| head` ends, a terminal is closed, the disk of a log is full. Nothing else ends with it.

What can't be written is dropped. A run says so once, on stderr and in its log.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from meshwright.log import get_logger

GONE = (errno.EPIPE, errno.EIO)
"""Errors of streams that nobody reads any more, so that nothing is missed."""

_log = get_logger(__name__)


class LastingStream:
    """Stream whose writes don't fail; with `warns`, the first failure is logged.

    Attributes:
        error: why something couldn't be written; None if everything was.
    """

    def __init__(self, stream: TextIO, *, warns: bool = False) -> None:
        self._stream, self._warns = stream, warns
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text, or drop it."""
        with self._enduring():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered, or leave it."""
        with self._enduring():
            self._stream.flush()

    @contextmanager
    def _enduring(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._warns and self.error is None:
                _log.warning("the output can't be written (%s): the run goes on without it", error.strerror)
            self.error = self.error or error
            # What the stream holds, and gets, goes nowhere: Python flushes it once more at the end, and may not fail.
            with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())


def lasting(stream: TextIO, *, warns: bool = False) -> TextIO:
    """Return a stream whose writes don't fail, and with `warns`, log the first failure."""
    inner = stream._stream if isinstance(stream, LastingStream) else stream  # which would keep failures to itself
    return cast("TextIO", LastingStream(inner, warns=warns))


@contextmanager
def lasting_output() -> Iterator[None]:
    """Let writes to stdout and stderr not fail within the block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = lasting(sys.stdout), lasting(sys.stderr)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def unwritten() -> OSError | None:
    """Return why stdout lacks something that someone may read; None for a pipe whose reader has ended."""
    sys.stdout.flush()
    error: OSError | None = getattr(sys.stdout, "error", None)
    return None if error is None or error.errno in GONE else error
