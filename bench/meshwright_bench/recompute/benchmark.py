"""`bench recompute`: bytes saved for the backward, predicted and measured, and step time of recomputation policies.

Torch-free: this module runs in the launcher, starts the measurement of each model and reports the results.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from functools import partial

from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.benchmarks import Benchmark, Options, Say
from meshwright_bench.devices import refuse_cuda
from meshwright_bench.ranks import RawResult, run_measurement, with_rounds
from meshwright_bench.recompute.cases import MODELS, RecomputeTask
from meshwright_bench.report import Figure, Report, cpu_name, of_rounds

WITHIN = 0.05
"""Target for the relative error of predicted bytes."""

NOTES = (
    "one thread; float32, 2 layers of width 256, 2048 tokens per step (diffusion: 64 images of 16 tokens)",
    "bytes: what the forward of a block leaves for its backward, by weak references to all new storages, without "
    "parameters and tables that blocks share",
    "extra: time of a training step over that of policy none, in the same round",
)


def bench_recompute(options: Options, say: Say) -> Report:
    """Measure the policies of each family, on the CPU.

    Raises:
        InputError: CUDA was requested.
    """
    because = "it counts the tensors that the CPU's operators save; kernels of GPUs save others"
    refuse_cuda(options, Benchmark.RECOMPUTE, because=because)
    answers: dict[str, RawResult] = {}
    for name, words in MODELS.items():
        say(f"{name} under each policy …")
        task = partial(RecomputeTask, words=words)
        answers[name] = run_measurement(recompute_body, with_rounds(task, options.rounds), num_ranks=1)
    return Report(Benchmark.RECOMPUTE, cpu_name(), date.today().isoformat(), tuple(recompute_figures(answers)), NOTES)


def recompute_figures(answers: Mapping[str, RawResult]) -> list[Figure]:
    """Return measured bytes, the ratio of predicted to measured ones, and extra time, by model and policy."""
    figures = []
    for model, answer in answers.items():
        seconds = answer["seconds"]
        for policy in RecomputePolicy:
            name, measured = f"{model}.{policy}", answer["measured"][policy]
            ratio = answer["predicted"][policy] / measured
            figures += [
                Figure(f"{name}.bytes", measured, "bytes"),
                Figure(f"{name}.predicted", ratio, "of measured", at_least=1 - WITHIN, at_most=1 + WITHIN),
            ]
            if policy is not RecomputePolicy.NONE:
                pairs = zip(seconds[policy], seconds[RecomputePolicy.NONE], strict=True)
                extra = [100 * (own / plain - 1) for own, plain in pairs]
                figures.append(of_rounds(f"{name}.extra", extra, "% of a step"))
    return figures


def recompute_body(context: RankContext, task: RecomputeTask) -> None:
    """Run one rank; torch is imported here, not in the launcher."""
    from meshwright_bench.recompute.measure import measure

    measure(context, task)
