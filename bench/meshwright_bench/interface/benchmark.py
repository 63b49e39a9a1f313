"""`bench interface`: the speed of training steps of transformers' Mistral, whose attention is ours, over our own
model's.

Torch-free: this module runs in the launcher, starts the measurement of each mask and reports the results.
"""

from __future__ import annotations

from datetime import date
from functools import partial

from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.alternate import Alternation
from meshwright_bench.benchmarks import Benchmark, Options, Say
from meshwright_bench.devices import refuse_cuda
from meshwright_bench.interface.cases import AT_LEAST, INTERFACE, MASKS, OURS, SEQ_LEN, THEIRS, InterfaceTask
from meshwright_bench.ranks import RawResult, run_measurement, with_rounds
from meshwright_bench.report import Figure, Report, cpu_name, of_rounds

NOTES = (
    f"training steps of 4 samples of {SEQ_LEN:,} tokens with the same parameters, float32; one process, one thread, "
    "processor time",
    f"{OURS}: llama-tiny; {INTERFACE}: transformers' Mistral, model.attention=meshwright; {THEIRS}: its own attention",
    f"causal; window: of {SEQ_LEN // 8} tokens; documents: packed",
)


def bench_interface(options: Options, say: Say) -> Report:
    """Measure each mask, on the CPU.

    Raises:
        InputError: CUDA was requested.
        RunError: the sides' losses differ.
    """
    refuse_cuda(options, Benchmark.INTERFACE, because="it measures the processor time of one thread")
    figures: list[Figure] = []
    for mask in MASKS:
        say(f"{mask} …")
        task = partial(InterfaceTask, mask=mask)
        figures += mask_figures(mask, run_measurement(interface_body, with_rounds(task, options.rounds), num_ranks=1))
    return Report(Benchmark.INTERFACE, cpu_name(), date.today().isoformat(), tuple(figures), NOTES)


def mask_figures(mask: str, answer: RawResult) -> list[Figure]:
    """Return the time of our step in milliseconds, and the speed of the interface over the other sides'."""
    times = Alternation({side: tuple(seconds) for side, seconds in answer.items()})
    figures = [of_rounds(f"{mask}.{OURS}_ms", [1e3 * seconds for seconds in times.seconds[OURS]], "ms")]
    for side in times.seconds:
        if side != INTERFACE:
            at_least = AT_LEAST if side == OURS else None
            ratios = times.speedups(INTERFACE, over=side)
            figures.append(of_rounds(f"{mask}.{INTERFACE}_over_{side}", ratios, "of steps/s", at_least=at_least))
    return figures


def interface_body(context: RankContext, task: InterfaceTask) -> None:
    """Run one rank; torch is imported here, not in the launcher."""
    from meshwright_bench.interface.measure import measure

    measure(context, task)
