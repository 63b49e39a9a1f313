"""Imports what ranks need, without looking for garbage: imports make none, and looking took a sixth of their time.

Loaded by the server process that ranks are forked from, and by ranks of other launchers.
"""

from __future__ import annotations

import gc
from importlib import import_module

MODULES = ("torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "meshwright.train.rank_run",
           "meshwright.train.launch.local_worker")  # fmt: skip


def _import_all() -> None:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for module in MODULES:
            import_module(module)
    finally:
        gc.freeze()  # modules live as long as the process: ranks need not look through them
        if was_enabled:
            gc.enable()


_import_all()
