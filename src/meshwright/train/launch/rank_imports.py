"""Imports what ranks need, without looking for garbage: imports make none, and looking took a sixth of their time.

Loaded by the server process that ranks are forked from, and by ranks of other launchers. Whatever the server imports,
here or later, may not start CUDA; if it does, the launcher learns of it.
"""

from __future__ import annotations

import gc
import inspect
import os
import traceback
from importlib import import_module

from meshwright.train.launch.private import call_before_cuda
from meshwright.train.launch.rank_environment import STARTED_CUDA

MODULES = ("torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "meshwright.train.rank_run",
           "meshwright.train.launch.launcher", "meshwright.train.launch.local_worker")  # fmt: skip


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


def note_importing() -> None:
    """Set STARTED_CUDA to the innermost module that is being imported, unless another one was earlier."""
    frames = (frame for frame, _ in traceback.walk_stack(inspect.currentframe()))
    importing = (frame.f_globals["__name__"] for frame in frames if frame.f_code.co_name == "<module>")
    os.environ[STARTED_CUDA] = os.environ.get(STARTED_CUDA) or next(importing, "")


_import_all()
