"""Adapter for private names of Python's multiprocessing.

Private PyTorch names: none. This is the only file of the room that uses a private name of Python's,
`multiprocessing.util._run_finalizers`, checked on 3.11.
"""

from __future__ import annotations

from multiprocessing import util


def release_semaphores() -> None:
    """Unlink the named semaphores of this process, as Python does when the interpreter ends.

    `torch.compile` leaves one behind, by its progress bar, and Python's resource tracker warns of it.
    """
    util._run_finalizers(0)  # type: ignore[attr-defined]
