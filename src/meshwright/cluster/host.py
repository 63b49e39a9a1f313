"""This machine: its cores and its memory. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def num_cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_bytes() -> int | None:
    """Memory and swap of this machine, or of the container if it has less; None where that can't be read."""
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
    except (OSError, ValueError):  # there is none; cgroups say `max`
        return None
