"""Threads per rank, and how busy this machine's cores are with other programs."""

from __future__ import annotations

import os
import time
from pathlib import Path

from meshwright.cluster.host import num_cores
from meshwright.units import counted

VARIABLE = "OMP_NUM_THREADS"
LOOK_S = 0.1
"""Shortest time over which business is measured: ten ticks of the kernel's counters."""
STAT = Path("/proc/stat")


def threads_per_rank(chosen: int | None, *, num_ranks: int) -> int:
    """Return the threads of each rank: as configured, else as OMP_NUM_THREADS says, else an equal part of the cores.

    Args:
        chosen: `train.threads`.
        num_ranks: number of ranks on this machine.
    """
    return chosen or _from_environment() or max(1, num_cores() // num_ranks)


class BusyCores:
    """Measures how many cores other programs use, from its creation on."""

    def __init__(self) -> None:
        self._start_s, self._before = time.perf_counter(), _busy_s()

    def count(self) -> float:
        """Return the number of cores that other programs have used since, on average; 0 if unknown."""
        time.sleep(max(0.0, self._start_s + LOOK_S - time.perf_counter()))
        seconds, busy = time.perf_counter() - self._start_s, _busy_s()
        if busy is None or self._before is None:
            return 0.0
        return max(0.0, (busy - self._before) / seconds)


def advice(chosen: int | None, *, num_ranks: int, others: BusyCores) -> str | None:
    """Return a warning if the default of threads is more than idle cores; None if it isn't, or was not left to us.

    OpenMP's threads wait for each other actively: with more of them than idle cores, a run may be several times slower
    than with one. The number is not changed by itself, since the last bits of sums depend on it.

    Args:
        chosen: `train.threads`.
        num_ranks: number of ranks on this machine.
        others: has measured since the command started.
    """
    threads, cores = threads_per_rank(None, num_ranks=num_ranks), num_cores()
    if chosen or _from_environment() or threads == 1:
        return None
    busy = others.count()
    if threads * num_ranks <= cores - busy + 0.5:
        return None
    return (
        f"other programs use {busy:.1f} of {counted(cores, 'core')}: "
        f"{counted(threads, 'thread')} per rank may be slow; "
        f"train.threads={max(1, int((cores - busy) // num_ranks))} may be faster"
    )


def _from_environment() -> int | None:
    """Return the number in OMP_NUM_THREADS, which may be a list for nested levels; None if there is none."""
    first = os.environ.get(VARIABLE, "").split(",")[0].strip()
    return int(first) if first.isascii() and first.isdigit() and int(first) else None


def _busy_s() -> float | None:
    """Return the time that our cores have been busy with other programs, in seconds; None where it is unknown."""
    try:
        rows = {row[0]: row[1:] for line in STAT.read_text("ascii").splitlines() if (row := line.split())}
        cores = [list(map(int, rows[f"cpu{core}"])) for core in os.sched_getaffinity(0)]
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    own = os.times()
    # User, nice and system time, interrupts, and time taken by other virtual machines; guests are part of user time.
    ticks = sum(sum(row[:3]) + sum(row[5:8]) for row in cores)
    return ticks / os.sysconf("SC_CLK_TCK") - own.user - own.system
