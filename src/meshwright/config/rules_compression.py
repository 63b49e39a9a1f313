"""Rules of compressed gradients and weights: what a codec takes, and the ranks that share weights or a node."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.comm.compression.catalogue import EXACT, Use, is_lossy, lossless_names
from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError, LayoutError
from meshwright.settings.violation import Fix, Violation


def lossy_keys(config: RunConfig) -> list[str]:
    """The keys of `comm` by which something is lost on the way."""
    return [f"comm.{use}" for use in (Use.GRADIENTS, Use.WEIGHTS) if is_lossy(getattr(config.comm, use))]


def lossless_value(key: str) -> str:
    """The value of `key`, one of the above, by which a run computes what it would without compression."""
    return lossless_names(Use(key.removeprefix("comm.")))[-1]


def idle_notes(config: RunConfig) -> Iterator[str]:
    """What `comm` asks for of bytes that no rank sends, for people."""
    comm, mesh = config.comm, config.mesh
    if comm.gradients != EXACT and mesh.axes().data_parallel() == 1:
        yield f"comm.gradients = {comm.gradients} changes nothing: with dp_replicate = dp_shard = 1 none are reduced"
    if comm.weights != EXACT and mesh.dp_shard == 1:
        yield f"comm.weights = {comm.weights} changes nothing: with dp_shard = 1 none are gathered"


def comm_violations(config: RunConfig) -> Iterator[Violation]:
    """The rules of `comm` that `config` violates."""
    for key in lossy_keys(config) if config.train.precision == "float64" else ():
        yield Violation(
            ConfigError,
            f"{key} = {getattr(config.comm, key.split('.')[1])} with train.precision = float64",
            key,
            "what loses digits on the way takes float32 and bfloat16",
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
            "dp_shard is divided into several groups of as many ranks, which each keep a whole copy of the weights",
            [*nearest, {"mesh.dp_shard": 2 * size}, {"comm.secondary_shards": None}],
        )
    if not config.mesh.reshard_after_forward:
        yield Violation(
            ConfigError,
            f"comm.secondary_shards = {size} with mesh.reshard_after_forward = false",
            "comm.secondary_shards",
            "weights that stay gathered until the backward are not divided again",
            [{"mesh.reshard_after_forward": True}, {"comm.secondary_shards": None}],
        )


def _nodes(config: RunConfig) -> Iterator[Violation]:
    size, ranks = config.comm.ranks_per_node, config.mesh.axes().num_ranks()
    if size is not None and ranks % size:
        fitting = [n for n in range(1, ranks + 1) if ranks % n == 0]
        yield Violation(
            LayoutError,
            f"comm.ranks_per_node = {size} does not divide {ranks} ranks",
            "comm.ranks_per_node",
            "every node has as many ranks",
            [{"comm.ranks_per_node": min(fitting, key=lambda n: abs(n - size))}, {"comm.ranks_per_node": None}],
        )
