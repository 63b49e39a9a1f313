"""Rules for compressed gradients and weights: dtypes supported by codecs, secondary shards, and ranks per node."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.comm.compression.catalogue import EXACT, Use, is_lossy, lossless_names
from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError, LayoutError
from meshwright.settings.violation import Fix, Violation
from meshwright.units import counted


def lossy_keys(config: RunConfig) -> list[str]:
    """Return the keys of `comm` that select lossy compression."""
    return [f"comm.{use}" for use in (Use.GRADIENTS, Use.WEIGHTS) if is_lossy(getattr(config.comm, use))]


def lossless_value(key: str) -> str:
    """Return the lossless value for one of the keys from `lossy_keys`."""
    return lossless_names(Use(key.removeprefix("comm.")))[-1]


def no_effect_notes(config: RunConfig) -> Iterator[str]:
    """Yield a message for each `comm` setting that has no effect, because no rank communicates such data."""
    comm, mesh = config.comm, config.mesh
    if comm.gradients != EXACT and mesh.axes().data_parallel() == 1:
        yield f"comm.gradients = {comm.gradients} has no effect: dp_replicate = dp_shard = 1, so none are reduced"
    if comm.weights != EXACT and mesh.dp_shard == 1:
        yield f"comm.weights = {comm.weights} has no effect: dp_shard = 1, so none are gathered"


def comm_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield violations of the rules for `comm`."""
    for key in lossy_keys(config) if config.train.precision == "float64" else ():
        yield Violation(
            ConfigError,
            f"{key} = {getattr(config.comm, key.split('.')[1])} with train.precision = float64",
            key,
            "lossy codecs support float32 and bfloat16 only",
            [{key: lossless_value(key)}, {"train.precision": "float32"}],
        )
    yield from _secondary_shards(config)
    yield from _nodes(config)


def _secondary_shards(config: RunConfig) -> Iterator[Violation]:
    size, ranks = config.comm.secondary_shards, config.mesh.dp_shard
    if size is None:
        return
    if ranks % size or size == ranks:
        fitting = [n for n in range(2, ranks) if ranks % n == 0]
        nearest: list[Fix] = [{"comm.secondary_shards": min(fitting, key=lambda n: abs(n - size))}] if fitting else []
        yield Violation(
            LayoutError,
            f"comm.secondary_shards = {size} and mesh.dp_shard = {ranks}",
            "comm.secondary_shards",
            "dp_shard is split into two or more equal groups, each of which keeps a full copy of the weights",
            [*nearest, {"mesh.dp_shard": 2 * size}, {"comm.secondary_shards": None}],
        )
    if not config.mesh.reshard_after_forward:
        yield Violation(
            ConfigError,
            f"comm.secondary_shards = {size} with mesh.reshard_after_forward = false",
            "comm.secondary_shards",
            "weights that stay unsharded until the backward pass are not resharded",
            [{"mesh.reshard_after_forward": True}, {"comm.secondary_shards": None}],
        )
    if config.mesh.tp > 1:
        yield Violation(
            LayoutError,
            f"comm.secondary_shards = {size} with mesh.tp = {config.mesh.tp}",
            "comm.secondary_shards",
            "FSDP2 can't reshard tensor-parallel parameters to other groups than they are stored in",
            [{"comm.secondary_shards": None}, {"mesh.tp": 1}],
        )


def _nodes(config: RunConfig) -> Iterator[Violation]:
    size, ranks = config.comm.ranks_per_node, config.mesh.axes().num_ranks()
    if size is not None and ranks % size:
        fitting = [n for n in range(1, ranks + 1) if ranks % n == 0]
        yield Violation(
            LayoutError,
            f"comm.ranks_per_node = {size} does not divide {counted(ranks, 'rank')}",
            "comm.ranks_per_node",
            "all nodes have the same number of ranks",
            [{"comm.ranks_per_node": min(fitting, key=lambda n: abs(n - size))}, {"comm.ranks_per_node": None}],
        )
