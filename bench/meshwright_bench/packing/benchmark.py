"""`bench packing`: real targets per second with packed documents, against a stream and a document per sample.

Torch-free: this module runs in the launcher, starts the measurement of each length of samples and reports the results.
"""

from __future__ import annotations

from datetime import date
from functools import partial
from statistics import median

from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.benchmarks import Benchmark, Options, Say
from meshwright_bench.devices import refuse_cuda
from meshwright_bench.packing.cases import ALONE, PACKED, SAMPLES, STREAM, PackingTask, words_for
from meshwright_bench.ranks import RawResult, run_measurement, with_rounds
from meshwright_bench.report import Figure, Report, cpu_name, of_rounds

NOTES = (
    "training steps of llama-tiny on its own corpus, float32; one process, one thread",
    "stream: data.packing=none; packed: data.packing=documents; alone: one document per sample, then padding",
    "fill: share of the samples' tokens that have a target; targets/s count these only, per second of processor time",
)


def bench_packing(options: Options, say: Say) -> Report:
    """Measure each length of samples, on the CPU.

    Raises:
        InputError: CUDA was requested.
    """
    refuse_cuda(options, Benchmark.PACKING, because="it measures the processor time of one thread")
    answers: dict[int, RawResult] = {}
    for seq_len in SAMPLES:
        say(f"samples of {seq_len:,} tokens …")
        task = partial(PackingTask, words=words_for(seq_len))
        answers[seq_len] = run_measurement(packing_body, with_rounds(task, options.rounds), num_ranks=1)
    figures = [
        figure for seq_len, answer in answers.items() for figure in packing_figures(seq_len, SAMPLES[seq_len], answer)
    ]
    return Report(Benchmark.PACKING, cpu_name(), date.today().isoformat(), tuple(figures), NOTES)


def packing_figures(seq_len: int, samples: int, answer: RawResult) -> list[Figure]:
    """Return fill and targets per second of each side, and the rates of packed documents over the others'."""
    seconds, fill = answer["seconds"], answer["fill"]
    rates = {side: [fill[side] * samples * seq_len / value for value in seconds[side]] for side in seconds}
    figures = []
    for side, rate in rates.items():
        figures += [
            Figure(f"{seq_len}.{side}.fill", fill[side], "of tokens"),
            Figure(f"{seq_len}.{side}.targets_per_s", median(rate), "targets/s"),
        ]
    for other in (STREAM, ALONE):
        ratios = [packed / rate for packed, rate in zip(rates[PACKED], rates[other], strict=True)]
        figures.append(of_rounds(f"{seq_len}.packed_over_{other}", ratios, "of targets/s"))
    return figures


def packing_body(context: RankContext, task: PackingTask) -> None:
    """Run one rank; torch is imported here, not in the launcher."""
    from meshwright_bench.packing.measure import measure

    measure(context, task)
