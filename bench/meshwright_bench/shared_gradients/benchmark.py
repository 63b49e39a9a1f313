"""`bench shared-gradients`: summing the gradients of shared parameters as they are sharded, against full ones.

Torch-free: runs in the launcher, starts the ranks of each measurement and turns what they wrote into figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from functools import partial
from statistics import median

from meshwright.config.facts_for_family import model_facts
from meshwright.plan.load_config import load
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.benchmarks import Options, Part, Say
from meshwright_bench.devices import refuse_cuda
from meshwright_bench.ranks import Answer, measured, with_rounds
from meshwright_bench.report import Figure, Report, cpu_name
from meshwright_bench.shared_gradients.cases import PP, SHARDED, WHOLE, SyncTask

PRESET = "dit-xl-2"
DP_SHARDS = (1, 2, 4)

NOTES = (
    f"embedders of {PRESET} (time MLP, label table), float32, over pp {PP} × dp_shard 1, 2, 4: a gloo process a rank",
    "sharded: a rank adds up over pp what FSDP2 left it of the gradients; whole: it adds up whole ones",
    "bytes: tensors that a rank hands to collectives, on the rank with most; both sides' sums are checked bitwise",
)


def bench_shared_gradients(options: Options, say: Say) -> Report:
    """Measure bytes and time at each number of shards, on the CPU.

    Raises:
        InputError: CUDA was asked for.
        RunError: the two sides' sums differ.
    """
    because = "it compares collectives of gloo processes; the bytes do not depend on the device"
    refuse_cuda(options, Part.SHARED_GRADIENTS, because=because)
    config = load(PRESET)
    answers: dict[int, Answer] = {}
    for dp_shard in DP_SHARDS:
        say(f"pp {PP} × dp_shard {dp_shard} …")
        task = partial(SyncTask, config=config, dp_shard=dp_shard)
        answers[dp_shard] = measured(sync_body, with_rounds(task, options.rounds), num_ranks=PP * dp_shard)
    figures = sync_figures(answers, row_bytes=4 * model_facts(config).edge.shape[-1])
    return Report(Part.SHARED_GRADIENTS, cpu_name(), date.today().isoformat(), tuple(figures), NOTES)


def sync_figures(answers: Mapping[int, Answer], *, row_bytes: int) -> list[Figure]:
    """Bytes and times by number of shards.

    Args:
        answers: what the ranks wrote, by number of shards, 1 among them.
        row_bytes: of a row of the label table, whose odd number of rows no shards divide.
    """
    whole = answers[1]["bytes"][SHARDED]
    figures = []
    for dp_shard, found in answers.items():
        name, seconds = f"dp_shard_{dp_shard}", found["seconds"]
        share = found["bytes"][SHARDED] / whole
        at_most = None if dp_shard == 1 else 1 / dp_shard + row_bytes / whole
        speedups = [theirs / own for own, theirs in zip(seconds[SHARDED], seconds[WHOLE], strict=True)]
        figures += [
            Figure(f"{name}.{SHARDED}_bytes", found["bytes"][SHARDED], "bytes"),
            Figure(f"{name}.{WHOLE}_bytes", found["bytes"][WHOLE], "bytes"),
            Figure(f"{name}.share", share, "of dp_shard 1's bytes", at_most=at_most),
            *(
                Figure(
                    f"{name}.{side}_ms",
                    1e3 * median(seconds[side]),
                    "ms",
                    spread=(1e3 * min(seconds[side]), 1e3 * max(seconds[side])),
                )
                for side in (SHARDED, WHOLE)
            ),
            Figure(f"{name}.speedup", median(speedups), "times", spread=(min(speedups), max(speedups))),
        ]
    return figures


def sync_body(context: RankContext, task: SyncTask) -> None:
    """What each rank runs; imports torch only there."""
    from meshwright_bench.shared_gradients.sync import measure_sync

    measure_sync(context, task)
