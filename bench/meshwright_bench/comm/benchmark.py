"""`bench comm`: compressed collectives against FSDP2's own, and their kernels against a memory copy.

Torch-free: this module runs in the launcher, starts the ranks of each measurement and reports their results.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date

from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.alternate import Alternation
from meshwright_bench.benchmarks import Benchmark, Options, Say
from meshwright_bench.comm.cases import (
    BITS_AT_MOST,
    BUILTIN,
    COPY,
    DECODE_SUM_8,
    FLOOR_BYTES,
    LOCO4,
    LOCO_AT_LEAST,
    NUM_RANKS,
    OVER_FLOOR_AT_MOST,
    QUANTISE,
    REDUCE_SCATTER,
    SPEEDUP_AT_LEAST,
    CudaTask,
    KernelTask,
    WireTask,
)
from meshwright_bench.devices import NEEDS_CUDA, find_cuda
from meshwright_bench.ranks import RawResult, run_measurement, with_rounds
from meshwright_bench.report import Figure, Report, cpu_name, of_rounds

CPU_NOTES = (
    "reduce_scatter, all_gather: 2 gloo processes with one thread, 16.8 M elements, against the collectives that FSDP2 "
    "calls by default",
    "bits and bytes: sent by a rank to the other, including scales; the results of both sides are compared first",
    "kernels: one process with one thread; of_copy: bytes read and written per second, relative to a memory copy",
)
CUDA_NOTES = (
    "loco4: a bfloat16 gradient and its int8 error to 4 bits and a new error; per MB of gradient",
    "decode_sum_8: the sum of 8 ranks' 4-bit blocks, in bfloat16; per MB of sum",
    "loco4.…, decode_sum_8.…: programs of other sizes than the defaults",
    "floor: 4.59 and 6.25 bytes per element at the bandwidth of a copy; of_copy: bytes actually read and written",
)


def bench_comm(options: Options, say: Say) -> Report:
    """Measure the kernels on a CUDA device, or the collectives and the kernels on the CPU.

    Raises:
        InputError: CUDA was requested and is not available.
        RunError: the two sides' results differ, or the byte count is incorrect.
    """
    gpu = find_cuda(options.device, say)
    today = date.today().isoformat()
    if gpu is not None:
        say("kernels on the device …")
        answer = run_measurement(cuda_body, with_rounds(CudaTask, options.rounds), num_ranks=1)
        return Report(Benchmark.COMM, f"{gpu}, {cpu_name()}", today, tuple(cuda_figures(answer)), CUDA_NOTES)
    say("collectives of two ranks …")
    wire = run_measurement(wire_body, with_rounds(WireTask, options.rounds), num_ranks=NUM_RANKS)
    say("kernels on one core …")
    kernels = run_measurement(kernel_body, with_rounds(KernelTask, options.rounds), num_ranks=1)
    figures = [*wire_figures(wire), *kernel_figures(kernels), *unmeasured_figures()]
    return Report(Benchmark.COMM, f"{cpu_name()}, {kernels['isa']}", today, tuple(figures), CPU_NOTES)


def wire_figures(answer: Mapping[str, Mapping[str, RawResult]]) -> list[Figure]:
    """Return the time, speed-up, bytes and bits of each collective and dtype."""
    figures = []
    for collective, types in answer.items():
        for dtype, measured in types.items():
            name, timed = f"{collective}.{dtype}", _alternation(measured)
            for side, sent in measured["bytes"].items():
                has_target = (collective, side) == (REDUCE_SCATTER, LOCO4)
                milliseconds = [1e3 * seconds for seconds in timed.seconds[side]]
                figures.append(of_rounds(f"{name}.{side}_ms", milliseconds, "ms"))
                if side != BUILTIN:
                    at_least = SPEEDUP_AT_LEAST[dtype] if has_target else None
                    speedups = timed.speedups(side, over=BUILTIN)
                    figures.append(of_rounds(f"{name}.{side}_speedup", speedups, "times", at_least=at_least))
                bits = 8 * sent / measured["elements_sent"]
                at_most = BITS_AT_MOST if has_target else None
                figures.append(Figure(f"{name}.{side}_bits", bits, "bits per element", at_most=at_most))
                figures.append(Figure(f"{name}.{side}_bytes", sent, "bytes"))
    return figures


def kernel_figures(answer: RawResult) -> list[Figure]:
    """Return each kernel's throughput in G elements per second, and its bandwidth relative to a copy."""
    timed, num_bytes = _alternation(answer), answer["bytes"]
    rates = {kernel: _rates(timed, kernel, num_bytes[kernel] / 1e9) for kernel in num_bytes}
    figures = [of_rounds(f"kernels.{COPY}", rates[COPY], "GB/s")]
    for kernel in num_bytes:
        if kernel == COPY:
            continue
        has_target = kernel.startswith(f"{LOCO4}_") and answer["isa"] == "avx512"
        figures += [
            of_rounds(
                f"kernels.{kernel}",
                _rates(timed, kernel, answer["num_elements"] / 1e9),
                "G elements/s",
                at_least=LOCO_AT_LEAST if has_target else None,
            ),
            of_rounds(f"kernels.{kernel}_of_copy", _ratios(rates[kernel], rates[COPY]), "of copy bandwidth"),
        ]
    return figures


def cuda_figures(answer: RawResult) -> list[Figure]:
    """Return nanoseconds per MB of bfloat16, and the floor set by the copy bandwidth."""
    timed, num_bytes = _alternation(answer), answer["bytes"]
    copied = _rates(timed, COPY, num_bytes[COPY])
    megabytes = answer["num_elements"] * 2 / 1e6
    figures = [of_rounds(f"cuda.{COPY}", [rate / 1e9 for rate in copied], "GB/s")]
    for kernel in (QUANTISE, DECODE_SUM_8):
        spent = [1e9 * seconds / megabytes for seconds in timed.seconds[kernel]]
        floors = [1e9 * FLOOR_BYTES[kernel] * answer["num_elements"] / megabytes / rate for rate in copied]
        moved = _rates(timed, kernel, num_bytes[kernel])
        figures += [
            of_rounds(f"cuda.{kernel}", spent, "ns per MB"),
            of_rounds(f"cuda.{kernel}_floor", floors, "ns per MB"),
            of_rounds(
                f"cuda.{kernel}_over_floor", _ratios(spent, floors), "times the floor", at_most=OVER_FLOOR_AT_MOST
            ),
            of_rounds(f"cuda.{kernel}_of_copy", _ratios(moved, copied), "of copy bandwidth"),
        ]
        for name in (name for name in timed.seconds if name.startswith(f"{kernel}.")):
            spent = [1e9 * seconds / megabytes for seconds in timed.seconds[name]]
            figures.append(of_rounds(f"cuda.{name}_over_floor", _ratios(spent, floors), "times the floor"))
    return figures


def unmeasured_figures() -> list[Figure]:
    """Return the CUDA figures on a machine without CUDA."""
    return [
        Figure(f"cuda.{kernel}_over_floor", None, at_most=OVER_FLOOR_AT_MOST, note=NEEDS_CUDA)
        for kernel in (QUANTISE, DECODE_SUM_8)
    ]


def wire_body(context: RankContext, task: WireTask) -> None:
    """Run one rank of the collectives; torch is imported here, not in the launcher."""
    from meshwright_bench.comm.collectives import measure_wire

    measure_wire(context, task)


def kernel_body(context: RankContext, task: KernelTask) -> None:
    """Measure the kernels on one core; torch is imported here."""
    from meshwright_bench.comm.kernels import measure_kernels

    measure_kernels(task)


def cuda_body(context: RankContext, task: CudaTask) -> None:
    """Measure the kernels on a CUDA device; torch is imported here."""
    from meshwright_bench.comm.kernels_cuda import measure_cuda

    measure_cuda(task)


def _alternation(answer: RawResult) -> Alternation:
    return Alternation({side: tuple(seconds) for side, seconds in answer["seconds"].items()})


def _rates(timed: Alternation, arm: str, amount: float) -> list[float]:
    """Convert an amount per step to the amount per second in each round."""
    return [amount / seconds for seconds in timed.seconds[arm]]


def _ratios(values: list[float], others: list[float]) -> list[float]:
    return [value / other for value, other in zip(values, others, strict=True)]
