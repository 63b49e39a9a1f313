"""`bench float8`: losses of training in float8 beside bfloat16, and on GPUs the speed of its linear layers.

Torch-free: this module runs in the launcher, starts the measurements and reports the results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from functools import partial
from statistics import median

from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.benchmarks import Benchmark, Options, Say
from meshwright_bench.devices import NEEDS_CUDA, find_cuda
from meshwright_bench.float8.cases import ARMS, BFLOAT16, LAST, LAYERS, SIDES, WITHIN, WORDS, LayerTask, LossTask
from meshwright_bench.ranks import RawResult, run_measurement, with_rounds
from meshwright_bench.report import Figure, Report, cpu_name, of_rounds

NOTES = (
    f"loss: {' '.join(WORDS)}, one process; the same initial weights and batches on all sides",
    f"a loss is the median of the last {LAST} steps, over_bfloat16 its relative increase; a round is a seed",
    "on a CPU, float8 is emulated: losses are those of float8, times are not; layers are timed on GPUs only",
    "layers: a norm and a SwiGLU feed-forward layer, compiled, forward and backward",
)

LOSS = "loss_nats_per_token"


def bench_float8(options: Options, say: Say) -> Report:
    """Train all sides, and time layers if there is a CUDA device; `rounds` is the number of seeds.

    Raises:
        InputError: CUDA was requested and is not available.
    """
    device = find_cuda(options.device, say)
    say(f"training {', '.join(ARMS)} …")
    task = partial(LossTask, device="cpu" if device is None else "cuda")
    losses = run_measurement(loss_body, with_rounds(task, options.rounds), num_ranks=1)
    times = None
    if device is not None:
        say("timing layers …")
        times = run_measurement(layer_body, with_rounds(LayerTask, options.rounds), num_ranks=1)
    layers = layer_figures(times)
    figures, notes = (*loss_figures(losses), *layers), (*NOTES, *findings(layers))
    return Report(Benchmark.FLOAT8, device or cpu_name(), date.today().isoformat(), figures, notes)


def loss_figures(losses: Mapping[str, Sequence[Sequence[float]]]) -> list[Figure]:
    """Return each side's loss and its increase over bfloat16, given the losses of all steps by side and seed."""
    last = {side: [median(steps[-LAST:]) for steps in seeds] for side, seeds in losses.items()}
    figures = []
    for side, found in last.items():
        figures.append(of_rounds(f"{LOSS}.{side}", found, "nats/token"))
        if side != BFLOAT16:
            over = [own / plain - 1 for own, plain in zip(found, last[BFLOAT16], strict=True)]
            figures.append(of_rounds(f"{LOSS}.{side}.over_bfloat16", over, "of the loss", at_most=WITHIN))
    return figures


def layer_figures(times: RawResult | None) -> list[Figure]:
    """Return the speed of each layer over bfloat16, forward and backward; unmeasured without a GPU or torchao."""
    figures = []
    for layer in LAYERS:
        for side in SIDES:
            name, seconds = f"cuda.{layer}.{side}.over_bfloat16", None if times is None else times[layer].get(side)
            if times is None or seconds is None:
                figures.append(Figure(name, None, note=NEEDS_CUDA if times is None else "needs torchao"))
                continue
            pairs = zip(times[layer][BFLOAT16], seconds, strict=True)
            figures.append(of_rounds(name, [plain / own for plain, own in pairs], "× as fast", at_least=1.0))
    return figures


def findings(layers: Sequence[Figure]) -> Iterator[str]:
    """Yield the sides that are slower than bfloat16."""
    for figure in layers:
        if figure.is_met is False:
            side = figure.name.removesuffix(".over_bfloat16")
            yield f"finding: {side} is slower than bfloat16 ({figure.value:.2f} ×)"


def loss_body(context: RankContext, task: LossTask) -> None:
    """Run one rank; torch is imported here, not in the launcher."""
    from meshwright_bench.float8.train_arms import measure

    measure(context, task)


def layer_body(context: RankContext, task: LayerTask) -> None:
    """Run one rank; torch is imported here, not in the launcher."""
    from meshwright_bench.float8.layer_times import measure

    measure(task)
