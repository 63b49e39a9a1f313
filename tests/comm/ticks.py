"""A Python thread that ticks while another one waits or computes: whether the GIL was released meanwhile."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

TICK_S, REQUIRED_HZ = 0.004, 50
"""The thread aims at 250 Hz, five times what is required."""

LOADED, FEW = 0.5, 6
"""Where a busy machine does not even let a thread beside an idle one tick at 100 Hz, half of what it does is required,
and `FEW` ticks at least: a held GIL leaves one before a call and one after it, however busy the machine is."""


@dataclass(frozen=True)
class Ticks:
    """How often the thread ran while something else did."""

    count: int
    seconds: float
    idle_hz: float
    """Rate just before, beside C code that does nothing and has released the GIL."""

    @property
    def is_free(self) -> bool:
        """Whether it ticked at the required rate: at 50 Hz, or at half of the idle rate where that is below 100 Hz."""
        return self.count >= max(FEW, min(REQUIRED_HZ, LOADED * self.idle_hz) * self.seconds)


def first_free(measure: Callable[[], Ticks], *, attempts: int = 10) -> Ticks:
    """Measure until the thread was free: others may take the cores from one measurement. A held GIL never lets it."""
    found = measure()
    while not found.is_free and (attempts := attempts - 1):
        found = measure()
    return found


class Ticker:
    """A thread that counts, while its context is open."""

    def __init__(self) -> None:
        self.count = 0
        self._end, self._thread = threading.Event(), threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Ticker:
        self._thread.start()
        self.wait_for(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def during(self, work: Callable[[], object]) -> Ticks:
        """Count while this thread works."""
        idle_count, idle_seconds = self._count(lambda: release_the_gil(0.1))
        count, seconds = self._count(work)
        return Ticks(count, seconds, idle_count / idle_seconds)

    def _count(self, work: Callable[[], object]) -> tuple[int, float]:
        count, begin = self.count, time.perf_counter()
        work()
        return self.count - count, time.perf_counter() - begin

    def wait_for(self, count: int) -> None:
        """Wait until it ticked so often."""
        while self.count < count:
            time.sleep(TICK_S)

    def _run(self) -> None:
        while not self._end.is_set():
            time.sleep(TICK_S)
            self.count += 1


def hold_the_gil(seconds: float) -> None:
    """Sleep in C with the GIL held, as a binding does that doesn't release it."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def release_the_gil(seconds: float) -> None:
    """Sleep in C with the GIL released."""
    ctypes.CDLL(None).usleep(int(seconds * 1e6))
