"""Benchmark of expert layers: rows and bytes of dispatches over their lower bounds, and times of a layer's parts.

Torch-free: this module runs in the launcher, starts the ranks of each measurement and reports their results.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from functools import partial

from meshwright.cluster.hardware import Rate
from meshwright.cluster.presets import device_for
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.alternate import Alternation
from meshwright_bench.benchmarks import Benchmark, Options, Say
from meshwright_bench.devices import find_cuda
from meshwright_bench.expert_layers.cases import (
    COMBINE,
    COMBINE_AT_MOST,
    COMBINE_INDEXED,
    COPY,
    COPY_FRESH,
    DISPATCH_RANKS,
    FORWARD,
    HOST_READS_AT_MOST,
    LAYER_RANKS,
    OVERLAPPED,
    PERMUTE,
    PERMUTE_AT_MOST,
    PERMUTE_FRESH,
    ROWS_AT_MOST,
    WAITING,
    WEIGHT_GRADIENT,
    DispatchTask,
    GroupedTask,
    LayerTask,
    MovesTask,
    PairTask,
)
from meshwright_bench.ranks import RawResult, run_measurement, with_rounds
from meshwright_bench.report import Figure, Report, cpu_name, of_rounds

NO_CUDA = "no CUDA device"

NOTES = (
    f"dispatch: 1024 tokens a rank, 8 of 64 experts, uniform routing, {' and '.join(map(str, DISPATCH_RANKS))} gloo "
    "processes; the lower bound is counted from the routing, token by token",
    "permute, combine, router, sort: one thread, T = 4096, K = 4, H = 2048, bfloat16, E = 64; copy: of T · K rows into "
    "kept memory; fresh: into new memory, as in a layer, including page faults; processor time of the thread",
    f"layer: forward and backward with shared experts on {LAYER_RANKS} gloo processes with one thread each, float32; "
    "transfers use the same cores as the computation, so overlap may not show on a CPU",
    "cuda.many_rows: 131,072 rows, which take longer than a launch from Python; combine_bags: by embedding_bag; "
    "combine.…: by programs of other sizes than the defaults",
    "overlap_pair: two tasks of expert layers that only wait, against the tasks one after the other",
)


def bench_experts(options: Options, say: Say) -> Report:
    """Count dispatches, time the parts of a layer on the CPU, and grouped products on a CUDA device if there is one.

    Raises:
        InputError: CUDA was requested and is not available.
        RunError: a result is wrong.
    """
    gpu = find_cuda(options.device, say)
    figures = []
    for num_ranks in DISPATCH_RANKS:
        say(f"dispatches of {num_ranks} ranks …")
        figures += dispatch_figures(num_ranks, run_measurement(dispatch_body, DispatchTask, num_ranks=num_ranks))
    say("permute, combine and router on one core …")
    figures += move_figures(run_measurement(moves_body, with_rounds(MovesTask, options.rounds), num_ranks=1))
    say(f"layers of {LAYER_RANKS} ranks …")
    layer_task = with_rounds(LayerTask, options.rounds)
    figures += layer_figures(run_measurement(layer_body, layer_task, num_ranks=LAYER_RANKS))
    say("pairs of tasks …")
    figures += pair_figures(run_measurement(pair_body, with_rounds(PairTask, options.rounds), num_ranks=1))
    if gpu is None:
        figures += unmeasured_figures()
    else:
        say("moves and grouped products on the device …")
        task = with_rounds(partial(MovesTask, device="cuda", steps=20), options.rounds)
        figures += move_figures(run_measurement(moves_body, task, num_ranks=1), prefix="cuda.")
        many = partial(MovesTask, device="cuda", num_tokens=32_768, steps=20, only_combine=True)
        figures += combine_figures(run_measurement(moves_body, with_rounds(many, options.rounds), num_ranks=1))
        grouped = run_measurement(grouped_body, with_rounds(GroupedTask, options.rounds), num_ranks=1)
        figures += grouped_figures(grouped, gpu)
    device = cpu_name() if gpu is None else f"{gpu}, {cpu_name()}"
    return Report(Benchmark.EXPERTS, device, date.today().isoformat(), tuple(figures), NOTES)


def dispatch_figures(num_ranks: int, counts: RawResult) -> list[Figure]:
    """Return rows and bytes of a dispatch, over their lower bounds and against a row per expert."""
    name, tokens, rows = f"{num_ranks}_ranks", counts["tokens"], counts["rows"]
    least_bytes = counts["lower_bound"] * counts["row_bytes"]
    return [
        Figure(f"{name}.rows_over_lower_bound", rows / counts["lower_bound"], "times", at_most=ROWS_AT_MOST),
        Figure(f"{name}.rows", rows / tokens, "rows per token"),
        Figure(f"{name}.rows_per_expert", counts["choices"] / tokens, "rows per token"),
        Figure(f"{name}.rows_saved", 100 * (1 - rows / counts["choices"]), "%"),
        Figure(f"{name}.dispatch_bytes_over_lower_bound", counts["dispatch_bytes"] / least_bytes, "times"),
        Figure(f"{name}.combine_bytes_over_lower_bound", counts["combine_bytes"] / least_bytes, "times"),
    ]


def move_figures(answer: RawResult, prefix: str = "") -> list[Figure]:
    """Return the times of permute and combine over those of a copy, and of the steps before them."""
    timed = _alternation(answer)
    targets = {PERMUTE: PERMUTE_AT_MOST, COMBINE: COMBINE_AT_MOST}
    figures = [_milliseconds(f"{prefix}{arm}_ms", timed.seconds[arm]) for arm in timed.seconds]
    for arm in (PERMUTE, COMBINE, COMBINE_INDEXED):
        ratios = timed.speedups(COPY, over=arm)
        figures.append(of_rounds(f"{prefix}{arm}_over_copy", ratios, "times", at_most=targets.get(arm)))
    for arm in (PERMUTE_FRESH, COMBINE_INDEXED):
        ratios = timed.speedups(COPY_FRESH, over=arm)
        figures.append(of_rounds(f"{prefix}{arm}_over_{COPY_FRESH}", ratios, "times"))
    return figures


def combine_figures(answer: RawResult) -> list[Figure]:
    """Return the times of ways to combine many rows on a CUDA device over those of a copy."""
    timed = _alternation(answer)
    return [
        of_rounds(f"cuda.many_rows.{arm}_over_copy", timed.speedups(COPY, over=arm), "times")
        for arm in timed.seconds
        if arm != COPY
    ]


def layer_figures(answer: RawResult) -> list[Figure]:
    """Return a layer's time with and without overlap, and the host's reads of splits per layer."""
    timed, num_layers = _alternation(answer), answer["layers"]
    per_layer = {side: [seconds / num_layers for seconds in timed.seconds[side]] for side in (OVERLAPPED, WAITING)}
    return [
        Figure("layer.host_reads", answer["host_reads"] / num_layers, "per layer", at_most=HOST_READS_AT_MOST),
        *(_milliseconds(f"layer.{side}_ms", seconds) for side, seconds in per_layer.items()),
        of_rounds("layer.overlapped_over_waiting", timed.speedups(WAITING, over=OVERLAPPED), "times"),
    ]


def pair_figures(answer: RawResult) -> list[Figure]:
    """Return the time of overlapped tasks over the sum of the tasks, and of a switch."""
    return [
        Figure("overlap_pair.pair_ms", 1e3 * answer["pair_s"], "ms"),
        Figure("overlap_pair.sum_ms", 1e3 * answer["sum_s"], "ms"),
        Figure("overlap_pair.pair_over_sum", answer["pair_s"] / answer["sum_s"], "times"),
        Figure("overlap_pair.switch_us", 1e6 * answer["switch_s"], "µs"),
    ]


def grouped_figures(answer: RawResult, device: str) -> list[Figure]:
    """Return the rates of grouped products, and their share of the device's bfloat16 peak, if that is known."""
    timed, known, figures = _alternation(answer), device_for(device), []
    for product in (FORWARD, WEIGHT_GRADIENT):
        rates = [answer["flops"] / seconds for seconds in timed.seconds[product]]
        name = f"cuda.grouped_gemm_{product}"
        figures.append(of_rounds(f"{name}_tflops", [rate / 1e12 for rate in rates], "TFLOP/s"))
        if known is None:
            figures.append(Figure(f"{name}_of_peak", None, note=f"the peak FLOP rate of {device} is unknown"))
        else:
            peak = known.peak(Rate.BF16)
            shares = [rate / peak for rate in rates]
            figures.append(of_rounds(f"{name}_of_peak", shares, f"of {peak / 1e12:g} TFLOP/s"))
    return figures


def unmeasured_figures() -> list[Figure]:
    """Return the CUDA figures on a machine without CUDA."""
    names = [f"{PERMUTE}_over_copy", f"{COMBINE}_over_copy"]
    names += [f"grouped_gemm_{product}_of_peak" for product in (FORWARD, WEIGHT_GRADIENT)]
    return [Figure(f"cuda.{name}", None, note=NO_CUDA) for name in names]


def _alternation(answer: RawResult) -> Alternation:
    return Alternation({arm: tuple(values) for arm, values in answer["seconds"].items()})


def _milliseconds(name: str, seconds: Sequence[float]) -> Figure:
    return of_rounds(name, [1e3 * each for each in seconds], "ms")


def dispatch_body(context: RankContext, task: DispatchTask) -> None:
    """Run one rank of the dispatch counts; torch is imported here, not in the launcher."""
    from meshwright_bench.expert_layers.dispatch_counts import measure_dispatch

    measure_dispatch(context, task)


def moves_body(context: RankContext, task: MovesTask) -> None:
    """Run permute, combine, router and sort."""
    from meshwright_bench.expert_layers.row_moves import measure_moves

    measure_moves(task)


def layer_body(context: RankContext, task: LayerTask) -> None:
    """Run one rank of the layers."""
    from meshwright_bench.expert_layers.layer_time import measure_layer

    measure_layer(context, task)


def pair_body(context: RankContext, task: PairTask) -> None:
    """Run the pairs of tasks."""
    from meshwright_bench.expert_layers.layer_time import measure_pairs

    measure_pairs(task)


def grouped_body(context: RankContext, task: GroupedTask) -> None:
    """Run the grouped products."""
    from meshwright_bench.expert_layers.grouped_gemm import measure_grouped

    measure_grouped(task)
