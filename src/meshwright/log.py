"""Logging: one logger for the package, silent unless a verb or the user turns it on."""

from __future__ import annotations

import logging
import sys

ROOT = "meshwright"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; pass `__name__`."""
    return logging.getLogger(name)


def configure(*, rank: int = 0, level: int = logging.WARNING) -> None:
    """Send the package's log to stderr, each line with its rank. Calling it again replaces the handler."""
    logger = logging.getLogger(ROOT)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(levelname)s rank {rank} %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
