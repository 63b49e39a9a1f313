"""Time of two overlapped tasks of expert layers, relative to the same tasks one after the other.

An all-to-all is a wait of a given time, and so is a computation, since only one of the tasks computes at a time. The
rest of the measured time is what the turns cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from meshwright.comm.overlap import helper_thread, run_overlapped, switch_task
from meshwright_bench.alternate import alternate

PAIR, SUM = "pair", "sum"


@dataclass(frozen=True)
class PairSeconds:
    """Median seconds of a pair and of its two tasks one after the other."""

    pair_s: float
    sum_s: float

    def ratio(self) -> float:
        """Return the time of the pair relative to the sum."""
        return self.pair_s / self.sum_s


def measure_pair(
    *,
    compute_s: tuple[float, float] = (0.002, 0.004),
    all_to_all_s: float = 0.002,
    num_layers: int = 4,
    rounds: int = 5,
) -> PairSeconds:
    """Measure a forward and a backward of expert layers, overlapped and one after the other, in alternation.

    Args:
        compute_s: time of each of a layer's two computations, in the forward and in the backward.
        all_to_all_s: time of each of a layer's two all-to-alls.
        num_layers: layers of each task.
        rounds: rounds of the alternation.
    """
    first, second = (_expert_layers(num_layers, each, all_to_all_s) for each in compute_s)

    def one_after_the_other() -> None:
        first()
        second()

    with helper_thread() as helper:
        arms = {PAIR: lambda: run_overlapped(first, second, helper=helper), SUM: one_after_the_other}
        timed = alternate(arms, timer=_seconds, rounds=rounds, steps=1)
    return PairSeconds(timed.step_seconds(PAIR), timed.step_seconds(SUM))


def switch_seconds(*, num_switches: int = 10_000) -> float:
    """Return the time of one switch between two tasks that do nothing else."""

    def task() -> None:
        for _ in range(num_switches):
            switch_task()

    return _seconds(lambda: run_overlapped(task, task)) / (2 * num_switches)


def _expert_layers(num_layers: int, compute_s: float, all_to_all_s: float) -> Callable[[], None]:
    """Return a task like a stage of expert layers: attention, dispatch, experts, combine."""

    def task() -> None:
        for _ in range(2 * num_layers):
            time.sleep(compute_s)
            arrives = time.perf_counter() + all_to_all_s
            switch_task()
            time.sleep(max(0.0, arrives - time.perf_counter()))

    return task


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
