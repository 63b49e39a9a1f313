"""Environment variables that ranks read when they start, before any of our code runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from meshwright.train.launch.threads import VARIABLE

TUNABLES = "GLIBC_TUNABLES"
NO_THREAD_CACHE = "glibc.malloc.tcache_count=0"
"""Lets glibc's allocator merge all that is free.

Small chunks in a thread's cache count as used, so each of them splits a hole that a gathered block would fit into: with
FSDP2 on two ranks, a process held 1.16 GiB instead of 0.93 GiB (docs/planning.md).
"""

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Lets imports ask whether there is a CUDA device without starting CUDA, after which ranks could not be forked."""
STARTED_CUDA = "MESHWRIGHT_STARTED_CUDA"
"""Set by the server that ranks are forked from to the module whose import started CUDA all the same."""


@contextmanager
def rank_environment(threads: int) -> Iterator[None]:
    """Set variables for processes started in the context; a thread cache that a user has chosen stays.

    Args:
        threads: threads of each rank, for OpenMP.
    """
    tunables = os.environ.get(TUNABLES, "")
    if "glibc.malloc.tcache_count" not in tunables:
        tunables = ":".join(filter(None, (tunables, NO_THREAD_CACHE)))
    values = {VARIABLE: str(threads), TUNABLES: tunables, NVML_CHECK: "1", STARTED_CUDA: ""}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
