"""Package logging, silent unless enabled by a command or the user."""

from __future__ import annotations

import logging
import sys

ROOT = "meshwright"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass `__name__`."""
    return logging.getLogger(name)


def configure(*, rank: int = 0, level: int = logging.WARNING) -> None:
    """Log to stderr with the rank on each line; calling this again replaces the handler."""
    logger = logging.getLogger(ROOT)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(levelname)s rank {rank} %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
