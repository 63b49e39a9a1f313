"""Small runs of the engine itself, to whose times costs are fitted that no kernel shows alone: those of the host per
block, unit, collective, action and step, and of kernels whose operands come from memory. Doesn't import torch."""

from __future__ import annotations

from meshwright.config.schema import RunConfig
from meshwright.plan.rules import load

PRESET = "llama-tiny"
SMALL = ("model.dim=32", "model.num_heads=2", "model.ffn_dim=96", "model.num_layers=6", "train.seq_len=32")
"""A step whose time is the host's."""
THIN = ("model.dim=64", "model.num_heads=2", "model.ffn_dim=192", "model.num_layers=2", "train.global_batch=32")
"""A step whose time is that of kernels bound by memory."""
MIDDLE = ("model.dim=192", "model.num_heads=6", "model.ffn_dim=512", "model.num_layers=3", "train.global_batch=12")
LARGE = (
    "model.dim=384",
    "model.num_heads=6",
    "model.ffn_dim=1024",
    "model.num_layers=2",
    "train.seq_len=256",
    "train.global_batch=4",
)
FOUR = "train.num_microbatches=4"
RUNS: dict[int, tuple[tuple[str, ...], ...]] = {
    1: (SMALL, (*SMALL, "model.num_layers=1"), (*SMALL, FOUR), THIN, MIDDLE, (*MIDDLE, FOUR), LARGE),
    2: (
        (*SMALL, "mesh.dp_shard=2"),
        (*MIDDLE, "mesh.dp_shard=2"),
        (*LARGE, "mesh.dp_replicate=2"),
        (*SMALL, "mesh.tp=2"),
        (*MIDDLE, "mesh.tp=2"),
        (*SMALL, "mesh.pp=2", FOUR),
        (*MIDDLE, "mesh.pp=2", FOUR),
    ),
    4: ((*SMALL, "mesh.dp_shard=4"), (*MIDDLE, "mesh.dp_shard=2", "mesh.tp=2")),
}
"""Words of the runs by number of processes."""


def small_runs(num_ranks: int, *, device: str) -> list[RunConfig]:
    """Return the configurations of small runs on so many processes, with one thread each."""
    return [load(PRESET, [*words, f"train.device={device}", "train.threads=1"]) for words in RUNS.get(num_ranks, ())]
