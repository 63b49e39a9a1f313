"""`bench shared-gradients`: summing sharded gradients of shared parameters against summing full gradients.

Torch-free: this module runs in the launcher, starts the ranks of each measurement and reports their results.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from functools import partial
from statistics import median

from meshwright.config.facts_for_family import model_facts
from meshwright.plan.rules import load
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.benchmarks import Benchmark, Options, Say
from meshwright_bench.devices import refuse_cuda
from meshwright_bench.ranks import RawResult, run_measurement, with_rounds
from meshwright_bench.report import Figure, Report, cpu_name
from meshwright_bench.shared_gradients.cases import FULL, PP, SHARDED, SyncTask

PRESET = "dit-xl-2"
DP_SHARDS = (1, 2, 4)

NOTES = (
    f"embedders of {PRESET} (time MLP, label table), float32, pp {PP} × dp_shard 1, 2, 4: one gloo process per rank",
    "sharded: each rank sums over pp the gradient shards that FSDP2 left; whole: it sums full gradients",
    "bytes: tensors that a rank passes to collectives, maximum over ranks; the sums of both sides are checked bitwise",
)


def bench_shared_gradients(options: Options, say: Say) -> Report:
    """Measure bytes and time for each number of shards, on the CPU.

    Raises:
        InputError: CUDA was requested.
        RunError: the two sides' sums differ.
    """
    because = "it compares collectives of gloo processes; the bytes do not depend on the device"
    refuse_cuda(options, Benchmark.SHARED_GRADIENTS, because=because)
    config = load(PRESET)
    answers: dict[int, RawResult] = {}
    for dp_shard in DP_SHARDS:
        say(f"pp {PP} × dp_shard {dp_shard} …")
        task = partial(SyncTask, config=config, dp_shard=dp_shard)
        answers[dp_shard] = run_measurement(sync_body, with_rounds(task, options.rounds), num_ranks=PP * dp_shard)
    figures = sync_figures(answers, row_bytes=4 * model_facts(config).edge.shape[-1])
    return Report(Benchmark.SHARED_GRADIENTS, cpu_name(), date.today().isoformat(), tuple(figures), NOTES)


def sync_figures(answers: Mapping[int, RawResult], *, row_bytes: int) -> list[Figure]:
    """Return bytes and times by number of shards.

    Args:
        answers: results of the ranks by number of shards, including 1.
        row_bytes: size in bytes of a row of the label table, which has an odd number of rows.
    """
    full_bytes = answers[1]["bytes"][SHARDED]
    figures = []
    for dp_shard, answer in answers.items():
        name, seconds = f"dp_shard_{dp_shard}", answer["seconds"]
        share = answer["bytes"][SHARDED] / full_bytes
        at_most = None if dp_shard == 1 else 1 / dp_shard + row_bytes / full_bytes
        speedups = [full / sharded for sharded, full in zip(seconds[SHARDED], seconds[FULL], strict=True)]
        figures += [
            Figure(f"{name}.{SHARDED}_bytes", answer["bytes"][SHARDED], "bytes"),
            Figure(f"{name}.{FULL}_bytes", answer["bytes"][FULL], "bytes"),
            Figure(f"{name}.share", share, "of dp_shard 1's bytes", at_most=at_most),
            *(
                Figure(
                    f"{name}.{side}_ms",
                    1e3 * median(seconds[side]),
                    "ms",
                    spread=(1e3 * min(seconds[side]), 1e3 * max(seconds[side])),
                )
                for side in (SHARDED, FULL)
            ),
            Figure(f"{name}.speedup", median(speedups), "times", spread=(min(speedups), max(speedups))),
        ]
    return figures


def sync_body(context: RankContext, task: SyncTask) -> None:
    """Run one rank; torch is imported here, not in the launcher."""
    from meshwright_bench.shared_gradients.sync import measure_sync

    measure_sync(context, task)
