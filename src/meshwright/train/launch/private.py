"""Adapter for private names of Python's multiprocessing and of PyTorch.

Private PyTorch names: `torch._C._cuda_init` and `torch._C._cuda_getDeviceCount`, checked on 2.13. This is the only file
of the room that uses them, or a private name of Python's, `multiprocessing.util._run_finalizers`, checked on 3.11.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import util


def release_semaphores() -> None:
    """Unlink the named semaphores of this process, as Python does when the interpreter ends.

    `torch.compile` leaves one behind, by its progress bar, and Python's resource tracker warns of it.
    """
    util._run_finalizers(0)  # type: ignore[attr-defined]


def call_before_cuda(first: Callable[[], object]) -> None:
    """Call `first`, which returns None, before any call after which processes forked from this one can't use CUDA."""
    import torch

    for name in ("_cuda_init", "_cuda_getDeviceCount"):
        if (original := getattr(torch._C, name, None)) is not None:  # builds without CUDA have neither
            setattr(torch._C, name, lambda original=original: first() or original())
