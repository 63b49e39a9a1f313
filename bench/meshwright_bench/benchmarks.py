"""Table of all benchmarks by name; a new benchmark is one entry of `BENCHMARKS`.

Torch-free; the module of a benchmark is imported when it is run.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import cast

from meshwright.errors import InputError
from meshwright_bench.report import Report


class DeviceChoice(StrEnum):
    """Device to measure on; `auto` uses a CUDA device if there is one, like `train.device`."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True)
class Options:
    """Command-line options that all benchmarks share."""

    device: DeviceChoice = DeviceChoice.AUTO
    rounds: int | None = None
    """Rounds per comparison; None for the benchmark's default."""
    cluster: str = "here"
    """Cluster that predictions are for."""


Say = Callable[[str], None]
"""Callback that receives the reason for a long wait."""
Body = Callable[[Options, Say], Report]
"""Function that runs a benchmark in the launcher, without importing torch; work that needs torch runs on ranks."""


class Benchmark(StrEnum):
    """Name of a benchmark."""

    TRAIN = "train"
    PIPELINE = "pipeline"
    SHARED_GRADIENTS = "shared-gradients"
    COMM = "comm"
    COMM_LOSS = "comm-loss"
    RESHARD = "reshard"
    OPERATORS = "operators"
    EXPERTS = "moe"
    ATTENTION = "attention"
    PACKING = "packing"
    INTERFACE = "interface"
    TOKENISE = "tokenise"
    LOADER = "loader"
    RECOMPUTE = "recompute"
    CAPTURE = "capture"
    FLOAT8 = "float8"
    MUON = "muon"
    LOSS = "loss"
    STEPS = "steps"
    PLAN = "plan"


@dataclass(frozen=True)
class BenchmarkEntry:
    """Table entry of a benchmark."""

    title: str
    body: str
    """`module:function` of the `Body`."""


BENCHMARKS = {
    Benchmark.TRAIN: BenchmarkEntry(
        "the training step against a bare PyTorch loop", "meshwright_bench.train.benchmark:bench_train"
    ),
    Benchmark.PIPELINE: BenchmarkEntry(
        "the pipeline engine against PyTorch's", "meshwright_bench.pipeline.benchmark:bench_pipeline"
    ),
    Benchmark.SHARED_GRADIENTS: BenchmarkEntry(
        "summing sharded gradients of shared parameters against summing full ones",
        "meshwright_bench.shared_gradients.benchmark:bench_shared_gradients",
    ),
    Benchmark.COMM: BenchmarkEntry(
        "compressed collectives against FSDP2's own", "meshwright_bench.comm.benchmark:bench_comm"
    ),
    Benchmark.COMM_LOSS: BenchmarkEntry(
        "validation loss with low-bit gradients", "meshwright_bench.comm.loss_cost:bench_comm_loss"
    ),
    Benchmark.RESHARD: BenchmarkEntry(
        "redistribution by plans against DTensor's", "meshwright_bench.reshard.benchmark:bench_reshard"
    ),
    Benchmark.OPERATORS: BenchmarkEntry(
        "operators on DTensors, with and without the fallback", "meshwright_bench.operators.benchmark:bench_operators"
    ),
    Benchmark.EXPERTS: BenchmarkEntry(
        "rows and times of expert layers against lower bounds and memory copies",
        "meshwright_bench.expert_layers.benchmark:bench_experts",
    ),
    Benchmark.ATTENTION: BenchmarkEntry(
        "attention under a window and documents against plain causal attention",
        "meshwright_bench.attention.benchmark:bench_attention",
    ),
    Benchmark.PACKING: BenchmarkEntry(
        "training on packed documents against windows of a stream and one document per sample",
        "meshwright_bench.packing.benchmark:bench_packing",
    ),
    Benchmark.INTERFACE: BenchmarkEntry(
        "training steps of a Hugging Face model, with our attention by its interface, against our own model",
        "meshwright_bench.interface.benchmark:bench_interface",
    ),
    Benchmark.TOKENISE: BenchmarkEntry(
        "time and memory of tokenising a gigabyte of text", "meshwright_bench.tokenise.benchmark:bench_tokenise"
    ),
    Benchmark.LOADER: BenchmarkEntry(
        "steps whose batches come from a slow source, with and without prefetching",
        "meshwright_bench.loader.benchmark:bench_loader",
    ),
    Benchmark.RECOMPUTE: BenchmarkEntry(
        "saved bytes and step time of recomputation policies", "meshwright_bench.recompute.benchmark:bench_recompute"
    ),
    Benchmark.CAPTURE: BenchmarkEntry(
        "captured layers against eager ones, and the memory of graphs",
        "meshwright_bench.capture.benchmark:bench_capture",
    ),
    Benchmark.FLOAT8: BenchmarkEntry(
        "losses of training in float8, and the speed of its linear layers on GPUs",
        "meshwright_bench.float8.benchmark:bench_float8",
    ),
    Benchmark.MUON: BenchmarkEntry(
        "Muon's updates on owners of matrices against updates on every rank",
        "meshwright_bench.muon.benchmark:bench_muon",
    ),
    Benchmark.LOSS: BenchmarkEntry(
        "head and loss by chunks of tokens against all logits at once", "meshwright_bench.loss.benchmark:bench_loss"
    ),
    Benchmark.STEPS: BenchmarkEntry(
        "predicted against measured times and memory of steps here", "meshwright_bench.steps.benchmark:bench_steps"
    ),
    Benchmark.PLAN: BenchmarkEntry(
        "predicted step times and memory against published runs", "meshwright_bench.published.benchmark:bench_plan"
    ),
}


def find_benchmark(name: str) -> Benchmark:
    """Look up a benchmark by name.

    Raises:
        InputError: the name is unknown.
    """
    if name in set(Benchmark):
        return Benchmark(name)
    near = difflib.get_close_matches(name.lower(), list(Benchmark), n=1, cutoff=0.0)
    raise InputError(
        f"{name} is not a benchmark",
        where="command line, PART",
        rule=f"the benchmarks are {', '.join(Benchmark)}",
        fix=f"meshwright bench {near[0]}",
    )


def load_body(part: Benchmark) -> Body:
    """Import and return the function that runs a benchmark."""
    module, _, function = BENCHMARKS[part].body.partition(":")
    return cast("Body", getattr(import_module(module), function))
