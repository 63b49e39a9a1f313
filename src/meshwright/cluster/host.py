"""CPU cores and memory of this machine. Doesn't import torch."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def num_cores() -> int:
    """Return the number of CPU cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory_bytes() -> int | None:
    """Return this machine's memory plus swap, or the container's limit if lower; None if unavailable."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return None
    facts = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    limits = [_limit(Path(name)) for name in CGROUP_LIMITS]
    return min([facts["MemTotal"] + facts.get("SwapTotal", 0), *(limit for limit in limits if limit is not None)])


def _limit(path: Path) -> int | None:
    try:
        return int(path.read_text("ascii"))
    except (OSError, ValueError):  # no limit: the file is missing or contains `max`
        return None
