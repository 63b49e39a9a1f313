"""`bench loader`: time of a step whose batches come from a slow source, with and without prefetching. Torch-free.

Source and step sleep, as a read from a slow disk and a wait for a device do, so the times are known: a step that
prefetches should take the longer of the two, and one that does not their sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import date
from statistics import median

from meshwright_bench.benchmarks import Benchmark, Options, Say
from meshwright_bench.devices import refuse_cuda
from meshwright_bench.report import Figure, Report, cpu_name, of_rounds

AHEAD = 2
CASES_MS = ((5, 20), (20, 20), (40, 20), (20, 5))
"""Milliseconds of the source and of the step."""
STEPS, ROUNDS = 20, 5
AT_MOST = 1.05
"""Target: how many times the longer of the two a step may take, where the shortfall alone gives 1."""

PREFETCHED, SYNCHRONOUS = "prefetched", "synchronous"

NOTES = (
    f"source and step sleep for the times in the name; {STEPS} steps a block, in the order A B B A; the first "
    f"{AHEAD + 1} of a block are not counted, since their batches may have been ready",
    f"prefetched: data.prefetch={AHEAD}; synchronous: each batch when its step needs it",
    "stall: a prefetched step over the longer of source and step, as measured by sleeping alone in the same round",
)

Take = Callable[[int], int]


def bench_loader(options: Options, say: Say) -> Report:
    """Measure each pair of times.

    Raises:
        InputError: CUDA was requested.
    """
    refuse_cuda(options, Benchmark.LOADER, because="it measures a thread of the host")
    figures: list[Figure] = []
    for source_ms, step_ms in CASES_MS:
        say(f"source {source_ms} ms, step {step_ms} ms …")
        figures += case_figures(source_ms, step_ms, rounds=options.rounds or ROUNDS)
    return Report(Benchmark.LOADER, cpu_name(), date.today().isoformat(), tuple(figures), NOTES)


def case_figures(source_ms: float, step_ms: float, *, rounds: int, steps: int = STEPS) -> list[Figure]:
    """Return the times of both sides, and the stall."""
    longer_ms = max(source_ms, step_ms)
    by_side: dict[str, list[float]] = {PREFETCHED: [], SYNCHRONOUS: []}
    stalls = []
    for _ in range(rounds):
        block: dict[str, list[float]] = {PREFETCHED: [], SYNCHRONOUS: []}
        for side in (PREFETCHED, SYNCHRONOUS, SYNCHRONOUS, PREFETCHED):
            block[side] += block_ms(side, source_ms, step_ms, steps=steps)
        for side, times in block.items():
            by_side[side].append(median(times))
        alone = median(_elapsed_ms(lambda: time.sleep(longer_ms / 1e3)) for _ in range(steps))
        stalls.append(by_side[PREFETCHED][-1] / alone)
    name = f"source_{source_ms:g}_step_{step_ms:g}"
    return [
        *(of_rounds(f"{name}.{side}_ms", times, "ms") for side, times in by_side.items()),
        of_rounds(f"{name}.stall", stalls, "times max", at_most=AT_MOST),
    ]


def block_ms(side: str, source_ms: float, step_ms: float, *, steps: int) -> list[float]:
    """Run a block of steps, and return the time of each that counts."""

    def read(number: int) -> int:
        time.sleep(source_ms / 1e3)
        return number

    def run(take: Take) -> list[float]:
        def step(number: int) -> None:
            assert take(number) == number, "each step gets its own batch"
            time.sleep(step_ms / 1e3)

        times = [_elapsed_ms(lambda number=number: step(number)) for number in range(steps)]  # type: ignore[misc]
        return times[AHEAD + 1 :]

    if side == SYNCHRONOUS:
        return run(read)
    from meshwright.data.prefetch import Prefetcher

    with Prefetcher(range(steps), read, ahead=AHEAD) as values:
        return run(values.take)


def _elapsed_ms(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - begin)
