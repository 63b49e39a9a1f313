"""`bench loss`: head and loss by chunks of tokens against all logits at once.

Torch-free: this module runs in the launcher, starts the process of the measurement and reports its results.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date

from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.benchmarks import Benchmark, Options, Say
from meshwright_bench.devices import refuse_cuda
from meshwright_bench.loss.cases import ALL, LossTask
from meshwright_bench.ranks import RawResult, run_measurement, with_rounds
from meshwright_bench.report import Figure, Report, cpu_name, of_rounds

NOTES = (
    "head and cross-entropy, forward and backward, of 4,096 tokens over 32,768 columns, width 512, float32, one thread",
    "peak_mib: most bytes of tensors that operators allocate and that live at once, gradients included, inputs not",
    "saving: peak of all logits over that of chunks; speed: seconds of all logits over those of chunks, by round",
)
TARGETS = {"chunk_512": (4.0, 1.0), "chunk_256": (7.0, 0.92)}
"""Least saving and speed of a side."""


def bench_loss(options: Options, say: Say) -> Report:
    """Measure both sides on the CPU.

    Raises:
        InputError: CUDA was requested.
        RunError: the gradients of the sides differ.
    """
    refuse_cuda(options, Benchmark.LOSS, because="it counts what operators of the CPU allocate")
    say("head and loss of 4,096 tokens …")
    answer = run_measurement(loss_body, with_rounds(LossTask, options.rounds), num_ranks=1)
    return Report(Benchmark.LOSS, cpu_name(), date.today().isoformat(), tuple(loss_figures(answer)), NOTES)


def loss_figures(answer: RawResult) -> Iterator[Figure]:
    """Yield bytes and times of each side, and what chunks save and cost."""
    peaks, seconds = answer["peak"], answer["seconds"]
    for name in peaks:
        yield Figure(f"{name}.peak_mib", peaks[name] / 2**20, "MiB")
        yield Figure(f"{name}.largest_tensor_mib", answer["largest"][name] / 2**20, "MiB")
        yield of_rounds(f"{name}.seconds", seconds[name], "s")
        if name != ALL:
            saving, speed = TARGETS.get(name, (None, None))
            yield Figure(f"{name}.saving", peaks[ALL] / peaks[name], "times", at_least=saving)
            speeds = [plain / own for plain, own in zip(seconds[ALL], seconds[name], strict=True)]
            yield of_rounds(f"{name}.speed", speeds, "times", at_least=speed)


def loss_body(context: RankContext, task: LossTask) -> None:
    """Run the one process; torch is imported here, not in the launcher."""
    from meshwright_bench.loss.measure import measure_loss

    measure_loss(context, task)
