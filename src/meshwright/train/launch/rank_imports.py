"""Imports what ranks need, without looking for garbage: imports make none, and looking took a sixth of their time.

Loaded by the server process that ranks are forked from, and by ranks of other launchers. Whatever the server imports,
here or later, may not start CUDA; if it does, the launcher learns of it.

Private PyTorch names: `torch._C._cuda_init` and `torch._C._cuda_getDeviceCount`, checked on 2.13. This is the only file
of the room that uses them, or a private name of Python's, `multiprocessing.util._run_finalizers`, checked on 3.11.
"""

from __future__ import annotations

import gc
import inspect
import os
import traceback
from collections.abc import Callable
from importlib import import_module
from multiprocessing import util

from meshwright.train.launch.rank_context import STARTED_CUDA

MODULES = ("torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "meshwright.train.rank_run",
           "meshwright.train.launch.local_worker")  # fmt: skip


def call_before_cuda(first: Callable[[], object]) -> None:
    """Call `first`, which returns None, before any call after which processes forked from this one can't use CUDA."""
    import torch

    for name in ("_cuda_init", "_cuda_getDeviceCount"):
        if (original := getattr(torch._C, name, None)) is not None:  # builds without CUDA have neither
            setattr(torch._C, name, lambda original=original: first() or original())


def release_semaphores() -> None:
    """Unlink the named semaphores of this process, as Python does when the interpreter ends.

    `torch.compile` leaves one behind, by its progress bar, and Python's resource tracker warns of it.
    """
    util._run_finalizers(0)  # type: ignore[attr-defined]


def note_importing() -> None:
    """Set STARTED_CUDA to the innermost module that is being imported, unless another one was earlier."""
    frames = (frame for frame, _ in traceback.walk_stack(inspect.currentframe()))
    importing = (frame.f_globals["__name__"] for frame in frames if frame.f_code.co_name == "<module>")
    os.environ[STARTED_CUDA] = os.environ.get(STARTED_CUDA) or next(importing, "")


def _import_all() -> None:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        call_before_cuda(note_importing)
        for module in MODULES:
            import_module(module)
    finally:
        gc.freeze()  # modules live as long as the process: ranks need not look through them
        if was_enabled:
            gc.enable()


_import_all()
