"""`bench attention`: time under a sliding window and under packed documents, over plain causal attention.

Torch-free: this module runs in the launcher, starts a rank for the measurement and reports its results.
"""

from __future__ import annotations

from datetime import date
from functools import partial

from meshwright.nn.attention.backend import Backend
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.alternate import Alternation
from meshwright_bench.attention.cases import (
    CAUSAL,
    DOCUMENTS,
    MASKS,
    SEQ_LEN,
    WINDOW,
    WINDOW_AT_MOST,
    AttentionTask,
    Pass,
    flops_over_causal,
    target_arm,
)
from meshwright_bench.benchmarks import Benchmark, Options, Say
from meshwright_bench.devices import find_cuda
from meshwright_bench.ranks import RawResult, run_measurement, with_rounds
from meshwright_bench.report import Figure, Report, cpu_name, of_rounds

BASELINE = f"{Backend.SDPA}.{CAUSAL}"

NOTES = (
    f"one sample of {SEQ_LEN} tokens, 8 heads of 64; window: causal, {WINDOW} tokens; documents: {len(DOCUMENTS)} of "
    f"{DOCUMENTS[0]} tokens, causal; all over one causal sample by scaled_dot_product_attention",
    "CPU: one thread, float32, processor time of the thread; flex has a forward only. CUDA: bfloat16, events",
)


def bench_attention(options: Options, say: Say) -> Report:
    """Time all backends on the CPU, and on a CUDA device if there is one.

    Raises:
        InputError: CUDA was requested and is not available.
        RunError: a backend's result is wrong.
    """
    gpu = find_cuda(options.device, say)
    figures = [
        Figure(f"{name}_flops_over_causal", flops_over_causal(name), "times") for name in MASKS if name != CAUSAL
    ]
    say("attention on the CPU …")
    answer = run_measurement(attention_body, with_rounds(AttentionTask, options.rounds), num_ranks=1)
    figures += time_figures(answer, target_arm("cpu", "float32"))
    if gpu is None:
        arm = target_arm("cuda", "bfloat16")
        figures.append(Figure(f"cuda.{arm}_over_causal_{Pass.FORWARD}", None, note="no CUDA device"))
    else:
        say("attention on the device …")
        task = with_rounds(partial(AttentionTask, device="cuda", dtype="bfloat16", steps=20), options.rounds)
        target = target_arm("cuda", "bfloat16")
        figures += time_figures(run_measurement(attention_body, task, num_ranks=1), target, prefix="cuda.")
    device = cpu_name() if gpu is None else f"{gpu}, {cpu_name()}"
    return Report(Benchmark.ATTENTION, device, date.today().isoformat(), tuple(figures), NOTES)


def time_figures(answer: RawResult, target: str, prefix: str = "") -> list[Figure]:
    """Return the time of every arm over plain causal attention, which is in milliseconds."""
    figures = []
    for timed in Pass:
        times = Alternation({arm: tuple(seconds) for arm, seconds in answer[timed].items()})
        causal_ms = [1e3 * seconds for seconds in times.seconds[BASELINE]]
        figures.append(of_rounds(f"{prefix}{BASELINE}_{timed}_ms", causal_ms, "ms"))
        for arm in times.seconds:
            if arm != BASELINE:
                is_target = timed is Pass.FORWARD and arm == target
                ratios = times.speedups(BASELINE, over=arm)
                name = f"{prefix}{arm}_over_causal_{timed}"
                figures.append(of_rounds(name, ratios, "times", at_most=WINDOW_AT_MOST if is_target else None))
    return figures


def attention_body(context: RankContext, task: AttentionTask) -> None:
    """Run the measurement; torch is imported here, not in the launcher."""
    from meshwright_bench.attention.times import measure_attention

    measure_attention(task)
